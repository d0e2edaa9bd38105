"""Where a process stands: the stacks of its threads at a signal or a crash, and of its asyncio tasks on request.

Both processes call `dump_at_signals` first of all. `kill -USR1 PID` then shows what a process does, even one that hangs
inside native code: Python's fault handler writes the stacks without running Python. The watchdog uses both ways.
"""

from __future__ import annotations

import asyncio
import faulthandler
import io
import signal
import sys
import threading
import traceback
from collections import Counter
from typing import Any

DUMP_SIGNAL = signal.SIGUSR1
MAX_SHOWN = 30  # different stacks of tasks


def dump_at_signals(crashes_fd: int = 2) -> None:
    """Writes the stacks of all threads to standard error at `DUMP_SIGNAL`, and to `crashes_fd` at a crash.

    Must be called in the main thread.
    """
    faulthandler.enable(crashes_fd)
    faulthandler.register(DUMP_SIGNAL, 2, all_threads=True)


def of_threads() -> str:
    """Returns the stacks of all threads of this process."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    parts = [
        f"thread {names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame))}"
        for ident, frame in sys._current_frames().items()
    ]
    return "".join(parts)


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
