"""What the page is shown of a scheduler: its pages, tree, requests and steps, in bounds, and only while one looks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from jaxsgl.messages.orders import Answer, ToEngine, WatchEngine
from jaxsgl.scheduler.loop import run_loop
from jaxsgl.scheduler.orders import view
from jaxsgl.scheduler.orders.control import Control
from jaxsgl.scheduler.orders.inspection import LeakCheck
from jaxsgl.scheduler.orders.view import EngineView
from jaxsgl.testing.engine import FakeEngine, ScriptedMailbox
from tests.checked import CheckedScheduler
from tests.scheduler.serving import Script, capacity, new_scheduler, request

SHARED = list(range(32))  # 8 pages


def views(script: Script, overlap: bool = True, **sizes: int) -> tuple[list[EngineView], CheckedScheduler]:
    made = capacity(**sizes)
    scheduler = CheckedScheduler(made, new_scheduler(made).state.buckets, ())
    mailbox = ScriptedMailbox(script)
    run_loop(scheduler, FakeEngine(made), mailbox, int(overlap))
    texts = [news.text for news in mailbox.other_news if isinstance(news, Answer)]
    return [msgspec.json.decode(text, type=EngineView) for text in texts], scheduler


def test_a_view_has_where_each_page_is_and_which_prefixes_are_shared() -> None:
    requests: list[ToEngine] = [request(name, [*SHARED, 100 + at], 30) for at, name in enumerate("ab")]
    (seen,), _ = views([[request("first", [*SHARED, 99])], *[[]] * 8, requests, *[[]] * 8, [WatchEngine(1)]])
    pages = seen.pages
    assert (pages.page_size, pages.pages_per_cell, len(pages.cells)) == (4, 1, 199)
    assert [pages.cells.count(state) for state in "0123"] == [pages.free, pages.evictable, pages.locked, pages.owned]
    assert (pages.locked, pages.free + pages.evictable + pages.locked + pages.owned) == (8, 199)
    parent, num_pages, locks, num_children = seen.tree[0]
    assert (parent, num_pages, locks) == (-1, 8, 2)
    assert num_children == 1  # what the first request has left behind
    assert seen.tree_pages == pages.evictable + pages.locked == sum(node.num_pages for node in seen.tree)
    assert [(each["request_id"], each["cached_tokens"], each["state"]) for each in seen.running] == [
        ("a", 32, "running"),
        ("b", 32, "running"),
    ]


def test_steps_are_reported_once_with_plan_bucket_and_time() -> None:
    script: Script = [[WatchEngine(1)], [request("a", range(20), 6)], *[[]] * 4, [WatchEngine(2)]]
    first, second = views(script)[0]
    assert first.steps == [] and first.last_step == 0
    numbers = [step.number for step in second.steps]
    assert numbers == list(range(1, len(numbers) + 1)) and second.last_step == numbers[-1] >= 3
    extend, decode = second.steps[0], second.steps[1]
    assert (extend.kind, extend.bucket, extend.tokens, extend.tokens_padded) == ("extend", "32x8", 20, 32)
    assert extend.plan.startswith("extend a/0+20 | admit a/0 (0 cached) | ")
    assert (decode.kind, decode.tokens, decode.seqs_padded) == ("decode", 1, 1)
    assert all(step.ms > 0 for step in second.steps)
    ran = {(bucket.kind, bucket.bucket): bucket.steps for bucket in second.buckets}
    assert ran["extend", "32x8"] == 1 and ran["decode", "1"] == len(numbers) - 1
    assert ran["decode", "8"] == 0, "compiled, but has not run"
    script[-1] = [WatchEngine(2, since=2)]
    assert [step.number for step in views(script)[0][1].steps] == numbers[2:]


def test_a_look_while_a_step_is_in_flight_does_not_take_its_time_for_the_next() -> None:
    for overlap in (True, False):
        script: Script = [[request("a", range(20), 9)], [], [WatchEngine(1)], *[[]] * 4, [WatchEngine(2)]]
        first, second = views(script, overlap)[0]
        assert first.steps == []
        assert second.steps and all(0 < step.ms < 1000 for step in second.steps)


def test_nothing_is_recorded_once_nobody_has_looked_for_a_while() -> None:
    made = capacity()
    scheduler = new_scheduler(made)
    now_s = 0.0
    control = Control(scheduler, FakeEngine(made), LeakCheck(scheduler), lambda: now_s)
    control.handle(WatchEngine(1, seconds=5.0))
    for now_s, is_active in ((0.0, True), (4.9, True), (5.0, False)):
        control.after_turn(False)
        assert control.is_active is is_active, now_s


def test_a_view_stays_small_whatever_the_pool_and_the_queue_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(view, "MAX_NODES", 6)
    monkeypatch.setattr(view, "MAX_LISTED", 5)
    requests: list[ToEngine] = [request(f"r{at}", [at, *range(500, 520)], 3) for at in range(40)]
    (seen,), _ = views([requests, *[[]] * 10, [WatchEngine(1)]], num_pages=5000)
    assert (len(seen.tree), len(seen.running), len(seen.waiting)) == (6, 5, 5)
    assert seen.num_waiting > 5 and 5 < seen.num_running <= 8
    assert seen.tree_pages > sum(node.num_pages for node in seen.tree)
    assert (seen.pages.pages_per_cell, len(seen.pages.cells)) == (5, 1000)


def test_a_view_holds_no_token_of_anybody() -> None:
    secret = {987, 986, 985, 984, 983, 982, 981, 980}
    (seen,), _ = views([[request("a", [*secret], 30)], *[[]] * 4, [WatchEngine(1)]])
    assert seen.num_running == 1

    def numbers(value: Any) -> Iterator[int]:
        if isinstance(value, dict | list):
            for each in value.values() if isinstance(value, dict) else value:
                yield from numbers(each)
        elif isinstance(value, int):
            yield value

    assert not secret & {*numbers(msgspec.to_builtins(seen))}
