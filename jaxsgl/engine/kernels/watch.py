"""Runs the process that tests kernels, and names the kernel at which it crashes or hangs.

Owns the process and its time limit. Never knows shapes or flags. Called by `kernel_test`.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import IO, NamedTuple

from pallas_kernels.selftest.report import CRASHED, HUNG, Begun, Ended, News, Request, Verdict, parse_news

_KILL_S = 10.0  # for the system to end it
MAX_NOTE = 300  # characters of what the process wrote at last


class Watched(NamedTuple):
    """What one process has found.

    Attributes:
      verdicts: in order; one that failed is the last one.
      problem: why the rest wasn't tested, if that is no kernel's fault; empty if there is no rest or a kernel failed.
    """

    verdicts: tuple[Verdict, ...]
    problem: str


def watch(command: Sequence[str], env: Mapping[str, str], request: Request, limit_s: float) -> Watched:
    """Runs the process until it ends, or says nothing for `limit_s` seconds: then it is killed."""
    verdicts: list[Verdict] = []
    begun: Begun | None = None
    with tempfile.TemporaryFile() as log, _started(command, env, log) as process:
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(request.line().encode() + b"\n")
            process.stdin.flush()
        for each in _news(process, limit_s):
            if isinstance(each, Ended):
                return Watched(tuple(verdicts), each.problem)
            if isinstance(each, Begun):
                begun = each
            else:
                begun = None
                verdicts.append(each)
        how, note = _end_of(process, log, limit_s)
    if begun is not None:
        verdicts.append(Verdict(begun.op, begun.backend, how, note))
    elif not (verdicts and verdicts[-1].failed):
        return Watched(tuple(verdicts), note)
    return Watched(tuple(verdicts), "")


@contextlib.contextmanager
def _started(command: Sequence[str], env: Mapping[str, str], log: IO[bytes]) -> Iterator[subprocess.Popen[bytes]]:
    """The process, which ends with the block, and with this process: it watches its standard input."""
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=log, env=dict(env), start_new_session=True)
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):  # a driver may hold it
            process.wait(_KILL_S)
        for end in (process.stdin, process.stdout):
            assert end is not None
            with contextlib.suppress(BrokenPipeError):
                end.close()


def _news(process: subprocess.Popen[bytes], limit_s: float) -> Iterator[News]:
    """What the process says, until it has closed its output or been silent for `limit_s`."""
    assert process.stdout is not None
    fd, rest = process.stdout.fileno(), b""
    deadline_s = time.monotonic() + limit_s
    while (left_s := deadline_s - time.monotonic()) > 0:
        if not select.select([fd], [], [], left_s)[0]:
            return
        more = os.read(fd, 1 << 16)
        if not more:
            return
        *lines, rest = (rest + more).split(b"\n")
        for line in lines:
            deadline_s = time.monotonic() + limit_s
            with contextlib.suppress(ValueError):  # what a library wrote past Python
                yield parse_news(line.decode(errors="replace"))


def _end_of(process: subprocess.Popen[bytes], log: IO[bytes], limit_s: float) -> tuple[str, str]:
    """How a process ended that said nothing of it, as a verdict and in words."""
    try:
        status = process.wait(1.0)
    except subprocess.TimeoutExpired:
        return HUNG, f"no answer within {limit_s:g} s"
    log.seek(0)
    words = log.read().decode(errors="replace").split()
    ending = f"signal {-status}" if status < 0 else f"status {status}"
    return CRASHED, f"its process ended with {ending}: {' '.join(words)[-MAX_NOTE:]}"
