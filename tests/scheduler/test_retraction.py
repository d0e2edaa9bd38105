"""When the estimate was too low: who is retracted, and that nobody notices."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from jaxsgl.batch.buckets import BucketSet, Capacity
from jaxsgl.config import SchedulingConfig
from jaxsgl.request import Request, SamplingParams
from jaxsgl.scheduler.loop import run_loop
from jaxsgl.scheduler.req import Req
from jaxsgl.scheduler.reserve import DECAY_STEPS, NewTokenRatio
from jaxsgl.scheduler.retract import in_order_of_loss
from jaxsgl.testing import FakeEngine, ScriptedMailbox
from tests.checked import CheckedScheduler
from tests.scheduler.serving import capacity, expected, request

OPTIMIST = SchedulingConfig(schedule_conservativeness=0.01)


def serve(
    sizes: Capacity, requests: list[Request], config: SchedulingConfig, overlap: bool = True
) -> tuple[ScriptedMailbox, CheckedScheduler]:
    scheduler = CheckedScheduler(sizes, BucketSet.derive(sizes), (), config)
    mailbox = ScriptedMailbox([requests])
    run_loop(scheduler, FakeEngine(sizes), mailbox, overlap)
    assert scheduler.is_idle
    assert scheduler.cache.num_available == sizes.num_pages - 1
    return mailbox, scheduler


def forgetful(name: str, prompt: range, max_tokens: int) -> Request:
    """Says nothing of how long it will be: it may end at EOS."""
    return request(name, prompt, max_tokens)


def patient(name: str, prompt: range, max_tokens: int) -> Request:
    """Is known to use all its max_tokens."""
    return Request(name, list(prompt), SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True))


@pytest.mark.parametrize("overlap", [True, False])
def test_retracted_requests_yield_the_same_tokens(overlap: bool) -> None:
    requests = [forgetful(f"r{i}", range(i, i + 20), 60) for i in range(8)]
    mailbox, scheduler = serve(capacity(num_pages=60), requests, OPTIMIST, overlap)
    assert scheduler.load(0).retractions_total > 0
    for i in range(8):
        assert mailbox.output_ids(f"r{i}") == expected(range(i, i + 20), 60)


def test_a_cautious_reserve_retracts_nobody() -> None:
    requests = [forgetful(f"r{i}", range(i, i + 20), 60) for i in range(8)]
    _, scheduler = serve(capacity(num_pages=60), requests, SchedulingConfig(schedule_conservativeness=100.0))
    assert scheduler.load(0).retractions_total == 0


@pytest.mark.parametrize("num_pages", [25, 40, 60, 90])
def test_requests_that_ignore_eos_are_forecast_exactly(num_pages: int) -> None:
    """However optimistic the ratio is, it doesn't count for them."""
    requests = [patient(f"r{i}", range(i, i + 5 + 3 * i), 10 + 7 * i) for i in range(9)]
    mailbox, scheduler = serve(capacity(num_pages=num_pages, rows=9), requests, OPTIMIST)
    assert scheduler.load(0).retractions_total == 0
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
    """Of (prompt, output) tokens."""
    for i, (prompt_len, output_len) in enumerate(lengths):
        req = Req(request(f"r{i}", range(prompt_len), 100), 100, frozenset(), 0)
        req.output_ids = [0] * output_len
        yield req


def test_who_has_least_to_lose_goes_first() -> None:
    reqs = list(reqs_with((10, 5), (10, 2), (30, 2), (10, 2), (10, 9)))
    assert [req.request_id for req in in_order_of_loss(reqs)] == ["r2", "r3", "r1", "r0", "r4"]


def test_the_ratio_falls_with_every_good_step_and_learns_from_a_retraction() -> None:
    ratio = NewTokenRatio(1.0)
    assert ratio.value == pytest.approx(0.7)
    for _ in range(DECAY_STEPS + 10):
        ratio.decoded()
    assert ratio.value == pytest.approx(0.7 * 0.14)
    ratio.retracted(list(reqs_with((10, 30), (10, 10))))
    assert ratio.value == pytest.approx((40 + 2 * 20) / 201)
    ratio.reset()
    assert ratio.value == pytest.approx(0.7)


def test_admission_opens_when_nobody_is_left_whose_end_could_open_it() -> None:
    """A retraction closes it, and then the last running request is taken back, too."""
    sizes = capacity()
    scheduler = CheckedScheduler(sizes, BucketSet.derive(sizes), ())
    engine = FakeEngine(sizes)
    scheduler.receive([forgetful(f"r{i}", range(i, i + 20), 9) for i in range(2)])
    for _ in range(3):
        inputs = scheduler.launch()
        assert inputs is not None
        scheduler.collect(engine.submit(inputs).tokens())
    retraction = scheduler._retraction
    retraction.one_of(scheduler._running.retractable)
    assert retraction.closed
    retraction.for_tests()
    assert (scheduler.num_running, scheduler.num_waiting) == (0, 2)
    inputs = scheduler.launch()
    assert inputs is not None and inputs.num_seqs == 2
