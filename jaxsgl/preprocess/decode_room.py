"""`DecodeRoom`: how much memory decoding takes at a time. Knows no pictures; decoding.py and loading.py ask it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from jaxsgl.errors import InvalidRequest


class DecodeRoom:
    """Memory for decoding, of which each picture takes its part: the next one waits until there is room.

    Args:
      max_bytes: for all pictures that are decoded at a time. None: no limit, and no waiting.
    """

    def __init__(self, max_bytes: int | None = None) -> None:
        self._max_bytes = max_bytes
        self._taken = 0
        self._given_back = threading.Condition()

    @contextmanager
    def taken(self, num_bytes: int, name: str) -> Iterator[None]:
        """Takes `num_bytes` while the block runs. Raises `InvalidRequest` if all memory for decoding is less."""
        if self._max_bytes is None:
            yield
            return
        if num_bytes > self._max_bytes:
            raise InvalidRequest(
                f"decoding {name} takes {num_bytes} bytes of memory, but may take {self._max_bytes} "
                "(--media-max-decode-bytes): send a smaller one, or one as baseline JPEG, which takes the least"
            )
        with self._given_back:
            self._given_back.wait_for(lambda: self._has(num_bytes))
            self._taken += num_bytes
        try:
            yield
        finally:
            with self._given_back:
                self._taken -= num_bytes
                self._given_back.notify_all()

    def _has(self, num_bytes: int) -> bool:
        assert self._max_bytes is not None
        return self._taken + num_bytes <= self._max_bytes
