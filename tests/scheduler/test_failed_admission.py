"""While requests wait for pages, the queue is read again only when something has changed that could make room.

That a skipped try would have admitted nothing is checked by `CheckedScheduler` after every plan, here and wherever else
it serves, random histories included.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from jaxsgl.batch.buckets import BucketSet
from jaxsgl.config.engine import POLICIES, SchedulingConfig
from jaxsgl.messages.orders import Abort
from jaxsgl.requests.request import Request, SamplingParams
from jaxsgl.scheduler import extend_step
from jaxsgl.scheduler.apply import Applier
from jaxsgl.scheduler.budget import HORIZON_STEPS, Forecast
from jaxsgl.scheduler.policy import MAX_REORDERED, Policy
from jaxsgl.scheduler.req import Req
from jaxsgl.scheduler.scheduler import Scheduler
from jaxsgl.testing.engine import FakeEngine
from tests.checked import CheckedScheduler
from tests.scheduler.serving import capacity

MODES: list[dict[str, Any]] = [{"schedule_policy": policy} for policy in POLICIES] + [
    {"enable_priority_scheduling": True},
    {"enable_mixed_chunk": True},
]
EVERY_MODE = pytest.mark.parametrize("config", MODES, ids=lambda config: "-".join(map(str, config.values())))


class Reads:
    """Counts how often the order of the queue is asked for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        order = Policy.order

        def counted(policy: Policy, *args: Any) -> Iterator[Req]:
            self.count += 1
            return order(policy, *args)

        monkeypatch.setattr(Policy, "order", counted)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Reads:
    return Reads(monkeypatch)


def of(name: str, start: int, max_tokens: int, ignore_eos: bool, length: int = 20, priority: int = 0) -> Request:
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=ignore_eos)
    return Request(name, [(start + i) % 1000 for i in range(length)], params, priority)


def step(scheduler: Scheduler, engine: FakeEngine) -> None:
    inputs = scheduler.launch()
    assert inputs is not None
    scheduler.collect(engine.submit(inputs).tokens())
    scheduler.take_replies()


def short_of_pages(
    config: dict[str, Any], ignore_eos: bool, num_waiting: int = 3, type_: type[Scheduler] = CheckedScheduler
) -> tuple[Scheduler, FakeEngine]:
    """Two requests run in the pages of three; others wait, and have just been tried twice."""
    sizes = capacity(page_size=4, num_pages=76, rows=8)
    scheduler = type_(sizes, BucketSet.derive(sizes), (), SchedulingConfig(schedule_conservativeness=2.0, **config))
    engine = FakeEngine(sizes)
    scheduler.receive([of(f"runs {i}", 100 * i, 100, ignore_eos) for i in range(2)])
    for _ in range(5):
        step(scheduler, engine)
    scheduler.receive([of(f"waits {i}", 500 + 20 * i, 95, ignore_eos) for i in range(num_waiting)])
    for _ in range(2):
        step(scheduler, engine)
    assert (scheduler.num_running, scheduler.num_waiting) == (2, num_waiting)
    return scheduler, engine


@EVERY_MODE
@pytest.mark.parametrize("ignore_eos", [False, True])
def test_decode_steps_that_are_short_of_pages_do_not_read_the_queue(
    config: dict[str, Any], ignore_eos: bool, reads: Reads
) -> None:
    scheduler, engine = short_of_pages(config, ignore_eos, type_=Scheduler)
    before = reads.count
    for _ in range(30):
        step(scheduler, engine)
    assert reads.count - before <= 2
    assert (scheduler.num_running, scheduler.num_waiting) == (2, 3)


def end_one(scheduler: Scheduler) -> None:
    scheduler.receive([Abort("runs 0")])


def abort_the_first(scheduler: Scheduler) -> None:
    scheduler.receive([Abort("waits 0")])


def flush(scheduler: Scheduler) -> None:
    scheduler.flush_cache()


@EVERY_MODE
@pytest.mark.parametrize("event", [end_one, abort_the_first, flush])
def test_what_could_make_room_leads_to_another_try(
    config: dict[str, Any], event: Callable[[Scheduler], None], reads: Reads
) -> None:
    scheduler, engine = short_of_pages(config, True, type_=Scheduler)
    before = reads.count
    event(scheduler)
    step(scheduler, engine)
    assert reads.count > before


@pytest.mark.parametrize(
    ("config", "arrival", "tried"),
    [
        ({"schedule_policy": "fcfs"}, of("small", 900, 1, True, length=2), False),
        ({"schedule_policy": "lof"}, of("shorter", 900, 90, True), False),
        ({"schedule_policy": "lof"}, of("longer", 900, 99, True), True),
        ({"schedule_policy": "lpm"}, of("cached", 0, 5, True), True),
        ({"schedule_policy": "dfs-weight"}, of("cached", 0, 5, True), True),
        ({"enable_priority_scheduling": True}, of("equal", 900, 5, True), False),
        ({"enable_priority_scheduling": True}, of("higher", 900, 5, True, priority=1), True),
    ],
)
def test_an_arrival_is_tried_if_it_may_go_first(
    config: dict[str, Any], arrival: Request, tried: bool, reads: Reads
) -> None:
    scheduler, engine = short_of_pages(config, True, type_=Scheduler)
    before = reads.count
    scheduler.receive([arrival])
    step(scheduler, engine)
    assert (reads.count > before) == tried


@pytest.mark.parametrize("policy", ["lpm", "dfs-weight"])
def test_an_arrival_behind_the_requests_whose_prefixes_are_looked_up_is_not_tried(policy: str, reads: Reads) -> None:
    scheduler, engine = short_of_pages({"schedule_policy": policy}, True, num_waiting=MAX_REORDERED, type_=Scheduler)
    before = reads.count
    scheduler.receive([of("cached", 0, 5, True)])
    step(scheduler, engine)
    assert reads.count == before


def served_until_room_appears(ignore_eos: bool, mixed: bool) -> int:
    """Steps until a request is admitted that finds no room at first. No other request ends or is retracted before.

    Lengths are known: the later it is admitted, the less it needs when the one that runs ends. Or they are unknown, and
    less and less is held for the output of the one that runs.
    """
    running, waiting, num_pages = (50, 100, 34) if ignore_eos else (1400, 1080, 524)
    sizes = capacity(page_size=4, num_pages=num_pages, context=2048)
    config = SchedulingConfig(enable_mixed_chunk=mixed)
    scheduler, engine = CheckedScheduler(sizes, BucketSet.derive(sizes), (), config), FakeEngine(sizes)
    scheduler.receive([of("runs", 0, running, ignore_eos)])
    step(scheduler, engine)
    scheduler.receive([of("waits", 500, waiting, ignore_eos)])
    num_steps = 0
    while scheduler.num_waiting:
        step(scheduler, engine)
        num_steps += 1
        assert num_steps < 50
    assert scheduler.num_running == 2
    return num_steps


@pytest.mark.parametrize("ignore_eos", [False, True])
@pytest.mark.parametrize("mixed", [False, True])
def test_a_request_is_admitted_in_the_step_in_which_room_appears(ignore_eos: bool, mixed: bool) -> None:
    assert served_until_room_appears(ignore_eos, mixed) > 9


def serve_while_short_of_pages(ignore_eos: bool) -> None:
    scheduler, engine = short_of_pages({}, ignore_eos)
    scheduler.receive([of(f"more {i}", 50 * i, 10 + i, ignore_eos, 5 + 3 * i) for i in range(8)])
    while not scheduler.is_idle:
        step(scheduler, engine)


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_without_planted_bugs_no_try_is_missed(ignore_eos: bool) -> None:
    serve_while_short_of_pages(ignore_eos)


def test_an_end_that_is_forgotten_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    end = Applier.end

    def end_and_remember(applier: Applier, req: Req, share: bool = True) -> None:
        epoch = applier._state.requests.epoch
        end(applier, req, share)
        applier._state.requests.epoch = epoch

    monkeypatch.setattr(Applier, "end", end_and_remember)
    with pytest.raises(AssertionError, match="another try to admit gives another plan"):
        serve_while_short_of_pages(True)


def test_a_forecast_that_waits_too_long_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    steps_short = Forecast.steps_short
    monkeypatch.setattr(Forecast, "steps_short", lambda *args: steps_short(*args) and HORIZON_STEPS)
    with pytest.raises(AssertionError, match="another try to admit gives another plan"):
        served_until_room_appears(True, False)


def test_a_ratio_that_falls_faster_than_foreseen_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extend_step, "ratio_steps_short", lambda *args: HORIZON_STEPS)
    with pytest.raises(AssertionError, match="another try to admit gives another plan"):
        served_until_room_appears(False, False)
