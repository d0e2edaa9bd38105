"""Pausing, continuing and draining: commands that wait for the steps in flight, or for the last request."""

from __future__ import annotations

import json

import pytest

from jaxsgl.batch.buckets import BucketSet
from jaxsgl.config.engine import SchedulingConfig
from jaxsgl.messages.orders import (
    Abort,
    Answer,
    ContinueGeneration,
    DumpState,
    FlushCache,
    PauseGeneration,
    PauseMode,
    Ping,
    ToEngine,
)
from jaxsgl.requests.request import FinishReason
from jaxsgl.scheduler.loop import run_loop
from jaxsgl.testing.engine import FakeEngine, ScriptedMailbox
from tests.checked import CheckedScheduler
from tests.scheduler.serving import capacity, expected, finish_reason, request, serve

both_loops = pytest.mark.parametrize("overlap", [True, False])
every_mode = pytest.mark.parametrize("mode", PauseMode)
PROMPT = list(range(40))
Script = list[list[ToEngine]]


def answers(mailbox: ScriptedMailbox) -> list[Answer]:
    return [news for news in mailbox.other_news if isinstance(news, Answer)]


class Blocking(ScriptedMailbox):
    """Keeps, for each entry of the script, whether the loop would have blocked for it."""

    def __init__(self, script: Script) -> None:
        super().__init__(script)
        self.blocked: list[bool] = []

    def receive(self, wait_s: float) -> list[ToEngine]:
        self.blocked.append(wait_s > 0)
        return super().receive(wait_s)


def run(script: Script, overlap: bool, **config: object) -> tuple[Blocking, CheckedScheduler]:
    sizes = capacity(max_extend_tokens=16)
    scheduler = CheckedScheduler(sizes, BucketSet.derive(sizes), (), SchedulingConfig(**config))  # type: ignore[arg-type]
    mailbox = Blocking(script)
    run_loop(scheduler, FakeEngine(sizes), mailbox, int(overlap))
    return mailbox, scheduler


@both_loops
@every_mode
@pytest.mark.parametrize("turns", range(9))
def test_a_paused_engine_launches_nothing_and_blocks_until_it_goes_on(
    turns: int, mode: PauseMode, overlap: bool
) -> None:
    """This holds whether the request waits, is between chunks, is in flight or decodes."""
    script: Script = [
        [request("a", PROMPT, 8)],
        *[[]] * turns,
        [PauseGeneration(1, mode), request("late", PROMPT, 3)],
        [Ping(2)],
        [Ping(3)],
        [Ping(4)],
        [ContinueGeneration(5)],
    ]
    mailbox, scheduler = run(script, overlap)
    assert [answer.number for answer in answers(mailbox)] in ([1, 2, 3, 4, 5], [2, 1, 3, 4, 5])
    assert all(answer.ok for answer in answers(mailbox))
    paused = mailbox.loads[turns + 1 : turns + 5]
    assert all(load.paused for load in paused)
    assert len({load.totals.steps for load in mailbox.loads[turns : turns + 5]}) == 1, "a step was launched"
    assert mailbox.blocked[turns + 4 : turns + 6] == [True, True], "the loop spins while it is paused"
    assert not mailbox.loads[-1].paused
    assert mailbox.output_ids("late") == expected(PROMPT, 3)
    if mode is PauseMode.ABORT:
        assert finish_reason(mailbox, "a") is FinishReason.ABORT
        assert mailbox.output_ids("a") == expected(PROMPT, 8)[: len(mailbox.output_ids("a"))]
    else:
        assert mailbox.output_ids("a") == expected(PROMPT, 8)
    assert scheduler.is_idle


def pause_while_two_run(mode: PauseMode, *meanwhile: ToEngine) -> tuple[Blocking, CheckedScheduler]:
    script: Script = [
        [request("a", PROMPT, 20), request("b", range(90, 99), 20)],
        *[[]] * 8,
        [PauseGeneration(1, mode)],
    ]
    script += [[], *([message] for message in meanwhile), [ContinueGeneration(9)]]
    return run(script, True)


def test_in_place_requests_keep_their_pages() -> None:
    mailbox, _ = pause_while_two_run(PauseMode.IN_PLACE)
    paused = [load for load in mailbox.loads if load.paused][-1]
    assert (paused.num_running, paused.num_waiting, paused.num_retracted) == (2, 0, 0)
    assert mailbox.loads[-1].totals.retractions == 0


def test_retracted_requests_give_their_pages_back_and_go_on_in_their_order() -> None:
    mailbox, _ = pause_while_two_run(PauseMode.RETRACT, DumpState(5))
    paused = [load for load in mailbox.loads if load.paused][-1]
    assert (paused.num_running, paused.num_waiting, paused.num_retracted, paused.used_tokens) == (0, 2, 2, 0)
    for name, prompt in (("a", PROMPT), ("b", range(90, 99))):
        assert mailbox.output_ids(name) == expected(list(prompt), 20)
    assert [entry["request_id"] for entry in dump_of(mailbox, 5)["waiting"]] == ["a", "b"]  # type: ignore[attr-defined]
    assert mailbox.loads[-1].num_retracted == 0


def test_a_pause_that_retracts_reopens_admission() -> None:
    class PausedAtFirstRetraction(ScriptedMailbox):
        paused = False

        def receive(self, wait_s: float) -> list[ToEngine]:
            if self.loads and self.loads[-1].totals.retractions and not self.paused:
                self.paused = True
                return [PauseGeneration(1, PauseMode.RETRACT)]
            if self.loads and self.loads[-1].paused:
                return [ContinueGeneration(2)]
            assert self.num_calls < 2000, "no request is admitted any more"
            return super().receive(wait_s)

    sizes = capacity(num_pages=60)
    scheduler = CheckedScheduler(sizes, BucketSet.derive(sizes), (), SchedulingConfig(schedule_conservativeness=0.01))
    mailbox = PausedAtFirstRetraction([[request(f"r{i}", range(i, i + 20), 60) for i in range(8)]])
    run_loop(scheduler, FakeEngine(sizes), mailbox, 1)
    assert mailbox.paused
    for i in range(8):
        assert mailbox.output_ids(f"r{i}") == expected(range(i, i + 20), 60)


def test_aborts_work_while_generation_is_paused() -> None:
    mailbox, scheduler = pause_while_two_run(PauseMode.IN_PLACE, Abort("a"))
    assert finish_reason(mailbox, "a") is FinishReason.ABORT
    told = next(load for load in mailbox.loads if load.paused and load.num_running == 1)
    assert told.paused, "the abort was told before generation went on"
    assert mailbox.output_ids("b") == expected(range(90, 99), 20)
    assert scheduler.is_idle


def test_a_pause_that_is_cut_short_has_failed() -> None:
    script: Script = [
        [request("a", PROMPT, 9)],
        *[[]] * 5,
        [PauseGeneration(1, PauseMode.RETRACT), ContinueGeneration(2)],
    ]
    mailbox, _ = run(script, True)
    assert [(answer.number, answer.ok) for answer in answers(mailbox)] == [(1, False), (2, True)]
    assert "continued before" in answers(mailbox)[0].text
    assert mailbox.output_ids("a") == expected(PROMPT, 9)


def test_continuing_without_a_pause_changes_nothing() -> None:
    mailbox, _ = run([[ContinueGeneration(1), request("a", PROMPT)]], True)
    assert answers(mailbox) == [Answer(1, True)]
    assert mailbox.output_ids("a") == expected(PROMPT)


def test_an_answer_comes_after_the_load_that_it_changed() -> None:
    order: list[str] = []

    class Ordered(ScriptedMailbox):
        def send(self, news: object) -> None:
            order.append(f"paused {news.load.paused}" if hasattr(news, "load") else type(news).__name__)

    sizes = capacity()
    script: Script = [[PauseGeneration(1, PauseMode.ABORT)], [ContinueGeneration(2)]]
    run_loop(CheckedScheduler(sizes, BucketSet.derive(sizes), ()), FakeEngine(sizes), Ordered(script), 1)
    assert order == ["paused True", "Answer", "paused False", "Answer"]


@pytest.mark.parametrize(
    ("mode", "flushed"), [(PauseMode.IN_PLACE, False), (PauseMode.RETRACT, True), (PauseMode.ABORT, True)]
)
def test_while_paused_the_cache_is_flushed_if_no_request_holds_pages(mode: PauseMode, flushed: bool) -> None:
    mailbox, _ = pause_while_two_run(mode, FlushCache(5, 1e6))
    answer = next(answer for answer in answers(mailbox) if answer.number == 5)
    assert answer.ok is flushed
    assert flushed or "2 requests hold pages: pause in the mode retract or abort" in answer.text
    told = [load for load in mailbox.loads if load.paused][-1]
    assert (told.used_tokens + told.cached_tokens == 0) is flushed
    if mode is PauseMode.RETRACT:
        assert mailbox.output_ids("a") == expected(PROMPT, 20)


@both_loops
def test_a_flush_waits_for_the_last_request(overlap: bool) -> None:
    script: Script = [[request("a", PROMPT, 6), request("b", PROMPT, 12), FlushCache(1, 1e6)], [], [Ping(2)]]
    mailbox, scheduler = serve(capacity(), script, overlap=overlap)
    assert [answer.number for answer in answers(mailbox)] == [2, 1]
    assert answers(mailbox)[1].ok
    assert mailbox.output_ids("b") == expected(PROMPT, 12)
    assert scheduler.cache.cached_tokens == 0


def test_a_flush_that_has_waited_long_enough_is_refused() -> None:
    mailbox, scheduler = serve(capacity(), [[request("a", PROMPT, 30), FlushCache(1, 1e-9)]])
    (answer,) = answers(mailbox)
    assert not answer.ok and "wait and" in answer.text
    assert scheduler.cache.cached_tokens > 0


def test_a_pause_ends_the_wait_for_a_flush() -> None:
    script: Script = [[request("a", PROMPT, 30), FlushCache(1, 1e6)], [], [PauseGeneration(2, PauseMode.IN_PLACE)]]
    mailbox, _ = run([*script, [], [ContinueGeneration(3)]], True)
    refused = next(answer for answer in answers(mailbox) if answer.number == 1)
    assert not refused.ok and "paused" in refused.text


def dump_of(mailbox: ScriptedMailbox, number: int) -> dict[str, object]:
    (answer,) = (answer for answer in answers(mailbox) if answer.number == number)
    state: dict[str, object] = json.loads(answer.text)
    return state


def test_a_dump_names_running_and_waiting_requests_and_why_they_wait() -> None:
    script: Script = [[request(f"r{i}", PROMPT[i:], 9) for i in range(4)], [], [], [], [DumpState(1, check=True)]]
    mailbox, _ = serve(capacity(rows=2), script)
    state = dump_of(mailbox, 1)
    assert (state["paused"], state["num_running"], state["num_waiting"]) == (False, 2, 2)
    assert (state["admission_stopped_for"], state["schedule_policy"], state["leaks"]) == ("rows", "lpm", [])
    assert state["cache"]["free_rows"] == 0  # type: ignore[index]
    running, waiting = state["running"], state["waiting"]
    assert [entry["request_id"] for entry in running] == ["r0", "r1"]  # type: ignore[attr-defined]
    assert [entry["request_id"] for entry in waiting] == ["r2", "r3"]  # type: ignore[attr-defined]
    first = running[0]  # type: ignore[index]
    assert (first["prompt_tokens"], first["max_new_tokens"], first["state"]) == (40, 9, "running")
    assert first["kv_tokens"] >= 40 and first["pages"] >= 10 and first["running_s"] >= 0


def test_a_long_queue_is_dumped_in_part() -> None:
    requests: list[ToEngine] = [request(f"r{i}", [1, 2, 3], 2) for i in range(300)]
    mailbox, _ = serve(capacity(rows=1), [[*requests, DumpState(1)]])
    state = dump_of(mailbox, 1)
    assert state["num_waiting"] == 300
    assert len(state["waiting"]) == 256  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("sizes", "reason"),
    [
        (capacity(rows=1), "rows"),
        (capacity(num_pages=20), "tokens"),
        (capacity(max_extend_tokens=8), "chunk"),
    ],
)
def test_the_load_counts_why_admission_stopped(sizes: object, reason: str) -> None:
    requests: list[ToEngine] = [request(f"r{i}", range(50 * i, 50 * i + 30), 20) for i in range(2)]
    mailbox, _ = serve(sizes, [requests])  # type: ignore[arg-type]
    last = mailbox.loads[-1]
    counts = {name: getattr(last.totals, f"short_of_{name}") for name in ("tokens", "rows", "chunk")}
    assert counts.pop(reason) > 0
    assert set(counts.values()) == {0}


def test_nothing_stops_admission_where_all_have_room() -> None:
    mailbox, _ = serve(capacity(), [[request("a", PROMPT), request("b", PROMPT)]])
    last = mailbox.loads[-1]
    assert (last.totals.short_of_tokens, last.totals.short_of_rows, last.totals.short_of_chunk) == (0, 0, 0)
