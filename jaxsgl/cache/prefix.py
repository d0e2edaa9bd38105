"""What a prefix cache is: the protocol that the radix tree and the naive cache share, and its values.

A prefix cache owns pages whose KV may be read by later requests with the same leading tokens. It works in whole
pages: token ids come as `[n, page_size]`. It never allocates or frees; it says which pages come free.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

from jaxsgl.cache.pages import IntArray


@dataclass(frozen=True)
class Match:
    """The longest cached prefix.

    Attributes:
      handle: proof of the match; valid until the next change of the cache, or while locked.
      pages: `[n]` page ids that hold the prefix, in order.
    """

    handle: Hashable
    pages: IntArray


@dataclass(frozen=True)
class Peek:
    """What a match would find.

    Attributes:
      num_pages: its length.
      path: the nodes on the way, from the root; the last one may be shared in part only. Each means something only as
        being the same as another's.
    """

    num_pages: int
    path: tuple[Hashable, ...] = ()


@dataclass(frozen=True)
class Insertion:
    """What became of the pages that were offered.

    Attributes:
      handle: the inserted prefix, to lock.
      num_existing: leading pages that the cache held already; those offered in their place are not taken.
      pages: `[m]` the cache's pages of the prefix; [num_existing:] of what was offered is now the cache's.
    """

    handle: Hashable
    num_existing: int
    pages: IntArray


@dataclass(frozen=True)
class Edge:
    """Cached pages, one behind the other.

    Attributes:
      token_pages: `[n, page_size]` their tokens.
      pages: `[n]` page ids.
      parent: the page before the first; the dummy page at the start of a sequence.
    """

    token_pages: IntArray
    pages: IntArray
    parent: int


@dataclass(frozen=True)
class WrongLocks:
    """Cached pages, `first_page` and those behind it, that are locked too often, or not often enough.

    Attributes:
      locks, holders: how often they are locked, and by how many.
    """

    first_page: int
    num_pages: int
    locks: int
    holders: int


class PrefixCache(Protocol):
    """Matching, inserting, locking and evicting of prefixes."""

    @property
    def num_pages(self) -> int:
        """Pages that the cache owns."""
        ...

    @property
    def num_evictable(self) -> int:
        """Pages that `evict` could give back now: those that no lock holds."""
        ...

    def match(self, token_pages: IntArray) -> Match:
        """The longest cached prefix of `token_pages [n, page_size]`; marks it as recently used."""
        ...

    def peek(self, token_pages: IntArray) -> Peek:
        """What `match` would find; changes nothing."""
        ...

    def insert(self, token_pages: IntArray, pages: IntArray, held: Hashable = None) -> Insertion:
        """Offers `pages [n]` that hold the KV of `token_pages [n, page_size]`.

        `held` is a locked handle of whoever offers them, of a prefix of `token_pages`. If nobody else locks it, it may
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

    def evict(self, num_pages: int) -> IntArray:
        """Drops least recently used, unlocked prefixes: `num_pages` pages, or all that can go if fewer."""
        ...

    def flush(self) -> IntArray:
        """Drops everything that no lock holds; returns its pages."""
        ...

    def edges(self) -> Iterator[Edge]:
        """All that is cached, parents before children."""
        ...

    def owned_pages(self) -> IntArray:
        """All pages of the cache, after checking the cache's own books; for the integrity check."""
        ...

    def wrong_locks(self, handles: Iterable[Hashable]) -> list[WrongLocks]:
        """Where the cache counts other locks than those of `handles`, which are all there are."""
        ...
