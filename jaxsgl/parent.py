"""How a child process of the server ends with its parent, however the parent ends and whatever the child does.

A thread sees the end of the pipe to the parent, cleans up and ends the process. A process that is stopped, or stuck in
C code that holds Python's lock, runs no thread: there Linux sends SIGKILL. The engine process and the front end's
workers call this first.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
from collections.abc import Callable

_PR_SET_PDEATHSIG = 1


def follow_parent(pipe: int, clean_up: Callable[[], None]) -> None:
    """Ends this process, after `clean_up`, as soon as the parent's end of `pipe` is closed."""

    def wait_for_end() -> None:
        # Not a file's read: it would hold its lock forever, a fatal error when the interpreter shuts down.
        while os.read(pipe, 4096):
            pass
        clean_up()
        os._exit(1)

    threading.Thread(target=wait_for_end, name="follow-parent", daemon=True).start()


def be_killed_with_parent() -> None:
    """Has the system kill this process when its parent ends; only Linux can. `follow_parent` sees an earlier end.

    The signal comes when the thread ends that started this process, which must therefore be the parent's main one.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
