"""Priorities when pages have run out: who is retracted, and who is admitted although admission is closed."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from jaxsgl.batch.buckets import BucketSet
from jaxsgl.config.engine import SchedulingConfig
from jaxsgl.requests.grammar import Grammar
from jaxsgl.requests.request import Request, SamplingParams
from jaxsgl.scheduler.req import Req
from jaxsgl.testing.engine import FakeEngine
from tests.checked import CheckedScheduler
from tests.scheduler.serving import capacity, expected

BOTH_SIGNS = pytest.mark.parametrize("sign", [1, -1])


def optimist(num_pages: int, rows: int, sign: int = 1, **config: Any) -> tuple[CheckedScheduler, FakeEngine]:
    """Admits far too many requests, by priorities; `sign` -1: low values go first."""
    sizes = capacity(num_pages=num_pages, rows=rows)
    scheduling = SchedulingConfig(
        enable_priority_scheduling=True,
        schedule_low_priority_values_first=sign < 0,
        schedule_conservativeness=0.01,
        **config,
    )
    return CheckedScheduler(sizes, BucketSet.derive(sizes), (), scheduling), FakeEngine(sizes)


def of(name: str, start: int, priority: int, max_tokens: int = 60) -> Request:
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    return Request(name, list(range(start, start + 20)), params, priority)


def turn(scheduler: CheckedScheduler, engine: FakeEngine) -> dict[str, list[int]]:
    """One turn of the loop; the tokens that it yields."""
    inputs = scheduler.launch()
    if inputs is not None:
        scheduler.collect(engine.submit(inputs).tokens())
    tokens: dict[str, list[int]] = {}
    for reply in scheduler.take_replies():
        tokens.setdefault(reply.request_id, []).extend(reply.token_ids)
    return tokens


def turn_until_retraction(scheduler: CheckedScheduler, engine: FakeEngine) -> list[str]:
    for _ in range(200):
        turn(scheduler, engine)
        assert scheduler.last_plan is not None
        if scheduler.last_plan.retract:
            return [req.request_id for req in scheduler.last_plan.retract]
    raise AssertionError("pages never ran out")


@BOTH_SIGNS
def test_the_lowest_priority_is_retracted_first(sign: int) -> None:
    """It has generated more than the others, so without priorities it would be the last to go."""
    scheduler, engine = optimist(60, 5, sign)
    scheduler.receive([of("low", 0, 0 * sign)])
    for _ in range(6):
        turn(scheduler, engine)
    scheduler.receive([of("high", 100, 5 * sign), of("middle", 200, 3 * sign), of("top", 300, 9 * sign)])
    assert turn_until_retraction(scheduler, engine) == ["low"]
    assert turn_until_retraction(scheduler, engine) == ["middle"]


def test_of_equal_priorities_the_one_with_least_to_lose_is_retracted() -> None:
    scheduler, engine = optimist(60, 5)
    scheduler.receive([of("old", 0, 1), of("high", 100, 2)])
    for _ in range(6):
        turn(scheduler, engine)
    scheduler.receive([of("new", 200, 1), of("high too", 300, 2)])
    assert turn_until_retraction(scheduler, engine) == ["new"]


@BOTH_SIGNS
def test_a_higher_priority_preempts_while_admission_is_closed(sign: int) -> None:
    scheduler, engine = optimist(60, 5, sign)
    scheduler.receive([of(f"r{i}", 100 * i, 0) for i in range(4)])
    turn_until_retraction(scheduler, engine)
    assert scheduler.state.admission_closed
    scheduler.receive([of("equal", 500, 5 * sign), of("urgent", 600, 1000 * sign, max_tokens=40)])
    tokens = turn(scheduler, engine)
    assert scheduler.last_plan is not None
    assert [entry.req.request_id for entry in scheduler.last_plan.admit] == ["urgent"]
    while not scheduler.is_idle:
        for name, more in turn(scheduler, engine).items():
            tokens.setdefault(name, []).extend(more)
    assert tokens["urgent"] == expected(range(600, 620), 40)
    assert tokens["equal"] == expected(range(500, 520), 60)


def test_no_request_is_preempted_for_its_row_if_pages_are_lacking_too() -> None:
    """The other running request, as important as the waiting one, holds them."""
    sizes = capacity(page_size=4, num_pages=61, rows=2, context=240, max_extend_tokens=128)
    config = SchedulingConfig(enable_priority_scheduling=True)
    scheduler, engine = CheckedScheduler(sizes, BucketSet.derive(sizes), (), config), FakeEngine(sizes)
    first = replace(of("first", 0, 50), prompt_ids=list(range(60)))
    low, high = of("low", 100, 0), replace(of("high", 200, 50, 40), prompt_ids=list(range(200, 320)))
    scheduler.receive([first, low])
    for _ in range(10):
        turn(scheduler, engine)
    scheduler.receive([high])
    while not scheduler.is_idle:
        turn(scheduler, engine)
        assert scheduler.last_plan is not None and not scheduler.last_plan.preempt


def test_no_request_is_preempted_for_pages_that_the_waiting_one_shares() -> None:
    """The prefix of both would stay locked, and what else the running one holds doesn't suffice."""
    sizes = capacity(page_size=4, num_pages=100, rows=4, context=400, max_extend_tokens=256)
    config = SchedulingConfig(enable_priority_scheduling=True)
    scheduler, engine = CheckedScheduler(sizes, BucketSet.derive(sizes), (), config), FakeEngine(sizes)
    document = list(range(240))
    low = replace(of("low", 0, 0, max_tokens=30), prompt_ids=[*document, 5])
    high = replace(of("high", 0, 50, max_tokens=150), prompt_ids=[*document, 6])
    scheduler.receive([replace(of("other", 300, 50, max_tokens=100)), low])
    for _ in range(6):
        turn(scheduler, engine)
    scheduler.receive([high])
    while not scheduler.is_idle:
        turn(scheduler, engine)
        assert scheduler.last_plan is not None and not scheduler.last_plan.preempt


def test_an_urgent_request_is_admitted_behind_one_that_was_preempted_for_it() -> None:
    """Once its victim is gone it outranks no running request any more, and is admitted nevertheless."""
    scheduler, engine = optimist(100, 4)
    scheduler.receive([of("low", 0, 0), *(of(f"high {i}", 100 * i, 1000) for i in range(1, 4))])
    for _ in range(20):
        turn(scheduler, engine)
    scheduler.state.admission_closed = True  # as after a retraction
    scheduler.receive([of("urgent", 600, 1000, max_tokens=30)])
    turn(scheduler, engine)
    plan = scheduler.last_plan
    assert plan is not None
    assert [req.request_id for req in plan.preempt] == ["low"]
    assert [entry.req.request_id for entry in plan.admit] == ["urgent"]


@pytest.mark.parametrize("fails", [False, True])
def test_a_request_that_is_refused_or_fails_takes_no_place_in_a_full_queue(
    fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has a grammar, which this server doesn't take; or there is a fault in our work for it."""
    sizes, scheduling = capacity(), SchedulingConfig(enable_priority_scheduling=True)
    scheduler = CheckedScheduler(sizes, BucketSet.derive(sizes), (), scheduling, max_queued_requests=1)
    low, high = of("low", 0, 0), of("high", 1, 5)
    scheduler.receive([low])
    if fails:
        monkeypatch.setattr(Req, "__init__", lambda *args, **kwargs: [][0])
    else:
        high = replace(high, sampling=replace(high.sampling, grammar=Grammar.regex("a")))
    scheduler.receive([high])
    assert [reply.request_id for reply in scheduler.take_replies()] == ["high"]
    assert scheduler.has("low") and scheduler.num_waiting == 1
