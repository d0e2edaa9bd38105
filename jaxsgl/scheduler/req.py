"""`Req`: the scheduler's view of one sample of a request, and the states it goes through. Owns its lengths and output.

known_ids  |=========== cached ===========|=== chunk ===|.........|
           0                       kv_len before    kv_len after   extend_to

Then one token a step: the token sampled last is stored (kv_len + 1) while the next one is sampled; or several steps in
one launch. The known tokens are the prompt and, for a request that was retracted, its output so far.

   .----------------- retract ------+------------------------------------.
   v                                |                                    |
WAITING ---admit---> EXTENDING -----'--last chunk launched---> RUNNING --'--stop, length---> FINISHED
   |                     |                                        |                             ^
   '------ abort --------'------------------ abort ---------------'-----------------------------'

With a host tier a request whose prefix goes on in host memory is PREFETCHING right after its admission, and EXTENDING
again later: its lease grows by pages that are loaded. It may be retracted and aborted as an EXTENDING one.

Only apply.py calls the methods that change a request, and the host tier (resources/host_tier.py) those for loads.
"""

from __future__ import annotations

import enum
import uuid
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np

from jaxsgl.batch.patches import token_positions
from jaxsgl.batch.sampling import pack_edits, row_setup, token_counts
from jaxsgl.cache.host_pages import HostPage
from jaxsgl.cache.manager import namespace_of
from jaxsgl.cache.pages import IntArray, Lease
from jaxsgl.requests.grammar_work import GrammarWork, Mark
from jaxsgl.requests.media import MediaItem, hash_ids
from jaxsgl.requests.request import MAX_SEED, FinishReason, Request
from jaxsgl.scheduler.grammars.constraint import Constraint, Matcher, TokenLimits
from jaxsgl.scheduler.outputs import OutputCollector
from jaxsgl.scheduler.speculation.drafter import NO_DRAFTS, Drafter

Key: TypeAlias = tuple[str, int]  # request id, index of the sample


@dataclass(eq=False, slots=True)
class Adapter:
    """One loading of a LoRA adapter, as requests have it.

    `resources/adapters.py` owns it and is the only one that changes it; a request keeps the one that it named at its
    arrival, whatever is loaded under that name later.

    Attributes:
      number: of the loading; never used again.
      name, folder, rank, pinned, alias: see `LoadAdapter`.
      digest: of what was read, equal on servers that have read the same.
      identity: stands for it in namespaces: `digest`, so that an equal adapter finds its prefixes again, after another
        start, too. One that has no digest is like no other.
      num_requests: samples that have it and have not ended.
      num_admitted: of those, the ones that hold a row.
      place: its small number on the device, 0 while it isn't there.
      last_used: counts uses; the order of them is all that matters.
    """

    number: int
    name: str
    folder: str
    rank: int
    pinned: bool
    digest: str = ""
    alias: str = ""
    identity: str = field(init=False)
    num_requests: int = 0
    num_admitted: int = 0
    place: int = 0
    last_used: int = 0

    def __post_init__(self) -> None:
        self.identity = self.digest or uuid.uuid4().hex


class State(enum.Enum):
    """Where a request stands."""

    WAITING = "waiting"  # in the queue; holds nothing but what it has generated
    PREFETCHING = "prefetching"  # admitted; holds row and pages; a part of its prefix is still to load from the host
    EXTENDING = "extending"  # admitted; holds row and pages; a chunk is still to launch
    RUNNING = "running"  # all its known tokens are launched; it decodes
    FINISHED = "finished"  # ended; holds nothing


TRANSITIONS: dict[State, frozenset[State]] = {
    State.WAITING: frozenset({State.EXTENDING, State.FINISHED}),
    State.PREFETCHING: frozenset({State.EXTENDING, State.WAITING, State.FINISHED}),
    State.EXTENDING: frozenset({State.PREFETCHING, State.RUNNING, State.WAITING, State.FINISHED}),
    State.RUNNING: frozenset({State.WAITING, State.FINISHED}),
    State.FINISHED: frozenset(),
}


class Req:
    """One sample of a request from its arrival to its end.

    Attributes:
      request_id, index: the request as the front end knows it, and which of its samples this is.
      key: both; unique in the scheduler.
      outputs: collect what the client gets besides tokens; mostly ().
      ends_with_prompt: whether that is all that it gets, and no token is sampled.
      single_steps: whether its decode steps run one by one: programs of several steps don't compute what it needs.
      leader: sample 0 of the same request, whose prompt it waits for; None for sample 0 itself.
      prompt_ids: `[n]` int32, what steps embed; one array shared by all samples.
      media: its images and video frames, whose placeholder tokens are among `prompt_ids`.
      rope_delta: what is added to the index of a token after the prompt to get its position, if there are images.
      output_ids: tokens read from the device so far.
      max_new_tokens: tokens it may generate, capped by context and pool.
      kv_len: tokens whose KV is stored or will be stored by steps in flight.
      num_launched: sampled tokens that are read or in flight.
      extend_to: tokens known when it was admitted, all to be stored before it samples.
      cached_tokens: prompt tokens found in the prefix cache when it was first admitted; 0 before that.
      max_found_tokens: the most that `cached_tokens` may count: what another server has computed for it and sent here
        is in the cache, too.
      lease_number: changes whenever it gets or gives back a lease. A step that was launched under another number yields
        nothing for it any more.
      prefilled: whether its whole prompt was launched once, so that the other samples find it in the cache.
      priority: as the client sent it.
      adapter: the LoRA adapter that it runs with; None: the model as it is.
      namespace: prefixes are shared with requests of an equal one alone.
      num_ahead: admissions before its arrival plus requests that waited then: as many may be admitted before it.
      lease: what it holds of the cache while it is admitted.
      page_names: of its leading full pages, if there is a host tier; [] without.
      to_load: while PREFETCHING, the host pages that are still to load, in order; it pins them.
      load_until_s: then, when it gives them up.
      constraint: what its next token may be, once its grammar is compiled; None: any token.
      max_cached_tokens: tokens whose KV may come from the prefix cache, at most; None: all.
      drafter: proposes what may follow its tokens.
      num_told: output tokens that the drafter has got, after the prompt.
      stays: whether its client has named the rank that serves it.
    """

    __slots__ = (
        "_prompt_hash_ids", "_prompt_positions", "adapter", "cached_tokens", "constraint", "drafter",
        "ends_with_prompt", "extend_to", "index", "key", "kv_len", "leader", "lease", "lease_number", "load_until_s",
        "max_cached_tokens", "max_found_tokens", "max_new_tokens", "media", "namespace", "num_ahead", "num_launched",
        "num_told", "output_ids", "outputs", "page_names", "prefilled", "priority", "prompt_ids", "request_id",
        "rope_delta", "sampling", "seed", "single_steps", "state", "stays", "stop_ids", "to_load",
    )  # fmt: skip

    def __init__(
        self,
        request: Request,
        max_new_tokens: int,
        eos_token_ids: frozenset[int],
        seed: int,
        index: int = 0,
        leader: Req | None = None,
        outputs: tuple[OutputCollector, ...] = (),
        adapter: Adapter | None = None,
        drafter: Drafter = NO_DRAFTS,
        has_axes: bool = False,
    ) -> None:
        self.request_id = request.request_id
        self.index = index
        self.key: Key = (request.request_id, index)
        self.leader = leader
        self.stays = request.rank is not None
        self.sampling = request.sampling
        self.outputs = outputs
        self.ends_with_prompt = any(collector.ends_request for collector in outputs)
        self.single_steps = request.sampling.has_row or any(collector.single_steps for collector in outputs)
        self.prompt_ids: IntArray = leader.prompt_ids if leader else np.array(request.prompt_ids, dtype=np.int32)
        self.media: tuple[MediaItem, ...] = request.media
        self._prompt_hash_ids: IntArray = self.prompt_ids
        self._prompt_positions: IntArray | None = None
        self.rope_delta = 0
        if request.media and has_axes:
            self._prompt_positions, self.rope_delta = token_positions(len(self.prompt_ids), request.media)
        if request.media:
            self._prompt_hash_ids = leader._prompt_hash_ids if leader else hash_ids(self.prompt_ids, request.media)
        self.max_new_tokens = max_new_tokens
        self.stop_ids = frozenset(request.sampling.stop_token_ids)
        if not request.sampling.ignore_eos:
            self.stop_ids |= eos_token_ids
        self.seed = (seed + index) & MAX_SEED
        self.output_ids: list[int] = []
        self.state = State.WAITING
        self.lease: Lease | None = None
        self.kv_len = 0
        self.num_launched = 0
        self.extend_to = self.prompt_len
        self.lease_number = 0
        self.prefilled = False
        self.priority = request.priority
        self.adapter = adapter
        identity = None if adapter is None else adapter.identity
        self.namespace = namespace_of(request.cache_salt, identity, request.kv_source)
        self.num_ahead = 0
        self.cached_tokens = 0
        self.max_found_tokens = self.prompt_len
        self.page_names: list[bytes] = []
        self.to_load: list[HostPage] = []
        self.load_until_s = 0.0
        self.constraint: Constraint | None = None
        self.max_cached_tokens: int | None = None
        self.drafter = drafter
        self.num_told = 0

    @property
    def name(self) -> str:
        """The request and its sample, in words, for logs and reports of leaks."""
        return f"{self.request_id} (sample {self.index})"

    @property
    def lacks_grammar(self) -> bool:
        """Whether its grammar is still being compiled."""
        return self.constraint is None and self.sampling.masked

    @property
    def may_start(self) -> bool:
        """Whether it may be admitted: its grammar is compiled, and the leader's prompt launched, to share its pages."""
        if self.lacks_grammar:
            return False
        return self.leader is None or self.leader.prefilled or self.leader.state is State.FINISHED

    @property
    def scores_prompt(self) -> bool:
        """Whether its chunks run a program that scores prompts."""
        return bool(self.outputs) and any(collector.scores_prompt for collector in self.outputs)

    @property
    def in_few_sizes(self) -> bool:
        """Whether its chunks run programs of which there are few sizes."""
        return bool(self.outputs) and any(collector.in_few_sizes for collector in self.outputs)

    @property
    def known_ids(self) -> IntArray:
        """Prompt and output so far, as steps embed them."""
        return self._with_output(self.prompt_ids)

    @property
    def hash_ids(self) -> IntArray:
        """Prompt and output so far, as the prefix cache compares them: the same unless there is media."""
        return self._with_output(self._prompt_hash_ids)

    @property
    def matchable_ids(self) -> IntArray:
        """The `hash_ids` of tokens whose KV may come from the prefix cache; none if all of them must be computed."""
        return self.prompt_ids[:0] if self.computes_prompt else self.hash_ids[: self.max_cached_tokens]

    @property
    def computes_prompt(self) -> bool:
        """Whether something is wanted of all tokens of its prompt: log-probabilities, states, or a mean of them."""
        return bool(self.outputs) and any(collector.computes_prompt for collector in self.outputs)

    @property
    def extend_left(self) -> int:
        """Known tokens that are neither stored nor in flight; 0 once it runs."""
        return max(self.extend_to - self.kv_len, 0)

    @property
    def prompt_len(self) -> int:
        """Tokens of the prompt."""
        return len(self.prompt_ids)

    @property
    def max_kv_len(self) -> int:
        """Tokens of KV that it can ever store: the KV of the last sampled token is never needed."""
        return self.prompt_len + self.max_new_tokens - 1

    @property
    def needs_page(self) -> bool:
        """Whether its next token needs a page more than its lease has."""
        assert self.lease is not None
        return self.kv_len >= self.lease.num_tokens

    @property
    def num_left(self) -> int:
        """Tokens that it may still generate, besides those that are read or in flight."""
        return self.max_new_tokens - self.num_launched

    @property
    def can_launch(self) -> bool:
        """Whether it may decode another token, as far as is known before the tokens in flight are read."""
        return self.state is State.RUNNING and self.num_launched < self.max_new_tokens

    @property
    def is_read(self) -> bool:
        """Whether all tokens that were sampled for it are read: no step in flight yields one."""
        return self.num_launched == len(self.output_ids)

    @property
    def on_first_lease(self) -> bool:
        """Whether it was admitted and never retracted: what it finds in a cache is not its own work."""
        return self.lease_number == 1

    @property
    def is_complete(self) -> bool:
        """Whether its grammar has ended its output, without a stop token."""
        return self.constraint is not None and self.constraint.ended and self.output_ids[-1] not in self.stop_ids

    def constrain(
        self, matcher: Matcher, eos_token_ids: frozenset[int], limits: TokenLimits | None, mark: Mark
    ) -> None:
        """Holds its output to a grammar, whose `matcher` is that of an empty output, and to `limits`."""
        work = GrammarWork(mark, self.request_id)
        self.constraint = Constraint(matcher, eos_token_ids, self.stop_ids, self.sampling.min_tokens, limits, work)

    def stored_ids(self) -> IntArray:
        """The `hash_ids` of tokens whose KV is stored or in flight: what may be shared."""
        return self.hash_ids[: self.kv_len]

    def rope_positions(self, start: int, stop: int) -> IntArray | None:
        """`[3, stop - start]` time, row and column of tokens; None without images, as they are the tokens' indices."""
        prompt, count = self._prompt_positions, stop - start
        if prompt is None:
            return None
        if stop <= self.prompt_len:
            return prompt[:, start:stop]
        later = np.arange(max(start, self.prompt_len), stop, dtype=np.int32) + self.rope_delta
        return np.concatenate([prompt[:, start:], np.broadcast_to(later, (3, len(later)))], axis=1)[:, :count]

    def edit_setup(self, vocab_size: int) -> IntArray | None:
        """What the device must know before it samples (see `row_setup`), if the request has a row of edits.

        It is made of ids that the host knows, so it also serves a request that starts over after a retraction.
        """
        if not self.sampling.has_row or self.lease is None:
            return None
        edits = pack_edits(self.sampling, self.stop_ids, self.prompt_len)
        return row_setup(self.lease.row, edits, token_counts(self.prompt_ids, self.output_ids, vocab_size))

    def admit(self, lease: Lease, cached_tokens: int) -> None:
        """Takes its lease, of which the first `cached_tokens` tokens are cached."""
        self._move(State.EXTENDING)
        self.lease = lease
        self.kv_len = cached_tokens
        self.extend_to = self.prompt_len + len(self.output_ids)
        self.lease_number += 1
        if self.on_first_lease:
            self.cached_tokens = min(cached_tokens, self.max_found_tokens)

    def begin_loading(self, to_load: Iterable[HostPage], until_s: float) -> None:
        """Waits for the pages `to_load` until then; right after its admission."""
        self._move(State.PREFETCHING)
        self.to_load, self.load_until_s = list(to_load), until_s

    def loaded(self, num_pages: int, num_tokens: int) -> None:
        """Counts `num_pages` more of its prefix, which hold `num_tokens` tokens, as loaded."""
        del self.to_load[:num_pages]
        self.kv_len += num_tokens
        if self.on_first_lease:
            self.cached_tokens = min(self.kv_len, self.max_found_tokens)
        if not self.to_load:
            self._move(State.EXTENDING)

    def stop_loading(self) -> list[HostPage]:
        """Takes no more pages from the host, and computes the rest; returns those that it gives up."""
        pages, self.to_load = self.to_load, []
        self._move(State.EXTENDING)
        return pages

    def launch_chunk(self, num_tokens: int) -> bool:
        """Counts `num_tokens` more known tokens as in flight; with the last of them it runs, and True is returned."""
        self.kv_len += num_tokens
        if self.kv_len < self.extend_to:
            return False
        self._move(State.RUNNING)
        self.prefilled = True
        self.num_launched = len(self.output_ids) + 1
        return True

    def launch_decode(self, num_tokens: int) -> bool:
        """Counts `num_tokens` more sampled tokens as in flight; False if they are the last that it may generate."""
        self.kv_len += num_tokens
        self.num_launched += num_tokens
        return self.num_launched < self.max_new_tokens

    def take(self, token_ids: tuple[int, ...]) -> tuple[tuple[int, ...], FinishReason | None]:
        """Takes `token_ids` up to the one that ends the request; returns those taken, and why it ended if it did.

        Raises `InvalidRequest` if its grammar can't be followed.
        """
        output_ids, stop_ids = self.output_ids, self.stop_ids
        most, constraint = self.max_new_tokens, self.constraint
        for count, token_id in enumerate(token_ids, 1):
            output_ids.append(token_id)
            if token_id in stop_ids:
                return token_ids[:count], FinishReason.STOP
            if constraint is not None:
                constraint.advance(token_id)
                if constraint.ended:
                    return token_ids[:count], FinishReason.STOP
            if len(output_ids) == most:
                return token_ids[:count], FinishReason.LENGTH
        return token_ids, None

    def retract(self) -> Lease:
        """Goes back to waiting with its output so far; returns its lease. Its tokens in flight are dropped."""
        self._move(State.WAITING)
        lease, self.lease = self.lease, None
        assert lease is not None
        self.lease_number += 1
        self.kv_len, self.num_launched = 0, len(self.output_ids)
        for collector in self.outputs:
            collector.restart()
        return lease

    def finish(self) -> Lease | None:
        """Ends it; returns its lease, if it held one."""
        self._move(State.FINISHED)
        self.lease_number += 1
        lease, self.lease = self.lease, None
        return lease

    def _with_output(self, ids: IntArray) -> IntArray:
        return np.concatenate((ids, np.array(self.output_ids, dtype=np.int32))) if self.output_ids else ids

    def _move(self, state: State) -> None:
        assert state in TRANSITIONS[self.state], f"{self.key}: {self.state} can't become {state}"
        self.state = state
