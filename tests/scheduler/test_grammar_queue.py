"""`GrammarQueue`: grammars compiled in threads, each once; deadlines, aborts, what is kept."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest

from jaxsgl.errors import EngineUnavailable, InvalidRequest
from jaxsgl.messages.replies import Refusal, RefusalKind
from jaxsgl.requests.grammar import Grammar
from jaxsgl.scheduler.grammars import queue as grammar_queue
from jaxsgl.scheduler.grammars.queue import Answer, GrammarQueue
from jaxsgl.testing.grammars import FakeMatcher

PATIENCE_S = 20.0


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Gate:
    """Compiles when `open` is set; tells what was begun."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.begun: list[str] = []
        self.changed = threading.Condition()

    def __call__(self, grammar: Grammar) -> FakeMatcher:
        with self.changed:
            self.begun.append(grammar.text)
            self.changed.notify_all()
        if grammar.text.startswith("slow"):
            assert self.open.wait(PATIENCE_S)
        if grammar.text.startswith("bad"):
            raise InvalidRequest(f"{grammar.text} is no grammar")
        if grammar.text.startswith("late"):
            raise EngineUnavailable(f"{grammar.text} took too long")
        if grammar.text.startswith("broken"):
            raise ZeroDivisionError
        return FakeMatcher(1, 2, 100)

    def wait_for(self, *texts: str) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: set(texts) <= set(self.begun), PATIENCE_S)


@pytest.fixture
def gate() -> Iterator[Gate]:
    gate = Gate()
    yield gate
    gate.open.set()


def answers(queue: GrammarQueue, count: int) -> dict[str, Answer]:
    found: dict[str, Answer] = {}
    for _ in range(1000):
        queue.wait(0.05)
        found |= dict(queue.poll())
        if len(found) >= count:
            break
    return found


def text_of(answer: Answer | None) -> str:
    assert isinstance(answer, Refusal)
    return f"{answer.kind.value}: {answer.text}"


def test_requests_with_equal_grammars_share_the_compilation_and_later_ones_have_it_at_once(gate: Gate) -> None:
    queue = GrammarQueue(gate, 30.0)
    gate.open.set()
    assert [queue.ask(name, Grammar.regex("slow")) for name in "abc"] == [None] * 3
    found = answers(queue, 3)
    assert found["a"] is found["b"] is found["c"] is queue.ask("d", Grammar.regex("slow"))
    assert gate.begun == ["slow"] and queue.num_waiting == 0


def test_failures_are_kept_unless_they_are_ours_or_of_the_moment(gate: Gate, caplog: pytest.LogCaptureFixture) -> None:
    queue = GrammarQueue(gate, 30.0)
    queue.ask("a", Grammar.regex("bad"))
    queue.ask("b", Grammar.regex("broken"))
    queue.ask("l", Grammar.regex("late"))
    found = answers(queue, 3)
    assert text_of(found["a"]) == "invalid: bad is no grammar"
    assert text_of(found["b"]).startswith("failed: ") and "ZeroDivisionError" in caplog.text
    assert queue.ask("c", Grammar.regex("bad")) == found["a"]
    assert queue.ask("d", Grammar.regex("broken")) is None
    assert text_of(found["l"]) == "waited: late took too long"
    assert queue.ask("m", Grammar.regex("late")) is None


def test_a_request_is_refused_if_its_grammar_is_not_begun_in_time_and_waits_for_one_that_is(gate: Gate) -> None:
    clock = Clock()
    queue = GrammarQueue(gate, 5.0, clock=clock)
    for name in ("slow 1", "slow 2", "quick"):
        queue.ask(name, Grammar.regex(name))
    gate.wait_for("slow 1", "slow 2")
    clock.now_s = 4.9
    assert queue.poll() == []
    clock.now_s = 5.1
    ((request_id, answer),) = queue.poll()
    assert request_id == "quick" and text_of(answer).startswith("waited: ")
    assert queue.ask("once more", Grammar.regex("quick")) is None, "it was never begun, and isn't known to be bad"
    gate.open.set()
    assert {type(answer) for answer in answers(queue, 3).values()} == {FakeMatcher}


def test_an_abort_takes_back_what_no_other_request_wants(gate: Gate) -> None:
    queue = GrammarQueue(gate, 30.0)
    for name in ("slow 1", "slow 2", "alone", "shared"):
        queue.ask(name, Grammar.regex(name))
    queue.ask("other", Grammar.regex("shared"))
    gate.wait_for("slow 1", "slow 2")
    queue.forget("alone")
    queue.forget("shared")
    queue.forget("unknown")
    gate.open.set()
    assert set(answers(queue, 3)) == {"slow 1", "slow 2", "other"}
    assert "alone" not in gate.begun and queue.num_waiting == 0


@pytest.mark.parametrize(("limit", "value"), [("MAX_KNOWN", 2), ("MAX_KNOWN_CHARS", 2), ("MAX_KNOWN_BYTES", 199)])
def test_the_grammars_that_were_asked_for_last_are_kept(
    gate: Gate, monkeypatch: pytest.MonkeyPatch, limit: str, value: int
) -> None:
    monkeypatch.setattr(grammar_queue, limit, value)
    queue = GrammarQueue(gate, 30.0)
    for name in "abac":
        if queue.ask(name, Grammar.regex(name)) is None:
            answers(queue, 1)
    assert queue.ask("x", Grammar.regex("a")) is not None
    assert queue.ask("y", Grammar.regex("b")) is None


def test_preparation_happens_once_and_takes_no_requests_time(gate: Gate) -> None:
    clock = Clock()
    may_end, calls = threading.Event(), []

    def prepare() -> None:
        calls.append(clock.now_s)
        assert may_end.wait(PATIENCE_S)

    queue = GrammarQueue(gate, 5.0, prepare, clock)
    for name in ("a", "b"):
        queue.ask(name, Grammar.regex(name))
    clock.now_s = 60.0
    assert queue.poll() == []
    may_end.set()
    assert all(isinstance(answer, FakeMatcher) for answer in answers(queue, 2).values())
    assert len(calls) == 1


def test_a_preparation_that_fails_is_tried_again(gate: Gate) -> None:
    failures: Iterator[Callable[[], None]] = iter([raise_memory_error, lambda: None])
    queue = GrammarQueue(gate, 5.0, lambda: next(failures)())
    queue.ask("a", Grammar.regex("x"))
    answer = answers(queue, 1)["a"]
    assert isinstance(answer, Refusal) and answer.kind is RefusalKind.FAILED
    queue.ask("b", Grammar.regex("x"))
    assert isinstance(answers(queue, 1)["b"], FakeMatcher)


def raise_memory_error() -> None:
    raise MemoryError


def test_a_request_may_leave_while_a_thread_takes_up_its_grammar(gate: Gate) -> None:
    """A thread asks for the time just before it begins."""
    main, asked, left = threading.get_ident(), threading.Event(), threading.Event()

    def clock() -> float:
        if threading.get_ident() != main and not left.is_set():
            assert asked.wait(PATIENCE_S)
            queue.forget("a")
            left.set()
        return 0.0

    queue = GrammarQueue(gate, 60.0, clock=clock)
    assert queue.ask("a", Grammar("regex", "x")) is None
    asked.set()
    assert left.wait(PATIENCE_S)
    assert queue.ask("b", Grammar("regex", "x")) is None
    assert set(answers(queue, 1)) == {"b"} and gate.begun == ["x"]
    assert queue.poll() == [] and queue.num_waiting == 0
