"""`Interrupts`: Ctrl-C waits for a moment at which nothing is half done.

A program that is called gives its arguments' memory away, and what it returns is kept a moment later: an exception
between the two, which a signal handler may raise anywhere, would leave an engine without its cache. A call to a server
that is interrupted while it starts can't be cancelled. Called by offline/run.py and chat.py.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any, Self


class Interrupts:
    """As a context, holds SIGINT back until `check` is called, or until the end; a second one is let through at once.

    Where the signal has no handler in Python, and in threads but the main one, which none interrupts, it does nothing.
    """

    def __init__(self) -> None:
        self._handler: Callable[[int, FrameType | None], Any] | None = None
        self._is_pressed = self._lets_through = False

    def __enter__(self) -> Self:
        handler = signal.getsignal(signal.SIGINT)
        if callable(handler) and threading.current_thread() is threading.main_thread():
            self._handler = handler
            signal.signal(signal.SIGINT, self._on_signal)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._handler is not None:
            signal.signal(signal.SIGINT, self._handler)
        if error is None:
            self.check()

    def check(self) -> None:
        """Lets a signal through that came since the last time: raises `KeyboardInterrupt`, unless the user's handler
        does something else."""
        if self._is_pressed and self._handler is not None:
            self._is_pressed = False
            self._handler(signal.SIGINT, None)

    @contextmanager
    def let_through(self) -> Iterator[None]:
        """Inside, a signal comes through at once."""
        self._lets_through = True
        try:
            self.check()
            yield
        finally:
            self._lets_through = False

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._handler is not None and (self._lets_through or self._is_pressed):
            self._is_pressed = False
            self._handler(number, frame)
        else:
            self._is_pressed = True
