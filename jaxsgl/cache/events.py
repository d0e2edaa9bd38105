"""The observer of a prefix cache, and the names of pages: `manager.py` tells the observer of every change.

A page of KV depends on all tokens up to its end, so its name is a hash chained from page to page: equal prefixes have
equal names in any process.
"""

from __future__ import annotations

import hashlib
from typing import Protocol

from jaxsgl.cache.pages import IntArray

_START = bytes(8)  # stands for the parent's name where a sequence starts


class CacheObserver(Protocol):
    """Is notified of every change of the prefix cache, in order. A page keeps its tokens from `stored` to `removed`.

    Prefixes under a salt are private: they are never `stored`, but their pages may be among those `removed`.
    """

    def stored(self, token_pages: IntArray, pages: IntArray, parent: int) -> None:
        """`pages [n]` with `token_pages [n, page_size]` follow page `parent` (the dummy page: none)."""
        ...

    def removed(self, pages: IntArray) -> None:
        """`pages [n]` were evicted or flushed."""
        ...

    def moved(self, pages: IntArray, to: IntArray) -> None:
        """What `pages [n]` held is cached as `to [n]` now: in the other tier, see `CacheManager.num_page_ids`."""
        ...

    def cleared(self) -> None:
        """The cache is empty now."""
        ...


def page_hashes(token_pages: IntArray, parent: int | None) -> list[int]:
    """Names of `token_pages [n, page_size]`, each chained to the one before, the first to the page named `parent`.

    Signed 64 bits: BLAKE2b of the parent's name and the page's ids, all little-endian. `parent` None: a sequence starts
    here.
    """
    tokens = token_pages.astype("<i4", copy=False)
    digest = _START if parent is None else parent.to_bytes(8, "little", signed=True)
    hashes = []
    for page in tokens:
        digest = hashlib.blake2b(digest + page.tobytes(), digest_size=8).digest()
        hashes.append(int.from_bytes(digest, "little", signed=True))
    return hashes
