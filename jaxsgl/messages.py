"""What the two processes say to each other, as msgspec structs (MessagePack on ZeroMQ; never pickle).

Front end to engine: `Request` (request.py), `Abort`, `Shutdown`, and commands (those on weights: weight_messages.py,
on adapters: adapter_messages.py), each answered once unless a `Withdraw` comes first: by an `Answer`, or in the case of
`WatchCache` by `CacheEvents`.
Several front-end processes that share an engine send `LineOrder`s too, which shared_mailbox.py carries out.
Engine to front end: `EngineReady` once, then one `Replies` per turn of the loop (hence per step), `CacheEvents` after a
`WatchCache`, and `EngineFailed` as the final message.
"""

from __future__ import annotations

import enum
from typing import TypeAlias

import msgspec

from jaxsgl.adapter_messages import AdapterOrder
from jaxsgl.config import Limits
from jaxsgl.load import Load
from jaxsgl.pooling import Pooled
from jaxsgl.request import FinishReason, Request
from jaxsgl.token_states import TokenStates
from jaxsgl.weight_messages import WeightOrder

PARENT_LINE = 0  # of the process that started the engine; other front-end processes have the lines 1, 2, ...
_LINE_SHIFT = 32


def first_number(line: int) -> int:
    """Returns the first of the numbers by which the front-end process at `line` names its requests and commands."""
    return line << _LINE_SHIFT


def line_of(number: int) -> int:
    """Returns the line of the process that counted `number`."""
    return number >> _LINE_SHIFT


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    """The client gave up, or one sample has all that it needs; what is unknown or has finished is ignored.

    Attributes:
      request_id: as in `Request`.
      index: the sample to end; None: all of the request's.
    """

    request_id: str
    index: int | None = None


class Shutdown(msgspec.Struct, frozen=True, tag="shutdown"):
    """Leave the loop and end the process."""


class Ping(msgspec.Struct, frozen=True, tag="ping"):
    """Asks for a sign of life: the loop answers between two steps.

    Attributes:
      number: names this command in its `Answer`, as in all commands.
    """

    number: int


class FlushCache(msgspec.Struct, frozen=True, tag="flush_cache"):
    """Drop every cached prefix. Refused (`Answer.ok` False) while requests wait or run.

    While generation is paused those that wait don't matter.

    Attributes:
      timeout_s: wait so long for the last of them to end. New ones are let in meanwhile.
    """

    number: int
    timeout_s: float = 0.0


class Withdraw(msgspec.Struct, frozen=True, tag="withdraw"):
    """The command `number` needs no answer: its client has left. A flush or a weight order that waits is dropped."""

    number: int


class PauseMode(enum.Enum):
    """What becomes of the requests when generation is paused."""

    IN_PLACE = "in_place"  # they keep their KV, and go on with it
    RETRACT = "retract"  # they go back to the queue without their KV, so that the cache can be flushed
    ABORT = "abort"  # they end


class PauseGeneration(msgspec.Struct, frozen=True, tag="pause_generation"):
    """Launch nothing until `ContinueGeneration`; requests queue up. Answered when no step is in flight any more."""

    number: int
    mode: PauseMode


class ContinueGeneration(msgspec.Struct, frozen=True, tag="continue_generation"):
    """Go on, if generation is paused."""

    number: int


class DumpState(msgspec.Struct, frozen=True, tag="dump_state"):
    """Tell the scheduler's state; the `Answer.text` is JSON.

    Attributes:
      check: account for all pages, rows and locks, too; takes milliseconds.
    """

    number: int
    check: bool = False


class StartProfile(msgspec.Struct, frozen=True, tag="start_profile"):
    """Record a trace of the device and the host from the next step on; one at a time. Lost if the engine ends before.

    Attributes:
      folder: where the trace goes.
      num_steps: stop by itself after this many steps; None: at `StopProfile`.
      by_stage: record two traces, one from the first step on that extends prompts, one from the first that only
        decodes, each until it holds `num_steps` steps of its kind.
      max_s: stop by itself after so many seconds, waiting for steps included.
      max_mb: stop by itself before the trace takes about so many megabytes of memory, writing it included.
    """

    number: int
    folder: str
    num_steps: int | None = None
    by_stage: bool = False
    max_s: float = 60.0
    max_mb: int = 1024


class StopProfile(msgspec.Struct, frozen=True, tag="stop_profile"):
    """Stop recording and write the trace; answered when that is done, which takes seconds after hundreds of steps."""

    number: int


class WatchCache(msgspec.Struct, frozen=True, tag="watch_cache"):
    """Send `CacheEvents` from now on, first of all one (with this `number`) that tells all that is cached now."""

    number: int


class OpenLine(msgspec.Struct, frozen=True, tag="open_line"):
    """A front-end process starts, and will talk over `line`, a number that no process had before. Never answered."""

    line: int


class CloseLine(msgspec.Struct, frozen=True, tag="close_line"):
    """The front-end process at `line` has ended; its requests have no client any more. Never answered."""

    line: int


class AbortMatching(msgspec.Struct, frozen=True, tag="abort_matching"):
    """End the requests of all front-end processes that have this id. `Answer.text` is their number.

    Attributes:
      request_id: as clients gave it.
      prefix: end all requests whose ids begin with it.
    """

    number: int
    request_id: str
    prefix: bool = False


class Answer(msgspec.Struct, frozen=True, tag="answer"):
    """What became of the command `number`; `text` says why not, or where the result is."""

    number: int
    ok: bool
    text: str = ""


class PagesStored(msgspec.Struct, frozen=True, tag="stored"):
    """Pages came into the prefix cache, one behind the other.

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
      number: of the `WatchCache` that this answers: all that is cached, parents before children; None: news.
    """

    events: list[CacheEvent]
    number: int | None = None


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
    """

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class StageTimes(msgspec.Struct, frozen=True, array_like=True):
    """Seconds that a sample spent in the engine before its first token.

    Attributes:
      queue_s: from its arrival to its first admission.
      prefill_s: from there until its first token was read.
    """

    queue_s: float
    prefill_s: float


class Reply(msgspec.Struct, frozen=True, array_like=True):
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


class Replies(msgspec.Struct, frozen=True, tag="replies"):
    """All news of one turn of the loop; sent after every step and every message, even if no request has news."""

    replies: list[Reply]
    load: Load = Load()


class EngineInfo(msgspec.Struct, frozen=True):
    """What the front end must know about the engine to check requests and to answer GetModelInfo.

    `warmup_s` is the time in seconds that loading and compiling took; `kv_bytes` and `weight_bytes` the
    sizes of all KV buffers and parameters; `kv_cache_dtype` what --kv-cache-dtype came to.
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


class EngineReady(msgspec.Struct, frozen=True, tag="ready"):
    """Every bucket is compiled; requests may be sent."""

    info: EngineInfo


class EngineFailed(msgspec.Struct, frozen=True, tag="failed"):
    """The engine ends because of this."""

    message: str


ProfileOrder: TypeAlias = StartProfile | StopProfile
Command: TypeAlias = (
    Ping
    | FlushCache
    | PauseGeneration
    | ContinueGeneration
    | DumpState
    | ProfileOrder
    | WatchCache
    | WeightOrder
    | AdapterOrder
)
ToEngine: TypeAlias = Request | Abort | Command | Withdraw | Shutdown
LineOrder: TypeAlias = OpenLine | CloseLine | AbortMatching
ToMailbox: TypeAlias = ToEngine | LineOrder
News: TypeAlias = Replies | Answer | CacheEvents
FromEngine: TypeAlias = EngineReady | News | EngineFailed
