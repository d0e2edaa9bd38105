"""Processes of a benchmark: where they find the project, their ports and processor time, their start, talk in lines.

Processor time comes from /proc (Linux). Imports nothing but the standard library, since reports run where only the
kernels' own packages are installed.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, TypeVar

SCRIPTS = Path(__file__).resolve().parents[1]
ROOT = SCRIPTS.parent
TICK_S = 1 / os.sysconf("SC_CLK_TCK")
POLL_S = 0.1
LOG_TAIL = 2000  # characters of a log that an error quotes

Ready = TypeVar("Ready")


def python_path(*more: str | None) -> str:
    """PYTHONPATH for a process that imports the project and `bench`, with `more` folders behind them."""
    return os.pathsep.join(filter(None, (str(ROOT), str(SCRIPTS), *more)))


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


def cpu_s(pid: int) -> float:
    """Seconds of processor time that process `pid` has used: all threads, and the kernel's work for them."""
    return _cpu_s(Path(f"/proc/{pid}/stat"))


def cpu_s_of_threads(pid: int) -> tuple[float, float]:
    """Seconds of processor time of the main thread, and of all other threads that are alive."""
    used = {folder.name: _cpu_s(folder / "stat") for folder in Path(f"/proc/{pid}/task").iterdir()}
    main_s = used.pop(str(pid))
    return main_s, sum(used.values())


def children(pid: int) -> list[int]:
    """Processes that `pid` started."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def free_ports(count: int) -> list[int]:
    """Ports that were free a moment ago."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for taken in sockets:
            taken.bind(("127.0.0.1", 0))
        return [taken.getsockname()[1] for taken in sockets]


def _cpu_s(stat: Path) -> float:
    fields = stat.read_text().rpartition(")")[2].split()
    return TICK_S * (int(fields[11]) + int(fields[12]))


def wait_until_ready(
    ready: Callable[[], Ready], process: subprocess.Popen[bytes], patience_s: float, log: Path | None = None
) -> Ready:
    """Polls until `ready` returns something true, and returns that.

    Raises `RuntimeError` with the end of the log if the process ends, or `patience_s` seconds pass, before.
    """
    deadline_s = time.monotonic() + patience_s
    while not (found := ready()):
        if process.poll() is not None or time.monotonic() > deadline_s:
            end = log.read_text(errors="replace")[-LOG_TAIL:] if log else "it printed why"
            raise RuntimeError(f"{process.args!r} isn't ready:\n{end}")
        time.sleep(POLL_S)
    return found


class LineChild:
    """A child process that answers each line on its standard input with one line on its standard output.

    Args:
      command: starts it.
      env: its environment.
      stderr: file for what it prints besides answers; None: this process's standard error.
    """

    def __init__(self, command: Sequence[str], env: Mapping[str, str], stderr: IO[bytes] | None = None) -> None:
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=stderr, env=env)
        assert self._process.stdin is not None and self._process.stdout is not None
        self._in, self._out = self._process.stdin, self._process.stdout

    @property
    def pid(self) -> int:
        """Id of the process."""
        return self._process.pid

    def ask(self, line: bytes) -> bytes:
        """Sends `line` and returns the answer; empty if the process has ended."""
        with contextlib.suppress(BrokenPipeError):  # then there is nothing to read, either
            self._in.write(line + b"\n")
            self._in.flush()
        return self.receive()

    def receive(self) -> bytes:
        """The next line of the process; empty if it has ended."""
        return self._out.readline()

    def wait(self) -> int:
        """Waits for the end of the process; returns its exit status."""
        return self._process.wait()

    def close(self, patience_s: float | None = None) -> None:
        """Ends the input, which asks the process to end, and kills it after `patience_s` seconds (None: never)."""
        try:
            self._in.close()
            self._process.wait(patience_s)
        except (BrokenPipeError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()
        self._out.close()


def answers_only() -> IO[str]:
    """In a `LineChild`'s process: the stream for answers. From now on, what libraries print goes to standard error."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return answers
