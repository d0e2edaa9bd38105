"""Commands between steps: each is answered once, whatever runs, and none ends the loop."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TypeVar

import pytest

from jaxsgl.batch.buckets import BucketSet, Capacity
from jaxsgl.messages.orders import (
    Abort,
    Answer,
    FlushCache,
    Ping,
    StartProfile,
    StopProfile,
    ToEngine,
    WatchCache,
    Withdraw,
)
from jaxsgl.messages.replies import CacheCleared, CacheEvents, PagesStored
from jaxsgl.scheduler.loop import run_loop
from jaxsgl.testing.engine import FakeEngine, ScriptedMailbox
from tests.cache_mirror import CacheMirror, cached_prefixes
from tests.checked import CheckedScheduler
from tests.scheduler.serving import Script, capacity, expected, last_reply, request, serve

both_loops = pytest.mark.parametrize("overlap", [True, False])
PROMPT = list(range(40))
EngineT = TypeVar("EngineT", bound=FakeEngine)


def answers(mailbox: ScriptedMailbox) -> dict[int, Answer]:
    found = [news for news in mailbox.other_news if isinstance(news, Answer)]
    assert len({answer.number for answer in found}) == len(found), "a command is answered once"
    return {answer.number: answer for answer in found}


def cache_events(mailbox: ScriptedMailbox) -> list[CacheEvents]:
    return [news for news in mailbox.other_news if isinstance(news, CacheEvents)]


def watched(mailbox: ScriptedMailbox, number: int) -> dict[int, tuple[int, ...]]:
    """What the sender of `WatchCache(number)` knows at the end, by its own snapshot and the news after it."""
    told = cache_events(mailbox)
    first = next(i for i, events in enumerate(told) if events.number == number)
    mirror = CacheMirror()
    for events in told[first:]:
        if events.number in (number, None):
            mirror.take(events.events)
    return mirror.prefixes


def profiled(
    script: Sequence[Sequence[ToEngine]], overlap: bool = True, make_engine: type[FakeEngine] = FakeEngine
) -> tuple[ScriptedMailbox, FakeEngine]:
    sizes = capacity()
    scheduler = CheckedScheduler(sizes, BucketSet.derive(sizes), ())
    mailbox, engine = ScriptedMailbox(script), make_engine(sizes)
    run_loop(scheduler, engine, mailbox, int(overlap))
    return mailbox, engine


@both_loops
def test_every_command_is_answered_once_while_requests_run(overlap: bool) -> None:
    commands: list[ToEngine] = [Ping(1), FlushCache(2), StartProfile(3, "/a"), StopProfile(4), WatchCache(5), Ping(6)]
    for turns in range(6):
        script: Script = [[request("a", PROMPT, 6)], *[[]] * turns, commands, *[[]] * 9, [FlushCache(7)]]
        mailbox, _ = serve(capacity(max_extend_tokens=16), script, overlap=overlap)
        assert {number: answer.ok for number, answer in answers(mailbox).items()} == {
            1: True, 2: False, 3: True, 4: True, 6: True, 7: True,
        }  # fmt: skip
        assert [events.number for events in cache_events(mailbox) if events.number is not None] == [5]
        assert mailbox.output_ids("a") == expected(PROMPT, 6)


def test_an_idle_engine_answers_a_ping() -> None:
    mailbox, _ = serve(capacity(), [[Ping(1)], [Ping(2)]])
    assert answers(mailbox) == {1: Answer(1, True), 2: Answer(2, True)}


def test_the_cache_is_flushed_only_while_no_request_waits_or_runs() -> None:
    script: Script = [
        [request("first", PROMPT), request("waits", PROMPT), FlushCache(1)],
        [FlushCache(2)],
        *[[]] * 9,
        [FlushCache(3), request("again", PROMPT)],
    ]
    mailbox, _ = serve(capacity(rows=1), script)
    found = answers(mailbox)
    assert (found[1].ok, found[2].ok, found[3].ok) == (False, False, True)
    assert "2 requests wait and 0 run" in found[1].text
    assert "1 requests wait and 1 run" in found[2].text
    assert last_reply(mailbox, "waits").cached_tokens == 36
    assert last_reply(mailbox, "again").cached_tokens == 0


def test_a_withdrawn_flush_neither_happens_nor_is_answered() -> None:
    script: Script = [[request("a", PROMPT, 30)], [], [FlushCache(1, 1000.0), FlushCache(2, 1000.0)], [], [Withdraw(1)]]
    mailbox, _ = serve(capacity(), [*script, *[[]] * 60, [Withdraw(2), Withdraw(9)], [request("again", PROMPT)]])
    assert answers(mailbox) == {2: Answer(2, True)}
    script[-1] = [Withdraw(1), Withdraw(2)]
    mailbox, _ = serve(capacity(), [*script, *[[]] * 60, [request("again", PROMPT)]])
    assert answers(mailbox) == {}
    assert last_reply(mailbox, "again").cached_tokens > 0


def test_a_flush_shows_in_the_load() -> None:
    mailbox, _ = serve(capacity(), [[request("a", PROMPT)], *[[]] * 9, [FlushCache(1)]])
    assert [load.cached_tokens for load in mailbox.loads[-2:]] == [40, 0]


@both_loops
@pytest.mark.parametrize("running", [True, False])
def test_a_profile_holds_the_steps_that_it_was_asked_for(running: bool, overlap: bool) -> None:
    before: list[ToEngine] = [request("a", PROMPT, 30)] if running else []
    script: Script = [
        before,
        [],
        [],
        [StartProfile(1, "/traces", 5)],
        [request("b", PROMPT, 20)],
        *[[]] * 20,
        [StopProfile(2)],
    ]
    mailbox, engine = profiled(script, overlap)
    assert answers(mailbox)[1] == Answer(1, True, "/traces")
    assert answers(mailbox)[2] == Answer(2, False, "no profile is being recorded")
    # Six, not five, where the next one is launched before the fifth is read.
    assert engine.profiles == [("/traces", 5 + overlap)]
    assert not engine.recording


def test_a_profile_without_a_number_of_steps_lasts_until_it_is_stopped() -> None:
    script: Script = [
        [StartProfile(1, "/traces"), request("a", PROMPT, 30)],
        *[[]] * 9,
        [StopProfile(2)],
        *[[]] * 4,
    ]
    mailbox, engine = profiled(script)
    assert answers(mailbox)[2] == Answer(2, True, "/traces")
    assert engine.profiles == [("/traces", 10)]


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        (StartProfile(9, "/other"), "a profile is being recorded to /traces: stop it first"),
        (StartProfile(9, "/unwritable"), "a profile is being recorded"),
    ],
)
def test_there_is_one_profile_at_a_time(command: StartProfile, reason: str) -> None:
    mailbox, engine = profiled([[StartProfile(1, "/traces")], [command], [StopProfile(2)]])
    assert not answers(mailbox)[9].ok and reason in answers(mailbox)[9].text
    assert answers(mailbox)[2].ok
    assert len(engine.profiles) == 1


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        (StartProfile(1, "/unwritable"), "the profile can't be recorded to '/unwritable': /unwritable can't"),
        (StartProfile(1, "/traces", 0), "num_steps is 0, but must be 1 and more"),
        (StopProfile(1), "no profile is being recorded"),
    ],
)
def test_a_command_that_fails_says_why_and_the_engine_goes_on(command: ToEngine, reason: str) -> None:
    script: Script = [
        [request("a", PROMPT, 9)],
        [command],
        [StartProfile(2, "/traces")],
        [StopProfile(3)],
    ]
    mailbox, _ = profiled(script)
    assert not answers(mailbox)[1].ok and reason in answers(mailbox)[1].text
    assert answers(mailbox)[2].ok and answers(mailbox)[3].ok
    assert mailbox.output_ids("a") == expected(PROMPT, 9)


class SlowDisk(FakeEngine):
    """An engine that writes a trace only once it is allowed to."""

    def __init__(self, sizes: Capacity) -> None:
        super().__init__(sizes)
        self.may_write = threading.Event()

    def stop_profile(self) -> None:
        assert self.may_write.wait(60)
        super().stop_profile()


class WaitingMailbox(ScriptedMailbox):
    """A mailbox that lets a trace be written after the script."""

    engine: SlowDisk
    tokens_before = 0

    def receive(self, wait_s: float) -> list[ToEngine]:
        messages = super().receive(wait_s)
        if not self._script and not self.engine.may_write.is_set():
            self.tokens_before = len(self.replies)
            self.engine.may_write.set()
        return messages


@both_loops
@pytest.mark.parametrize("running", [True, False])
def test_requests_and_commands_go_on_while_a_trace_is_written(running: bool, overlap: bool) -> None:
    requests: list[ToEngine] = [request("a", PROMPT, 5)] if running else []
    meanwhile: list[ToEngine] = [Ping(3), StartProfile(4, "/other"), StopProfile(5)]
    script: Script = [[StartProfile(1, "/traces"), *requests], [StopProfile(2)], meanwhile, *[[]] * 8]
    sizes = capacity()
    mailbox = WaitingMailbox(script)
    mailbox.engine = SlowDisk(sizes)
    run_loop(CheckedScheduler(sizes, BucketSet.derive(sizes), ()), mailbox.engine, mailbox, int(overlap))
    assert list(answers(mailbox)) == [1, 3, 4, 5, 2]
    assert [answers(mailbox)[number].ok for number in (4, 5, 2)] == [False, False, True]
    assert "still being written to /traces" in answers(mailbox)[4].text
    assert "being written to /traces" in answers(mailbox)[5].text
    assert mailbox.tokens_before == (5 if running else 0)


@both_loops
@pytest.mark.parametrize("watched_from", range(7))
def test_a_watcher_knows_the_cache_from_a_snapshot_and_the_events_after_it(watched_from: int, overlap: bool) -> None:
    """The pool is so small that pages are evicted; the watch begins before, while or after the first request runs."""
    requests: list[ToEngine] = [request(f"r{i}", [*range(8 * (i % 3)), *range(100 * i, 100 * i + 9)]) for i in range(9)]
    script: Script = [turn for each in requests for turn in ([each], [], [])]
    script.insert(watched_from, [WatchCache(70)])
    script.insert(20, [WatchCache(71)])
    mailbox, scheduler = serve(capacity(num_pages=15, context=40), script, overlap=overlap)
    cached = cached_prefixes(scheduler.cache.edges())
    assert watched(mailbox, 70) == watched(mailbox, 71) == cached and cached


def test_events_right_before_a_second_watch_reach_the_first_watcher() -> None:
    """The abort stores two pages of output, in the same turn."""
    script: Script = [[WatchCache(70), request("a", PROMPT, 30)], *[[]] * 9, [Abort("a"), WatchCache(71)]]
    mailbox, scheduler = serve(capacity(), script)
    cached = cached_prefixes(scheduler.cache.edges())
    assert watched(mailbox, 70) == watched(mailbox, 71) == cached
    assert len(cached) == 12


def test_no_cache_events_are_sent_before_a_watch() -> None:
    mailbox, _ = serve(capacity(), [[request("a", PROMPT)], *[[]] * 9, [FlushCache(1)]])
    assert mailbox.other_news == [Answer(1, True)]


def test_watchers_hear_of_a_flush_before_it_is_answered() -> None:
    mailbox, _ = serve(capacity(), [[WatchCache(1), request("a", PROMPT)], *[[]] * 9, [FlushCache(2)]])
    assert mailbox.other_news[0] == CacheEvents([], 1)
    stored = mailbox.other_news[1]
    assert isinstance(stored, CacheEvents) and isinstance(stored.events[0], PagesStored)
    assert (stored.events[0].token_ids, stored.events[0].parent) == (PROMPT, None)
    assert mailbox.other_news[-2:] == [CacheEvents([CacheCleared()]), Answer(2, True)]


def test_without_a_radix_tree_there_is_nothing_to_watch() -> None:
    script: Script = [[WatchCache(1), request("a", PROMPT)], *[[]] * 9, [FlushCache(2)], [WatchCache(3)]]
    mailbox, _ = serve(capacity(), script, radix=False)
    assert mailbox.other_news == [CacheEvents([], 1), Answer(2, True), CacheEvents([], 3)]
