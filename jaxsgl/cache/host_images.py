"""Embeddings of images in host memory, by digest: of those that the device's pool has let go, too.

Rows are kept up to a limit of bytes; those unused for longest leave first, but none of an image that requests hold. A
request may hold images whose rows come later. Plain accounting beside the arrays: knows no device and no requests but
their ids. The scheduler owns one, if the model sees images (`scheduler/resources/images.py`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

HostRows: TypeAlias = npt.NDArray[np.uint8]  # [tokens, bytes of a row]


@dataclass(slots=True)
class _Entry:
    """An image: its rows, None until they come; the bytes that they take; how many requests hold it."""

    num_bytes: int
    rows: HostRows | None = None
    num_holders: int = 0


class HostImages:
    """Rows of images in host memory.

    Args:
      limit_bytes: of all rows, those included that are to come.

    Attributes:
      num_bytes: that they take now.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.num_bytes = 0
        self._entries: OrderedDict[bytes, _Entry] = OrderedDict()  # by digest, the one used last at the end
        self._held: dict[str, tuple[bytes, ...]] = {}  # by request

    def find(self, digest: bytes) -> HostRows | None:
        """The rows of that image, if they are here. Reads only."""
        entry = self._entries.get(digest)
        return None if entry is None else entry.rows

    def used(self, digest: bytes) -> None:
        """The image is needed now; others leave before it."""
        if digest in self._entries:
            self._entries.move_to_end(digest)

    def put(self, digest: bytes, rows: HostRows) -> None:
        """Keeps the rows of an image, unless all that may leave for them is too little."""
        if self._made_room({digest: rows.nbytes}):
            self._entry(digest, rows.nbytes).rows = rows

    def hold(self, request_id: str, images: Mapping[bytes, int]) -> bool:
        """Holds images of so many bytes for a request, until `drop`; False, and nothing is held, if there is no room.

        They take the place of what it held before. Rows that are not here take their place from now on.
        """
        self.drop(request_id)
        if not self._made_room(images):
            return False
        for digest, num_bytes in images.items():
            self._entry(digest, num_bytes).num_holders += 1
        self._held[request_id] = tuple(images)
        return True

    def drop(self, request_id: str) -> bool:
        """The request holds nothing any more. Returns whether it held something."""
        digests = self._held.pop(request_id, ())
        for digest in digests:
            entry = self._entries[digest]
            entry.num_holders -= 1
            if entry.rows is None and not entry.num_holders:
                self._remove(digest)
        return bool(digests)

    @property
    def num_holders(self) -> int:
        """Requests that hold images."""
        return len(self._held)

    def flush(self) -> None:
        """Drops what no request holds."""
        for digest in [digest for digest, entry in self._entries.items() if not entry.num_holders]:
            self._remove(digest)

    def retire(self) -> None:
        """Drops all rows, as weights of the past have made them. What requests hold may come again."""
        self.flush()
        for entry in self._entries.values():
            entry.rows = None

    def check(self) -> None:
        """Raises AssertionError if bytes or holders are miscounted."""
        assert self.num_bytes == sum(entry.num_bytes for entry in self._entries.values()) <= self.limit_bytes
        held = [digest for digests in self._held.values() for digest in digests]
        for digest, entry in self._entries.items():
            assert entry.num_holders == held.count(digest), "an image is held by no request"
            assert entry.rows is None or entry.rows.nbytes == entry.num_bytes
            assert entry.rows is not None or entry.num_holders, "an image is kept without rows"

    def _entry(self, digest: bytes, num_bytes: int) -> _Entry:
        entry = self._entries.get(digest)
        if entry is None:
            entry = self._entries[digest] = _Entry(num_bytes)
            self.num_bytes += num_bytes
        assert entry.num_bytes == num_bytes, f"an image of {entry.num_bytes} bytes now has {num_bytes}"
        self._entries.move_to_end(digest)
        return entry

    def _made_room(self, images: Mapping[bytes, int]) -> bool:
        """Lets images leave until those of `images` that are not here find room; changes nothing if they can't."""
        missing = sum(num_bytes for digest, num_bytes in images.items() if digest not in self._entries)
        excess = self.num_bytes + missing - self.limit_bytes
        leaving: list[bytes] = []
        for digest in self._leaving(images):
            if excess <= 0:
                break
            leaving.append(digest)
            excess -= self._entries[digest].num_bytes
        if excess > 0:
            return False
        for digest in leaving:
            self._remove(digest)
        return True

    def _leaving(self, but: Mapping[bytes, int]) -> Iterable[bytes]:
        return (digest for digest, entry in self._entries.items() if not entry.num_holders and digest not in but)

    def _remove(self, digest: bytes) -> None:
        self.num_bytes -= self._entries.pop(digest).num_bytes
