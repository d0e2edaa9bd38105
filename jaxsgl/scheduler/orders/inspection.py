"""How an operator sees into a running scheduler: its state in plain values, and the leak check. Changes nothing.

A leak is logged with the last owner of what was lost, and counted; serving goes on, since a server that has lost a page
of thousands is better than none. loop.py runs the check, control.py asks for both.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from itertools import islice
from typing import Any

from jaxsgl.cache.manager import CacheManager
from jaxsgl.scheduler.plan import StepPlan
from jaxsgl.scheduler.req import Req
from jaxsgl.scheduler.request_table import RequestTable
from jaxsgl.scheduler.serving import AnyScheduler
from jaxsgl.scheduler.state import SchedulerState

MAX_LISTED = 256  # requests in a dump; the queue may hold thousands
MIN_INTERVAL_S = 5.0
MAX_SHARE = 0.01  # of the time that leak checks may take, however large the pool
MAX_LOGGED = 10  # leaks of one check

logger = logging.getLogger(__name__)


def dump_scheduler(scheduler: AnyScheduler) -> dict[str, Any]:
    """The scheduler's state as JSON takes it; of several ranks, that of each one."""
    each = [dump_state(rank.state, rank.is_paused, rank.last_plan) for rank in scheduler.ranks]
    if len(each) == 1:
        return each[0]
    return {"paused": scheduler.is_paused, "steps_in_flight": scheduler.steps_in_flight, "ranks": each}


def dump_state(state: SchedulerState, paused: bool, last_plan: StepPlan | None) -> dict[str, Any]:
    """The state of a scheduler or a rank, the first `MAX_LISTED` waiting and running requests included."""
    requests = state.requests
    return {
        "paused": paused,
        "schedule_policy": state.config.policy,
        "new_token_ratio": state.ratio.value,
        "admission_stopped_for": state.blocked.value if state.blocked else None,
        "admission_closed": state.admission_closed,
        "steps_in_flight": state.steps_in_flight,
        "last_plan": None if last_plan is None else str(last_plan),
        "retractions_total": state.totals.retractions,
        "num_waiting": len(requests.waiting),
        "num_retracted": requests.num_retracted,
        "num_running": len(requests.admitted),
        "cache": _dump_cache(state.cache),
        **{name: value for resource in state.resources for name, value in resource.dump().items()},
        "waiting": dump_requests(requests.waiting.values(), requests, MAX_LISTED),
        "running": dump_requests(requests.admitted.values(), requests, MAX_LISTED),
    }


class LeakCheck:
    """Checks when the scheduler becomes idle, though not each time if that happens often, and when asked.

    Args:
      scheduler: what is checked.
      clock: gives seconds.

    Attributes:
      num_leaks: found so far.
    """

    def __init__(self, scheduler: AnyScheduler, clock: Callable[[], float] = time.monotonic) -> None:
        self._scheduler = scheduler
        self._clock = clock
        self._known: set[str] = set()
        self._next_s = clock() + MIN_INTERVAL_S
        self._steps_seen = 0
        self.num_leaks = 0

    def when_idle(self) -> None:
        """Checks after a turn that left the scheduler idle, if it is time and steps have run since the last one."""
        num_steps = self._scheduler.num_steps
        if num_steps != self._steps_seen and self._clock() >= self._next_s:
            self.run()
        self._steps_seen = num_steps

    def run(self) -> list[str]:
        """All leaks, in words; new ones are logged and counted."""
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


def _dump_cache(cache: CacheManager) -> dict[str, int]:
    """Pages and rows. Cached pages are in the prefix tree; those that no request locks are evictable."""
    return {
        "page_size": cache.page_size,
        "pages": cache.num_pages - 1,
        "free_pages": cache.num_free,
        "cached_pages": cache.prefixes.num_pages,
        "evictable_pages": cache.prefixes.num_evictable,
        "rows": len(cache.table.pages),
        "free_rows": cache.table.num_free_rows,
    }


def dump_requests(reqs: Iterable[Req], requests: RequestTable, max_listed: int) -> list[dict[str, Any]]:
    """The first `max_listed` of `reqs`, which are among `requests`, as JSON takes them: numbers, and no token."""
    return [_dump_request(req, requests) for req in islice(reqs, max_listed)]


def _dump_request(req: Req, requests: RequestTable) -> dict[str, Any]:
    return {
        "request_id": req.request_id,
        "sample": req.index,
        "state": req.state.value,
        "priority": req.priority,
        "prompt_tokens": req.prompt_len,
        "output_tokens": len(req.output_ids),
        "max_new_tokens": req.max_new_tokens,
        "cached_tokens": req.cached_tokens,
        "kv_tokens": req.kv_len,
        "extend_left": req.extend_left,
        "pages": req.lease.num_pages if req.lease else 0,
        "row": req.lease.row if req.lease else None,
        "waited_s": requests.waited_s(req.request_id),
        "running_s": requests.running_s(req.request_id),
    }
