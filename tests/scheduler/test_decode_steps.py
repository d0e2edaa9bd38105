"""`--decode-steps`: several steps in one program where no request needs the host in between; same tokens."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from jaxsgl.batch.buckets import BucketSet, Capacity
from jaxsgl.config.engine import EngineConfig, SchedulingConfig
from jaxsgl.errors import ConfigError
from jaxsgl.messages.orders import Abort, ToEngine
from jaxsgl.messages.replies import Reply
from jaxsgl.requests.request import FinishReason, Request, SamplingParams
from jaxsgl.scheduler.loop import run_loop
from jaxsgl.testing.engine import FakeEngine, ScriptedMailbox
from tests.checked import CheckedScheduler
from tests.scheduler.serving import VOCAB, capacity, expected, request

PROMPT = range(5, 15)
both_loops = pytest.mark.parametrize("overlap", [True, False])


def serve(
    sizes: Capacity,
    script: list[list[ToEngine]],
    decode_steps: int = 4,
    *,
    overlap: bool = True,
    eos: tuple[int, ...] = (),
    config: SchedulingConfig = SchedulingConfig(),
) -> tuple[ScriptedMailbox, CheckedScheduler]:
    scheduler = CheckedScheduler(sizes, BucketSet.derive(sizes, decode_steps=decode_steps), eos, config)
    mailbox = ScriptedMailbox(script)
    run_loop(scheduler, FakeEngine(sizes), mailbox, int(overlap))
    assert scheduler.is_idle
    assert scheduler.cache.num_available == sizes.num_pages - 1
    return mailbox, scheduler


def steps_of(scheduler: CheckedScheduler) -> list[int]:
    """The number of steps of each decode program that was launched."""
    return [inputs.bucket.num_steps for inputs in scheduler.launched if inputs.bucket.kind == "decode"]


def replies_of(mailbox: ScriptedMailbox, request_id: str) -> list[Reply]:
    return [reply for reply in mailbox.replies if reply.request_id == request_id]


@both_loops
@pytest.mark.parametrize("decode_steps", [1, 2, 4, 7])
def test_tokens_are_the_same_whatever_the_number_of_steps(decode_steps: int, overlap: bool) -> None:
    """Ends come anywhere in a program: at max_tokens, which no number of steps divides, and at stop tokens."""
    requests: list[Request] = []
    for i in range(20):
        prompt = range(3 * i, 3 * i + 2 + i)
        stop = expected(prompt, 40)[5 + i] if i % 2 else VOCAB - 1
        requests.append(request(f"r{i}", prompt, 17 + i, stop=(stop,)))
    mailbox, scheduler = serve(capacity(num_pages=100, rows=5), [list(requests)], decode_steps, overlap=overlap)
    for asked in requests:
        output = expected(asked.prompt_ids, asked.sampling.max_tokens or 0, frozenset(asked.sampling.stop_token_ids))
        assert mailbox.output_ids(asked.request_id) == output
    assert decode_steps in steps_of(scheduler)
    assert scheduler.load(0).totals.output_tokens == sum(len(reply.token_ids) for reply in mailbox.replies)


def test_all_tokens_of_a_program_come_in_one_reply_and_cost_one_launch() -> None:
    mailbox, scheduler = serve(capacity(), [[request("a", PROMPT, 1 + 4 + 4 + 3)]])
    assert steps_of(scheduler) == [4, 4, 1, 1, 1]  # every step yields a token
    assert [len(reply.token_ids) for reply in mailbox.replies] == [1, 4, 4, 1, 1, 1]
    load = scheduler.load(0)
    assert (load.totals.steps, load.totals.decode_rows, load.totals.decode_rows_padded) == (6, 11, 11)


@both_loops
def test_tokens_after_a_stop_token_are_dropped_and_never_cached(overlap: bool) -> None:
    output = expected(PROMPT, 20)
    stop = output[6]  # the second token of the second program
    ended = [*PROMPT, *output[:7]]
    again: list[ToEngine] = [request("b", [*PROMPT, *output[:20]], 3)]
    script: list[list[ToEngine]] = [[request("a", PROMPT, 20, stop=(stop,))], *[[] for _ in range(12)], again]
    mailbox, _ = serve(capacity(page_size=1), script, overlap=overlap)
    assert mailbox.output_ids("a") == output[:7]
    assert [len(reply.token_ids) for reply in replies_of(mailbox, "a")] == [1, 4, 2]
    assert replies_of(mailbox, "a")[-1].finish_reason is FinishReason.STOP
    assert mailbox.output_ids("b") == expected([*PROMPT, *output[:20]], 3)
    assert replies_of(mailbox, "b")[-1].cached_tokens == len(ended), "a token behind the end was cached"


@pytest.mark.parametrize(
    "features", [{"presence_penalty": 1.0}, {"logprobs": 0}, {"min_tokens": 2}, {"logit_bias": {3: 1.0}}]
)
def test_requests_with_features_get_single_steps_and_so_do_all_in_their_batch(features: dict) -> None:
    asked = Request("f", list(PROMPT), SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, **features))
    _, scheduler = serve(capacity(), [[request("a", range(4), 14), asked]])
    assert steps_of(scheduler) == [1] * 5 + [4, 4]


def test_prompts_between_chunks_are_not_kept_waiting() -> None:
    script: list[list[ToEngine]] = [[request("a", range(4), 60)], [], [], [request("b", range(100), 4)]]
    config = SchedulingConfig(decode_first=True)
    _, scheduler = serve(capacity(max_extend_tokens=16), script, config=config)
    kinds = [(inputs.bucket.kind, inputs.bucket.num_steps) for inputs in scheduler.launched]
    first = kinds.index(("extend", 1), 1)
    last = len(kinds) - 1 - kinds[::-1].index(("extend", 1))
    assert set(kinds[first : last + 1]) == {("extend", 1), ("decode", 1)}
    assert ("decode", 4) in kinds[:first] and ("decode", 4) in kinds[last:]


def test_a_request_that_waits_for_a_row_does_not_prevent_several_steps() -> None:
    requests: list[ToEngine] = [request(f"r{i}", range(i, i + 4), 33) for i in range(6)]
    mailbox, scheduler = serve(capacity(rows=2), [requests])
    assert steps_of(scheduler).count(4) == 3 * 8
    assert all(len(mailbox.output_ids(f"r{i}")) == 33 for i in range(6))


def test_programs_are_single_steps_where_most_rows_would_idle() -> None:
    requests: list[ToEngine] = [request(f"r{i}", range(i, i + 4), 2 if i < 4 else 9) for i in range(5)]
    _, scheduler = serve(capacity(), [requests])
    assert steps_of(scheduler)[0] == 1


def test_several_steps_never_retract_a_request() -> None:
    """With a forecast that knows the ends, the pool is full to the last page, and no request is retracted."""
    for num_pages in (25, 40, 60, 90):
        params = [SamplingParams(temperature=0.0, max_tokens=10 + 7 * i, ignore_eos=True) for i in range(9)]
        prompts = [list(range(i, i + 5 + 3 * i)) for i in range(9)]
        requests: list[ToEngine] = [Request(f"r{i}", prompts[i], params[i]) for i in range(9)]
        sizes = capacity(num_pages=num_pages, rows=9)
        mailbox, scheduler = serve(sizes, [requests], config=SchedulingConfig(schedule_conservativeness=0.01))
        assert scheduler.load(0).totals.retractions == 0
        assert set(steps_of(scheduler)) == {1, 4}
        for i in range(9):
            assert mailbox.output_ids(f"r{i}") == expected(prompts[i], 10 + 7 * i)


@both_loops
def test_tokens_stay_right_when_requests_are_retracted_or_aborted_with_several_steps_in_flight(overlap: bool) -> None:
    requests: list[ToEngine] = [request(f"r{i}", range(i, i + 20), 60) for i in range(8)]
    script: list[list[ToEngine]] = [requests, *[[] for _ in range(6)], [Abort("r3")]]
    config = SchedulingConfig(schedule_conservativeness=0.01)
    mailbox, scheduler = serve(capacity(num_pages=60), script, overlap=overlap, config=config)
    assert scheduler.load(0).totals.retractions > 0 and 4 in steps_of(scheduler)
    for i in {*range(8)} - {3}:
        assert mailbox.output_ids(f"r{i}") == expected(range(i, i + 20), 60)
    aborted = mailbox.output_ids("r3")
    assert aborted == expected(range(3, 23), 60)[: len(aborted)]
    assert [reply.finish_reason for reply in replies_of(mailbox, "r3")][-1] is FinishReason.ABORT


@dataclass
class Clock:
    now_s: float = 0.0


@pytest.mark.parametrize(("decode_steps", "used"), [(4, True), (6, False)])
def test_several_steps_end_within_the_bound_between_two_tokens(decode_steps: int, used: bool) -> None:
    """A step takes a millisecond, the bound is 5 ms; what a step takes has to be measured first."""
    clock, sizes = Clock(), capacity()
    buckets = BucketSet.derive(sizes, decode_steps=decode_steps)
    config = SchedulingConfig(max_itl_ms=5.0)
    scheduler = CheckedScheduler(sizes, buckets, (), config, clock=lambda: clock.now_s)
    engine = FakeEngine(sizes)
    scheduler.receive([request("a", PROMPT, 80)])
    while (inputs := scheduler.launch()) is not None:
        tokens = engine.submit(inputs).tokens()
        clock.now_s += 1e-3 * inputs.bucket.num_steps
        scheduler.collect(tokens)
    assert steps_of(scheduler)[0] == 1
    assert (decode_steps in steps_of(scheduler)) == used
    assert [token for reply in scheduler.take_replies() for token in reply.token_ids] == expected(PROMPT, 80)


@pytest.mark.parametrize("decode_steps", [0, 65])
def test_a_number_of_steps_out_of_bounds_is_refused(decode_steps: int) -> None:
    with pytest.raises(ConfigError, match=f"--decode-steps is {decode_steps}, but must be 1 to 64"):
        EngineConfig(decode_steps=decode_steps)
