"""The protocol of a prefix cache, its values, and `NaiveCache`, which caches nothing. `radix.py` has the real one.

A prefix cache owns pages whose KV may be read by later requests with the same leading tokens and the same salt; b"" is
a salt like any other. It works in whole pages: token ids come as `[n, page_size]`. It never allocates or frees pages;
it returns those that come free.

`manager.py` reports every change to a `CacheObserver`, for which pages have names: the KV of a page depends on all
tokens up to its end, so its name is a hash chained from page to page. Equal prefixes have equal names in any process.
"""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from jaxsgl.cache.pages import IntArray

NO_PAGES: IntArray = np.empty(0, dtype=np.int32)
_START = bytes(8)  # stands for the parent's name where a sequence starts


class Match(NamedTuple):
    """The longest cached prefix.

    Attributes:
      handle: proof of the match; valid until the next change of the cache, or while locked.
      pages: `[n]` page ids that hold the prefix, in order.
      snapshot: the place of the state after it, for models with states.
    """

    handle: Hashable
    pages: IntArray
    snapshot: int | None = None


class Span(NamedTuple):
    """The part of a cached prefix that stands in one node.

    Attributes:
      node: identifies the node; useful only to compare it with the nodes of another prefix.
      num_pages: pages of the prefix that stand in it; fewer than the node holds where a prefix ends inside it.
      locks: how often the node is locked now.
    """

    node: Hashable
    num_pages: int
    locks: int


class Peek(NamedTuple):
    """What a match would find.

    Attributes:
      num_pages: its length.
      spans: its nodes, from the root; the prefix may end inside the last one.
      num_seen: pages that are cached; more than the match where these have a state and the others have none.
    """

    num_pages: int
    spans: tuple[Span, ...] = ()
    num_seen: int = 0


class Insertion(NamedTuple):
    """The result of an insertion.

    Attributes:
      handle: the inserted prefix, to lock.
      num_existing: leading pages that the cache held already; those offered in their place are not taken.
      pages: `[m]` the cache's pages of the prefix. The cache now owns pages [num_existing:] of those offered.
    """

    handle: Hashable
    num_existing: int
    pages: IntArray


@dataclass(frozen=True)
class Edge:
    """Cached pages that follow each other in a sequence.

    Attributes:
      token_pages: `[n, page_size]` their tokens.
      pages: `[n]` page ids.
      parent: the page before the first; the dummy page at the start of a sequence.
      salt: of the requests that share them.
    """

    token_pages: IntArray
    pages: IntArray
    parent: int
    salt: bytes = b""


class TreeNode(NamedTuple):
    """A node of the prefix tree as people see it: without its tokens.

    Attributes:
      parent: the place of its parent in the outline; -1: it stands at the root.
      num_pages: pages of its edge.
      locks: requests that use it, or a node below it.
      num_children: prefixes that go on from it, shown or not.
    """

    parent: int
    num_pages: int
    locks: int
    num_children: int


@dataclass(frozen=True)
class WrongLocks:
    """Cached pages, `first_page` and those after it, with the wrong number of locks.

    Attributes:
      locks, holders: locks counted, and leases that hold one.
    """

    first_page: int
    num_pages: int
    locks: int
    holders: int


class PrefixCache(Protocol):
    """Matching, inserting, locking and evicting of prefixes.

    Attributes:
      keeps: whether anything that is inserted can be matched later.
    """

    keeps: bool

    @property
    def num_pages(self) -> int:
        """Pages that the cache owns."""
        ...

    @property
    def num_evictable(self) -> int:
        """Pages that `evict` could give back now: those that no lock holds."""
        ...

    def match(self, token_pages: IntArray, salt: bytes = b"") -> Match:
        """The longest prefix of `token_pages [n, page_size]` cached under `salt`; marks it as recently used."""
        ...

    def peek(self, token_pages: IntArray, salt: bytes = b"") -> Peek:
        """What `match` would find; changes nothing."""
        ...

    def insert(self, token_pages: IntArray, pages: IntArray, held: Hashable = None, salt: bytes = b"") -> Insertion:
        """Offers `pages [n]` that hold the KV of `token_pages [n, page_size]`, to be found under `salt`.

        `held` is the caller's locked handle of a prefix of `token_pages`. If no other lock holds it, the handle may
        stand for the longer prefix from now on.
        """
        ...

    def lock(self, handle: Hashable) -> None:
        """Keeps the prefix of `handle` from eviction; locks count."""
        ...

    def unlock(self, handle: Hashable) -> None:
        """Takes one lock back."""
        ...

    def num_exclusive(self, handle: Hashable) -> int:
        """Pages of the prefix of `handle` that no other lock holds."""
        ...

    def spans(self, handle: Hashable) -> tuple[Span, ...]:
        """The nodes of the prefix of `handle`, in no order."""
        ...

    def evict(self, num_pages: int) -> IntArray:
        """Drops least recently used, unlocked prefixes: `num_pages` pages, or all that can go if fewer."""
        ...

    def flush(self) -> IntArray:
        """Drops everything that no lock holds; returns its pages."""
        ...

    def rename(self, prefix: bytes) -> None:
        """Puts `prefix`, in which no request's salt begins, before every salt: nothing that is cached now is found."""
        ...

    def edges(self) -> Iterator[Edge]:
        """All that is cached, parents before children."""
        ...

    def outline(self, max_nodes: int) -> list[TreeNode]:
        """The `max_nodes` nodes that are in use or were used last, parents before children; changes nothing."""
        ...

    def owned_pages(self) -> IntArray:
        """All pages of the cache, after checking the cache's own books; for the integrity check."""
        ...

    def wrong_locks(self, handles: Iterable[Hashable]) -> list[WrongLocks]:
        """Pages whose lock counts differ from the locks of `handles`, which must be all handles that are locked."""
        ...


class NaiveCache:
    """A prefix cache that keeps nothing (`--disable-radix-cache`): every request computes its whole prompt."""

    keeps = False
    num_pages = 0
    num_evictable = 0

    def match(self, token_pages: IntArray, salt: bytes = b"") -> Match:
        """No prefix."""
        return Match(None, NO_PAGES)

    def peek(self, token_pages: IntArray, salt: bytes = b"") -> Peek:
        """No prefix."""
        return Peek(0)

    def insert(self, token_pages: IntArray, pages: IntArray, held: Hashable = None, salt: bytes = b"") -> Insertion:
        """Takes none of the pages."""
        return Insertion(None, 0, NO_PAGES)

    def lock(self, handle: Hashable) -> None:
        """Nothing to lock."""

    def unlock(self, handle: Hashable) -> None:
        """Nothing to unlock."""

    def num_exclusive(self, handle: Hashable) -> int:
        """No prefix, no pages."""
        return 0

    def spans(self, handle: Hashable) -> tuple[Span, ...]:
        """No prefix, no nodes."""
        return ()

    def evict(self, num_pages: int) -> IntArray:
        """Nothing to evict."""
        return NO_PAGES

    def flush(self) -> IntArray:
        """Nothing to drop."""
        return NO_PAGES

    def rename(self, prefix: bytes) -> None:
        """Nothing to rename."""

    def edges(self) -> Iterator[Edge]:
        """Nothing is cached."""
        return iter(())

    def outline(self, max_nodes: int) -> list[TreeNode]:
        """No nodes."""
        return []

    def owned_pages(self) -> IntArray:
        """No pages."""
        return NO_PAGES

    def wrong_locks(self, handles: Iterable[Hashable]) -> list[WrongLocks]:
        """No locks."""
        return []


class CacheObserver:
    """Is notified of every change of the prefix cache, in order. A page keeps its tokens from `stored` to `removed`.

    Prefixes under a salt are private: they are never `stored`, but their pages may be among those `removed`. This one
    notes nothing.
    """

    def stored(self, token_pages: IntArray, pages: IntArray, parent: int) -> None:
        """`pages [n]` with `token_pages [n, page_size]` follow page `parent` (the dummy page: none)."""

    def removed(self, pages: IntArray) -> None:
        """`pages [n]` were evicted or flushed."""

    def moved(self, pages: IntArray, to: IntArray) -> None:
        """What `pages [n]` held is cached as `to [n]` now: in the other tier, see `CacheManager.num_page_ids`."""

    def cleared(self) -> None:
        """The cache is empty now."""


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
