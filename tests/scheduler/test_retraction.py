"""When the estimate was too low: which request is retracted, and that its client sees no difference."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from itertools import pairwise

import pytest

from jaxsgl.batch.buckets import BucketSet, Capacity
from jaxsgl.config.engine import SchedulingConfig
from jaxsgl.messages.orders import Abort
from jaxsgl.requests.request import FinishReason, Request, SamplingParams
from jaxsgl.scheduler.budget import DECAY_STEPS, NewTokenRatio
from jaxsgl.scheduler.loop import run_loop
from jaxsgl.scheduler.policy import in_order_of_loss
from jaxsgl.scheduler.req import Req
from jaxsgl.testing.engine import FakeEngine, RetractEvery, ScriptedMailbox
from tests.checked import CheckedScheduler
from tests.scheduler.serving import Script, capacity, expected, request

OPTIMIST = SchedulingConfig(schedule_conservativeness=0.01)


def serve(
    sizes: Capacity, requests: list[Request], config: SchedulingConfig, overlap: bool = True
) -> tuple[ScriptedMailbox, CheckedScheduler]:
    scheduler = CheckedScheduler(sizes, BucketSet.derive(sizes), (), config)
    mailbox = ScriptedMailbox([requests])
    run_loop(scheduler, FakeEngine(sizes), mailbox, int(overlap))
    assert scheduler.is_idle
    assert scheduler.cache.num_available == sizes.num_pages - 1
    return mailbox, scheduler


def forgetful(name: str, prompt: range, max_tokens: int) -> Request:
    """A request of unknown length: it may end at EOS."""
    return request(name, prompt, max_tokens)


def patient(name: str, prompt: range, max_tokens: int) -> Request:
    """A request that is known to use all its max_tokens."""
    return Request(name, list(prompt), SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True))


@pytest.mark.parametrize("overlap", [True, False])
def test_retracted_requests_yield_the_same_tokens(overlap: bool) -> None:
    requests = [forgetful(f"r{i}", range(i, i + 20), 60) for i in range(8)]
    mailbox, scheduler = serve(capacity(num_pages=60), requests, OPTIMIST, overlap)
    assert scheduler.load(0).totals.retractions > 0
    for i in range(8):
        assert mailbox.output_ids(f"r{i}") == expected(range(i, i + 20), 60)


def test_a_cautious_reserve_retracts_no_request() -> None:
    requests = [forgetful(f"r{i}", range(i, i + 20), 60) for i in range(8)]
    _, scheduler = serve(capacity(num_pages=60), requests, SchedulingConfig(schedule_conservativeness=100.0))
    assert scheduler.load(0).totals.retractions == 0


@pytest.mark.parametrize("num_pages", [25, 40, 60, 90])
def test_requests_that_ignore_eos_are_forecast_exactly(num_pages: int) -> None:
    """The ratio doesn't count for them, however optimistic it is."""
    requests = [patient(f"r{i}", range(i, i + 5 + 3 * i), 10 + 7 * i) for i in range(9)]
    mailbox, scheduler = serve(capacity(num_pages=num_pages, rows=9), requests, OPTIMIST)
    assert scheduler.load(0).totals.retractions == 0
    for i in range(9):
        assert mailbox.output_ids(f"r{i}") == expected(range(i, i + 5 + 3 * i), 10 + 7 * i)


def test_the_forecast_admits_what_a_full_reservation_would_not() -> None:
    """The short one ends long before the long one needs its pages."""
    short, long = patient("short", range(40), 4), patient("long", range(100, 110), 100)
    sizes = capacity(num_pages=1 + 30)
    _, scheduler = serve(sizes, [short, long], SchedulingConfig())
    assert max(step.num_seqs for step in scheduler.launched) == 2
    full = sum(-(-(len(r.prompt_ids) + (r.sampling.max_tokens or 0) - 1) // 4) for r in (short, long))
    assert full > 30


def reqs_with(*lengths: tuple[int, int]) -> Iterator[Req]:
    """Requests with these numbers of (prompt, output) tokens."""
    for i, (prompt_len, output_len) in enumerate(lengths):
        req = Req(request(f"r{i}", range(prompt_len), 100), 100, frozenset(), 0)
        req.output_ids = [0] * output_len
        yield req


def test_the_request_with_least_to_lose_is_retracted_first() -> None:
    reqs = list(reqs_with((10, 5), (10, 2), (30, 2), (10, 2), (10, 9)))
    assert [req.request_id for req in in_order_of_loss(reqs, lambda req: 0)] == ["r2", "r3", "r1", "r0", "r4"]


def test_the_ratio_falls_with_every_good_step_and_learns_from_a_retraction() -> None:
    ratio = NewTokenRatio(1.0)
    assert ratio.value == pytest.approx(0.7)
    for _ in range(DECAY_STEPS + 10):
        ratio.decoded()
    assert ratio.value == pytest.approx(0.7 * 0.14)
    ratio.retracted(list(reqs_with((10, 30), (10, 10))))
    assert ratio.value == pytest.approx((40 + 2 * 20) / 201)
    ratio.retracted(list(reqs_with((10, 3), (10, 1))))
    assert ratio.value == pytest.approx((40 + 2 * 20) / 201), "a retraction never lowers it"
    ratio.reset()
    assert ratio.value == pytest.approx(0.7)


def test_the_ratio_learns_from_requests_that_leave_max_tokens_out() -> None:
    """Not more of their max_tokens counts than is held for them."""
    ratio = NewTokenRatio(0.01)
    (req,) = reqs_with((10, 2000))
    req.max_new_tokens = 100_000
    ratio.retracted([req])
    assert ratio.value == pytest.approx(2020 / 4097)


def test_admission_opens_when_the_last_running_request_is_retracted_without_need() -> None:
    """A retraction closes admission until a request ends, but here no request is left that could end."""
    sizes = capacity()
    scheduler = CheckedScheduler(
        sizes, BucketSet.derive(sizes), (), retract_also=lambda view: list(view.requests.decoding.values())[:1]
    )
    engine = FakeEngine(sizes)
    scheduler.receive([forgetful("r", range(20), 9)])
    scheduler.state.admission_closed = True
    for _ in range(2):
        scheduler.state.admission_closed = scheduler.num_running > 0
        inputs = scheduler.launch()
        assert inputs is not None and inputs.num_seqs == 1
        scheduler.collect(engine.submit(inputs).tokens())
    assert scheduler.load(0).totals.retractions == 1
    assert scheduler.last_plan is not None and [entry.req.request_id for entry in scheduler.last_plan.admit] == ["r"]


def test_admission_stays_closed_after_a_retraction_until_a_request_ends() -> None:
    requests = [forgetful(f"r{i}", range(i, i + 20), 60) for i in range(8)]
    sizes = capacity(num_pages=60)
    scheduler, engine = CheckedScheduler(sizes, BucketSet.derive(sizes), (), OPTIMIST), FakeEngine(sizes)
    scheduler.receive(requests)
    closed_for = 0
    while not scheduler.is_idle:
        inputs = scheduler.launch()
        closed = scheduler.state.admission_closed
        assert scheduler.last_plan is not None and not (closed and scheduler.last_plan.admit)
        closed_for += closed
        if inputs is not None:
            scheduler.collect(engine.submit(inputs).tokens())
        scheduler.take_replies()
    assert closed_for > 0


def test_a_request_that_found_no_room_has_no_cached_tokens() -> None:
    """It shares a cached prefix, but was never admitted, so it never used it."""
    sizes = capacity(num_pages=20)
    holder, tried = patient("holder", range(40), 30), patient("tried", range(40), 30)
    script: Script = [[holder], [], [tried], [], [], [Abort("tried")]]
    mailbox = ScriptedMailbox(script)
    run_loop(CheckedScheduler(sizes, BucketSet.derive(sizes), ()), FakeEngine(sizes), mailbox, 1)
    (reply,) = (reply for reply in mailbox.replies if reply.request_id == "tried")
    assert (reply.finish_reason, reply.cached_tokens) == (FinishReason.ABORT, 0)


@pytest.mark.parametrize("turns", [1, 6])
def test_a_retracted_request_has_the_cached_tokens_that_it_found_at_first(turns: int) -> None:
    """What it computed itself is cached when it comes back, before its first token or later."""
    sizes = capacity(max_extend_tokens=16)
    scheduler, engine = CheckedScheduler(sizes, BucketSet.derive(sizes), ()), FakeEngine(sizes)
    cached: dict[str, int] = {}

    def turn() -> None:
        inputs = scheduler.launch()
        if inputs is not None:
            scheduler.collect(engine.submit(inputs).tokens())
        cached.update((reply.request_id, reply.cached_tokens) for reply in scheduler.take_replies())

    for name, prompt in (("before", range(12)), ("again", range(60))):
        scheduler.receive([forgetful(name, prompt, 9)])
        for _ in range(turns if name == "again" else 20):
            turn()
    for _ in range(3):
        scheduler.pause()
        scheduler.retract_all()
        scheduler.resume()
        turn()
    while not scheduler.is_idle:
        turn()
    totals = scheduler.load(0).totals
    assert totals.retractions == 3
    assert cached == {"before": 0, "again": 12}
    assert (totals.prompt_tokens, totals.cached_prompt_tokens) == (72, 12)


@pytest.mark.parametrize("mixed", [False, True])
def test_the_ratio_falls_once_a_decode_step_and_not_in_idle_turns(mixed: bool) -> None:
    sizes = capacity()
    config = SchedulingConfig(enable_mixed_chunk=mixed)
    scheduler, engine = CheckedScheduler(sizes, BucketSet.derive(sizes), (), config), FakeEngine(sizes)
    for _ in range(50):
        assert scheduler.launch() is None
    first = scheduler.state.ratio.value
    assert first == NewTokenRatio(1.0).value, "idle turns teach nothing"
    scheduler.receive([forgetful("a", range(20), 12)])
    for _ in range(9):
        inputs = scheduler.launch()
        assert inputs is not None
        scheduler.collect(engine.submit(inputs).tokens())
    decoded = NewTokenRatio(1.0)
    decoded.decoded(8)
    assert scheduler.state.ratio.value == pytest.approx(decoded.value)


def test_retractions_are_logged_at_most_once_in_ten_seconds(caplog: pytest.LogCaptureFixture) -> None:
    sizes, now_s = capacity(num_pages=60), 0.0
    scheduler = CheckedScheduler(sizes, BucketSet.derive(sizes), (), OPTIMIST, clock=lambda: now_s)
    engine = FakeEngine(sizes)
    scheduler.receive([forgetful(f"r{i}", range(i, i + 20), 60) for i in range(24)])
    retracted_at: list[float] = []
    with caplog.at_level(logging.WARNING, "jaxsgl.scheduler"):
        while not scheduler.is_idle:
            before = scheduler.load(0).totals.retractions
            inputs = scheduler.launch()
            if inputs is not None:
                scheduler.collect(engine.submit(inputs).tokens())
            scheduler.take_replies()
            retracted_at += [now_s] * (scheduler.load(0).totals.retractions - before)
            now_s += 0.25
    logged, count, next_s = [], 0, 0.0
    for at_s, is_last in zip(retracted_at, [*(a != b for a, b in pairwise(retracted_at)), True], strict=True):
        count += 1
        if at_s >= next_s and is_last:
            logged.append(count)
            count, next_s = 0, at_s + 10.0
    assert len(logged) > 1 and sum(logged) > len(logged), "several lines, some of them for several requests"
    for message, count in zip(caplog.messages, logged, strict=True):
        assert f"of 236 tokens ran out: {count} running requests were retracted within" in message
        assert "raise --schedule-conservativeness (now 0.01) or lower --max-running-requests (now 8)" in message


def test_a_retraction_without_need_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    sizes = capacity()
    scheduler = CheckedScheduler(sizes, BucketSet.derive(sizes), (), retract_also=RetractEvery(2))
    run_loop(scheduler, FakeEngine(sizes), ScriptedMailbox([[forgetful("r", range(20), 9)]]), 1)
    assert scheduler.load(0).totals.retractions > 0 and not caplog.messages
