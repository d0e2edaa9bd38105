"""What the engine says about its load: enough to see that it steps, and that nothing is left behind."""

from __future__ import annotations

import time

import msgspec
import pytest

from jaxsgl.batch.buckets import BucketSet
from jaxsgl.messages.orders import Abort, ToEngine
from jaxsgl.messages.replies import Load, RefusalKind, Totals
from jaxsgl.requests.grammar import Grammar
from jaxsgl.requests.request import FinishReason, Request, SamplingParams
from tests.checked import CheckedScheduler
from tests.scheduler.grammars import GrammarsInTurn
from tests.scheduler.serving import VOCAB, capacity, expected, finish_reason, last_reply, new_scheduler, request, serve

both_loops = pytest.mark.parametrize("overlap", [True, False])
PROMPT = list(range(40))


@both_loops
def test_totals_count_what_was_admitted_computed_and_padded(overlap: bool) -> None:
    later: list[ToEngine] = [request("b", PROMPT, 5), request("c", [7] * 3, 5), request("d", [8] * 3, 5)]
    mailbox, _ = serve(capacity(), [[request("a", PROMPT, 5)], *[[]] * 9, later], overlap=overlap)
    assert msgspec.structs.replace(mailbox.loads[-1], step_times=b"") == Load(
        cached_tokens=44 + 4 + 4,  # prompts and all outputs but the last token, in whole pages of 4
        totals=Totals(
            prompt_tokens=40 + 40 + 3 + 3,
            cached_prompt_tokens=36,
            output_tokens=4 * 5,
            steps=2 * (1 + 4),
            decode_rows=4 * (1 + 3),
            decode_rows_padded=4 * (1 + 4),
            extend_tokens=40 + (4 + 3 + 3),
            extend_tokens_padded=64 + 16,
        ),
    )


@both_loops
def test_every_step_is_reported_even_if_it_yields_no_token(overlap: bool) -> None:
    mailbox, scheduler = serve(capacity(max_extend_tokens=4), [[request("a", PROMPT, 2)]], overlap=overlap)
    assert len(mailbox.replies) == 2
    steps = [load.totals.steps for load in mailbox.loads]
    assert set(steps) == set(range(1, len(scheduler.launched) + 1))


def test_the_load_counts_waiting_and_running_samples() -> None:
    requests: list[ToEngine] = [request(f"r{i}", range(10 * i, 10 * i + 10), 9) for i in range(5)]
    requests.append(Request("n", PROMPT, SamplingParams(temperature=0.0, max_tokens=9, n=3)))
    mailbox, _ = serve(capacity(rows=2), [requests])
    first = mailbox.loads[0]
    assert (first.num_running, first.num_waiting, first.waiting_tokens) == (2, 6, 3 * 10 + 3 * 40)
    assert first.used_tokens == 2 * 12  # three pages of 4 each


def test_no_step_is_owed_to_a_request_whose_grammar_is_compiled_still() -> None:
    sizes, grammars = capacity(rows=4), GrammarsInTurn(VOCAB, lambda: 0.0)
    scheduler = CheckedScheduler(sizes, BucketSet.derive(sizes), (), grammars=grammars)
    sampling = SamplingParams(temperature=0.0, max_tokens=9, n=2, grammar=Grammar.regex("1 12"))
    scheduler.receive([Request("n", PROMPT, sampling)])
    load = scheduler.load(0)
    assert (load.num_waiting, load.num_blocked, load.owes_step) == (2, 2, False)
    scheduler.receive([request("a", PROMPT, 5)])
    assert scheduler.load(0).owes_step
    scheduler.receive([Abort("a")])
    assert not scheduler.load(0).owes_step
    assert scheduler.launch() is not None, "it is compiled now"
    load = scheduler.load(0)
    assert (load.num_running, load.num_blocked, load.owes_step) == (1, 0, True)
    scheduler.check()


@both_loops
@pytest.mark.parametrize("turns", range(12))
def test_after_the_last_request_the_load_says_that_nothing_is_held(turns: int, overlap: bool) -> None:
    """Also after an abort in any state: waiting, between chunks, in flight, running, ended."""
    script: list[list[ToEngine]] = [
        [request("a", PROMPT, 5), request("b", range(90, 99), 30), request("c", PROMPT)],
        *[[]] * turns,
        [Abort("a"), Abort("b"), Abort("c")],
    ]
    mailbox, _ = serve(capacity(max_extend_tokens=16, rows=2), script, overlap=overlap)
    last = mailbox.loads[-1]
    assert (last.num_running, last.num_waiting, last.waiting_tokens, last.used_tokens) == (0, 0, 0, 0)
    assert finish_reason(mailbox, "b") is FinishReason.ABORT


def test_two_hundred_aborts_at_once_take_less_than_a_second() -> None:
    sizes = capacity(rows=128, num_pages=10_000)
    scheduler = new_scheduler(sizes)
    scheduler.receive([request(f"r{i}", range(i, i + 100), 20) for i in range(200)])
    while scheduler.num_running < 128:
        inputs = scheduler.launch()
        assert inputs is not None
        scheduler.collect([5] * inputs.num_seqs)
    start_s = time.perf_counter()
    scheduler.receive([Abort(f"r{i}") for i in range(200)])
    assert time.perf_counter() - start_s < 1
    load = scheduler.load(0)
    assert (load.num_running, load.num_waiting, load.used_tokens) == (0, 0, 0)
    scheduler.check()


def test_the_load_passes_on_the_engines_recompiles() -> None:
    assert new_scheduler(capacity()).load(recompiles=3) == Load(totals=Totals(recompiles=3))


def test_a_full_queue_refuses_new_requests_until_there_is_room() -> None:
    def arrive(name: str, n: int = 1) -> Request:
        return Request(name, PROMPT, SamplingParams(temperature=0.0, max_tokens=4, n=n))

    script = [
        [arrive("runs")],
        [arrive("one"), arrive("two", n=3), arrive("late"), arrive("late too", n=2)],
        *[[]] * 30,
        [arrive("late again")],
    ]
    mailbox, _ = serve(capacity(rows=1), script, max_queued_requests=3)
    for name in ("late", "late too"):
        refusal = last_reply(mailbox, name).refusal
        assert refusal is not None and refusal.kind is RefusalKind.OVERLOADED
        text = "the queue is full: 4 wait for admission, and --max-queued-requests is 3: try again later"
        assert refusal.text == text
        assert [reply.request_id for reply in mailbox.replies].count(name) == 1
    for name in ("runs", "one", "late again"):
        assert mailbox.output_ids(name) == expected(PROMPT)
    assert len(mailbox.output_ids("two")) == 3 * len(expected(PROMPT))


def test_a_queue_of_many_tokens_refuses_new_requests_until_there_is_room() -> None:
    long = list(range(60))
    script = [
        [request("runs", PROMPT)],
        [request("one", long), request("two", long), request("late", [5])],
        *[[]] * 30,
        [request("late again", [5])],
    ]
    mailbox, _ = serve(capacity(rows=1), script, max_queued_tokens=100)
    refusal = last_reply(mailbox, "late").refusal
    assert refusal is not None and refusal.kind is RefusalKind.OVERLOADED
    text = "the queue is full: 120 prompt tokens wait for admission, and --max-queued-tokens is 100: try again later"
    assert refusal.text == text
    for name, prompt in (("one", long), ("two", long), ("late again", [5])):
        assert mailbox.output_ids(name) == expected(prompt)


def test_an_invalid_request_is_refused_as_such_even_if_the_queue_is_full() -> None:
    mailbox, _ = serve(capacity(), [[request("a", PROMPT), request("bad", [])]], max_queued_requests=1)
    refusal = last_reply(mailbox, "bad").refusal
    assert refusal is not None and refusal.kind is RefusalKind.INVALID


def test_without_a_limit_any_number_may_wait() -> None:
    scheduler = new_scheduler(capacity())
    scheduler.receive([request(f"r{i}", [1, 2, 3]) for i in range(20_000)])
    assert scheduler.take_replies() == []
    assert scheduler.num_waiting == 20_000
