"""Planning only reads; a plan is one readable line, and comes true; bugs planted into plan and apply are caught."""

from __future__ import annotations

import copy
import logging

import pytest

from jaxsgl.batch.buckets import BucketSet
from jaxsgl.cache.manager import CacheManager
from jaxsgl.cache.pages import IntArray, Lease
from jaxsgl.cache.prefix import Peek
from jaxsgl.config.engine import SchedulingConfig
from jaxsgl.requests.request import Request, SamplingParams
from jaxsgl.scheduler.loop import run_loop
from jaxsgl.scheduler.planner import plan_step
from jaxsgl.scheduler.req import Req
from jaxsgl.scheduler.request_table import RequestTable
from jaxsgl.testing.engine import FakeEngine, ScriptedMailbox
from tests.checked import WatchedScheduler
from tests.scheduler.serving import capacity, expected, new_scheduler, request

OPTIMIST = SchedulingConfig(schedule_conservativeness=0.01)


def serve_until_pages_run_out() -> WatchedScheduler:
    """Chunks, shared prefixes, eviction, retraction and overlap in one short history."""
    sizes = capacity(num_pages=60, max_extend_tokens=24)
    scheduler = WatchedScheduler(sizes, BucketSet.derive(sizes), (), OPTIMIST)
    requests = [request(f"r{i}", [*range(12), *range(i, i + 20)], 60) for i in range(8)]
    mailbox = ScriptedMailbox([requests[:4], [], [], requests[4:]])
    run_loop(scheduler, FakeEngine(sizes), mailbox, 1)
    for i in range(8):
        assert mailbox.output_ids(f"r{i}") == expected([*range(12), *range(i, i + 20)], 60)
    assert scheduler.load(0).totals.retractions > 0
    return scheduler


def test_a_history_with_every_kind_of_plan_passes_all_checks() -> None:
    assert serve_until_pages_run_out().is_idle


def test_a_plan_that_takes_a_lock_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    peek = CacheManager.peek

    def peek_and_lock(cache: CacheManager, token_ids: IntArray, salt: bytes) -> Peek:
        cache.prefixes.lock(cache.match(token_ids).handle)
        return peek(cache, token_ids)

    monkeypatch.setattr(CacheManager, "peek", peek_and_lock)
    with pytest.raises(AssertionError, match="planning has changed the state"):
        serve_until_pages_run_out()


def test_an_apply_that_allocates_a_page_more_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    grow = CacheManager.grow

    def grow_too_much(cache: CacheManager, lease: Lease, num_tokens: int) -> None:
        grow(cache, lease, num_tokens + cache.page_size)

    monkeypatch.setattr(CacheManager, "grow", grow_too_much)
    with pytest.raises(AssertionError, match="but the plan was: extend"):
        serve_until_pages_run_out()


def test_a_stale_entry_in_the_table_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    moved = RequestTable.moved

    def forget_the_end(requests: RequestTable, req: Req) -> None:
        decoding = copy.copy(requests.decoding)
        moved(requests, req)
        requests.decoding.update({key: old for key, old in decoding.items() if old is req})

    monkeypatch.setattr(RequestTable, "moved", forget_the_end)
    with pytest.raises(AssertionError, match=r"misfiled|have ended"):
        serve_until_pages_run_out()


def test_a_plan_is_one_readable_line(caplog: pytest.LogCaptureFixture) -> None:
    sizes = capacity(page_size=4, num_pages=100, rows=4, max_extend_tokens=32)
    scheduler, engine = new_scheduler(sizes), FakeEngine(sizes)
    scheduler.receive([request("a", range(40), 9), request("b", range(100, 104), 9)])
    lines = []
    with caplog.at_level(logging.DEBUG, "jaxsgl.scheduler"):
        for _ in range(4):
            lines.append(str(plan_step(scheduler.state)))
            inputs = scheduler.launch()
            if inputs is not None:
                scheduler.collect(engine.submit(inputs).tokens())
    assert lines == [
        "extend a/0+32 | admit a/0 (0 cached) | blocked by chunk | 91 free 0 evictable pages",
        "extend a/0+8 b/0+4 | admit b/0 (0 cached) | 88 free 0 evictable pages",
        "decode 2 | 86 free 0 evictable pages",
        "decode 2 | 86 free 0 evictable pages",
    ]
    assert caplog.messages == [f"plan: {line}" for line in lines]


def test_an_idle_scheduler_plans_no_step() -> None:
    scheduler = new_scheduler(capacity(num_pages=11))
    assert str(plan_step(scheduler.state)) == "no step | 10 free 0 evictable pages"


def test_a_plan_names_the_requests_that_it_preempts() -> None:
    sizes = capacity(rows=1)
    config = SchedulingConfig(enable_priority_scheduling=True)
    scheduler = WatchedScheduler(sizes, BucketSet.derive(sizes), (), config)
    scheduler.receive([request("low", range(9), 30)])
    launched = scheduler.launch()
    assert launched is not None
    scheduler.collect([5])
    params = SamplingParams(temperature=0.0, max_tokens=4)
    scheduler.receive([Request("high", list(range(50, 59)), params, priority=20)])
    plan = plan_step(scheduler.state)
    assert ([req.request_id for req in plan.preempt], [entry.req.request_id for entry in plan.admit]) == (
        ["low"],
        ["high"],
    )
    assert "preempt low/0" in str(plan)
