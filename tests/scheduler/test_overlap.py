"""Overlap is real: the host's work hides behind the device's."""

from __future__ import annotations

import time

from jaxsgl.batch.buckets import BucketSet
from jaxsgl.scheduler.loop import run_loop
from jaxsgl.scheduler.scheduler import Scheduler
from jaxsgl.testing.engine import FakeEngine, ScriptedMailbox
from tests.scheduler.serving import capacity, request

DEVICE_S, HOST_S, STEPS = 0.005, 0.003, 30


def seconds_per_step(overlap: bool) -> float:
    sizes = capacity(context=STEPS + 8)
    engine = FakeEngine(sizes, step_s=DEVICE_S)
    mailbox = ScriptedMailbox([[request("a", range(4), STEPS)]], host_work_s=HOST_S)
    start = time.perf_counter()
    run_loop(Scheduler(sizes, BucketSet.derive(sizes), ()), engine, mailbox, int(overlap))
    assert len(mailbox.output_ids("a")) == STEPS
    return (time.perf_counter() - start) / STEPS


def test_overlap_hides_most_of_three_milliseconds_of_host_work_behind_a_step_of_five() -> None:
    """Compared with the same work without overlap, since timers and other programs make both longer."""
    hidden_s = (seconds_per_step(overlap=False) - seconds_per_step(overlap=True) for _ in range(10))
    assert any(each > 0.002 for each in hidden_s)


def test_without_overlap_host_and_device_take_turns() -> None:
    assert seconds_per_step(overlap=False) > 0.008
