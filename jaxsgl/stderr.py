"""Standard error without waiting: a bounded queue of lines that a thread writes, and pipes that bring lines in.

A reader of standard error may stall: a full pipe of a container's log collector, a stopped terminal. A process that
writes to it directly then stops, in the middle of its event loop or of a step. So each process gives its lines to a
`LineWriter`, which drops and counts them once its queue is full; and what writes to file descriptor 2 itself (native
libraries, child processes) gets a pipe instead, which `read_lines` empties at all times. Never knows what a line means;
logs.py formats them.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import threading
import time
from collections import Counter, deque
from collections.abc import Callable

MAX_QUEUED_BYTES = 4 << 20
MAX_LINE_BYTES = 1 << 20  # of a pipe; a longer line is cut
PIPE_BYTES = 1 << 20
POLL_MS = 1000


class LineWriter:
    """Writes lines to a file descriptor from a thread of its own, in order.

    Args:
      fd: where the lines go. May be non-blocking.
      on_dropped: makes the line that tells how many lines were dropped.
      max_bytes: of lines that wait; what comes beyond them is dropped.

    Attributes:
      counts: of lines so far; those `dropped`.
    """

    def __init__(self, fd: int, on_dropped: Callable[[int], bytes], max_bytes: int = MAX_QUEUED_BYTES) -> None:
        self.counts: Counter[str] = Counter(dropped=0)
        self._fd = fd
        self._on_dropped = on_dropped
        self._max_bytes = max_bytes
        self._lines: deque[bytes] = deque()
        self._num_bytes = 0  # of lines that are not written, the one being written included
        self._changed = threading.Condition()
        threading.Thread(target=self._run, name="stderr", daemon=True).start()

    def put(self, line: bytes) -> None:
        """Queues `line`, which ends with a line break; drops it if too much waits. Never blocks."""
        with self._changed:
            if self._lines and self._num_bytes + len(line) > self._max_bytes:
                self.counts["dropped"] += 1
                return
            self._lines.append(line)
            self._num_bytes += len(line)
            self._changed.notify_all()

    def flush(self, timeout_s: float) -> bool:
        """Waits at most `timeout_s` seconds until all lines are written; returns whether they are."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._num_bytes, timeout_s)

    def _run(self) -> None:
        num_told = 0
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._lines)
                line = self._lines.popleft()
            self._write(line)
            # The queue was full of lines that are older than those dropped: tell of them when it is empty.
            num_dropped = self.counts["dropped"]
            if not self._lines and num_dropped > num_told:
                self._write(self._on_dropped(num_dropped - num_told))
                num_told = num_dropped
            with self._changed:
                self._num_bytes -= len(line)
                self._changed.notify_all()

    def _write(self, line: bytes) -> None:
        rest = memoryview(line)
        while rest:
            try:
                rest = rest[os.write(self._fd, rest) :]
            except BlockingIOError:
                poll = select.poll()
                poll.register(self._fd, select.POLLOUT)
                poll.poll(POLL_MS)
            except OSError:  # nothing reads it any more
                return


def new_pipe() -> tuple[int, int]:
    """Returns the ends of a pipe, for reading and writing; a writer is never blocked, even if it is full."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    with contextlib.suppress(OSError, AttributeError):  # the system may allow less, or not know this at all
        fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    return reading, writing


def read_lines(fd: int, take: Callable[[bytes], None]) -> threading.Thread:
    """Gives each line that arrives at `fd` to `take`, with its line break, until all writers have closed it.

    A progress bar, which returns to the start of its line, is handed over without waiting for the line's end. Returns
    the thread that does all this; it closes `fd` at its end.
    """

    def run() -> None:
        rest = b""
        while chunk := os.read(fd, 64 << 10):
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                take(line + b"\n")
            if b"\r" in rest or len(rest) > MAX_LINE_BYTES:
                take(rest)
                rest = b""
        if rest:
            take(rest)
        os.close(fd)

    thread = threading.Thread(target=run, name="read-stderr", daemon=True)
    thread.start()
    return thread


class Stderr:
    """This process's standard error, and the pipes whose lines end up in it.

    Args:
      on_dropped: as in `LineWriter`.
      take: is given each line of a pipe, with the name of the process that wrote it.

    Attributes:
      writer: takes the lines of this process.
    """

    def __init__(self, on_dropped: Callable[[int], bytes], take: Callable[[str, bytes], None]) -> None:
        try:
            self._real = os.dup(2)
        except OSError:  # it is closed
            self._real = os.open(os.devnull, os.O_WRONLY)
        self.writer = LineWriter(self._real, on_dropped)
        self._take = take
        self._readers: list[threading.Thread] = []
        self._replaced = False

    @property
    def real_fd(self) -> int:
        """Where the lines go in the end."""
        return self._real

    def replace(self, name: str) -> None:
        """Puts a pipe in the place of file descriptor 2: what writes there neither waits nor tears lines apart."""
        writing = self.pipe(name)
        os.dup2(writing, 2)
        os.close(writing)
        self._replaced = True

    def pipe(self, name: str) -> int:
        """Returns the end of a new pipe for the child process `name` to write to. Close it once the child has it."""
        self._readers = [reader for reader in self._readers if reader.is_alive()]
        reading, writing = new_pipe()
        self._readers.append(read_lines(reading, lambda line: self._take(name, line)))
        return writing

    def close(self, timeout_s: float) -> None:
        """Puts file descriptor 2 back, and writes within `timeout_s` seconds what can be written."""
        deadline_s = time.monotonic() + timeout_s
        if self._replaced:
            self._replaced = False
            os.dup2(self._real, 2)
        for reader in self._readers:  # those of children that still run don't end
            reader.join(max(deadline_s - time.monotonic(), 0.0))
        self.writer.flush(max(deadline_s - time.monotonic(), 0.0))
