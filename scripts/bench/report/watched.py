"""Runs one process of a report under limits. Before one that hangs is ended, its stacks are taken.

A process hangs if it exceeds its limit, or neither prints nor writes its result for as long as it may be quiet.
Python prints the stacks of all threads when it is aborted (PYTHONFAULTHANDLER), native waits included, and cuda-gdb,
where it is, says what the GPU runs. Knows no sections. Called by `bench.report.results`. Imports no JAX.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

_LOOK_S = 0.5
_ABORT_S = 5.0  # from the abort, which prints stacks, to the end by force
_STACK_CHARS = 8000
_GPU_STACKS = ("info cuda kernels", "info cuda warps", "info threads")


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a process ended.

    Attributes:
      status: of the process; negative: the signal that ended it.
      seconds: that it ran.
      hung: why it was ended; empty if it ended by itself.
      stacks: of a process that hung or crashed.
      log: all that it printed.
    """

    status: int
    seconds: float
    hung: str
    stacks: str
    log: str

    @property
    def ended_at_item(self) -> bool:
        """Whether what it was doing ended it: it crashed, or had to be ended."""
        return self.status < 0


def watch(
    command: Sequence[str],
    env: Mapping[str, str],
    log: Path,
    *,
    limit_s: float,
    quiet_s: float,
    result: Path,
    progress: Callable[[], None] = lambda: None,
) -> Outcome:
    """Runs `command` until it ends or hangs; calls `progress` when it has written to its `result`."""
    begin = time.monotonic()
    with log.open("wb") as out:
        process = subprocess.Popen(
            command,
            stdout=out,
            stderr=subprocess.STDOUT,
            env={**env, "PYTHONFAULTHANDLER": "1", "PYTHONUNBUFFERED": "1"},
            start_new_session=True,
        )
    hung = stacks = ""
    seen, seen_at = (0, 0), begin
    while process.poll() is None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(min(_LOOK_S, max(0.05, limit_s / 20)))
        now, written = time.monotonic(), (log.stat().st_size, _changed(result))
        if written[1] != seen[1]:
            progress()
        if written != seen:
            seen, seen_at = written, now
        if process.poll() is None and (now - begin > limit_s or now - seen_at > quiet_s):
            hung = f"no end after {limit_s:.0f} s" if now - begin > limit_s else f"silent for {quiet_s:.0f} s"
            stacks = _gpu_stacks(process.pid)
            _end(process)
    seconds, text = time.monotonic() - begin, log.read_text(errors="replace")
    if process.returncode < 0:
        stacks = (stacks + _python_stacks(text))[-_STACK_CHARS:]
    return Outcome(process.returncode, round(seconds, 1), hung, stacks, text)


def _changed(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:
        return 0


def _gpu_stacks(pid: int) -> str:
    """What runs on the GPU; empty without cuda-gdb."""
    debugger = shutil.which("cuda-gdb")
    if debugger is None or not Path("/dev/nvidiactl").exists():
        return ""
    orders = [word for order in _GPU_STACKS for word in ("-ex", order)]
    command = [debugger, "-nx", "-batch", "-p", str(pid), *orders]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False).stdout[-_STACK_CHARS:]
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"cuda-gdb: {error}\n"


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends the process and its children, first by an abort, which makes Python print its stacks."""
    for kind in (signal.SIGABRT, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, kind)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_ABORT_S)
    process.wait()


def _python_stacks(log: str) -> str:
    begin = log.rfind("Fatal Python error")
    return "" if begin < 0 else log[begin:]
