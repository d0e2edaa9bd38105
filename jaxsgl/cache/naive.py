"""A prefix cache that keeps nothing (`--disable-radix-cache`): every request computes its whole prompt."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator

import numpy as np

from jaxsgl.cache.pages import IntArray
from jaxsgl.cache.prefix import Edge, Insertion, Match, Peek, WrongLocks

_NO_PAGES: IntArray = np.empty(0, dtype=np.int32)


class NaiveCache:
    """Matches nothing, takes nothing."""

    num_pages = 0
    num_evictable = 0

    def match(self, token_pages: IntArray) -> Match:
        """No prefix."""
        return Match(None, _NO_PAGES)

    def peek(self, token_pages: IntArray) -> Peek:
        """No prefix."""
        return Peek(0)

    def insert(self, token_pages: IntArray, pages: IntArray, held: Hashable = None) -> Insertion:
        """Takes none of the pages."""
        return Insertion(None, 0, _NO_PAGES)

    def lock(self, handle: Hashable) -> None:
        """Nothing to lock."""

    def unlock(self, handle: Hashable) -> None:
        """Nothing to unlock."""

    def num_exclusive(self, handle: Hashable) -> int:
        """No prefix, no pages."""
        return 0

    def evict(self, num_pages: int) -> IntArray:
        """Nothing to evict."""
        return _NO_PAGES

    def flush(self) -> IntArray:
        """Nothing to drop."""
        return _NO_PAGES

    def edges(self) -> Iterator[Edge]:
        """Nothing is cached."""
        return iter(())

    def owned_pages(self) -> IntArray:
        """No pages."""
        return _NO_PAGES

    def wrong_locks(self, handles: Iterable[Hashable]) -> list[WrongLocks]:
        """No locks."""
        return []
