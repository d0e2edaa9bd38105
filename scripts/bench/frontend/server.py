"""`python -m jaxsgl.serve` with the fake engine in the engine's place, and a sampling profile on demand.

    python -m bench.frontend.server PLAN [flags of jaxsgl.serve]

Every few milliseconds of processor time, the profile notes which functions of the main thread are running. It costs the
program about 1%, whereas a tracing profile would double the price of every call. Python handles signals at loops and
calls, so time in C code or in the event loop counts for what runs next in Python. One signal to the process starts the
profile, another ends it and writes it to a file as JSON.
"""

from __future__ import annotations

import functools
import signal
import sys
from collections import Counter
from pathlib import Path
from types import CodeType, FrameType

from bench.frontend.plan import Plan, write_whole
from jaxsgl.serve import run

PERIOD_S = 0.004  # seconds of processor time between samples; Linux's clock for it is no finer
START = signal.SIGRTMIN  # the server has others for stacks
STOP = signal.SIGRTMIN + 1


class SamplingProfile:
    """Samples between the signals START and STOP, then writes {"samples", "own", "total", "lines"}: counts by place."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._num_samples = 0
        self._own: Counter[str] = Counter()
        self._total: Counter[str] = Counter()
        self._lines: Counter[str] = Counter()

    def install(self) -> None:
        """Sets the signal handlers. Must be called in the main thread."""
        signal.signal(signal.SIGPROF, self._sample)
        signal.signal(START, self._start)
        signal.signal(STOP, self._stop)

    def _start(self, number: int, frame: FrameType | None) -> None:
        for counter in (self._own, self._total, self._lines):
            counter.clear()
        self._num_samples = 0
        signal.setitimer(signal.ITIMER_PROF, PERIOD_S, PERIOD_S)

    def _stop(self, number: int, frame: FrameType | None) -> None:
        signal.setitimer(signal.ITIMER_PROF, 0)
        counters = {"own": self._own, "total": self._total, "lines": self._lines}
        write_whole(self._path, {"samples": self._num_samples, **counters})

    def _sample(self, number: int, frame: FrameType | None) -> None:
        if frame is None:
            return
        self._num_samples += 1
        name = _name(frame.f_code)
        self._own[name] += 1
        self._lines[f"{name}:{frame.f_lineno}"] += 1
        seen = set()
        caller: FrameType | None = frame
        while caller is not None:
            seen.add(_name(caller.f_code))
            caller = caller.f_back
        self._total.update(seen)


@functools.cache
def _name(code: CodeType) -> str:
    path = Path(code.co_filename)
    return f"{path.parent.name}/{path.name} {code.co_qualname}"


def main() -> None:
    """Runs the server process."""
    plan_path = sys.argv.pop(1)
    SamplingProfile(Plan.load(plan_path).profile_path).install()
    run([sys.executable, "-m", "bench.frontend.engine", plan_path])


if __name__ == "__main__":
    main()
