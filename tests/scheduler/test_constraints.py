"""Requests whose output is held to a grammar, among free ones: on the fake engine, with fake grammars.

`constrained` is the oracle: what such a request must yield, whatever runs beside it.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
import pytest

from jaxsgl.batch.buckets import BucketSet, Capacity
from jaxsgl.batch.inputs import StepInputs
from jaxsgl.config.engine import SchedulingConfig
from jaxsgl.errors import InvalidRequest
from jaxsgl.messages.orders import Abort, ToEngine
from jaxsgl.messages.replies import RefusalKind, Reply
from jaxsgl.requests import grammar_work
from jaxsgl.requests.grammar import Grammar
from jaxsgl.requests.grammar_work import GrammarWork
from jaxsgl.requests.request import FinishReason, Request, SamplingParams
from jaxsgl.scheduler.grammars.constraint import ALL, Constraint, Words
from jaxsgl.scheduler.grammars.queue import GrammarQueue
from jaxsgl.scheduler.loop import run_loop
from jaxsgl.testing.engine import FakeEngine, FakeHandle, RetractEvery, ScriptedMailbox, generate
from jaxsgl.testing.grammars import FakeMatcher, compile_fake
from tests.checked import CheckedScheduler
from tests.scheduler.grammars import constrained_output
from tests.scheduler.serving import VOCAB, capacity

EOS = (7, 500)


def fake(seed: int, length: int, words: str = "") -> Grammar:
    return Grammar.regex(f"{seed} {length} {words}".strip())


def asking(
    request_id: str, prompt: Sequence[int], grammar: Grammar | None, max_tokens: int = 20, **params: Any
) -> Request:
    sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, grammar=grammar, **params)
    return Request(request_id, list(prompt), sampling)


def constrained(request: Request) -> tuple[list[int], FinishReason | RefusalKind]:
    return constrained_output(request, request.sampling.max_tokens or 0, VOCAB, frozenset(EOS))


def served(
    script: Sequence[Sequence[ToEngine]],
    sizes: Capacity | None = None,
    *,
    overlap: bool = True,
    config: SchedulingConfig = SchedulingConfig(),
    retract_every: int | None = None,
    compile: Callable[[Grammar], FakeMatcher] = lambda grammar: compile_fake(grammar, VOCAB),
    decode_steps: int = 1,
) -> tuple[ScriptedMailbox, CheckedScheduler]:
    sizes = sizes or capacity()
    scheduler = CheckedScheduler(
        sizes,
        BucketSet.derive(sizes, decode_steps=decode_steps),
        EOS,
        config,
        retract_also=RetractEvery(retract_every) if retract_every else None,
        grammars=GrammarQueue(compile, 30.0),
    )
    mailbox = ScriptedMailbox(script)
    run_loop(scheduler, FakeEngine(sizes), mailbox, int(overlap))
    assert scheduler.is_idle and scheduler.cache.num_available == sizes.num_pages - 1
    return mailbox, scheduler


def outcome(mailbox: ScriptedMailbox, request_id: str, index: int = 0) -> tuple[list[int], FinishReason | None]:
    replies = [reply for reply in mailbox.replies if (reply.request_id, reply.index) == (request_id, index)]
    return [token for reply in replies for token in reply.token_ids], replies[-1].finish_reason


def refusal(mailbox: ScriptedMailbox, request_id: str) -> str:
    (reply,) = [reply for reply in mailbox.replies if reply.request_id == request_id and reply.refusal is not None]
    assert reply.refusal is not None
    return f"{reply.refusal.kind.value}: {reply.refusal.text}"


def some_requests(seed: int, count: int = 24) -> list[Request]:
    """A third are free; the others share few grammars, with all that may end an output."""
    dice = random.Random(seed)
    requests = []
    for number in range(count):
        prompt = [dice.randrange(VOCAB) for _ in range(dice.randint(1, 40))]
        grammar = None if dice.random() < 0.34 else fake(dice.randrange(4), dice.choice((1, 5, 12, 40)))
        ends = dice.random()
        params: dict[str, object] = {}
        if ends < 0.3:
            params = {"stop_token_ids": tuple(dice.sample(range(VOCAB), 3))}
        elif ends < 0.5:
            params = {"min_tokens": dice.randint(1, 10)}
        elif ends < 0.6:
            params = {"ignore_eos": True}
        requests.append(asking(f"r{number}", prompt, grammar, dice.randint(10, 24), **params))
    return requests


@pytest.mark.parametrize(
    ("overlap", "retract_every", "decode_steps", "mixed"),
    [(True, None, 1, False), (False, None, 1, False), (True, 3, 1, True), (True, None, 4, True), (False, 4, 1, True)],
)
def test_free_and_constrained_rows_share_batches_and_keep_their_tokens(
    overlap: bool, retract_every: int | None, decode_steps: int, mixed: bool
) -> None:
    requests = some_requests(5)
    script = [list(requests[i : i + 4]) for i in range(0, len(requests), 4)]
    config = SchedulingConfig(enable_mixed_chunk=mixed)
    mailbox, scheduler = served(
        script, overlap=overlap, config=config, retract_every=retract_every, decode_steps=decode_steps
    )
    for request in requests:
        params = request.sampling
        if params.grammar is not None:
            assert outcome(mailbox, request.request_id) == constrained(request)
            continue
        stops = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else frozenset(EOS))
        free = generate(request.prompt_ids, params.max_tokens or 0, stops, VOCAB, params.min_tokens)
        assert outcome(mailbox, request.request_id)[0] == free
    assert (scheduler.state.totals.retractions > 0) == (retract_every is not None)


@pytest.mark.parametrize(("overlap", "retract_every"), [(True, None), (False, None), (True, 3)])
def test_allowed_tokens_and_bad_words_hold_with_grammars_and_without(overlap: bool, retract_every: int | None) -> None:
    dice = random.Random(9)
    requests: list[Request] = []
    for request in some_requests(5, 18):
        before, _ = constrained(request)
        number = len(requests) % 3
        words = tuple({tuple(before[at - size : at]) for at in range(1, len(before) + 1) for size in (1, 2, 4)} - {()})
        limits: list[dict[str, Any]] = [
            {"allowed_token_ids": tuple(dice.sample(range(VOCAB), 12) + before + list(EOS))},
            {"bad_word_ids": tuple(sorted(word for word in words if len(word) == number + 1))},
            {},
        ]
        if request.sampling.grammar is not None:
            limits[1]["bad_word_ids"] = tuple(word for word in words if len(word) == 2)[:1]
        given = msgspec.structs.replace(request.sampling, **limits[number])
        requests.append(msgspec.structs.replace(request, sampling=given))
    script = [list(requests[i : i + 4]) for i in range(0, len(requests), 4)]
    mailbox, _ = served(script, overlap=overlap, retract_every=retract_every)
    changed = 0
    for request, old in zip(requests, some_requests(5, 18), strict=True):
        assert outcome(mailbox, request.request_id) == constrained(request), request
        changed += constrained(request) != constrained(old)
    assert changed > 4


def test_limits_that_leave_no_token_end_their_request_with_words() -> None:
    requests = [
        asking("eos", [1], None, allowed_token_ids=EOS, min_tokens=3),
        asking("both", [2], None, allowed_token_ids=(5,), bad_word_ids=((5, 5),)),
        asking("free", [3], None),
    ]
    mailbox, scheduler = served([requests])
    assert "after 0 tokens allowed_token_ids and bad_words leave none" in refusal(mailbox, "eos")
    assert "after 1 tokens allowed_token_ids and bad_words leave none" in refusal(mailbox, "both")
    assert outcome(mailbox, "free")[0] == generate([3], 20, frozenset(EOS), VOCAB)
    assert scheduler.state.totals.failed_requests == 0


def test_rows_that_free_requests_take_over_are_free() -> None:
    """Two rows: each is held to a grammar, free, and held to another one in turn."""
    sizes = capacity(rows=2)
    requests = [asking(f"r{i}", [i, i + 1], None if i % 2 else fake(i, 4)) for i in range(10)]
    mailbox, _ = served([requests], sizes)
    for request in requests:
        if request.sampling.grammar is None:
            assert outcome(mailbox, request.request_id)[0] == generate(request.prompt_ids, 20, frozenset(EOS), VOCAB)
        else:
            assert outcome(mailbox, request.request_id) == constrained(request)


def test_equal_grammars_are_compiled_once_and_each_sample_follows_its_own() -> None:
    compiled: list[Grammar] = []

    def compile(grammar: Grammar) -> FakeMatcher:
        compiled.append(grammar)
        return compile_fake(grammar, VOCAB)

    grammar = fake(3, 12)
    requests = [asking(f"r{i}", [i, 9], grammar, n=2, seed=i) for i in range(4)]
    later = asking("later", [77], grammar)
    mailbox, _ = served([requests, [], [], [later]], compile=compile)
    assert compiled == [grammar]
    for request in [*requests, later]:
        for index in range(request.sampling.n):
            assert outcome(mailbox, request.request_id, index) == constrained(request)


def test_a_hostile_grammar_ends_only_its_request() -> None:
    """Its grammar is followed for some tokens, then goes beyond its limits."""
    hostile = asking("hostile", [1, 2], fake(2, 10, "fails"), ignore_eos=True)
    others = [asking("held", [3, 4], fake(2, 10)), asking("free", [5, 6], None)]
    mailbox, scheduler = served([[hostile, *others]])
    assert refusal(mailbox, "hostile") == "invalid: the fake grammar fails here"
    assert outcome(mailbox, "hostile")[0] == constrained(asking("held", [1, 2], fake(2, 10), ignore_eos=True))[0][:5]
    assert outcome(mailbox, "held") == constrained(others[0])
    assert outcome(mailbox, "free")[0] == generate([5, 6], 20, frozenset(EOS), VOCAB)
    assert scheduler.state.totals.failed_requests == 0, "no fault of ours"


def test_a_request_whose_first_token_ends_it_by_a_failure_leaves_nothing_behind() -> None:
    class Limited(FakeMatcher):
        """Is beyond its limits with any token."""

        def copy(self) -> FakeMatcher:
            return Limited(self._seed, self.length, self._vocab_size)

        def advance(self, token_id: int) -> None:
            raise InvalidRequest("the grammar goes beyond its limits")

    mailbox, scheduler = served([[asking("a", [1, 2], fake(2, 10))]], compile=lambda given: Limited(2, 10, VOCAB))
    assert refusal(mailbox, "a") == "invalid: the grammar goes beyond its limits"
    scheduler.check()
    assert not scheduler.state.requests._arrived_s, "its times"


class Marks:
    """Whose grammar is worked on; `ids` are all of them so far."""

    def __init__(self) -> None:
        self.now = ""
        self.ids: list[str] = []

    def begin(self, request_id: str) -> None:
        self.now = request_id
        self.ids.append(request_id)

    def end(self) -> None:
        self.now = ""


class Slow(FakeMatcher):
    """Takes time in one of its methods, and is marked in all."""

    def __init__(self, slow: str, marks: Marks) -> None:
        super().__init__(1, 100, VOCAB)
        self._slow, self._marks = slow, marks

    def _work(self, method: str) -> None:
        assert self._marks.now == "a", f"nothing says whose {method} runs"
        until_s = time.thread_time() + 2e-3
        while method == self._slow and time.thread_time() < until_s:
            pass

    def copy(self) -> Slow:
        self._work("copy")
        other = Slow(self._slow, self._marks)
        other.output = self.output.copy()
        return other

    def advance(self, token_id: int) -> None:
        self._work("advance")
        super().advance(token_id)

    def num_allowed(self, token_ids: Sequence[int]) -> int:
        self._work("num_allowed")
        return super().num_allowed(token_ids)

    def mask_into(self, words: Words) -> None:
        self._work("mask_into")
        super().mask_into(words)


@pytest.mark.parametrize("slow", ["", "copy", "advance", "num_allowed", "mask_into"])
def test_all_that_a_grammar_does_counts_against_its_time_and_says_whose_it_is(
    slow: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_work, "CPU_S", 0.02)
    monkeypatch.setattr(grammar_work, "CPU_S_PER_TOKEN", 0.0002)
    marks = Marks()
    constraint = Constraint(Slow(slow, marks), EOS, EOS, 0, work=GrammarWork(marks, "a"))
    words = np.zeros((2, -(-VOCAB // 32)), dtype=np.uint32)
    follower = FakeMatcher(1, 100, VOCAB)

    def follow() -> None:
        for _ in range(80):
            (token_id, *_) = follower.allowed()
            constraint.num_allowed([token_id])
            assert constraint.mask_into(words[0])
            bound = constraint.masks_ahead(words, [], [token_id])
            if bound.error is not None:
                raise bound.error
            constraint.advance(token_id)
            follower.advance(token_id)

    if not slow:
        monkeypatch.setattr(grammar_work, "CPU_S", 10.0)
        follow()
    else:
        with pytest.raises(InvalidRequest, match=r"the grammar took 0\.. s for \d+ tokens.*simplify it"):
            follow()
        assert len(follower.output) > 2, "it has some time at first"
    assert marks.now == "" and len(marks.ids) > 4 * len(follower.output)


def test_a_token_that_the_mask_allowed_and_the_grammar_refuses_is_our_fault(caplog: pytest.LogCaptureFixture) -> None:
    class Wrong(FakeMatcher):
        """Its masks allow other tokens than it takes."""

        def copy(self) -> FakeMatcher:
            return Wrong(self._seed, self.length, self._vocab_size)

        def mask_into(self, words: Words) -> None:
            super().mask_into(words)
            if len(self.output) == 2:
                words ^= np.uint32(ALL)

    wrong = asking("wrong", [1, 2], fake(2, 10), ignore_eos=True)
    requests = [wrong, asking("held", [3, 4], fake(3, 10)), asking("free", [5, 6], None)]
    mailbox, scheduler = served(
        [requests], compile=lambda given: Wrong(2, 10, VOCAB) if given == fake(2, 10) else compile_fake(given, VOCAB)
    )
    text = refusal(mailbox, "wrong")
    assert text.startswith("failed: ") and "RequestFailed" in text and "don't repeat it" in text
    assert "'wrong' failed by our own fault" in caplog.text and "doesn't follow" in caplog.text
    assert scheduler.state.totals.failed_requests == 1
    assert outcome(mailbox, "held") == constrained(requests[1])
    assert outcome(mailbox, "free")[0] == generate([5, 6], 20, frozenset(EOS), VOCAB)


def test_min_tokens_beyond_the_grammars_end_leaves_a_defined_end() -> None:
    request = asking("a", [1], fake(1, 3), min_tokens=10)
    mailbox, _ = served([[request]])
    tokens, reason = outcome(mailbox, "a")
    assert (len(tokens), reason) == (3, FinishReason.STOP)


def test_a_stop_token_that_the_grammar_needs_is_refused_with_words() -> None:
    first = compile_fake(fake(1, 3), VOCAB).allowed()
    request = asking("a", [1], fake(1, 3), stop_token_ids=tuple(first))
    mailbox, _ = served([[request, asking("b", [2], None)]])
    if compile_fake(fake(1, 3), VOCAB).accepts:
        assert outcome(mailbox, "a") == constrained(request)
    else:
        assert "leaves no token of the vocabulary" in refusal(mailbox, "a")
    assert outcome(mailbox, "b")[0] == generate([2], 20, frozenset(EOS), VOCAB)


def test_nothing_advances_after_the_end() -> None:
    """The step behind the last token is in flight already; its token is dropped, and no matcher gets it."""
    advanced: list[FakeMatcher] = []

    class Watched(FakeMatcher):
        def copy(self) -> FakeMatcher:
            advanced.append(Watched(self._seed, self.length, self._vocab_size))
            return advanced[-1]

    request = asking("a", [1], fake(1, 4), max_tokens=9)
    mailbox, _ = served([[request]], compile=lambda grammar: Watched(1, 4, VOCAB))
    (matcher,) = advanced
    tokens, _ = outcome(mailbox, "a")
    assert tokens[: len(matcher.output)] == matcher.output and len(tokens) - len(matcher.output) <= 1


def test_a_request_that_waits_for_its_grammar_lets_others_pass_and_is_served_then() -> None:
    may_compile = threading.Event()

    def compile(grammar: Grammar) -> FakeMatcher:
        assert may_compile.wait(10)
        return compile_fake(grammar, VOCAB)

    class Mailbox(ScriptedMailbox):
        def receive(self, wait_s: float) -> list[ToEngine]:
            if any(reply.request_id == "free" and reply.finish_reason for reply in self.replies):
                may_compile.set()
            return super().receive(wait_s)

    sizes = capacity(rows=1)
    scheduler = CheckedScheduler(sizes, BucketSet.derive(sizes), EOS, grammars=GrammarQueue(compile, 30.0))
    held = asking("held", [1, 2], fake(1, 4))
    mailbox = Mailbox([[held, asking("free", [3, 4], None)]])
    run_loop(scheduler, FakeEngine(sizes), mailbox, 1)
    assert outcome(mailbox, "free")[0] == generate([3, 4], 20, frozenset(EOS), VOCAB)
    assert outcome(mailbox, "held") == constrained(held)


def test_an_abort_ends_a_request_that_waits_for_its_grammar() -> None:
    may_compile = threading.Event()

    def compile(grammar: Grammar) -> FakeMatcher:
        assert may_compile.wait(10)
        return compile_fake(grammar, VOCAB)

    script: list[list[Request | Abort]] = [
        [asking("a", [1], fake(1, 4), n=2)],
        [],
        [Abort("a", 0)],
        [Abort("a", 1)],
        [],
    ]
    mailbox, scheduler = served(script, compile=compile)
    may_compile.set()
    assert [outcome(mailbox, "a", index) for index in (0, 1)] == [([], FinishReason.ABORT)] * 2
    assert scheduler.state.totals.steps == 0


def test_a_bad_grammar_is_refused_and_the_refusal_is_kept() -> None:
    compiled: list[str] = []

    def compile(grammar: Grammar) -> FakeMatcher:
        compiled.append(grammar.text)
        raise InvalidRequest("no grammar at all")

    script: list[list[Request | Abort]] = [[asking("a", [1], fake(1, 4))], [], [], [asking("b", [1], fake(1, 4))]]
    mailbox, _ = served(script, compile=compile)
    assert [refusal(mailbox, name) for name in "ab"] == ["invalid: no grammar at all"] * 2
    assert len(compiled) == 1


def test_without_a_grammar_queue_requests_with_grammars_are_refused() -> None:
    sizes = capacity()
    scheduler = CheckedScheduler(sizes, BucketSet.derive(sizes), EOS)
    mailbox = ScriptedMailbox([[asking("a", [1], fake(1, 4))]])
    run_loop(scheduler, FakeEngine(sizes), mailbox, 1)
    assert "--grammar-backend none" in refusal(mailbox, "a")


def test_steps_without_grammars_bring_no_masks() -> None:
    masked: list[bool] = []

    class Watching(FakeEngine):
        def submit(self, inputs: StepInputs) -> FakeHandle:
            masked.append(inputs.masked)
            return super().submit(inputs)

    sizes = capacity(rows=4)
    scheduler = CheckedScheduler(
        sizes, BucketSet.derive(sizes), EOS, grammars=GrammarQueue(lambda grammar: compile_fake(grammar, VOCAB), 30.0)
    )
    script: list[list[ToEngine]] = [[asking("free", range(5), None, 6)]]
    run_loop(scheduler, Watching(sizes), ScriptedMailbox(script), 1)
    assert masked and not any(masked)


def replies_of(mailbox: ScriptedMailbox, request_id: str) -> list[Reply]:
    return [reply for reply in mailbox.replies if reply.request_id == request_id]


def test_the_grammars_end_comes_as_a_reply_of_its_own_so_that_the_last_token_is_text() -> None:
    mailbox, _ = served([[asking("a", [1], fake(1, 2), ignore_eos=True)]])
    *tokens, end = replies_of(mailbox, "a")
    assert sum(len(reply.token_ids) for reply in tokens) == 2 and all(reply.finish_reason is None for reply in tokens)
    assert (end.token_ids, end.finish_reason) == ((), FinishReason.STOP)
