"""What a profile holds, and that it ends by itself: by stage, after its seconds, before it takes too much memory."""

from __future__ import annotations

import pytest

from jaxsgl.batch.buckets import BucketSet
from jaxsgl.batch.inputs import StepInputs
from jaxsgl.messages.orders import Answer, StartProfile, StopProfile, ToEngine
from jaxsgl.scheduler.loop import run_loop
from jaxsgl.scheduler.orders.profiling import WRITING_FACTOR, Profiling, resident_bytes
from jaxsgl.testing.engine import FakeEngine, FakeHandle, ScriptedMailbox
from tests.checked import CheckedScheduler
from tests.scheduler.serving import Script, capacity, expected, request

PROMPT = list(range(40))
both_loops = pytest.mark.parametrize("overlap", [True, False])


class NotingEngine(FakeEngine):
    """Notes the kinds of the steps that were submitted while each profile was recorded."""

    def start_profile(self, folder: str) -> None:
        super().start_profile(folder)
        self.kinds: dict[str, list[str]] = {**getattr(self, "kinds", {}), folder: []}

    def submit(self, inputs: StepInputs) -> FakeHandle:
        if self.recording:
            self.kinds[self.profiles[-1][0]].append(inputs.bucket.kind)
        return super().submit(inputs)


class FullDisk(NotingEngine):
    """An engine that can't write its first trace."""

    tried = False

    def stop_profile(self) -> None:
        super().stop_profile()
        if not self.tried:
            self.tried = True
            raise OSError("no space left")


def profiled(
    script: Script, overlap: bool = True, make_engine: type[NotingEngine] = NotingEngine
) -> tuple[dict[int, Answer], NotingEngine, ScriptedMailbox]:
    sizes = capacity(max_extend_tokens=16)
    mailbox, engine = ScriptedMailbox(script), make_engine(sizes)
    run_loop(CheckedScheduler(sizes, BucketSet.derive(sizes), ()), engine, mailbox, int(overlap))
    assert not engine.recording
    return {news.number: news for news in mailbox.other_news if isinstance(news, Answer)}, engine, mailbox


@both_loops
@pytest.mark.parametrize("decodes_first", [True, False])
def test_a_profile_by_stage_holds_so_many_steps_of_each(overlap: bool, decodes_first: bool) -> None:
    """Each stage has a trace of its own, which begins with the first step of the stage, whichever comes first."""
    first: list[ToEngine] = [request("a", PROMPT, 30)]
    second: list[ToEngine] = [request("b", list(range(50, 90)), 30)]
    order: list[ToEngine] = [StartProfile(1, "/traces", 2, by_stage=True)]
    script: Script = [first, *[[]] * 9, order, *[[]] * 9, second, *[[]] * 40]
    answers, engine, mailbox = profiled(script if decodes_first else [order, *script], overlap)
    assert answers[1] == Answer(1, True, "/traces")
    stages = ["decode", "extend"] if decodes_first else ["extend", "decode"]
    assert list(engine.kinds) == [f"/traces/{stage}" for stage in stages]
    for stage in stages:
        kinds = engine.kinds[f"/traces/{stage}"]
        assert kinds[:2] == [stage] * 2
        assert len(kinds) <= 2 + overlap, "with overlap one step more is launched before the second is read"
    assert mailbox.output_ids("b") == expected(range(50, 90), 30)


def test_a_profile_by_stage_that_is_stopped_before_its_steps_holds_nothing() -> None:
    script: Script = [[StartProfile(1, "/a", 2, by_stage=True)], [StopProfile(2)], [StartProfile(3, "/b")]]
    answers, engine, _ = profiled([*script, [StopProfile(4)]])
    assert answers[2] == Answer(2, True, "/a")
    assert answers[3].ok
    assert list(engine.kinds) == ["/b"]


def test_a_profile_by_stage_needs_a_number_of_steps() -> None:
    answers, engine, _ = profiled([[StartProfile(1, "/a", by_stage=True)]])
    assert not answers[1].ok and "num_steps" in answers[1].text
    assert not engine.profiles


@pytest.mark.parametrize("num_steps", [None, 2])
def test_a_profile_that_cannot_be_written_is_dropped_and_the_next_one_can_be_recorded(num_steps: int | None) -> None:
    script: Script = [
        [StartProfile(1, "/full", num_steps), request("a", PROMPT, 30)],
        *[[]] * 5,
        [StopProfile(2)],
        [StartProfile(3, "/traces", 2)],
        *[[]] * 9,
    ]
    answers, engine, mailbox = profiled(script, make_engine=FullDisk)
    if num_steps is None:
        assert not answers[2].ok and "'/full' and is dropped: no space left" in answers[2].text
    else:
        assert answers[2].text == "no profile is being recorded"
    assert answers[3].ok
    assert list(engine.kinds) == ["/full", "/traces"]
    assert mailbox.output_ids("a") == expected(PROMPT, 30)


class Recorder:
    """A `Profiling` on its own, with a clock and a memory that the test sets."""

    def __init__(self) -> None:
        self.now_s, self.bytes = 0.0, 10**9
        self.answers: list[Answer] = []
        self.engine = FakeEngine(capacity())
        self.profiling = Profiling(
            self.engine, self.answers.append, lambda: False, lambda: self.now_s, lambda: self.bytes
        )

    def turn_until_written(self) -> None:
        while self.profiling.after_turn(True):
            pass


@pytest.mark.parametrize("by_stage", [False, True])
def test_a_profile_ends_after_its_seconds(by_stage: bool) -> None:
    recorder = Recorder()
    assert recorder.profiling.start(StartProfile(1, "/traces", 1000, by_stage=by_stage, max_s=30.0), 0)
    recorder.profiling.before_step("decode", 1)
    recorder.now_s = 29.0
    assert recorder.profiling.after_turn(True)
    assert recorder.engine.recording
    recorder.now_s = 30.0
    recorder.turn_until_written()
    assert not recorder.engine.recording
    assert recorder.profiling.start(StartProfile(2, "/more"), 0)


def test_a_stage_that_never_comes_does_not_keep_the_profile_open() -> None:
    recorder = Recorder()
    assert recorder.profiling.start(StartProfile(1, "/traces", 5, by_stage=True, max_s=30.0), 0)
    recorder.now_s = 31.0
    assert not recorder.profiling.after_turn(False)
    assert recorder.engine.profiles == []
    assert recorder.profiling.start(StartProfile(2, "/more"), 0)


def test_a_profile_ends_before_writing_it_takes_too_much_memory() -> None:
    recorder = Recorder()
    assert recorder.profiling.start(StartProfile(1, "/traces", max_mb=70), 0)
    recorder.bytes += 70 * 10**6 // WRITING_FACTOR
    assert recorder.profiling.after_turn(True)
    assert recorder.engine.recording
    recorder.bytes += 1
    recorder.turn_until_written()
    assert not recorder.engine.recording


def test_the_memory_of_the_process_is_known() -> None:
    before = resident_bytes()
    held = bytearray(b"x" * (64 << 20))
    assert resident_bytes() - before > len(held) // 2
