"""The runtime check: a leak is reported with its owner, counted once, and doesn't stop the server."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable

import numpy as np
import pytest

from jaxsgl.batch.buckets import BucketSet
from jaxsgl.messages.orders import Answer, DumpState, ToEngine
from jaxsgl.scheduler.loop import run_loop
from jaxsgl.scheduler.orders import inspection
from jaxsgl.scheduler.orders.inspection import LeakCheck
from jaxsgl.scheduler.scheduler import Scheduler
from jaxsgl.testing.engine import FakeEngine, ScriptedMailbox
from tests.scheduler.serving import capacity, expected, new_scheduler, request

PROMPT = list(range(40))


def lose_pages(scheduler: Scheduler) -> None:
    scheduler.flush_cache()
    scheduler.cache._allocator.allocate(2)


def lose_row(scheduler: Scheduler) -> None:
    scheduler.cache.table.take_row()


def lose_lock(scheduler: Scheduler) -> None:
    scheduler.cache.prefixes.lock(scheduler.cache.match(np.array(PROMPT, dtype=np.int32)).handle)


def serve_one(scheduler: Scheduler, name: str = "a") -> None:
    sizes = capacity()
    run_loop(scheduler, FakeEngine(sizes), ScriptedMailbox([[request(name, PROMPT)]]), 1)


leaks = pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lose_pages, ["page 1 is in 0 places; a (sample 0) had it last", "page 2 is in 0 places"]),
        (lose_row, ["row 0 is in 0 places; a (sample 0) had it last"]),
        (lose_lock, ["have 1 locks, but 0 hold them; a (sample 0) computed them"]),
    ],
)


@leaks
def test_a_leak_is_reported_with_its_owner_and_counted_once(
    damage: Callable[[Scheduler], None], words: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    scheduler = new_scheduler(capacity())
    serve_one(scheduler)
    check = LeakCheck(scheduler)
    assert check.run() == []
    damage(scheduler)
    with caplog.at_level(logging.ERROR):
        found = check.run()
        assert check.run() == found
    assert len(caplog.messages) == len(found) == check.num_leaks
    for part in words:
        assert any(part in message for message in caplog.messages)
    with pytest.raises(AssertionError, match=r"places|locks"):
        scheduler.check()


def test_a_server_with_a_leak_goes_on_and_reports_its_load(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inspection, "MIN_INTERVAL_S", 0.0)
    sizes = capacity()
    scheduler = new_scheduler(sizes)
    scheduler.cache._allocator.allocate(3)
    mailbox = ScriptedMailbox([[request("a", PROMPT)], *[[]] * 9, [request("b", PROMPT)], *[[]] * 9, [DumpState(1)]])
    run_loop(scheduler, FakeEngine(sizes), mailbox, 1)
    assert mailbox.output_ids("a") == mailbox.output_ids("b") == expected(PROMPT)
    assert (mailbox.loads[0].totals.leaks, mailbox.loads[-1].totals.leaks) == (0, 3)
    (answer,) = (news for news in mailbox.other_news if isinstance(news, Answer))
    assert json.loads(answer.text)["leaks_total"] == 3


def test_many_leaks_are_logged_in_few_lines(caplog: pytest.LogCaptureFixture) -> None:
    scheduler = new_scheduler(capacity())
    scheduler.cache._allocator.allocate(100)
    check = LeakCheck(scheduler)
    assert len(check.run()) == check.num_leaks == 100
    assert len(caplog.messages) == 11
    assert caplog.messages[-1] == "and 90 leaks more"


class Counting:
    """A scheduler that takes a step when the test says so and is idle after it; a check takes `cost_s`."""

    def __init__(self, cost_s: float = 0.0) -> None:
        self.num_steps = 0
        self.now_s = 0.0
        self.num_checks = 0
        self._cost_s = cost_s

    def leaks(self) -> list[str]:
        self.num_checks += 1
        self.now_s += self._cost_s
        return []

    def work(self, watched: LeakCheck) -> None:
        self.num_steps += 1
        for _ in range(3):
            watched.when_idle()


def checked(cost_s: float = 0.0) -> tuple[Counting, LeakCheck]:
    scheduler = Counting(cost_s)
    return scheduler, LeakCheck(scheduler, clock=lambda: scheduler.now_s)  # type: ignore[arg-type]


def test_leaks_are_checked_once_each_time_the_scheduler_becomes_idle() -> None:
    scheduler, watched = checked()
    for times in range(1, 5):
        scheduler.now_s += 10.0
        scheduler.work(watched)
        assert scheduler.num_checks == times


def test_an_idle_scheduler_is_not_checked_again_and_again() -> None:
    scheduler, watched = checked()
    scheduler.now_s = 10.0
    scheduler.work(watched)
    for _ in range(100):  # such as pings
        scheduler.now_s += 10.0
        watched.when_idle()
    assert scheduler.num_checks == 1


def test_leaks_are_checked_less_often_where_requests_come_and_go_fast() -> None:
    scheduler, watched = checked()
    for _ in range(1000):
        scheduler.now_s += 0.1
        scheduler.work(watched)
    assert scheduler.num_checks == pytest.approx(20, abs=1)


def test_checks_take_a_hundredth_of_the_time_at_most() -> None:
    scheduler, watched = checked(cost_s=1.0)
    while scheduler.now_s < 2000:
        scheduler.now_s += 0.1
        scheduler.work(watched)
    assert 15 <= scheduler.num_checks <= 20


def test_with_check_every_step_a_leak_ends_the_loop() -> None:
    sizes = capacity()
    scheduler = Scheduler(sizes, BucketSet.derive(sizes), ())
    script: list[list[ToEngine]] = [[request("a", PROMPT, 30)]]
    run_loop(scheduler, FakeEngine(sizes), ScriptedMailbox(script), 1, check_every_step=True)
    scheduler.cache._allocator.allocate(1)
    with pytest.raises(AssertionError, match="in 0 places"):
        run_loop(scheduler, FakeEngine(sizes), ScriptedMailbox(script), 1, check_every_step=True)
