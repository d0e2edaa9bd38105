from __future__ import annotations

import logging

import pytest

from jaxsgl.frontend.metrics.exposition import StatusLine
from jaxsgl.frontend.metrics.measurements import WINDOW_S, Metrics, Rates
from jaxsgl.messages.replies import Load, Totals

pytestmark = pytest.mark.unit


class Engine:
    """A load and a clock that tests move on."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.load = Load()
        self.metrics = Metrics(lambda: self.load, lambda: self.now_s)
        self.throughput = self.metrics.throughput
        self.status = StatusLine(self.metrics)

    def work(self, seconds: int, num_running: int = 0, num_waiting: int = 0, used_tokens: int = 0, **done: int) -> None:
        """Lets time pass and samples it; all work is done at its start."""
        self.load = Load(num_running, num_waiting, used_tokens=used_tokens, totals=Totals(**done))
        for _ in range(seconds):
            self.now_s += 1.0
            self.throughput.sample()


def test_rates_are_of_the_last_seconds() -> None:
    engine = Engine()
    engine.work(2, output_tokens=100, prompt_tokens=40, cached_prompt_tokens=10, steps=20)
    assert engine.throughput.rates() == Rates(50.0, 20.0, 0.25)
    engine.work(100, output_tokens=100, prompt_tokens=40, cached_prompt_tokens=10, steps=20)
    engine.work(1, output_tokens=600, prompt_tokens=140, cached_prompt_tokens=110, steps=30)
    assert engine.throughput.rates() == Rates(500 / WINDOW_S, 100 / WINDOW_S, 1.0)


def test_a_long_start_does_not_thin_out_the_first_rates() -> None:
    engine = Engine()
    engine.now_s += 100.0  # the model is loaded and compiled
    engine.throughput.sample()
    engine.work(2, output_tokens=100)
    assert engine.throughput.rates().output_tokens_per_s == 50.0


def test_work_at_any_moment_between_two_status_lines_is_in_the_second_one() -> None:
    engine = Engine()
    for burst in range(10):
        for sample in range(10):
            if sample == burst:
                engine.load = Load(totals=Totals(output_tokens=1000 * (burst + 1)))
            engine.now_s += 1.001  # a timer is a little late
            engine.throughput.sample()
        assert engine.throughput.rates().output_tokens_per_s == pytest.approx(1000 / 10.01, rel=1e-9)


def test_an_idle_engine_has_no_rates_but_keeps_its_hit_rate() -> None:
    engine = Engine()
    assert engine.throughput.rates() == Rates(0.0, 0.0, 0.0)
    totals = {"output_tokens": 100, "prompt_tokens": 40, "cached_prompt_tokens": 10}
    engine.work(5, **totals)
    assert engine.throughput.rates().cache_hit_rate == 0.25
    engine.work(100, **totals)
    assert engine.throughput.rates() == Rates(0.0, 0.0, 0.25)


def test_the_status_line_is_written_while_something_happens(caplog: pytest.LogCaptureFixture) -> None:
    engine = Engine()
    with caplog.at_level(logging.INFO, "jaxsgl"):
        engine.status.write()
        assert not caplog.messages, "nothing has happened yet"
        engine.work(10, steps=5, output_tokens=50, num_running=3, num_waiting=2, used_tokens=7)
        engine.status.write()
        engine.work(10, steps=9, output_tokens=70, prompt_tokens=300, cached_prompt_tokens=150, retractions=4)
        engine.status.write()
        engine.status.write()
        engine.work(10, steps=10, output_tokens=70, prompt_tokens=300, cached_prompt_tokens=150, retractions=5)
        engine.status.write()
    assert caplog.messages == [
        "3 running, 2 queued, 5 output tokens/s, 0 prompt tokens/s, KV pool 0%, cache hits 0%, 0 retracted",
        "0 running, 0 queued, 2 output tokens/s, 30 prompt tokens/s, KV pool 0%, cache hits 50%, 4 retracted",
        "0 running, 0 queued, 0 output tokens/s, 0 prompt tokens/s, KV pool 0%, cache hits 50%, 1 retracted",
    ]


def test_an_engine_with_a_stuck_queue_is_not_idle(caplog: pytest.LogCaptureFixture) -> None:
    engine = Engine()
    engine.work(1, num_waiting=1)
    with caplog.at_level(logging.INFO, "jaxsgl"):
        engine.status.write()
        engine.status.write()
    assert len(caplog.messages) == 2


def test_the_speed_is_that_of_busy_seconds_and_stays_while_the_engine_is_idle() -> None:
    engine = Engine()
    engine.work(3, num_running=2, output_tokens=100)  # the first second began idle
    engine.work(2, num_running=1, output_tokens=400)
    engine.work(100, output_tokens=500)
    assert engine.throughput.rates().busy_tokens_per_s == 300 / 4
    assert engine.throughput.rates().output_tokens_per_s == 0
