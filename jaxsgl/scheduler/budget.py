"""What a step may take: tokens that it extends, time, and pages, now and until the running requests have ended.

`TokenBudget` is used up by chunks; `Timing` says how long a step may take: as long as it likes, unless latency.py
bounds it. `Ledger` answers what-if questions about the pool (lock a match, take n pages, give back what a request
holds) without touching the cache. `NewTokenRatio` and `Forecast` say how many pages must be held for running requests,
`FailedAdmission` what is known when that leaves no room. Values and arithmetic; called by planner.py and latency.py.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from jaxsgl.batch.build import Work
from jaxsgl.batch.inputs import StepInputs
from jaxsgl.cache.manager import CacheManager
from jaxsgl.cache.pages import IntArray, Lease, pages_before_ends, pages_for, sums_from, tokens_in
from jaxsgl.cache.prefix import Peek, Span
from jaxsgl.scheduler.req import Req

CLIP_TOKENS = 4096  # more of a request's max_tokens is not reserved; retraction covers the rest
FIRST_RATIO = 0.7
LEAST_SHARE = 0.14  # of the first ratio
DECAY_STEPS = 600
STEP_COST_TOKENS = 128  # what a step costs besides its tokens (weights to read, a launch), in tokens
HORIZON_STEPS = 64  # decode steps that are looked ahead for room
TOKENS_AHEAD = 20  # tokens for which each request should find room after a retraction


class PageCount(NamedTuple):
    """Pages of the pool that a request could get: on the free list, and in the prefix cache without a lock."""

    free: int
    evictable: int


@dataclass(slots=True, eq=False)
class Claim:
    """What a request holds of the pool, or would hold if it was admitted.

    Attributes:
      req: the request.
      kv_len: tokens whose KV is stored or in flight.
      extend_to: known tokens.
      num_launched: sampled tokens that are read or in flight.
      num_pages: pages that it holds.
      num_shared: of those, pages of the prefix cache.
      prefix: of a request that is not admitted yet, the cached prefix that it would lock.
    """

    req: Req
    kv_len: int
    extend_to: int
    num_launched: int
    num_pages: int
    num_shared: int
    prefix: Peek | None

    @classmethod
    def held(cls, req: Req) -> Claim:
        """What the admitted `req` holds."""
        lease = req.lease
        assert lease is not None
        return cls(req, req.kv_len, req.extend_to, req.num_launched, lease.num_pages, lease.num_shared, None)

    @classmethod
    def planned(cls, req: Req, prefix: Peek, cache: CacheManager) -> Claim:
        """What the waiting `req` would hold right after its admission."""
        known, num_pages = req.prompt_len + len(req.output_ids), prefix.num_pages
        return cls(req, cache.tokens_of(num_pages), known, len(req.output_ids), num_pages, num_pages, prefix)

    @property
    def extend_left(self) -> int:
        """Known tokens that are neither stored nor in flight."""
        return max(self.extend_to - self.kv_len, 0)

    @property
    def tokens_to_come(self) -> int:
        """Output tokens that it may still store, clipped."""
        return min(max(self.req.max_new_tokens - self.num_launched, 0), CLIP_TOKENS)


class _NodeLocks:
    """The locks on one node of the prefix cache after some what-ifs.

    Attributes:
      whole: locks that were there and still are; each holds all pages of the node.
      depths: leading pages that each new lock holds.
    """

    __slots__ = ("depths", "whole")

    def __init__(self, locks: int) -> None:
        self.whole = locks
        self.depths: list[int] = []

    @property
    def deepest(self) -> int:
        """Leading pages that new locks hold."""
        return max(self.depths, default=0)


class Ledger:
    """The pages of the pool after what-ifs: locks, pages taken, requests that gave theirs back.

    Attributes:
      free, evictable: as in `PageCount`, after all what-ifs so far.
    """

    __slots__ = ("_cache", "_locks", "evictable", "free")

    def __init__(self, cache: CacheManager) -> None:
        self._cache = cache
        self._locks: dict[object, _NodeLocks] = {}
        self.free = cache.num_free
        self.evictable = cache.prefixes.num_evictable

    @property
    def available(self) -> int:
        """Pages that could be taken now."""
        return self.free + self.evictable

    @property
    def count(self) -> PageCount:
        """The pages that are left."""
        return PageCount(self.free, self.evictable)

    def take(self, num_pages: int) -> None:
        """Takes pages off the free list, and evicts where they don't suffice."""
        self.free -= num_pages
        if self.free < 0:
            self.evictable += self.free
            self.free = 0
        assert self.evictable >= 0, "more pages are planned than there are"

    def lock(self, prefix: Peek) -> None:
        """Locks the prefix of a request that is to be admitted."""
        for span in prefix.spans:
            locks = self._locks_on(span)
            before = locks.deepest
            locks.depths.append(span.num_pages)
            if not locks.whole:
                self.evictable -= locks.deepest - before

    def unlock(self, prefix: Peek) -> None:
        """Takes `lock` back."""
        for span in prefix.spans:
            locks = self._locks_on(span)
            before = locks.deepest
            locks.depths.remove(span.num_pages)
            if not locks.whole:
                self.evictable += before - locks.deepest

    def give_back(self, lease: Lease) -> None:
        """Frees the pages that an admitted request owns and unlocks its prefix."""
        self.free += lease.num_pages - lease.num_shared
        for span in self._cache.prefixes.spans(lease.handle):
            locks = self._locks_on(span)
            locks.whole -= 1
            if not locks.whole:
                self.evictable += span.num_pages - locks.deepest

    def num_exclusive(self, claim: Claim) -> int:
        """Pages that no request holds besides that of `claim`: those that its end frees or makes evictable."""
        if claim.prefix is not None:
            return sum(self._exclusive_to_new_lock(span) for span in claim.prefix.spans)
        lease = claim.req.lease
        assert lease is not None
        if not self._locks:
            return self._cache.num_exclusive(lease)
        spans = self._cache.prefixes.spans(lease.handle)
        return lease.num_pages - lease.num_shared + sum(self._exclusive_to_old_lock(span) for span in spans)

    def _exclusive_to_new_lock(self, span: Span) -> int:
        locks = self._locks[span.node]
        others = locks.depths.copy()
        others.remove(span.num_pages)
        return 0 if locks.whole else max(span.num_pages - max(others, default=0), 0)

    def _exclusive_to_old_lock(self, span: Span) -> int:
        locks = self._locks.get(span.node)
        if locks is None:
            return span.num_pages if span.locks == 1 else 0
        return span.num_pages - locks.deepest if locks.whole == 1 else 0

    def _locks_on(self, span: Span) -> _NodeLocks:
        locks = self._locks.get(span.node)
        if locks is None:
            locks = self._locks[span.node] = _NodeLocks(span.locks)
        return locks


class NewTokenRatio:
    """The share of their max_tokens that running requests are expected to use (SGLang's new_token_ratio).

    Most requests end long before their max_tokens, so reserving all of it would leave the pool half empty. The ratio
    begins high, falls with every decode step that finds its pages, and is raised to what a retraction shows.
    apply.py moves it.

    Args:
      conservativeness: scales the first ratio; 1 is SGLang's default.
    """

    def __init__(self, conservativeness: float) -> None:
        self._first = min(FIRST_RATIO * conservativeness, 1.0)
        self._least = LEAST_SHARE * self._first
        self._step = (self._first - self._least) / DECAY_STEPS
        self.value = self._first

    def decoded(self, num_steps: int = 1) -> None:
        """Lowers the ratio after `num_steps` decode steps that found all their pages."""
        self.value = max(self.value - num_steps * self._step, self._least)

    def after(self, num_steps: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        """What the ratio will be after `num_steps [n]` more such steps."""
        return np.maximum(self.value - num_steps * self._step, self._least)

    def retracted(self, running: Iterable[Req]) -> None:
        """Raises the ratio to what the requests show that go on after pages ran out."""
        reqs = list(running)
        done = sum(len(req.output_ids) for req in reqs)
        most = sum(min(req.max_new_tokens, CLIP_TOKENS) for req in reqs)
        shown = (done + TOKENS_AHEAD * len(reqs)) / (most + 1)
        self.value = max(self.value, min(shown, 1.0))

    def reset(self) -> None:
        """Starts over: no request runs, so what was learnt says nothing about the next requests."""
        self.value = self._first


def pages_held_for(reqs: Iterable[Req], ratio: float, cache: CacheManager) -> int:
    """Pages held for admitted requests: for all that is left to extend of each, and for its share of output."""
    pages_of, total = cache.pages_for, 0
    for req in reqs:
        assert req.lease is not None
        to_come = min(max(req.max_new_tokens - req.num_launched, 0), CLIP_TOKENS)
        if not req.sampling.ignore_eos:
            to_come = math.ceil(to_come * ratio)
        total += max(pages_of(max(req.kv_len, req.extend_to) + to_come) - req.lease.num_pages, 0)
    return total


def pages_to_come(claim: Claim, num_tokens: int, cache: CacheManager) -> int:
    """Pages that the request takes until it has stored all that is known of it, and `num_tokens` tokens more."""
    return max(cache.pages_for(claim.kv_len + claim.extend_left + num_tokens) - claim.num_pages, 0)


class Forecast:
    """Whether the pool suffices until requests that run to their max_tokens have ended.

    The forecast is exact, since requests that ignore EOS are known to go on. It serves one step: while it is used,
    nothing that the claims hold changes, apart from what is recorded in `ledger`.

    Args:
      claims: of all admitted requests.
      ledger, cache: the pool.
    """

    def __init__(self, claims: Sequence[Claim], ledger: Ledger, cache: CacheManager) -> None:
        self._cache = cache
        self._ledger = ledger
        self._claims = list(claims)
        self._table = self._rows(self._claims)

    def add(self, claim: Claim) -> None:
        """Counts the request of `claim` as admitted."""
        self._claims.append(claim)
        self._table = np.concatenate((self._table, self._rows([claim])))

    def steps_short(self, claim: Claim) -> int:
        """Decode steps for which the pool can't do with the request of `claim` besides; 0 if it suffices now.

        The pool suffices if it does until the last request ends. The prefix of `claim` is locked. Between two ends each
        request grows by the same number of tokens, so the pool is tightest right before an end. The pages of a request
        come free at its end; those that it shares with other requests only when no other lock holds them.

        While steps run that end no request, those that run come nearer to their ends, where they need the same as
        before, and the new one would need less there. Right before the end of the new one they need more and more,
        until one of them would end earlier than it.
        """
        if claim.num_shared:  # requests with the same prefix no longer hold it alone
            self._table = self._rows(self._claims)
        table = np.concatenate((self._table, self._rows([claim])))
        steps, known, held, exclusive = table[np.argsort(table[:, 0], kind="stable")].T
        freed = np.cumsum(exclusive) - exclusive
        needed = pages_before_ends(steps, known, self._cache.page_size) - sums_from(held)
        missing = needed - self._ledger.available - freed
        if not (missing > 0).any():
            return 0
        known_of_new = claim.kv_len + claim.extend_left
        of_new = claim.req.max_kv_len - known_of_new
        until_crossing = (self._table[self._table[:, 0] >= of_new, 0] - of_new).min(initial=HORIZON_STEPS)
        decides = (missing > 0) & (steps <= of_new)
        lengths = known_of_new + steps[decides]  # of the new request at these ends, now
        fitting = tokens_in(pages_for(lengths, self._cache.page_size) - missing[decides], self._cache.page_size)
        shorter = np.where(steps[decides] == of_new, until_crossing, 0) + lengths - fitting
        return int(np.clip(shorter.max(initial=1), 1, HORIZON_STEPS))

    def _rows(self, claims: Iterable[Claim]) -> npt.NDArray[np.int64]:
        """`[n, 4]` steps until its end, tokens that it knows now, pages that it has, pages that its end sets free."""
        rows = []
        for claim in claims:
            known = claim.kv_len + claim.extend_left
            exclusive = self._ledger.num_exclusive(claim)
            rows.append((claim.req.max_kv_len - known, known, claim.num_pages, exclusive))
        return np.array(rows, dtype=np.int64).reshape(-1, 4)


class TokenBudget:
    """What one extend step may hold: tokens, and seconds for their attention.

    Args:
      num_tokens: tokens that the step may extend.
      seconds: that the attention of its chunks may take.
      kv_token_s, pair_s: seconds per token of KV read, and per pair of tokens that attend.
    """

    def __init__(
        self, num_tokens: int, seconds: float = math.inf, kv_token_s: float = 0.0, pair_s: float = 0.0
    ) -> None:
        self.num_tokens = num_tokens
        self._seconds = seconds
        self._kv_token_s = kv_token_s
        self._pair_s = pair_s

    def spend(self, seconds: float) -> None:
        """Takes seconds for something else than chunks."""
        self._seconds -= seconds

    def longest_chunk(self, start: int, before: int = 0, besides_s: float = 0.0) -> int:
        """Tokens that a chunk at position `start` may have, instead of the `before` tokens that it has.

        `besides_s` are seconds that it would cost besides, as its images do.
        """
        seconds = self._seconds - besides_s + self._attention(start, before)
        if seconds == math.inf:
            return before + self.num_tokens
        left = seconds - self._kv_token_s * start
        if left <= 0:
            return 0
        square, linear = self._pair_s / 2, self._kv_token_s + self._pair_s * start
        divisor = linear + math.sqrt(linear * linear + 4 * square * left)
        most = before + self.num_tokens
        return min(int(2 * left / divisor), most) if divisor > 2 * left / (most + 1) else most

    def take(self, start: int, before: int, count: int) -> None:
        """Gives a chunk at position `start` `count` tokens instead of `before`."""
        self.num_tokens -= count - before
        self._seconds -= self._attention(start, count) - self._attention(start, before)

    def _attention(self, start: int, count: int) -> float:
        if not count:
            return 0.0
        return self._kv_token_s * (start + count) + self._pair_s * count * (start + count / 2)


class Timing:
    """How long steps may take, and what images cost of that: here, time is unbounded and nothing is measured.

    Attributes:
      is_bounded: whether the time between two tokens of a running request is.
      for_encoding_s: seconds that all images of a step may take together.
    """

    is_bounded = False
    for_encoding_s = math.inf

    def budget(
        self, most: int, decoding: Collection[Req], continuing: Sequence[Claim], mixed: Sequence[Req]
    ) -> TokenBudget:
        """What the next extend step may hold, at most `most` tokens; see `Latency.budget`."""
        return TokenBudget(most)

    def leaves_time_for(self, num_steps: int, decoding: Collection[Req]) -> bool:
        """Whether the tokens of `num_steps` decode steps in one program come in time."""
        return True

    def encode_s(self, num_patches: int) -> float | None:
        """Seconds that the vision tower takes for so many patches at most; None before any were measured."""
        return 0.0

    def restore_s(self, num_embeddings: int) -> float | None:
        """Seconds that so many embeddings take to come back from host memory; None before any was measured."""
        return 0.0

    def restores(self, num_embeddings: int) -> None:
        """So many embeddings are copied back from host memory before the step that is launched next."""

    def extends(self, inputs: StepInputs, works: Sequence[Work]) -> None:
        """An extend step, made of `works`, goes to the device."""

    def decodes(self, inputs: StepInputs, positions_S: IntArray, steps_S: IntArray | None) -> None:
        """A decode step goes to the device: for each row, `steps_S` tokens from `positions_S` on; None: one token."""

    def collected(self, seconds: float) -> None:
        """The oldest step in flight took `seconds`."""


def fair_shares(wanted: Sequence[int], budget: int) -> list[int]:
    """Shares `budget` max-min fairly: a share is below what is wanted only if no share is much larger."""
    shares = [0] * len(wanted)
    left = budget
    for rank, i in enumerate(sorted(range(len(wanted)), key=lambda i: wanted[i])):
        shares[i] = min(wanted[i], left // (len(wanted) - rank))
        left -= shares[i]
    return shares


def without_much_padding(num_tokens: int, sizes: Sequence[int], can_shed: int) -> int:
    """Tokens that a step should extend instead of `num_tokens`, if up to `can_shed` may come in the next step.

    The tail over the next smaller bucket is left out where two steps cost less than the padding of one. Cost is taken
    as proportional to padded tokens plus a constant.

    Args:
      num_tokens: what the budget allows.
      sizes: T of the extend buckets, ascending.
      can_shed: tokens of the last chunk, less the least that it must keep.
    """
    padded = next(size for size in sizes if size >= num_tokens)
    smaller = max((size for size in sizes if size < num_tokens), default=0)
    shed = num_tokens - smaller
    if not smaller or shed > can_shed:
        return num_tokens
    rest = next(size for size in sizes if size >= shed)
    return smaller if smaller + rest + STEP_COST_TOKENS < padded else num_tokens


@dataclass(frozen=True, slots=True)
class FailedAdmission:
    """A try to admit waiting requests that found no room, so that it isn't repeated in vain.

    While requests wait for pages, only decode steps are launched, and each of them would order the queue and try its
    first request again. The try must fail as long as no request arrives that may go first, none ends, is retracted or
    aborted, and nothing is extended or flushed. Owners of what may come free count that in their `epoch`, and a try of
    another epoch than now says nothing any more (`epoch_of` in planner.py). What still changes is that running
    requests come nearer to their ends and the share of output that is held for them falls; `ratio_steps_short` and
    `Forecast.steps_short` say how many decode steps that takes.

    Attributes:
      head: the request that was first in the order; None: none could be tried.
      head_pages: pages of its prefix that were cached. If the order depends on the cache, only their eviction can
        change who is first.
      num_evicted: of the cache, at the try.
      epoch: of the state, at the try.
      steps: decode steps that must still run before another try can succeed.
    """

    head: Req | None
    head_pages: int
    num_evicted: int
    epoch: int
    steps: int


def ratio_steps_short(running: Iterable[Req], ratio: NewTokenRatio, pages_short: int, cache: CacheManager) -> int:
    """Decode steps after which `pages_short` pages fewer are taken by or held for running requests (`pages_held_for`).

    At most `HORIZON_STEPS`, if that is not enough.

    Args:
      running: all admitted requests. None is between chunks or ends meanwhile.
      ratio: as it is now.
      pages_short: pages that a waiting request lacks now.
      cache: the pool.
    """
    table = [_row(req) for req in running]
    kv_len, left, held, ignores_eos = np.array(table, dtype=np.int64).reshape(-1, 4).T[:, :, None]
    steps = np.arange(HORIZON_STEPS + 1, dtype=np.int64)
    grown = np.minimum(steps, left)
    shares = np.where(ignores_eos, 1.0, ratio.after(steps))
    rounding = np.where(steps, 1e-6, 0.0)  # the ratio is lowered step by step, so it may come out a little lower
    to_come = np.ceil(np.minimum(left - grown, CLIP_TOKENS) * shares - rounding).astype(np.int64)
    pages = np.maximum(pages_for(kv_len + grown + to_come, cache.page_size), held).sum(axis=0)
    enough = np.flatnonzero(pages <= pages[0] - pages_short)
    return int(enough[0]) if len(enough) else HORIZON_STEPS


def _row(req: Req) -> tuple[int, int, int, bool]:
    assert req.lease is not None
    return req.kv_len, max(req.num_left, 0), req.lease.num_pages, req.sampling.ignore_eos
