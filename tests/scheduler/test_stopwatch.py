"""What the scheduler measures: waiting, prefill and steps."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from jaxsgl.batch.buckets import BucketSet
from jaxsgl.config.engine import SchedulingConfig
from jaxsgl.messages.orders import Abort
from jaxsgl.messages.replies import STEP_BOUNDS_S, BucketTimes, Reply, StageTimes, unpack_times
from jaxsgl.scheduler.in_flight import NEWS_S
from jaxsgl.scheduler.scheduler import Scheduler
from tests.scheduler.serving import capacity, request

SIZES = capacity(rows=1, max_extend_tokens=16)


@dataclass
class Clock:
    now_s: float = 0.0

    def __call__(self) -> float:
        return self.now_s


class Engine:
    """A scheduler whose steps take as long as the test says."""

    def __init__(self) -> None:
        self.clock = Clock()
        config = SchedulingConfig(enable_mixed_chunk=False)
        self.scheduler = Scheduler(SIZES, BucketSet.derive(SIZES), (), config, clock=self.clock)

    def step(self, seconds: float) -> list[Reply]:
        inputs = self.scheduler.launch()
        assert inputs is not None
        self.clock.now_s += seconds
        self.scheduler.collect(np.full(inputs.num_seqs, 5, dtype=np.int32))
        return self.scheduler.take_replies()

    def times(self) -> dict[str, BucketTimes]:
        return {f"{entry.kind} {entry.bucket}": entry for entry in unpack_times(self.scheduler.load(0).step_times)}


def test_a_first_token_brings_the_times_of_waiting_and_prefill() -> None:
    engine = Engine()
    engine.scheduler.receive([request("a", range(24), 3), request("b", range(100, 108), 1)])
    engine.clock.now_s = 2.0
    assert engine.step(0.25) == []  # the first chunk of two
    (first,) = engine.step(0.5)
    assert first.times == StageTimes(2.0, 0.75)
    assert [reply.times for _ in range(2) for reply in engine.step(1.0)] == [None, None]
    (alone,) = engine.step(4.0)
    assert alone.finish_reason is not None
    assert alone.times == StageTimes(2.0 + 0.75 + 2.0, 4.0), "a token that ends its request"


def test_a_request_that_ends_without_a_token_is_forgotten() -> None:
    engine = Engine()
    for number in range(3):
        engine.scheduler.receive([request(str(number), range(24), 3)])
        engine.step(0.25)
        engine.scheduler.receive([Abort(str(number))])
        engine.scheduler.take_replies()
    held = engine.scheduler.state.requests
    assert held.first_token(("0", 0)) is None and not held._arrived_s and not held._queue_s


def test_times_of_steps_are_counted_by_bucket() -> None:
    engine = Engine()
    engine.scheduler.receive([request("a", range(16), 3)])
    for seconds in (0.3, 0.003, 0.004):
        engine.step(seconds)
    times = engine.times()
    assert sorted(times) == ["decode 1", "extend 16x1"]
    assert times["extend 16x1"].seconds == 0.3
    assert times["extend 16x1"].counts[STEP_BOUNDS_S.index(0.5)] == 1
    assert times["decode 1"].counts[STEP_BOUNDS_S.index(0.005)] == sum(times["decode 1"].counts) == 2


def test_a_step_begins_when_the_one_before_has_ended() -> None:
    engine = Engine()
    engine.scheduler.receive([request("a", range(16), 5)])
    engine.scheduler.launch()
    engine.clock.now_s = 1.0
    engine.scheduler.launch()  # while the first one runs
    engine.clock.now_s = 3.0
    engine.scheduler.collect([5])
    engine.clock.now_s = 3.5
    engine.scheduler.collect([5])
    engine.scheduler.receive([Abort("a")])
    engine.scheduler.take_replies()
    times = engine.times()
    assert (times["extend 16x1"].seconds, times["decode 1"].seconds) == (3.0, 0.5)


def test_a_busy_engine_tells_its_times_once_in_a_while() -> None:
    engine = Engine()
    engine.scheduler.receive([request("a", range(16), 60)])
    told = set()
    for _ in range(40):
        engine.step(NEWS_S / 10)
        told.add(engine.scheduler.load(0).step_times)
    assert 4 <= len(told) <= 6
