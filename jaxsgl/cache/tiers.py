"""`HostTier`: which cached pages are on the device, on the host, or on both; what is written, and what can be loaded.

    DEVICE --write--> BOTH (WRITING until the host copy is there) --evicted from the pool--> HOST --load--> BOTH

Write-through: a page is written while it is on the device, at once when it is computed or when it is needed a second
time, so an eviction never waits for a copy. The second rule also writes what is first to follow a page that came back:
a chat that took a second turn takes a third, while what differs after a common system prompt may never return.

The gather of a write is submitted in step order, so the pool may hand the page out as soon as that is done. Pages are
known by their names (host_pages.py); a split of a node of the prefix tree changes no name, and no ticket holds a node.
The planner reads `to_write` and `run_of`; manager.py tells what enters and leaves the prefix tree, and the scheduler's
apply.py begins and ends writes and loads.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from jaxsgl.cache.host_pages import HostPage, HostPages, extend_names
from jaxsgl.cache.pages import DUMMY_PAGE, IntArray
from jaxsgl.cache.prefix import NO_PAGES, Edge, PrefixCache
from jaxsgl.config.features import WRITE_POLICIES

WRITE_THROUGH, WRITE_AFTER_REUSE = WRITE_POLICIES
_SEEN_PER_PAGE = 8  # names that are remembered for each page of the arena


class _Cached(NamedTuple):
    """A page of the prefix tree.

    Attributes:
      name, parent: of the page, and of the page before it.
      tokens: `[page_size]`; None if they are private to a salt.
    """

    name: bytes
    parent: bytes | None
    tokens: IntArray | None


class LowerTier:
    """A tier below the pool: the manager reports each page to it, and asks it for pages. This one holds none.

    Attributes:
      epoch: rises with each write that ends: a waiting request may load those pages.
    """

    epoch = 0

    @property
    def num_pages(self) -> int:
        """Places for pages."""
        return 0

    def tell_gone(self, listener: Callable[[list[int]], None]) -> None:
        """Tells `listener` from now on the places of pages that can't be found any more."""

    def name(self, names: list[bytes], token_pages: IntArray, salt: bytes) -> None:
        """Adds to the first `names` of `token_pages [n, ..]` under `salt` the others, if this tier goes by names."""

    def run_of(self, names: Sequence[bytes], first: int) -> list[HostPage]:
        """The hosted pages of a prefix from page `first` on. Changes nothing."""
        return []

    def load(self, pages: Sequence[HostPage]) -> npt.NDArray[Any]:
        """A copy of what `pages` hold, for the pool."""
        raise AssertionError("no page is hosted")

    def entered(self, names: Sequence[bytes], pages: IntArray, first: int, token_pages: IntArray, salt: bytes) -> None:
        """The prefix tree took `pages [n]` [first:] of the prefix with these `names [n]` and `token_pages [n, ..]`."""

    def reused(self, names: Sequence[bytes], pages: IntArray) -> None:
        """A request was admitted with `pages [n]` of the prefix tree, which have the first of `names`."""

    def left(self, pages: IntArray) -> tuple[IntArray, IntArray]:
        """The prefix tree dropped `pages`: returns those that are hosted, and their places in host memory."""
        return NO_PAGES, NO_PAGES

    def flush(self, pages: IntArray) -> None:
        """The prefix tree dropped `pages`, and so is all that is hosted."""

    def edges(self, first_number: int) -> Iterator[Edge]:
        """Pages that are on the host alone, parents first, one by one; that at place i is number `first_number` + i."""
        return iter(())

    def hosted_slots(self, names: Sequence[bytes]) -> list[int]:
        """The places in host memory of the first of `names` that are hosted."""
        return []

    def clear(self) -> None:
        """Forgets all pages of both tiers; writes in flight are dropped when their gathers end."""

    def wrong(self, prefixes: PrefixCache, loading: Iterable[HostPage]) -> list[str]:
        """What is wrong with both tiers, if `prefixes` is the prefix tree; see `HostPages.wrong`."""
        return []


class HostTier(LowerTier):
    """The tier below one pool, in host memory.

    Args:
      host: the pages in host memory.
      policy: `WRITE_THROUGH` or `WRITE_AFTER_REUSE`.
      most_pages: of one write, and of one load.

    Attributes:
      host, most_pages: see above.
      num_written: pages that were written so far.
      num_not_written: pages that found no room in host memory.
      num_loaded: pages that were copied to the pool so far.
    """

    def __init__(self, host: HostPages, policy: str, most_pages: int) -> None:
        self.host = host
        self.most_pages = most_pages
        self.num_written = self.num_not_written = self.num_loaded = self.epoch = 0
        self._at_once = policy == WRITE_THROUGH
        self._cached: dict[int, _Cached] = {}  # pages of the prefix tree
        self._followers: Counter[bytes] = Counter()  # of each name, cached pages whose parent it is
        self._to_write: dict[int, None] = {}  # device pages, in order
        self._seen: OrderedDict[bytes, None] = OrderedDict()  # names of pages that were computed once
        self._writing: set[HostPage] = set()  # whose gathers have not ended

    @property
    def is_writing(self) -> bool:
        """Whether a write waits for its gather."""
        return bool(self._writing)

    @property
    def has_to_write(self) -> bool:
        """Whether a page is to be written."""
        return bool(self._to_write)

    def to_write(self) -> tuple[int, ...]:
        """The device pages to write next, `most_pages` at most. Changes nothing."""
        return tuple(islice(self._to_write, self.most_pages))

    @property
    def num_pages(self) -> int:
        """See `LowerTier`."""
        return self.host.num_pages

    def tell_gone(self, listener: Callable[[list[int]], None]) -> None:
        """See `LowerTier`."""
        self.host.on_gone = listener

    def name(self, names: list[bytes], token_pages: IntArray, salt: bytes) -> None:
        """See `LowerTier`."""
        extend_names(names, token_pages, salt)

    def run_of(self, names: Sequence[bytes], first: int) -> list[HostPage]:
        """See `LowerTier`."""
        return self.host.run_of(names, first)

    def load(self, pages: Sequence[HostPage]) -> npt.NDArray[Any]:
        """See `LowerTier`."""
        self.num_loaded += len(pages)
        return self.host.read(pages)

    def entered(self, names: Sequence[bytes], pages: IntArray, first: int, token_pages: IntArray, salt: bytes) -> None:
        """See `LowerTier`."""
        for i in range(first, len(pages)):
            page, name = int(pages[i]), names[i]
            parent, tokens = names[i - 1] if i else None, None if salt else token_pages[i].copy()
            self._cached[page] = _Cached(name, parent, tokens)
            is_first = parent is not None and not self._followers[parent]
            if parent is not None:
                self._followers[parent] += 1
            if self.host.get(name) is not None:
                continue
            came_back = is_first and (int(pages[i - 1]) in self._to_write or self.host.get(names[i - 1]) is not None)
            if self._at_once or came_back or name in self._seen:
                self._to_write[page] = None
            else:
                self._remember(name)

    def reused(self, names: Sequence[bytes], pages: IntArray) -> None:
        """See `LowerTier`."""
        for page, name in zip(pages.tolist(), names, strict=False):
            if self.host.get(name) is None and page in self._cached:
                self._to_write[page] = None
        self.host.touch(names)

    def left(self, pages: IntArray) -> tuple[IntArray, IntArray]:
        """See `LowerTier`."""
        hosted, slots = [], []
        for page in pages.tolist():
            cached = self._cached.pop(page, None)
            if cached is None:
                continue
            self._to_write.pop(page, None)
            if cached.parent is not None:
                self._followers[cached.parent] -= 1
                if not self._followers[cached.parent]:
                    del self._followers[cached.parent]
            entry = self.host.get(cached.name)
            if entry is not None:
                hosted.append(page)
                slots.append(entry.slot)
        return np.array(hosted, np.int32), np.array(slots, np.int32)

    def flush(self, pages: IntArray) -> None:
        """See `LowerTier`."""
        self.left(pages)
        self.host.clear()

    def edges(self, first_number: int) -> Iterator[Edge]:
        """See `LowerTier`."""
        page_of = {known.name: page for page, known in self._cached.items()}
        for entry in self.host.all():
            if entry.tokens is None or entry.name in page_of:
                continue
            parent = DUMMY_PAGE
            if entry.parent is not None:
                parent = page_of.get(entry.parent.name, first_number + entry.parent.slot)
            yield Edge(entry.tokens[None], np.array([first_number + entry.slot], np.int32), parent)

    def hosted_slots(self, names: Sequence[bytes]) -> list[int]:
        """See `LowerTier`."""
        slots = []
        for name in names:
            entry = self.host.get(name)
            if entry is None:
                break
            slots.append(entry.slot)
        return slots

    def begin_write(self, pages: Sequence[int]) -> tuple[list[HostPage], tuple[int, ...]]:
        """Takes room for `pages` of `to_write`; returns it, and those that found some, which are to be gathered."""
        entries: list[HostPage] = []
        to_gather: list[int] = []
        for page in pages:
            del self._to_write[page]
            cached = self._cached[page]
            if self.host.get(cached.name) is not None:
                continue
            entry = self.host.reserve(*cached)
            if entry is None:
                self.num_not_written += 1
                continue
            entries.append(entry)
            to_gather.append(page)
        self._writing.update(entries)
        return entries, tuple(to_gather)

    def end_write(self, entries: list[HostPage], data: npt.NDArray[Any]) -> None:
        """The gather of pages into `entries` has ended: the host copy is there."""
        self._writing.difference_update(entries)
        self.host.written(entries, data)
        self.num_written += len(entries)
        self.epoch += 1

    def write_all(self, pages: Iterable[int]) -> None:
        """Has all of `pages`, which are cached, parents first, written that aren't hosted."""
        for page in pages:
            if page in self._cached and self.host.get(self._cached[page].name) is None:
                self._to_write[page] = None

    def clear(self) -> None:
        """See `LowerTier`."""
        for known in (self._cached, self._followers, self._to_write, self._seen):
            known.clear()
        self.host.clear()

    def wrong(self, prefixes: PrefixCache, loading: Iterable[HostPage]) -> list[str]:
        """See `LowerTier`."""
        found = self.host.wrong(self._writing, loading)
        gone = self._cached.keys() - set(prefixes.owned_pages().tolist())
        found += [f"page {page} has a name, but is not cached" for page in gone]
        if len({known.name for known in self._cached.values()}) != len(self._cached):
            found.append("two cached pages have one name")
        found += [f"page {page} is to be written, but has no name" for page in self._to_write.keys() - self._cached]
        return found

    def _remember(self, name: bytes) -> None:
        self._seen[name] = None
        if len(self._seen) > _SEEN_PER_PAGE * self.host.num_pages:
            self._seen.popitem(last=False)
