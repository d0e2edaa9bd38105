"""One recorded run of the real scheduler and engine in this process, and how late the recording's stamps are.

The run's mailbox delivers all requests at the first call, as bytes, and encodes every message that goes out, as
`jaxsgl.ipc` does, but without sockets. Knows no figures. Called by `bench_offline.py`.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Iterable, Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from bench.offline.recording import Recording, RecordingEngine
from jaxsgl.batch.inputs import Bucket, StepInputs, packed_len
from jaxsgl.batch.outputs import NO_OUTPUTS, HostOutputs
from jaxsgl.messages.orders import FromEngine, News, Shutdown, StartProfile, ToEngine
from jaxsgl.messages.replies import Replies
from jaxsgl.requests.request import Request
from jaxsgl.scheduler.loop import run_loop
from jaxsgl.scheduler.served_engine import ServedEngine
from jaxsgl.scheduler.serving import AnyScheduler

_TRIED_STEPS = 200
_WORK_S = 0.5e-3  # seconds of Python while a step becomes ready


def record_run(
    scheduler: AnyScheduler,
    engine: ServedEngine,
    requests: Sequence[Request],
    depth: int,
    profile: str | None = None,
) -> tuple[Recording, list[FromEngine]]:
    """Serves `requests` to their end, `depth` as `run_loop`. Returns the recording and all messages that were sent."""
    recording = Recording()
    mailbox = RecordedMailbox(requests, recording, profile)
    try:
        run_loop(scheduler, RecordingEngine(engine, recording), mailbox, depth)
    finally:
        recording.close()
    return recording, mailbox.news()


class _Ready:
    """A step that becomes ready when `say_so` is called."""

    def __init__(self) -> None:
        self.ready = threading.Event()
        self.ready_s = 0.0

    def say_so(self) -> None:
        self.ready_s = time.perf_counter()
        self.ready.set()

    def tokens(self) -> npt.NDArray[np.int32]:
        self.ready.wait()
        return np.empty(0, np.int32)

    def outputs(self) -> HostOutputs:
        return NO_OUTPUTS

    def drafts(self) -> npt.NDArray[np.int32]:
        return np.empty((0, 0), np.int32)


def seen_late() -> dict[str, float]:
    """Microseconds from when a step is ready to its stamp, while the host computes in Python. Takes 0.2 s."""
    bucket = Bucket("decode", 1, 1, False)
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
    """Runs Python code for so long."""
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        pass


PROFILED_STEPS = 50


class RecordedMailbox:
    """A `Mailbox` that ends the loop when it is idle.

    Args:
      requests: delivered at the first call.
      recording: takes the stamps.
      profile: folder for a trace of some steps, which begins when half of the output tokens have been generated.
    """

    def __init__(self, requests: Iterable[Request], recording: Recording, profile: str | None = None) -> None:
        requests = list(requests)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(ToEngine)
        self._waiting = [self._encoder.encode(request) for request in requests]
        self._recording = recording
        self._profile = profile
        self._half_tokens = sum(request.sampling.max_tokens or 0 for request in requests) // 2
        self.sent: list[bytes] = []

    def receive(self, wait_s: float) -> list[ToEngine]:
        """The requests or commands that are waiting; if there is none and the loop is idle, `Shutdown`."""
        self._recording.turn_begins()
        waiting, self._waiting = self._waiting, []
        messages = [self._decoder.decode(message) for message in waiting]
        self._recording.turns[-1].received_s = time.perf_counter()
        return messages or ([Shutdown()] if wait_s else [])

    def send(self, news: News) -> None:
        """Encodes the message and keeps it."""
        begin_s = time.perf_counter()
        message = self._encoder.encode(news)
        turn = self._recording.turns[-1]
        turn.sent_s, turn.send_s = time.perf_counter(), begin_s
        self.sent.append(message)
        if self._profile and isinstance(news, Replies) and news.load.totals.output_tokens >= self._half_tokens:
            self._waiting.append(self._encoder.encode(StartProfile(1, self._profile, PROFILED_STEPS)))
            self._profile = None

    def news(self) -> list[FromEngine]:
        """All messages that were sent, decoded as the front end would decode them."""
        decoder = msgspec.msgpack.Decoder(FromEngine)
        return [decoder.decode(message) for message in self.sent]
