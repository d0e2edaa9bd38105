"""`CacheJournal`: what comes into the prefix cache and leaves it, as messages for those who watch it.

It names each page by a hash of all tokens up to its end, as gateways do. Never knows who watches; control.py makes it
with the first `WatchCache`.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from jaxsgl.cache.manager import CacheManager
from jaxsgl.cache.pages import DUMMY_PAGE, IntArray
from jaxsgl.cache.prefix import CacheObserver, Edge, page_hashes
from jaxsgl.messages.replies import CacheCleared, CacheEvent, PagesRemoved, PagesStored


class CacheJournal(CacheObserver):
    """Notes every change of the prefix cache as a message, and knows the name of each page.

    It leaves out what is cached under a salt: its tokens are private, and a gateway that sees tokens takes any worker
    that holds them to have them for every request.
    """

    def __init__(self, cache: CacheManager) -> None:
        self._cache = cache
        self._hash_of_page = np.zeros(cache.num_page_ids, dtype=np.int64)
        self._is_reported: npt.NDArray[np.bool_] = np.zeros(cache.num_page_ids, dtype=bool)
        self._events: list[CacheEvent] = []
        for edge in self._edges():
            self._name(edge.token_pages, edge.pages, edge.parent)
        cache.observe(self)

    def take(self) -> list[CacheEvent]:
        """Events since the last call, in order."""
        events, self._events = self._events, []
        return events

    def snapshot(self) -> list[CacheEvent]:
        """Events that describe all that is cached now, parents before children."""
        return [self._stored(edge.token_pages, edge.pages, edge.parent) for edge in self._edges()]

    def stored(self, token_pages: IntArray, pages: IntArray, parent: int) -> None:
        """See `CacheObserver`."""
        self._name(token_pages, pages, parent)
        self._events.append(self._stored(token_pages, pages, parent))

    def removed(self, pages: IntArray) -> None:
        """See `CacheObserver`."""
        reported = pages[self._is_reported[pages]]
        self._is_reported[reported] = False
        if len(reported):
            self._events.append(PagesRemoved(self._hash_of_page[reported].tolist()))

    def moved(self, pages: IntArray, to: IntArray) -> None:
        """See `CacheObserver`."""
        self._hash_of_page[to], self._is_reported[to] = self._hash_of_page[pages], self._is_reported[pages]
        self._is_reported[pages] = False

    def cleared(self) -> None:
        """See `CacheObserver`."""
        self._is_reported[:] = False
        self._events.append(CacheCleared())

    def _edges(self) -> Iterator[Edge]:
        return (edge for edge in self._cache.edges() if not edge.salt)

    def _name(self, token_pages: IntArray, pages: IntArray, parent: int) -> None:
        self._hash_of_page[pages] = page_hashes(token_pages, self._hash_at(parent))
        self._is_reported[pages] = True

    def _stored(self, token_pages: IntArray, pages: IntArray, parent: int) -> PagesStored:
        return PagesStored(self._hash_of_page[pages].tolist(), token_pages.ravel().tolist(), self._hash_at(parent))

    def _hash_at(self, page: int) -> int | None:
        return None if page == DUMMY_PAGE else int(self._hash_of_page[page])
