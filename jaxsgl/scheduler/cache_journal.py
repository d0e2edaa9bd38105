"""What happened to the prefix cache since it was last asked, as messages for those who follow it from outside.

Owns the name of every cached page, and the events of the current turn of the loop. Exists only once somebody watches;
commands.py makes it and sends what it tells.
"""

from __future__ import annotations

import numpy as np

from jaxsgl.cache.events import page_hashes
from jaxsgl.cache.manager import CacheManager
from jaxsgl.cache.pages import DUMMY_PAGE, IntArray
from jaxsgl.messages import CacheCleared, CacheEvent, PagesRemoved, PagesStored


class CacheJournal:
    """A `CacheObserver` that writes down what it is told."""

    def __init__(self, cache: CacheManager) -> None:
        self._cache = cache
        self._hash_of_page = np.zeros(cache.num_pages, dtype=np.int64)
        self._events: list[CacheEvent] = []
        for edge in cache.prefixes.edges():
            self._name(edge.token_pages, edge.pages, edge.parent)
        cache.observe(self)

    def take(self) -> list[CacheEvent]:
        """Events since the last call, in order."""
        events, self._events = self._events, []
        return events

    def snapshot(self) -> list[CacheEvent]:
        """All that is cached now, parents before children."""
        return [self._stored(edge.token_pages, edge.pages, edge.parent) for edge in self._cache.prefixes.edges()]

    def stored(self, token_pages: IntArray, pages: IntArray, parent: int) -> None:
        """See `CacheObserver`."""
        self._name(token_pages, pages, parent)
        self._events.append(self._stored(token_pages, pages, parent))

    def removed(self, pages: IntArray) -> None:
        """See `CacheObserver`."""
        self._events.append(PagesRemoved(self._hash_of_page[pages].tolist()))

    def cleared(self) -> None:
        """See `CacheObserver`."""
        self._events.append(CacheCleared())

    def _name(self, token_pages: IntArray, pages: IntArray, parent: int) -> None:
        self._hash_of_page[pages] = page_hashes(token_pages, self._hash_at(parent))

    def _stored(self, token_pages: IntArray, pages: IntArray, parent: int) -> PagesStored:
        return PagesStored(self._hash_of_page[pages].tolist(), token_pages.ravel().tolist(), self._hash_at(parent))

    def _hash_at(self, page: int) -> int | None:
        return None if page == DUMMY_PAGE else int(self._hash_of_page[page])
