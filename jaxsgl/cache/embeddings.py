"""Embeddings of images, by digest: which rows of the device's pool hold which image, and those kept in host memory.

An image is named by its digest, so that requests with the same image share its rows. On the device rows are numbers
from 1 on (row 0 stands for text): free, kept for a later request, or locked; those unused for longest are taken for
others first. In host memory rows are kept up to a limit of bytes, also those that the device's pool has let go; there,
too, those unused for longest leave first, but none of an image that requests hold. A request may hold images whose rows
come later. Plain accounting next to the arrays: knows no pixels, no device, and of requests their ids. The scheduler
owns both, if the model sees images (`scheduler/resources/images.py`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from jaxsgl.cache.pages import IntArray


@dataclass(slots=True, eq=False)
class HeldImage:
    """An image that has rows.

    Attributes:
      digest: its name.
      rows: `[tokens]` of its embeddings, in the order of its tokens.
      num_locks: requests that need it; its rows stay while there are any.
      encoded: whether the call of the tower that writes its rows is launched.
      retired: it was computed by weights of the past, so that no other request may find it.
    """

    digest: bytes
    rows: IntArray
    num_locks: int = 0
    encoded: bool = False
    retired: bool = False


class EmbeddingRows:
    """The rows 1 .. num_rows of the pool.

    Attributes:
      num_rows: all of them.
      num_locked: rows of locked images.
    """

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows
        self.num_locked = 0
        self._free: IntArray = np.arange(num_rows, 0, -1, dtype=np.int32)  # a stack, of which the first are free
        self._num_free = num_rows
        self._images: OrderedDict[bytes, HeldImage] = OrderedDict()  # by digest, the one used last at the end

    @property
    def num_available(self) -> int:
        """Rows that images may take: free ones, and those of images that no request needs."""
        return self.num_rows - self.num_locked

    def find(self, digest: bytes) -> HeldImage | None:
        """The image of that name, if it has rows. Reads only."""
        return self._images.get(digest)

    def lock(self, digest: bytes, num_tokens: int) -> HeldImage:
        """Locks the image; gives it rows if it has none. There must be as many available as it has tokens."""
        image = self._images.get(digest)
        if image is None:
            image = self._images[digest] = HeldImage(digest, self._take(num_tokens))
        self._images.move_to_end(digest)
        if image.num_locks == 0:
            self.num_locked += len(image.rows)
        image.num_locks += 1
        return image

    def unlock(self, image: HeldImage) -> None:
        """Takes one lock away. The rows stay the image's until others need them, unless nothing can be found there."""
        assert image.num_locks > 0, "an image that is not locked was unlocked"
        image.num_locks -= 1
        if image.num_locks:
            return
        self.num_locked -= len(image.rows)
        if image.retired:
            self._give_back(image)
        elif not image.encoded:
            self._drop(image)

    def retire(self) -> None:
        """Lets no later request find an image that has rows now; those that are locked keep them until then."""
        for image in list(self._images.values()):
            if image.num_locks == 0:
                self._drop(image)
            else:
                image.retired = True
                del self._images[image.digest]

    def flush(self) -> None:
        """Drops every image that no request needs."""
        for image in [image for image in self._images.values() if image.num_locks == 0]:
            self._drop(image)

    def check(self, locks: list[HeldImage]) -> None:
        """Raises AssertionError unless every row is in one place, and images have the `locks` that requests hold."""
        held = {id(image): image for image in (*self._images.values(), *locks)}
        rows = [self._free[: self._num_free], *(image.rows for image in held.values())]
        assert sorted(np.concatenate(rows).tolist()) == list(range(1, self.num_rows + 1)), "a row is lost or twice held"
        for key, image in held.items():
            assert image.num_locks == sum(id(lock) == key for lock in locks), "an image has a lock of no request"
            assert image.encoded or image.num_locks, "an image has rows that no call writes"
        locked = sum(len(image.rows) for image in held.values() if image.num_locks)
        assert locked == self.num_locked, f"{self.num_locked} rows count as locked, but {locked} are"

    def _take(self, num_tokens: int) -> IntArray:
        for image in list(self._images.values()) if self._num_free < num_tokens else ():
            if image.num_locks == 0:
                self._drop(image)
            if self._num_free >= num_tokens:
                break
        assert self._num_free >= num_tokens, f"{num_tokens} rows are needed, but {self._num_free} are free"
        self._num_free -= num_tokens
        return self._free[self._num_free : self._num_free + num_tokens].copy()

    def _drop(self, image: HeldImage) -> None:
        del self._images[image.digest]
        self._give_back(image)

    def _give_back(self, image: HeldImage) -> None:
        count = len(image.rows)
        self._free[self._num_free : self._num_free + count] = image.rows
        self._num_free += count


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
