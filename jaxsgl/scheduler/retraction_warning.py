"""`RetractionWarning`: tells the operator in the log that pages ran out, and which flags to change.

A retracted request computes its prompt and its output so far again, so a server that retracts often is slower than it
need be. Retractions come in bursts: one line stands for all of at least `INTERVAL_S` seconds. scheduler.py calls it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from jaxsgl.batch.buckets import Capacity

INTERVAL_S = 10.0

logger = logging.getLogger(__name__)


class RetractionWarning:
    """Counts retractions and warns of them.

    Args:
      capacity: of the pool and the batch.
      conservativeness: --schedule-conservativeness.
      clock: gives seconds.
    """

    def __init__(self, capacity: Capacity, conservativeness: float, clock: Callable[[], float]) -> None:
        self._capacity = capacity
        self._conservativeness = conservativeness
        self._clock = clock
        self._since_s = self._next_s = clock()
        self._count = 0

    def retracted(self, count: int) -> None:
        """Counts `count` requests that a step has retracted for want of pages; logs them if it is time."""
        now_s = self._clock()
        if not self._count:
            self._since_s = now_s
        self._count += count
        if now_s < self._next_s:
            return
        logger.warning(
            "the KV pool of %d tokens ran out: %d running requests were retracted within %.0f s and start over later; "
            "raise --schedule-conservativeness (now %g) or lower --max-running-requests (now %d), or enlarge the pool "
            "(--mem-fraction-static, --max-total-tokens)",
            self._capacity.pool_tokens, self._count, now_s - self._since_s, self._conservativeness,
            self._capacity.num_rows,
        )  # fmt: skip
        self._next_s, self._count = now_s + INTERVAL_S, 0
