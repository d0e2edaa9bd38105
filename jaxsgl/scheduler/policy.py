"""Which waiting request is admitted first: SGLang's policies, as functions from the queue to an order.

planner.py admits requests in that order until there is no more room. Whatever the policy, requests that were overtaken
too often or were retracted come first, in order of arrival, so that no request starves. `PrefixesInProgress` tells
which requests had better wait for another one to compute what both begin with.

At the end: which running requests go back to the queue, when pages run out (retraction) or for a higher priority
(preemption). One that was taken back gives its pages back at once and keeps its output, so that its client sees no
difference.
"""

from __future__ import annotations

import itertools
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence

import numpy as np

from jaxsgl.cache.manager import CacheManager
from jaxsgl.cache.pages import IntArray
from jaxsgl.cache.prefix import Peek
from jaxsgl.config.engine import SchedulingConfig
from jaxsgl.requests.request import Request
from jaxsgl.scheduler.budget import Claim
from jaxsgl.scheduler.req import Req, State

MAX_REORDERED = 128  # prefixes of this many requests are looked up; later arrivals are served first come, first served
MAX_OVERTAKEN = 256  # admissions of later arrivals that a request lets pass
MAX_OVERTAKEN_OFF_DEVICE = 32  # likewise one whose adapter is not on the device
SHARED_TOKENS = 32  # common tokens that are worth waiting for


class Policy:
    """Puts waiting requests in order.

    Args:
      config: names the policy.
      cache: says whether prefixes are kept at all.
      random_seed: seed of the random policy.

    Attributes:
      by_prefix: whether the order depends on cached prefixes.
    """

    def __init__(self, config: SchedulingConfig, cache: CacheManager, random_seed: int) -> None:
        self._config = config
        self._name = config.policy
        self._random_seed = random_seed
        self.by_prefix = self._name in ("lpm", "dfs-weight") and cache.prefixes.keeps

    def order(self, waiting: Iterable[Req], num_admitted: int, peek: Callable[[Req], Peek]) -> Iterator[Req]:
        """`waiting` (in order of arrival), in the order in which they are to be admitted now; read as far as needed.

        Args:
          num_admitted: admissions so far.
          peek: looks up the cached prefix of a request.
        """
        if self._config.enable_priority_scheduling:
            return iter(sorted(waiting, key=self._key))
        if self.by_prefix:
            later = iter(waiting)
            window = list(itertools.islice(later, MAX_REORDERED))
            return itertools.chain(self._reordered(window, num_admitted, peek), later)
        if self._name in ("lof", "random"):
            return iter(self._reordered(list(waiting), num_admitted, peek))
        return iter(waiting)

    def may_precede(self, arrival: Req, head: Req | None, waiting: Iterable[Req]) -> bool:
        """Whether the order may begin with `arrival` from now on, instead of with `head` (None: it was empty).

        `waiting` are the requests that wait ahead of `arrival` and may be admitted; read as far as needed.
        """
        if head is None:
            return True
        if self.by_prefix:
            return sum(1 for _ in itertools.islice(waiting, MAX_REORDERED)) < MAX_REORDERED
        return self._key(arrival) < self._key(head)

    def goes_first(self, req: Req, num_admitted: int) -> bool:
        """Whether `req` was retracted, or overtaken so often that it waits for no other request any more."""
        on_device = req.adapter is None or req.adapter.place > 0
        most = MAX_OVERTAKEN if on_device else MAX_OVERTAKEN_OFF_DEVICE
        return bool(req.output_ids) or num_admitted - req.num_ahead > most

    def lower_than(self, request: Request, reqs: Sequence[Req]) -> list[Req]:
        """Those of `reqs`, in order of arrival, that have a lower priority: the lowest first, the newest of equals."""
        lower = [req for req in reversed(reqs) if self.rank(req) > self.rank(request)]
        return sorted(lower, key=self.rank, reverse=True)

    def rank(self, req: Req | Request) -> int:
        """Its priority, as a number of which the lowest goes first; 0 for all if priorities are off."""
        if not self._config.enable_priority_scheduling:
            return 0
        return req.priority if self._config.schedule_low_priority_values_first else -req.priority

    def _key(self, req: Req) -> tuple[int, int]:
        """What the order goes by if it doesn't depend on the cache; equals stay in order of arrival."""
        by_policy = 0
        if self._name == "lof":
            by_policy = -req.max_new_tokens
        elif self._name == "random":
            by_policy = zlib.crc32(f"{self._random_seed} {req.request_id} {req.index}".encode())
        return self.rank(req), by_policy

    def _reordered(self, waiting: list[Req], num_admitted: int, peek: Callable[[Req], Peek]) -> list[Req]:
        first = [req for req in waiting if self.goes_first(req, num_admitted)]
        overdue = frozenset(first)
        waiting = [req for req in waiting if req not in overdue]
        if not self.by_prefix:
            return first + sorted(waiting, key=self._key)
        peeks = {req: peek(req) for req in waiting}
        if self._name == "lpm":
            return first + sorted(waiting, key=lambda req: -peeks[req].num_pages)
        return first + _depth_first(waiting, peeks)


class PrefixesInProgress:
    """The prompts that are being computed: a request that begins like one of them finds that part cached a step later.

    Args:
      cache: knows the size of pages.
      claims: of the requests between chunks.
    """

    def __init__(self, cache: CacheManager, claims: Iterable[Claim]) -> None:
        self._cache = cache
        self._least_tokens = cache.tokens_of(cache.pages_for(SHARED_TOKENS))
        self._prompts: dict[tuple[bytes, int, bytes], list[IntArray]] = {}
        for claim in claims:
            self.add(claim)

    def add(self, claim: Claim) -> None:
        """Adds the prompt of a request that extends in the step that is being planned, unless it shares nothing."""
        if claim.req.lease is not None and claim.req.lease.is_retired:
            return
        ids = claim.req.hash_ids
        start, stop = self._next_pages(claim.num_shared)
        if stop <= len(ids):
            key = (claim.req.namespace, start, ids[start:stop].tobytes())
            self._prompts.setdefault(key, []).append(ids)

    def cover(self, req: Req, prefix: Peek) -> bool:
        """Whether `req`, of which `prefix` is cached, shares `SHARED_TOKENS` in whole pages more with one of them."""
        ids = req.matchable_ids
        start, stop = self._next_pages(prefix.num_pages)
        if stop >= len(ids):  # a match leaves one token to compute
            return False
        prompts = self._prompts.get((req.namespace, start, ids[start:stop].tobytes()), ())
        return any(np.array_equal(prompt[:start], ids[:start]) for prompt in prompts)

    def _next_pages(self, num_pages: int) -> tuple[int, int]:
        """Where the tokens begin and end that come after `num_pages` cached pages, and are worth waiting for."""
        start = self._cache.tokens_of(num_pages)
        return start, start + self._least_tokens


def _depth_first(waiting: list[Req], peeks: dict[Req, Peek]) -> list[Req]:
    """Down the prefix tree, into the branch with most waiting requests first; prefixes that end at a node come last."""
    weight: Counter[Hashable] = Counter(span.node for req in waiting for span in peeks[req].spans)
    number = {node: i for i, node in enumerate(weight)}  # keeps branches of equal weight apart

    def place(req: Req) -> list[tuple[int, int]]:
        return [*((-weight[span.node], number[span.node]) for span in peeks[req].spans), (1, 0)]

    return sorted(waiting, key=place)


def retractable(admitted: Iterable[Req]) -> list[Req]:
    """Requests that go on; one whose last token is in flight is about to give its pages back anyway."""
    return [req for req in admitted if req.state in (State.PREFETCHING, State.EXTENDING) or req.can_launch]


def in_order_of_loss(reqs: Collection[Req], rank: Callable[[Req], int]) -> list[Req]:
    """`reqs` (in order of admission), the one to retract first at the head.

    That is one of the lowest priority (`rank` gives priorities, of which the lowest number goes first), and of these
    the one that loses least: fewest tokens generated, then the longest input, since it frees most; of equals the
    newest. So the oldest request with most output goes on, and the whole makes progress.
    """
    newest_first = reversed(list(reqs))
    return sorted(newest_first, key=lambda req: (-rank(req), len(req.output_ids), -req.prompt_len))


def outranked(rank: Callable[[Req], int], waiting: Req, running: Iterable[Req], threshold: int) -> list[Req]:
    """Those of `running` whose priority is lower than that of `waiting` by more than `threshold`."""
    return [req for req in running if rank(req) - rank(waiting) > threshold]


def victims(
    rank: Callable[[Req], int],
    waiting: Req,
    candidates: Sequence[Req],
    threshold: int,
    pages_short: int,
    num_exclusive: Callable[[Req], int],
) -> list[Req]:
    """Requests whose pages and row suffice for `waiting`; [] if all together don't suffice.

    Args:
      rank: priority, less goes first.
      candidates: requests that may be preempted, in order of admission.
      threshold: how much lower a victim's priority must be.
      pages_short: pages that `waiting` lacks; 0 if it lacks a row only.
      num_exclusive: pages that a candidate alone holds.
    """
    lower = outranked(rank, waiting, candidates, threshold)
    lower.reverse()  # newest first
    lower.sort(key=rank, reverse=True)  # and before that, lowest priority first
    chosen: list[Req] = []
    for req in lower:
        chosen.append(req)
        pages_short -= num_exclusive(req)
        if pages_short <= 0:
            return chosen
    return []
