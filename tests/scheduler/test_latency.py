"""`--max-itl-ms`: running requests get their tokens in time, whatever prompts come, and prompts still make progress."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxsgl.batch.buckets import BucketSet, Capacity
from jaxsgl.batch.inputs import StepInputs
from jaxsgl.batch.outputs import HostOutputs
from jaxsgl.config.engine import SchedulingConfig
from jaxsgl.errors import ConfigError
from jaxsgl.requests.request import Request
from jaxsgl.scheduler.budget import TokenBudget
from jaxsgl.scheduler.latency import FIT_EVERY, FORGET_AFTER, Latency, StepTimes
from jaxsgl.scheduler.loop import run_loop
from jaxsgl.testing.engine import FakeEngine, FakeHandle, ScriptedMailbox
from tests.checked import CheckedScheduler
from tests.scheduler import image_requests
from tests.scheduler.serving import capacity, expected, request

SIZES = capacity(page_size=4, num_pages=2000, rows=8, context=2048, max_extend_tokens=256)


@dataclass
class Clock:
    now_s: float = 0.0


class TimedEngine(FakeEngine):
    """An engine whose steps take 1 ms, 10 us a padded token and 0.01 us a pair, give or take some percent of noise."""

    def __init__(self, clock: Clock, noise: float, sizes: Capacity = SIZES) -> None:
        super().__init__(sizes)
        self._clock = clock
        self._rng = np.random.default_rng(0)
        self._noise = noise
        self._free_at_s = 0.0
        self.steps: list[tuple[StepInputs, float]] = []

    def submit(self, inputs: StepInputs) -> FakeHandle:
        pairs = int((inputs.arrays.positions[: inputs.num_tokens] + 1).sum())
        seconds = 1e-3 + 1e-5 * inputs.bucket.num_tokens + 1e-8 * pairs
        seconds *= 1 + self._noise * float(self._rng.random())
        self._free_at_s = max(self._free_at_s, self._clock.now_s) + seconds
        self.steps.append((inputs, self._free_at_s))
        return TimedHandle(super().submit(inputs), self._clock, self._free_at_s)


class TimedHandle(FakeHandle):
    def __init__(self, handle: FakeHandle, clock: Clock, ready_at_s: float) -> None:
        self._handle, self._clock, self._ready_at_s = handle, clock, ready_at_s

    def tokens(self) -> np.ndarray:
        self._clock.now_s = max(self._clock.now_s, self._ready_at_s)
        return self._handle.tokens()

    def outputs(self) -> HostOutputs:
        return self._handle.outputs()

    def drafts(self) -> np.ndarray:
        return self._handle.drafts()


def served(
    config: SchedulingConfig, script: list[list[Request]], *, noise: float = 0.02, overlap: bool = True
) -> tuple[TimedEngine, ScriptedMailbox]:
    clock = Clock()
    engine, mailbox = TimedEngine(clock, noise), ScriptedMailbox(script)
    scheduler = CheckedScheduler(SIZES, BucketSet.derive(SIZES), (), config, clock=lambda: clock.now_s)
    run_loop(scheduler, engine, mailbox, int(overlap))
    return engine, mailbox


def gaps_ms(engine: TimedEngine, num_tokens: int) -> list[float]:
    """Milliseconds between tokens of the request in row 0, which must decode at least `num_tokens`."""
    ends = []
    for inputs, end_s in engine.steps:
        arrays = inputs.arrays
        row = np.flatnonzero(arrays.token_ids[: inputs.num_tokens] == ~0)
        if len(row):
            ends.append(1e3 * end_s)
    assert len(ends) >= num_tokens
    return np.diff(ends).tolist()


def long_prompts(first: int, count: int, length: int = 1500) -> list[Request]:
    return [request(f"long{first + i}", [(7 * i + j) % 900 for j in range(length)], 3) for i in range(count)]


SCRIPT = [[request("short", range(8), 900)], [], [], long_prompts(0, 2), *[[] for _ in range(200)], long_prompts(2, 3)]


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("mixed", [True, False])
def test_running_requests_get_their_tokens_in_time(mixed: bool, overlap: bool) -> None:
    config = SchedulingConfig(max_itl_ms=5.0, enable_mixed_chunk=mixed)
    engine, mailbox = served(config, SCRIPT, overlap=overlap)
    gaps = gaps_ms(engine, 800)
    assert np.mean(np.array(gaps) <= 5.0) >= 0.99
    extended = [inputs.num_tokens for inputs, _ in engine.steps if inputs.bucket.kind == "extend"]
    assert max(extended[10:]) >= 120, "chunks are no smaller than they must be"
    assert mailbox.output_ids("short") == expected(range(8), 900)


def test_without_the_bound_the_same_prompts_stall_running_requests() -> None:
    for config in (SchedulingConfig(enable_mixed_chunk=True), SchedulingConfig(decode_first=True)):
        engine, _ = served(config, SCRIPT)
        assert np.mean(np.array(gaps_ms(engine, 800)) > 5.0) > 0.01


def test_chunks_are_full_while_no_request_decodes() -> None:
    engine, _ = served(SchedulingConfig(max_itl_ms=0.5), [long_prompts(0, 1)])
    counts = [inputs.num_tokens for inputs, _ in engine.steps if inputs.bucket.kind == "extend"]
    assert counts == [256] * 5 + [1500 - 5 * 256]


@pytest.mark.parametrize("mixed", [True, False])
def test_prompts_advance_by_a_page_a_step_where_no_step_ends_in_time(mixed: bool) -> None:
    config = SchedulingConfig(max_itl_ms=0.1, enable_mixed_chunk=mixed)
    script = [[request("short", range(8), 200)], [], [], long_prompts(0, 1, length=200)]
    engine, mailbox = served(config, script)
    assert len(mailbox.output_ids("long0")) == 3
    counts = [inputs.num_tokens - mixed for inputs, _ in engine.steps[3:] if inputs.bucket.kind == "extend"]
    assert set(counts[8:-1]) == {SIZES.page_size}


def test_the_first_chunk_beside_running_requests_is_small_before_any_step_is_measured() -> None:
    script = [[request("short", range(8), 100)], long_prompts(0, 1)]
    engine, _ = served(SchedulingConfig(max_itl_ms=5.0, enable_mixed_chunk=True), script)
    sizes = [inputs.bucket.num_tokens for inputs, _ in engine.steps if inputs.bucket.kind == "extend"]
    assert sizes[1] <= 16 and max(sizes) > 64


def test_the_bound_has_to_be_positive() -> None:
    with pytest.raises(ConfigError, match="--max-itl-ms is 0"):
        SchedulingConfig(max_itl_ms=0)


def test_step_times_are_learnt_exactly_where_they_follow_the_formula() -> None:
    times, rng = StepTimes(), np.random.default_rng(0)
    for _ in range(10 * FIT_EVERY):
        size, kv = int(rng.choice([16, 64, 256])), float(rng.integers(0, 10_000))
        pairs = kv * size * rng.random()
        times.measured(size, kv, pairs, 1e-3 + 1e-5 * size + 2e-8 * kv + 3e-9 * pairs)
    assert times.kv_token_s == pytest.approx(2e-8, rel=1e-3)
    assert times.pair_s == pytest.approx(3e-9, rel=1e-3)
    assert times.base(64) == pytest.approx(1e-3 + 64e-5, rel=1e-3)


def test_sizes_that_were_not_measured_are_bounded_by_their_neighbours() -> None:
    times = StepTimes()
    assert times.base(64) is None
    times.measured(64, 0, 0, 2.0)
    times.measured(256, 0, 0, 5.0)
    assert (times.base(32), times.base(128), times.base(512)) == (2.0, 4.0, 10.0)


def test_one_slow_step_among_many_does_not_count_and_old_sizes_are_forgotten() -> None:
    times = StepTimes()
    for i in range(4 * FIT_EVERY):
        times.measured(64, 0, 0, 50.0 if i == 5 else 1.0)
    assert times.base(64) == 1.0
    times.measured(128, 0, 0, 9.0)
    assert times.base(128) == 9.0
    for _ in range(FORGET_AFTER + FIT_EVERY):
        times.measured(64, 0, 0, 1.0)
    assert times.base(128) == 2.0


def test_images_cost_what_a_step_takes_beyond_others_of_its_kind() -> None:
    """A step that verifies drafts is one of them; of steps that score a prompt it isn't known."""
    buckets = BucketSet.derive(SIZES, max_drafts=4)
    latency = Latency(1.0, buckets, page_size=4)
    for num_patches, seconds in ((0, 2.0), (0, 2.0), (10, 3.0)):
        latency.launched(buckets.verify(8), 0.0, 0.0, num_patches)
        latency.collected(seconds)
    latency.launched(buckets.score(8), 0.0, 0.0, 10)
    latency.collected(50.0)
    assert latency.encode_s(10) == pytest.approx(1.0)


@given(
    st.integers(1, 4096), st.just(0.0) | st.floats(1e-9, 1e3), st.sampled_from([0.0, 1e-3]),
    st.sampled_from([0.0, 1e-6]), st.integers(0, 100_000), st.integers(0, 64),
)  # fmt: skip
def test_the_longest_chunk_uses_up_the_budget_and_no_more(
    num_tokens: int, seconds: float, kv_token_s: float, pair_s: float, start: int, before: int
) -> None:
    budget = TokenBudget(num_tokens + before, seconds, kv_token_s, pair_s)
    first = min(before, budget.longest_chunk(start))
    budget.take(start, 0, first)
    count = budget.longest_chunk(start, first)
    assert 0 <= count <= num_tokens + before

    def cost(count: int) -> float:
        return kv_token_s * (start + count) + pair_s * count * (start + count / 2) if count else 0.0

    assert cost(count) <= seconds * (1 + 1e-6) + 1e-9
    assert count == num_tokens + before or cost(count + 1) >= seconds * (1 - 1e-6)
    assert math.isinf(TokenBudget(5)._seconds)


@pytest.mark.parametrize("mixed", [False, True])
def test_an_image_that_is_seen_whole_takes_a_step_that_ends_too_late_by_itself(mixed: bool) -> None:
    """Of a step of 1.3 ms its 40 tokens take 1.4: else it waited until all requests that run have ended."""
    sizes = image_requests.capacity(rows=40, page_size=4, num_pages=400, chunk=64, sees_ahead=True)
    assert sizes.tower is not None
    sizes = replace(sizes, context_length=400, tower=replace(sizes.tower, max_patches=256, num_rows=100))
    text, image = image_requests.asked("text", [40], 200), image_requests.asked("image", [3, (1, 40), 2], 3)
    before = [[image_requests.asked(f"{i}", [5 + i], 3)] for i in range(3)]
    clock, mailbox = Clock(), ScriptedMailbox([[text], [], [], *before, *[[]] * 20, [image]])
    config = SchedulingConfig(enable_mixed_chunk=mixed, max_itl_ms=1.3)
    scheduler = CheckedScheduler(sizes, BucketSet.derive(sizes), (), config, clock=lambda: clock.now_s)
    run_loop(scheduler, TimedEngine(clock, 0.0, sizes), mailbox, 1)
    order = [reply.request_id for reply in mailbox.replies if reply.token_ids]
    assert order.index("image") < 60 < len(order) - 1 - order[::-1].index("text")
    assert mailbox.output_ids("image") == image_requests.expected(image)
