"""Which rows of the device's pool of embeddings hold which image: free, kept for a later request, or locked.

An image is named by its digest, so that requests with the same image share its rows. Rows of images that no request
needs now are taken for others, those unused for longest first. Plain accounting: rows are numbers from 1 on (row 0
stands for text). Knows no pixels and no requests; the scheduler owns one, if the model sees images.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import numpy as np

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
