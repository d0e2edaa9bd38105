"""One recorded run of the real scheduler and engine, in this process; and how late the recording's stamps are.

Called by `bench_offline.py`; knows no figures of runs.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from bench.offline.mailbox import RecordedMailbox
from bench.offline.recording import Recording, RecordingEngine
from bench.workloads.jobs import Job
from jaxsgl.batch.engine_api import StepEngine, StepScores
from jaxsgl.batch.inputs import Bucket, StepInputs, packed_len
from jaxsgl.messages import FromEngine
from jaxsgl.request import Request, SamplingParams
from jaxsgl.scheduler.loop import run_loop
from jaxsgl.scheduler.scheduler import Scheduler

_TRIED_STEPS = 200
_WORK_S = 0.5e-3  # of Python, while a step gets ready


def requests_of(jobs: Sequence[Job]) -> list[Request]:
    """Greedy, EOS ignored."""
    return [
        Request(str(i), job.prompt_ids, SamplingParams(temperature=0.0, max_tokens=job.output_len, ignore_eos=True))
        for i, job in enumerate(jobs)
    ]


def record_run(
    scheduler: Scheduler, engine: StepEngine, requests: Sequence[Request], overlap: bool, profile: str | None = None
) -> tuple[Recording, list[FromEngine]]:
    """Serves `requests` to their end. Returns what was recorded, and all messages that went out."""
    recording = Recording()
    mailbox = RecordedMailbox(requests, recording, profile)
    try:
        run_loop(scheduler, RecordingEngine(engine, recording), mailbox, overlap)
    finally:
        recording.close()
    return recording, mailbox.news()


class _Ready:
    """A step that is ready when somebody says so."""

    def __init__(self) -> None:
        self.ready = threading.Event()
        self.ready_s = 0.0

    def say_so(self) -> None:
        self.ready_s = time.perf_counter()
        self.ready.set()

    def tokens(self) -> npt.NDArray[np.int32]:
        self.ready.wait()
        return np.empty(0, np.int32)

    def scores(self) -> StepScores:
        return StepScores()


def seen_late() -> dict[str, float]:
    """Microseconds from when a step is ready to its stamp, while the host computes in Python; a fifth of a second."""
    bucket = Bucket("decode", 1, 1, 1, False)
    inputs = StepInputs(bucket, np.zeros(packed_len(bucket), np.int32), 1, 1)
    recording = Recording()
    recording.turn_begins()
    ready_s, steps = [], []
    for _ in range(_TRIED_STEPS):
        handle = _Ready()
        now_s = time.perf_counter()
        steps.append(recording.submitted(inputs, handle, now_s, now_s))
        recording.turn_begins()
        _compute(_WORK_S)
        handle.say_so()
        ready_s.append(handle.ready_s)
        _compute(_WORK_S)
    recording.close()
    late_us = [1e6 * (step.seen_s - at) for step, at in zip(steps, ready_s, strict=True)]
    return {"seen_late_us": statistics.median(late_us), "seen_late_p99_us": float(np.percentile(late_us, 99))}


def _compute(seconds: float) -> None:
    """Python for so long."""
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        pass
