"""The runtime check: whether every page, row and lock is accounted for, while the server serves.

A leak is logged with whoever had it last and counted, and serving goes on: a server that has lost a page of thousands
is better than none. The loop calls it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from jaxsgl.scheduler.scheduler import Scheduler

MIN_INTERVAL_S = 5.0
MAX_SHARE = 0.01  # of the time that checks may take, however large the pool
MAX_LOGGED = 10  # leaks of one check

logger = logging.getLogger(__name__)


class Checker:
    """Checks when the scheduler becomes idle, though not each time if that happens often, and when asked.

    Args:
      scheduler: what is checked.
      every_step: check after every turn of the loop, and raise AssertionError; for tests.
      clock: gives seconds.

    Attributes:
      num_leaks: found so far.
    """

    def __init__(
        self, scheduler: Scheduler, every_step: bool = False, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._scheduler = scheduler
        self._every_step = every_step
        self._clock = clock
        self._known: set[str] = set()
        self._next_s = clock() + MIN_INTERVAL_S
        self._was_idle = True
        self.num_leaks = 0

    def turn_ends(self) -> None:
        """A turn of the loop is over."""
        if self._every_step:
            self._scheduler.check()
        idle = self._scheduler.is_idle
        if idle and not self._was_idle and self._clock() >= self._next_s:
            self.check()
        self._was_idle = idle

    def check(self) -> list[str]:
        """All leaks, in words; those that are new are logged and counted."""
        start_s = self._clock()
        leaks = self._scheduler.leaks()
        new = [leak for leak in leaks if leak not in self._known]
        self._known.update(new)
        self.num_leaks += len(new)
        for leak in new[:MAX_LOGGED]:
            logger.error("leak: %s", leak)
        if len(new) > MAX_LOGGED:
            logger.error("and %d leaks more", len(new) - MAX_LOGGED)
        end_s = self._clock()
        self._next_s = end_s + max(MIN_INTERVAL_S, (end_s - start_s) / MAX_SHARE)
        return leaks
