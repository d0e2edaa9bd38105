"""Decides whether the next decode step is one step, or several in one program (`--decode-steps`).

Several cost the host as much as one, but whoever comes or ends meanwhile waits until all are done. Called by the
scheduler; decides nothing about who decodes.
"""

from __future__ import annotations

from collections.abc import Sequence

from jaxsgl.cache.manager import CacheManager
from jaxsgl.scheduler.pace import Pace
from jaxsgl.scheduler.req import Req

LEAST_USED = 0.75  # of the rows of several steps; the others are requests that have all their tokens by then


class DecodeSteps:
    """The choice between the programs that are compiled.

    Args:
      several: steps of the programs that take several; 1: there are none.
      cache, pace: the scheduler's.
    """

    def __init__(self, several: int, cache: CacheManager, pace: Pace) -> None:
        self._several = several
        self._cache = cache
        self._pace = pace

    def choose(self, reqs: Sequence[Req]) -> int:
        """Steps in which nobody of `reqs`, for whose next token there are pages, needs the host in between.

        Several if each step yields tokens that somebody waits for, few rows idle, nobody's logits are edited or scored,
        there are pages for all these tokens without taking any from other requests, and they are there in time.
        """
        if self._several == 1 or any(req.is_featured for req in reqs):
            return 1
        counts = [min(self._several, req.num_left) for req in reqs]
        if max(counts) < self._several or sum(counts) < LEAST_USED * self._several * len(reqs):
            return 1
        num_pages = sum(
            self._cache.pages_for(req.kv_len + count) - req.lease.num_pages
            for req, count in zip(reqs, counts, strict=True)
            if req.lease
        )
        if num_pages > self._cache.num_available or not self._pace.leaves_time_for(self._several, reqs):
            return 1
        return self._several
