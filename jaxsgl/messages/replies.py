"""What the engine reports, as msgspec structs: of its requests, its load and its prefix cache, and of its own life.

The scheduler makes one `Load` per turn of its loop; metrics, routers and the endpoints about load read it. Gateways get
the `CacheEvents`.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from typing import TypeAlias

import msgspec

from jaxsgl.config.engine import DEFAULT_WEIGHT_VERSION, Limits
from jaxsgl.requests.outputs import Pooled, TokenStates
from jaxsgl.requests.request import FinishReason


class Totals(msgspec.Struct, array_like=True):
    """Counters since the start of the engine. The scheduler counts; a `Load` carries a copy.

    Attributes:
      prompt_tokens: of admitted samples.
      cached_prompt_tokens: of those, found in the prefix cache.
      output_tokens: read from the device.
      steps: launched; several decode steps in one program are one.
      decode_rows, decode_rows_padded: sequences of decode steps, and rows of their programs, of each of several steps.
      extend_tokens, extend_tokens_padded: likewise tokens of extend steps. Of ranks that share steps, padded ones are
        those of MLPs.
      retractions: running samples that were taken back to the queue.
      short_of_tokens, short_of_rows, short_of_chunk, short_of_adapters: steps at which requests waited for room in
        pool, batch, step, or on the device for their adapters.
      recompiles: programs compiled while serving; more than 0 is a bug.
      leaks: pages, rows and locks that the leak check found lost or in two places; more than 0 is a bug.
      failed_requests: requests that were ended because the work for them raised an exception; more than 0 is a bug.
      encoded_images: images and frame pairs that the vision tower has encoded.
      restored_images: whose embeddings came back from host memory instead.
    """

    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    output_tokens: int = 0
    steps: int = 0
    decode_rows: int = 0
    decode_rows_padded: int = 0
    extend_tokens: int = 0
    extend_tokens_padded: int = 0
    retractions: int = 0
    short_of_tokens: int = 0
    short_of_rows: int = 0
    short_of_chunk: int = 0
    short_of_adapters: int = 0
    recompiles: int = 0
    leaks: int = 0
    failed_requests: int = 0
    encoded_images: int = 0
    restored_images: int = 0


class SpeculationTotals(msgspec.Struct, array_like=True):
    """What became of drafts, counted since the start of the engine; zeros if nothing speculates.

    A run is what one step verifies of one sample: its drafts, one after the other. It yields the accepted ones and one
    token more.

    Attributes:
      runs: verified so far.
      draft_tokens, accepted_tokens: of all runs, also of those that a stop has cut.
      accepted_at: for each place in a run, from the first on, how many runs had their draft there accepted.
      plain_decodes: tokens of samples that speculate, which a step decoded without drafts, by the reason: a value of
        `WhyPlain` (scheduler/speculation/speculation.py).
    """

    runs: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    accepted_at: tuple[int, ...] = ()
    plain_decodes: dict[str, int] = {}


class HostLoad(msgspec.Struct, array_like=True):
    """How full the host tier is, and counters since the start of the engine; zeros without such a tier.

    Attributes:
      total_tokens, used_tokens: tokens that host memory can hold, and holds.
      written_tokens: copied from the pool.
      loaded_tokens: copied to the pool instead of being computed.
      evicted_tokens: that left host memory because others needed their room.
      not_written_tokens: that found no room in host memory.
      given_up: loads that were stopped, so that their requests computed the rest.
    """

    total_tokens: int = 0
    used_tokens: int = 0
    written_tokens: int = 0
    loaded_tokens: int = 0
    evicted_tokens: int = 0
    not_written_tokens: int = 0
    given_up: int = 0


class TransferLoad(msgspec.Struct, frozen=True, array_like=True):
    """Requests and memory on the way between prefill and decode.

    Attributes:
      mode: "prefill" or "decode".
      num_bootstrapping: requests that wait for their other leg, or for staging memory.
      num_moving: requests whose pages are sent or received.
      staged_bytes: staging memory that is taken or promised.
      moved_bytes: sent or received since the start.
      hidden_bytes: of those, sent before the prompt was computed, so that no one waited for them. Prefill only.
    """

    mode: str
    num_bootstrapping: int
    num_moving: int
    staged_bytes: int
    moved_bytes: int
    hidden_bytes: int = 0


class RankLoad(msgspec.Struct, frozen=True, array_like=True):
    """How busy a rank of the engine is; see `Load`, whose numbers are the sums."""

    num_running: int
    num_waiting: int
    waiting_tokens: int
    used_tokens: int
    cached_tokens: int


class Load(msgspec.Struct, frozen=True, array_like=True):
    """How busy the engine is after a turn of the loop.

    Attributes:
      num_running, num_waiting: samples that hold a row, and samples that wait for admission.
      waiting_tokens: prompt tokens of those, cached or not.
      used_tokens: KV slots in pages that running samples own or lock.
      cached_tokens: KV slots in pages that only the prefix cache holds; they are evicted when needed.
      num_retracted: waiting samples that have run before.
      paused: nothing is launched until generation is continued.
      totals: counters.
      step_times: how long steps took since the start, as `pack_times` has it: packed, since only a scrape reads it.
      weight_version: of the weights that made the tokens that come with this load, and of those served now.
      transfer: of a prefill or decode worker. Its requests on the way count as waiting too.
      host: the host tier.
      adapters: the names of the LoRA adapters that requests may name.
      speculation: what became of drafts.
      ranks: of an engine with data-parallel attention, by rank; () of any other.
      num_blocked: those of `num_waiting` that no step is owed to now: they wait for their grammar, or for the other
        side of a prefill or decode worker.
    """

    num_running: int = 0
    num_waiting: int = 0
    waiting_tokens: int = 0
    used_tokens: int = 0
    cached_tokens: int = 0
    num_retracted: int = 0
    paused: bool = False
    totals: Totals = msgspec.field(default_factory=Totals)
    step_times: bytes = b""
    weight_version: str = DEFAULT_WEIGHT_VERSION
    transfer: TransferLoad | None = None
    host: HostLoad = msgspec.field(default_factory=HostLoad)
    adapters: tuple[str, ...] = ()
    speculation: SpeculationTotals = msgspec.field(default_factory=SpeculationTotals)
    ranks: tuple[RankLoad, ...] = ()
    num_blocked: int = 0

    @property
    def owes_step(self) -> bool:
        """Whether the engine must make a step soon."""
        return not self.paused and self.num_running + self.num_waiting > self.num_blocked


# Upper bounds of the times by which steps are counted, in seconds.
STEP_BOUNDS_S = (5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)


class BucketTimes(msgspec.Struct, array_like=True):
    """How long the steps of one bucket took.

    Attributes:
      kind: decode, extend, score or verify.
      bucket: the padded shape, in short.
      counts: steps up to each of `STEP_BOUNDS_S`, and above the last.
      seconds: of all of them.
    """

    kind: str
    bucket: str
    counts: list[int]
    seconds: float


pack_times = msgspec.msgpack.Encoder().encode  # the times of all buckets, a `list[BucketTimes]`, as bytes


def unpack_times(packed: bytes) -> list[BucketTimes]:
    """Returns the times of all buckets; none for b""."""
    return msgspec.msgpack.decode(packed, type=list[BucketTimes]) if packed else []


def merged_times(each: Iterable[bytes]) -> bytes:
    """Returns the times of several engines together, packed like those of one."""
    total: dict[tuple[str, str], BucketTimes] = {}
    for packed in each:
        for times in unpack_times(packed):
            so_far = total.get((times.kind, times.bucket))
            if so_far is None:
                total[times.kind, times.bucket] = times
            else:
                so_far.counts = [a + b for a, b in zip(so_far.counts, times.counts, strict=True)]
                so_far.seconds += times.seconds
    return pack_times(list(total.values()))


class PagesStored(msgspec.Struct, frozen=True, tag="stored"):
    """Pages came into the prefix cache, one after the other.

    Attributes:
      hashes: of each page; a page's hash depends on all tokens up to its end. Signed 64 bits.
      token_ids: of all pages, page after page.
      parent: hash of the page before the first, None at the start of a sequence.
    """

    hashes: list[int]
    token_ids: list[int]
    parent: int | None


class PagesRemoved(msgspec.Struct, frozen=True, tag="removed"):
    """Pages left the prefix cache."""

    hashes: list[int]


class CacheCleared(msgspec.Struct, frozen=True, tag="cleared"):
    """Nothing is cached any more."""


CacheEvent: TypeAlias = PagesStored | PagesRemoved | CacheCleared


class CacheEvents(msgspec.Struct, frozen=True, tag="cache_events"):
    """What happened to the prefix cache in one step, in order.

    Attributes:
      number: of the `WatchCache` that this answers: all that is cached, parents before children. None for news.
      rank: whose cache it is. Each rank answers a `WatchCache`, in their order.
    """

    events: list[CacheEvent]
    number: int | None = None
    rank: int = 0


class RefusalKind(enum.Enum):
    """Why the scheduler refused or ended a request."""

    INVALID = "invalid"  # it can never be served
    OVERLOADED = "overloaded"  # the queue is full
    WAITED = "waited"  # it waited too long for its admission
    RAN = "ran"  # it ran too long
    FAILED = "failed"  # the server failed at it, and would again
    PEER = "peer"  # the worker of its other leg is gone


class Refusal(msgspec.Struct, frozen=True, array_like=True):
    """A refused request; `text` is for the client."""

    kind: RefusalKind
    text: str


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """Natural logarithms of probabilities at one position.

    Attributes:
      logprob: of the token that stands there.
      top: (token id, log-probability) of the most likely ones, best first; as many as were asked for.
      named: log-probabilities of the tokens that the request names, in their order.
    """

    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    named: tuple[float, ...] = ()

    @property
    def num_scores(self) -> int:
        """How many log-probabilities these are."""
        return 1 + len(self.top) + len(self.named)


class StageTimes(msgspec.Struct, frozen=True, array_like=True):
    """Seconds that a sample spent in the engine before its first token.

    Attributes:
      queue_s: from its arrival to its first admission.
      prefill_s: from there until its first token was read.
    """

    queue_s: float
    prefill_s: float


class Run(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Drafts of a sample that a step has verified, and how many of them, from the first, are among its new tokens.

    Attributes:
      of_prediction: whether they are those of the request's `prediction_ids`.
    """

    drafted: int
    kept: int
    of_prediction: bool = False


class Reply(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """News about one sample of a request: its new tokens, and its end if it ended.

    Attributes:
      request_id: as in `Request`.
      token_ids: new output tokens (empty when the request was refused or aborted).
      finish_reason: None while it runs.
      cached_tokens: prompt tokens whose KV was already cached when it was admitted.
      refusal: set when the scheduler refused the request, and then nothing more comes of any of its samples.
      index: which of the request's n samples.
      logprob: of the new token, if asked for; such requests get one token a step.
      prompt_logprobs: of prompt tokens 1, 2, ... (nothing stands before token 0), if asked for; comes once, with the
        first token of sample 0.
      times: with a sample's first token, or with `pooled`.
      pooled: the whole answer to a request for pooling, with its end.
      states: of the tokens since the reply before, up to the one before its last new one, if asked for.
      run: of the step that yielded the tokens, if it verified drafts. Of several replies for one step the first has it.
    """

    request_id: str
    token_ids: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None
    cached_tokens: int = 0
    refusal: Refusal | None = None
    index: int = 0
    logprob: TokenLogprob | None = None
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None
    times: StageTimes | None = None
    pooled: Pooled | None = None
    states: TokenStates | None = None
    run: Run | None = None


class Replies(msgspec.Struct, frozen=True, tag="replies"):
    """All news of one turn of the loop; sent after every step and every message, even if no request has news."""

    replies: list[Reply]
    load: Load = Load()


class EngineInfo(msgspec.Struct, frozen=True):
    """What the front end must know about the engine to check requests and to answer GetModelInfo.

    `warmup_s` is the time in seconds that loading and compiling took; `kv_bytes` and `weight_bytes` the
    sizes of all KV buffers and parameters; `kv_cache_dtype` what --kv-cache-dtype came to; `kernels` the
    operation, backend and verdict of each test of a kernel, none on a CPU; `num_ranks` how many ranks have attention of
    their own, whose KV pools each hold the tokens that `limits` says.
    """

    model_path: str
    architecture: str
    dtype: str
    limits: Limits
    eos_token_ids: tuple[int, ...]
    page_size: int
    max_running_requests: int
    attention_backend: str
    platform: str
    kv_bytes: int
    weight_bytes: int
    warmup_s: float
    kv_cache_dtype: str = "auto"
    kernels: tuple[tuple[str, str, str], ...] = ()
    num_ranks: int = 1

    @property
    def pool_tokens(self) -> int:
        """Tokens that the KV pools of all ranks hold."""
        return self.num_ranks * self.limits.pool_tokens


class HostState(msgspec.Struct, frozen=True, array_like=True):
    """One of the hosts that share a model, as the host that reports it sees it.

    Attributes:
      rank: its --node-rank.
      silent_s: seconds since it gave a sign of life, 0 for the reporting host; one comes every second.
      lag_calls: calls of the engine that host 0 has sent, and that this one hadn't played at its last sign of life.
    """

    rank: int
    silent_s: float = 0.0
    lag_calls: int = 0


class HostsLoad(msgspec.Struct, frozen=True, tag="hosts"):
    """The hosts that share a model live. A thread of the engine process sends it every second, whatever its loop does.

    Attributes:
      hosts: those that this host hears, itself included; none: no other host shares the model.
      leaving: names a host that was asked to stop, so that all are to; "" if none was.
    """

    hosts: tuple[HostState, ...] = ()
    leaving: str = ""


class EngineReady(msgspec.Struct, frozen=True, tag="ready"):
    """Every bucket is compiled; requests may be sent."""

    info: EngineInfo


class EngineFailed(msgspec.Struct, frozen=True, tag="failed"):
    """The engine ends because of this."""

    message: str
