"""Ends Python code that runs for too long in a thread: templates that clients bring. tokenizer.py uses it."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from types import FrameType
from typing import Any


@contextlib.contextmanager
def within_cpu_s(limit_s: float) -> Iterator[None]:
    """Raises `TimeoutError` in the block once this thread has computed for `limit_s` seconds in it.

    Each line of Python is watched, which makes it several times as slow. One call into C is never interrupted.
    """
    until_s = time.thread_time() + limit_s

    def watch(frame: FrameType, event: str, value: Any) -> Any:
        if time.thread_time() > until_s:
            raise TimeoutError(f"it takes more than {limit_s:g} s")
        return watch

    before = sys.gettrace()
    sys.settrace(watch)
    try:
        yield
    finally:
        sys.settrace(before)
