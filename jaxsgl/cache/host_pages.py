"""`HostPages`: KV pages in host memory, found by name: the arena, the index, and which page goes when there is no room.

A page's name is a hash of all tokens up to its end and of their salt, chained from page to page, so that equal prefixes
have equal names in any process. A page is hosted only while its parent is, so what is found of a prefix is one run of
pages. Pages under WRITING are being gathered and can't be read yet; pages under LOADING are read by a request that
waits for them. Neither is evicted; of the others the least recently used one without children goes first. Knows nothing
about device pages or requests; tiers.py and kv_file.py call it. `allocate_arena` takes the memory, once at the start.
"""

from __future__ import annotations

import hashlib
import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from jaxsgl.cache.pages import IntArray
from jaxsgl.config.features import HOST_POOLS, HostKvConfig
from jaxsgl.errors import ConfigError

NAME_BYTES = 16


def root_name(salt: bytes) -> bytes:
    """The name that stands for the start of all sequences under `salt`."""
    return hashlib.blake2b(salt, digest_size=NAME_BYTES, person=b"jaxsgl pages").digest()


def extend_names(names: list[bytes], token_pages: IntArray, salt: bytes) -> None:
    """Appends the names of those of `token_pages [n, page_size]` that `names`, of the leading ones, lacks."""
    digest = names[-1] if names else root_name(salt)
    for page in token_pages[len(names) :].astype("<i4", copy=False):
        digest = hashlib.blake2b(digest + page.tobytes(), digest_size=NAME_BYTES).digest()
        names.append(digest)


class HostPage:
    """A page in host memory.

    Attributes:
      name, parent: of the page and of the page before it; None at the start of a sequence.
      tokens: `[page_size]` its tokens; None if it is private to a salt.
      slot: its place in the arena.
      is_written: whether its KV is there; False under WRITING.
      num_loads: requests that wait for it (LOADING).
      is_indexed: whether it can be found; False after `clear`, until nothing uses it any more.
    """

    __slots__ = (
        "in_heap", "is_indexed", "is_written", "last_used", "name", "num_children", "num_loads", "parent", "slot",
        "tokens",
    )  # fmt: skip

    def __init__(self, name: bytes, parent: HostPage | None, tokens: IntArray | None, slot: int, used: int) -> None:
        self.name = name
        self.parent = parent
        self.tokens = tokens
        self.slot = slot
        self.last_used = used
        self.is_written = False
        self.is_indexed = True
        self.in_heap = False
        self.num_loads = self.num_children = 0

    @property
    def may_go(self) -> bool:
        """Whether it may be evicted."""
        return self.is_written and not (self.num_loads or self.num_children)


class HostPages:
    """The pages of one arena.

    Args:
      arena: `[num_pages, ...]` room for pages in their host form.

    Attributes:
      arena: see above.
      num_evicted: pages so far that went because others needed their room.
      on_gone: is told the slots of pages that can't be found any more.
    """

    def __init__(self, arena: npt.NDArray[Any]) -> None:
        self.arena = arena
        self.num_evicted = 0
        self.on_gone: Callable[[list[int]], None] = lambda slots: None
        self._by_name: dict[bytes, HostPage] = {}
        self._free = list(range(len(arena) - 1, -1, -1))
        self._heap: list[tuple[int, int, HostPage]] = []
        self._clock = self._serial = 0

    @property
    def num_pages(self) -> int:
        """Pages that the arena holds."""
        return len(self.arena)

    @property
    def num_used(self) -> int:
        """Pages that are taken."""
        return len(self.arena) - len(self._free)

    def get(self, name: bytes) -> HostPage | None:
        """The page of this name, written or not."""
        return self._by_name.get(name)

    def run_of(self, names: Sequence[bytes], first: int) -> list[HostPage]:
        """The pages of names [first], [first + 1] .. as far as they are there and written. Changes nothing."""
        found: list[HostPage] = []
        for i in range(first, len(names)):
            page = self._by_name.get(names[i])
            if page is None or not page.is_written:
                break
            found.append(page)
        return found

    def all(self) -> Iterator[HostPage]:
        """All pages that can be found, parents before children."""
        return iter(self._by_name.values())

    def touch(self, names: Iterable[bytes]) -> None:
        """Marks the pages of `names`, of one prefix, as recently used."""
        self._clock += 1
        for name in names:
            page = self._by_name.get(name)
            if page is None:
                break
            page.last_used = self._clock

    def continue_after(self, last_used: int) -> None:
        """Counts uses on from those of pages that another process has kept."""
        self._clock = max(self._clock, last_used)

    def reserve(self, name: bytes, parent_name: bytes | None, tokens: IntArray | None) -> HostPage | None:
        """Takes room for a page, which is then under WRITING; evicts if need be.

        Returns None if there is no room, or if the parent isn't hosted. `parent_name` None: a sequence starts here.
        """
        assert name not in self._by_name, "a page is hosted twice"
        parent = None if parent_name is None else self._by_name.get(parent_name)
        if parent is None and parent_name is not None:
            return None
        if parent is not None:
            parent.num_children += 1  # so that it isn't what goes
        if not self._free and not self._evict_one():
            if parent is not None:
                parent.num_children -= 1
                self._offer(parent)
            return None
        page = self._by_name[name] = HostPage(name, parent, tokens, self._free.pop(), self._clock)
        return page

    def written(self, pages: Sequence[HostPage], data: npt.NDArray[Any]) -> None:
        """Ends WRITING: `data [n, ...]` is what `pages` hold."""
        self.arena[[page.slot for page in pages]] = data
        for page in pages:
            page.is_written = True
            self._settle(page)

    def begin_load(self, pages: Iterable[HostPage]) -> None:
        """LOADING: a request waits for `pages`."""
        for page in pages:
            page.num_loads += 1

    def end_load(self, pages: Iterable[HostPage]) -> None:
        """The request has them, or doesn't want them any more."""
        for page in pages:
            page.num_loads -= 1
            self._settle(page)

    def read(self, pages: Sequence[HostPage]) -> npt.NDArray[Any]:
        """A copy of what `pages` hold."""
        data: npt.NDArray[Any] = self.arena[[page.slot for page in pages]]
        return data

    def clear(self) -> None:
        """Lets no page be found any more; those under WRITING or LOADING keep their room until that ends."""
        pages, self._by_name = list(self._by_name.values()), {}
        self._heap.clear()
        for page in pages:
            page.is_indexed = page.in_heap = False
            page.parent = None
            page.num_children = 0
            self._settle(page)
        self.on_gone([page.slot for page in pages])

    def wrong(self, writing: Iterable[HostPage], loading: Iterable[HostPage]) -> list[str]:
        """What is wrong with places, links and pins, in words.

        `writing` are all pages that a gather fills, `loading` all that requests wait for, one for each request.
        """
        writing, loading, found = list(writing), list(loading), []
        pages = {id(page): page for page in [*self._by_name.values(), *writing, *loading]}
        places = Counter([*self._free, *(page.slot for page in pages.values())])
        found += [
            f"place {slot} in host memory is in {places[slot]} places"
            for slot in range(self.num_pages)
            if places[slot] != 1
        ]
        is_writing, loads = {id(page) for page in writing}, Counter(map(id, loading))
        children = Counter(id(page.parent) for page in pages.values() if page.parent)
        for number, page in pages.items():
            where = f"the page at {page.slot} in host memory"
            if page.parent is not None and self._by_name.get(page.parent.name) is not page.parent:
                found.append(f"{where} is there without its parent")
            if page.num_children != children[number]:
                found.append(f"{where} has {children[number]} children, but counts {page.num_children}")
            if page.num_loads != loads[number]:
                found.append(f"{where} is loaded by {loads[number]} requests, but counts {page.num_loads}")
            if page.is_written == (number in is_writing):
                found.append(f"{where} is {'written' if page.is_written else 'not written'}: its gather says otherwise")
            if page.may_go and page.is_indexed and not page.in_heap:
                found.append(f"{where} can't be found by eviction")
        return found

    def _evict_one(self) -> bool:
        while self._heap:
            last_used, _, page = heapq.heappop(self._heap)
            page.in_heap = False
            if not (page.may_go and page.is_indexed):
                continue  # it comes back when its pin ends, or when its last child goes
            if page.last_used != last_used:
                self._offer(page)
                continue
            self._remove(page)
            self._free.append(page.slot)
            self.num_evicted += 1
            self.on_gone([page.slot])
            return True
        return False

    def _remove(self, page: HostPage) -> None:
        del self._by_name[page.name]
        page.is_indexed = False
        if page.parent is not None:
            page.parent.num_children -= 1
            self._offer(page.parent)

    def _settle(self, page: HostPage) -> None:
        """A pin has ended: the page may be evicted, or, if it can't be found any more, its room is free."""
        if page.is_indexed:
            self._offer(page)
        elif page.is_written and not page.num_loads:
            self._free.append(page.slot)

    def _offer(self, page: HostPage) -> None:
        if page.may_go and page.is_indexed and not page.in_heap:
            page.in_heap = True
            self._serial += 1
            heapq.heappush(self._heap, (page.last_used, self._serial, page))


COPY_BYTES = 32 << 20  # of one turn of the loop, which copies on the host meanwhile: milliseconds
MOST_PAGES = 64


def allocate_arena(
    shape: tuple[int, ...], dtype: np.dtype[Any], config: HostKvConfig, pool_pages: int, free_bytes: int
) -> npt.NDArray[Any]:
    """`[num_pages, ...]` room for pages of `shape[1:]`. The system gives memory as pages are written.

    Args:
      shape: of one page in its host form, `[1, ...]`.
      dtype: of the host form.
      config: says how much.
      pool_pages: pages of the pool, for which `HOST_POOLS` holds.
      free_bytes: of host memory.

    Raises:
      ConfigError: not a page fits into what was asked for, or the machine hasn't as much memory free.
    """
    page_bytes = int(np.prod(shape)) * dtype.itemsize
    num_pages = int(config.host_kv_gib * 2**30) // page_bytes if config.host_kv_gib else int(HOST_POOLS * pool_pages)
    asked = f"--host-kv-gib {config.host_kv_gib:g}" if config.host_kv_gib else "--enable-hierarchical-cache"
    if not num_pages:
        raise ConfigError(f"{asked} holds no page of {page_bytes / 2**20:.2f} MiB: raise it, or lower --page-size")
    if num_pages * page_bytes > free_bytes:
        raise ConfigError(
            f"{asked} takes {num_pages * page_bytes / 2**30:.2f} GiB, but {free_bytes / 2**30:.2f} GiB of host memory "
            "are free: lower --host-kv-gib"
        )
    return np.empty((num_pages, *shape[1:]), dtype)


def pages_per_turn(page_bytes: int) -> int:
    """Pages that one turn of the loop may write to the host tier, and load from it."""
    return max(min(MOST_PAGES, COPY_BYTES // page_bytes), 1)
