"""A copy of the prefix cache that is built from its events alone, and what must be in it."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

import numpy as np

from jaxsgl.cache.pages import DUMMY_PAGE
from jaxsgl.cache.prefix import Edge, page_hashes
from jaxsgl.messages.replies import CacheCleared, CacheEvent, PagesRemoved, PagesStored


class CacheMirror:
    """Follows events; each must make sense after the events before it.

    Attributes:
      prefixes: by the hash of each cached page, all tokens up to its end.
    """

    def __init__(self, events: Iterable[CacheEvent] = ()) -> None:
        self.prefixes: dict[int, tuple[int, ...]] = {}
        self.take(events)

    def take(self, events: Iterable[CacheEvent]) -> None:
        for event in events:
            match event:
                case PagesStored(hashes, token_ids, parent):
                    prefix = () if parent is None else self.prefixes[parent]
                    pages = np.array(token_ids).reshape(len(hashes), -1).tolist()
                    for name, page in zip(hashes, pages, strict=True):
                        assert name not in self.prefixes, "a page is stored twice"
                        prefix += tuple(page)
                        self.prefixes[name] = prefix
                case PagesRemoved(hashes):
                    for name in hashes:
                        del self.prefixes[name]
                case CacheCleared():
                    self.prefixes.clear()


def cached_prefixes(edges: Iterable[Edge]) -> dict[int, tuple[int, ...]]:
    """What a mirror must hold: all tokens up to the end of each page of any tier, by the hash that the page must have.

    What is cached under a salt is none of its business.
    """
    prefix_of_page: dict[int, tuple[int, ...]] = {DUMMY_PAGE: ()}
    found = {}
    for edge in edges:
        prefix = prefix_of_page[edge.parent]
        for tokens, page in zip(edge.token_pages.tolist(), edge.pages.tolist(), strict=True):
            prefix += tuple(tokens)
            prefix_of_page[page] = prefix
            if not edge.salt:
                found[prefix_hash(prefix, len(tokens))] = prefix
    return found


@cache
def prefix_hash(prefix: tuple[int, ...], page_size: int) -> int:
    """The hash of the last page, computed from the tokens alone."""
    return page_hashes(np.array(prefix, dtype=np.int32).reshape(-1, page_size), None)[-1]
