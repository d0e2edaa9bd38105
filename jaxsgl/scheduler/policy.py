"""Which waiting request is admitted first: SGLang's policies, as functions from the queue to an order.

planner.py admits requests in that order until there is no more room. Whatever the policy, requests that were overtaken
too often or were retracted come first, in order of arrival, so that no request starves.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Hashable, Sequence

from jaxsgl.cache.manager import CacheManager
from jaxsgl.cache.prefix import Peek
from jaxsgl.config import SchedulingConfig
from jaxsgl.request import Request
from jaxsgl.scheduler.req import Req

MAX_REORDERED = 128  # prefixes of this many requests are looked up; later arrivals are served first come, first served
MAX_OVERTAKEN = 256  # admissions of later arrivals that a request lets pass
SHARED_TOKENS = 32  # common tokens that are worth waiting for


class Policy:
    """Puts waiting requests in order.

    Args:
      config: names the policy.
      cache: where prefixes are looked up.
      random_seed: seed of the random policy.
    """

    def __init__(self, config: SchedulingConfig, cache: CacheManager, random_seed: int) -> None:
        self._config = config
        self._cache = cache
        self._random_seed = random_seed

    def order(self, waiting: Sequence[Req], num_admitted: int, num_steps: int) -> list[Req]:
        """`waiting` (in order of arrival), in the order in which they are to be admitted now.

        Requests that had better wait until another one has computed their common prefix are left out.

        Args:
          num_admitted: admissions so far.
          num_steps: steps launched so far.
        """
        if self._config.enable_priority_scheduling:
            return sorted(waiting, key=lambda req: (self.rank(req), self._by_length(req)))
        policy = self._config.schedule_policy
        if policy == "fcfs":
            return list(waiting)
        first = [req for req in waiting if req.output_ids or num_admitted - req.num_ahead > MAX_OVERTAKEN]
        overdue = frozenset(first)
        return first + self._reordered(policy, [req for req in waiting if req not in overdue], num_steps)

    def lowest(self, reqs: Sequence[Req]) -> Req | None:
        """The request of the lowest priority; of several, the one that came last."""
        return max(reversed(reqs), key=self.rank, default=None)

    def rank(self, req: Req | Request) -> int:
        """Its priority, as a number of which the lowest goes first."""
        return req.priority if self._config.schedule_low_priority_values_first else -req.priority

    def _by_length(self, req: Req) -> int:
        return -req.max_new_tokens if self._config.schedule_policy == "lof" else 0

    def _reordered(self, policy: str, waiting: list[Req], num_steps: int) -> list[Req]:
        if policy == "random":
            return random.Random(f"{self._random_seed} {num_steps}").sample(waiting, len(waiting))
        if policy == "lof":
            return sorted(waiting, key=lambda req: -req.max_new_tokens)
        waiting, others = waiting[:MAX_REORDERED], waiting[MAX_REORDERED:]
        peeks = {req: self._cache.peek(req.matchable_ids, req.cache_salt) for req in waiting}
        later = self._sharing_with_earlier(peeks)
        waiting = [req for req in waiting if req not in later]
        if policy == "lpm":
            return sorted(waiting, key=lambda req: -peeks[req].num_pages) + others
        return _depth_first(waiting, peeks) + others

    def _sharing_with_earlier(self, peeks: dict[Req, Peek]) -> frozenset[Req]:
        """Requests that share more than SHARED_TOKENS uncached tokens with an earlier one, which goes first."""
        seen: set[bytes] = set()
        later: list[Req] = []
        for req, peek in peeks.items():
            stop = self._cache.tokens_of(peek.num_pages) + SHARED_TOKENS + 1
            if len(req.matchable_ids) < stop:
                continue
            beginning = req.matchable_ids[:stop].tobytes() + req.cache_salt
            if beginning in seen:
                later.append(req)
            seen.add(beginning)
        return frozenset(later)


def _depth_first(waiting: list[Req], peeks: dict[Req, Peek]) -> list[Req]:
    """Down the prefix tree, into the branch with most waiting requests first; prefixes that end at a node come last."""
    weight: Counter[Hashable] = Counter(span.node for req in waiting for span in peeks[req].spans)
    number = {node: i for i, node in enumerate(weight)}  # keeps branches of equal weight apart

    def place(req: Req) -> list[tuple[int, int]]:
        return [*((-weight[span.node], number[span.node]) for span in peeks[req].spans), (1, 0)]

    return sorted(waiting, key=place)
