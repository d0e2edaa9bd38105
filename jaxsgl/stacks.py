"""Where a process stands: the stacks of its threads at a signal or a crash, and of its asyncio tasks on request.

Both processes call `dump_at_signals` first of all. `kill -USR1 PID` then shows what a process does: its main thread's
stack even while that thread hangs inside native code, for Python's fault handler writes it without running Python, and
those of all threads as soon as the main thread runs Python again. `kill -USR2 PID` is for a process that hangs for
good: the fault handler writes the stacks of all threads at once. It walks their frames while they run on, which ends a
busy process now and then (seen with CPython 3.11.7). The watchdog uses both ways.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import gc
import io
import logging
import queue
import signal
import sys
import threading
import traceback
from collections import Counter
from collections.abc import Iterator
from typing import Any

DUMP_SIGNAL = signal.SIGUSR1
LAST_DUMP_SIGNAL = signal.SIGUSR2  # may end a process that doesn't hang
MAX_SHOWN = 30  # different stacks of tasks

logger = logging.getLogger(__name__)


def dump_at_signals(crashes_fd: int = 2) -> None:
    """Writes the stacks of all threads to standard error at either signal, and to `crashes_fd` at a crash.

    Must be called in the main thread.
    """
    faulthandler.enable(crashes_fd)
    asked: queue.SimpleQueue[None] = queue.SimpleQueue()  # may be put to in the middle of anything
    signal.signal(DUMP_SIGNAL, lambda number, frame: asked.put(None))
    faulthandler.register(DUMP_SIGNAL, 2, all_threads=False, chain=True)
    faulthandler.register(LAST_DUMP_SIGNAL, 2, all_threads=True)
    threading.Thread(target=_log_when_asked, args=[asked], name="stacks", daemon=True).start()


def _log_when_asked(asked: queue.SimpleQueue[None]) -> None:
    """Logs the stacks of all threads once for each item. A signal handler may not: a lock may be held where it runs."""
    while True:
        asked.get()
        logger.error("stacks of all threads:\n%s", of_threads())


def of_threads() -> str:
    """Returns the stacks of all threads of this process."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    with _no_collection():
        found = {ident: list(traceback.walk_stack(frame)) for ident, frame in sys._current_frames().items()}
    parts = []
    for ident, inner_first in found.items():
        summary = traceback.StackSummary.extract(reversed(inner_first))
        parts.append(f"thread {names.get(ident, ident)}:\n{''.join(summary.format())}")
    return "".join(parts)


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Keeps the garbage collector away while stacks of other threads are walked.

    `sys._current_frames` holds a lock of the interpreter: a finalizer that lets another thread run, which wants that
    lock, would end in a deadlock (https://github.com/python/cpython/issues/106883). And a frame's `f_back` makes an
    object of the frame before: if a collection at that moment lets its thread run on and return from it, the process
    crashes. Both were seen with CPython 3.11.7.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def of_tasks() -> str:
    """Returns the stacks of the running loop's tasks; those that stand at the same place are shown once and counted."""
    current = asyncio.current_task()
    stacks = Counter(_stack(task) for task in asyncio.all_tasks() if task is not current)
    parts = [f"{count} tasks:\n{stack}" for stack, count in stacks.most_common(MAX_SHOWN)]
    if len(stacks) > MAX_SHOWN:
        parts.append(f"and {len(stacks) - MAX_SHOWN} stacks more\n")
    return "".join(parts)


def _stack(task: asyncio.Task[Any]) -> str:
    written = io.StringIO()
    for frame in task.get_stack(limit=20):
        written.write("".join(traceback.format_stack(frame, limit=1)))
    return written.getvalue() or "  (it has no frame)\n"
