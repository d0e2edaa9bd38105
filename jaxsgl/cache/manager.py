"""The leases of requests, from match to release. The only writer of page table, free list and prefix cache.

    row of the page table:  [ shared pages | own pages | dummy ... ]
                              owned by the    allocated    never read
                              prefix cache,   for this
                              locked by us    request

Knows token ids and lengths, but no request states, budgets or batches. Called by the scheduler alone.

A namespace separates prefixes of equal tokens whose KV must not be shared:

    common                         b""
    under a request's salt         the salt as UTF-8
    of an adapter                  _ADAPTER, 16 bytes that stand for one loading of it, the salt as UTF-8
    of KV from an unproved server  _SOURCE, 16 bytes that stand for its address, what it would be otherwise
    of weights that were replaced  _RETIRED, 8 bytes that count replacements, what it was before

UTF-8 has no byte 0xfd, 0xfe or 0xff, and what follows them is of fixed length, so no salt reaches into another
namespace. The prefix tree has a root for each namespace, and names of pages begin with it. The scheduler makes a
namespace once for each request.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from jaxsgl.cache.audit import LastOwners, audit
from jaxsgl.cache.host_pages import HostPage
from jaxsgl.cache.pages import (
    DUMMY_PAGE,
    IntArray,
    Lease,
    PageAllocator,
    PageState,
    PageTable,
    as_pages,
    full_pages,
    pages_for,
    tokens_in,
)
from jaxsgl.cache.prefix import CacheObserver, Edge, Insertion, Match, Peek, PrefixCache
from jaxsgl.cache.tiers import LowerTier

_SOURCE = b"\xfd"
_ADAPTER = b"\xfe"
_RETIRED = b"\xff"


def namespace_of(cache_salt: str, adapter: str | None = None, source: str = "") -> bytes:
    """The namespace of a request's prefixes.

    `adapter` stands for an adapter's numbers, not its name: other weights under the same name must give another text,
    and pages in host memory and in files outlive a loading and a start of the server. `source` is that of
    `Request.kv_source`.
    """
    namespace = cache_salt.encode("utf-8", "surrogatepass")
    if adapter is not None:
        namespace = _ADAPTER + _digest(adapter) + namespace
    return _SOURCE + _digest(source) + namespace if source else namespace


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def retired(number: int) -> bytes:
    """What comes before all namespaces of the weights that were replaced as number `number`."""
    return _RETIRED + number.to_bytes(8, "big")


class SnapshotBooks:
    """What the manager does with states that are kept with prefixes. This one: of a model whose layers keep none.

    Attributes:
      num_dropped: snapshots that were taken from the tree for others so far.
    """

    num_dropped = 0

    def begin(self, lease: Lease, match: Match) -> None:
        """The lease's first step is to read the state that `match` found."""

    def release(self, lease: Lease, num_tokens: int) -> None:
        """Keeps the newest border of a lease within its `num_tokens` tokens, which are in the tree by now."""

    def drop(self, lease: Lease) -> None:
        """Takes all places of the lease back."""

    def wrong(self, leases: Iterable[Lease]) -> list[str]:
        """What is wrong with places, given all leases."""
        return []


class CacheManager:
    """Pages, rows and prefixes of one KV pool.

    Attributes:
      tier: the tier below the pool.
      snapshots: the books of states that are kept with prefixes.
      num_evicted: pages that were evicted so far.
      num_retired: how often weights were exchanged so far.
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        table: PageTable,
        prefixes: PrefixCache,
        tier: LowerTier = LowerTier(),
        snapshots: SnapshotBooks = SnapshotBooks(),
    ) -> None:
        self.page_size = page_size
        self.table = table
        self.prefixes = prefixes
        self.tier = tier
        self.snapshots = snapshots
        self.num_evicted = 0
        self.num_retired = 0
        self._num_changes = 0  # of what is cached, besides those that steps make
        self._allocator = PageAllocator(num_pages)
        self._observer = CacheObserver()
        self._last_owners = LastOwners(num_pages, len(table.pages))
        tier.tell_gone(self._gone_from_host)

    @property
    def num_pages(self) -> int:
        """Pages of the pool, the dummy page included."""
        return self._allocator.num_pages

    @property
    def num_available(self) -> int:
        """Pages that can be allocated now, by evicting if need be."""
        return self._allocator.num_free + self.prefixes.num_evictable

    @property
    def num_free(self) -> int:
        """Pages on the free list."""
        return self._allocator.num_free

    @property
    def used_tokens(self) -> int:
        """KV slots in pages that leases own or lock."""
        return tokens_in(self.num_pages - 1 - self.num_available, self.page_size)

    @property
    def cached_tokens(self) -> int:
        """KV slots in pages that only the prefix cache holds: eviction may take them at any time."""
        return tokens_in(self.prefixes.num_evictable, self.page_size)

    @property
    def num_page_ids(self) -> int:
        """Numbers by which an observer is told of pages: those of the pool, then those of places in host memory."""
        return self.num_pages + self.tier.num_pages

    @property
    def epoch(self) -> int:
        """Rises when a waiting request may find room or a prefix that it did not find, though no request ended."""
        return self._num_changes + self.tier.epoch

    def edges(self) -> Iterator[Edge]:
        """All that is cached in any tier, parents before children, by the numbers that an observer is told."""
        yield from self.prefixes.edges()
        yield from self.tier.edges(self.num_pages)

    def observe(self, observer: CacheObserver) -> None:
        """Tells `observer` of all changes of the prefix cache from now on; there is only one observer."""
        self._observer = observer

    def match(self, token_ids: IntArray, salt: bytes = b"") -> Match:
        """The longest prefix cached under `salt` that leaves at least one token to compute (it yields the logits)."""
        return self.prefixes.match(as_pages(token_ids[:-1], self.page_size), salt)

    def peek(self, token_ids: IntArray, salt: bytes = b"") -> Peek:
        """What `match` would find; changes nothing."""
        return self.prefixes.peek(as_pages(token_ids[:-1], self.page_size), salt)

    def acquire(self, match: Match, owner: str = "", salt: bytes = b"", names: list[bytes] | None = None) -> Lease:
        """Takes a row and locks the prefix matched under `salt` for `owner`, a name for the report of a leak.

        `names` are those of the request's pages, as far as they are known; the lease adds to the list.
        """
        names = [] if names is None else names
        self.prefixes.lock(match.handle)
        row, num_pages = self.table.take_row(), len(match.pages)
        self.table.put(row, 0, match.pages)
        self._last_owners.of_row[row] = owner
        self.tier.reused(names, match.pages)
        num_tokens = tokens_in(num_pages, self.page_size)
        lease = Lease(row, num_pages, num_tokens, num_pages, match.handle, owner, salt, names)
        self.snapshots.begin(lease, match)
        return lease

    def grow(self, lease: Lease, num_tokens: int) -> None:
        """Allocates pages so that the lease holds `num_tokens` tokens; evicts if need be."""
        if num_tokens > lease.num_tokens:
            needed = pages_for(num_tokens, self.page_size)
            pages = self._allocate(needed - lease.num_pages)
            self.table.pages[lease.row, lease.num_pages : needed] = pages
            self._last_owners.of_page[pages] = lease.owner
            lease.num_pages, lease.num_tokens = needed, tokens_in(needed, self.page_size)

    def grow_loaded(self, lease: Lease, num_pages: int) -> IntArray:
        """Allocates `num_pages` more, which an insert fills and not a step; all pages of the lease must be full."""
        first = lease.num_pages
        self.grow(lease, tokens_in(first + num_pages, self.page_size))
        pages = self.table.pages[lease.row, first : lease.num_pages].copy()
        self.table.put(lease.row, first, pages)
        return pages

    def share(self, lease: Lease, token_ids: IntArray) -> None:
        """Gives the full pages of `token_ids`, whose KV is stored or in flight, to the prefix cache.

        Where another request has inserted the same tokens already, its pages replace the lease's own in the row, and
        those are freed: a row never names a page that it neither owns nor locks. Steps in flight may still write the
        freed pages; steps run in order, so a later owner writes after them.
        """
        num_full = full_pages(len(token_ids), self.page_size)
        if num_full <= lease.num_shared or lease.is_retired:
            return
        row = self.table.pages[lease.row]
        token_pages = as_pages(token_ids, self.page_size)
        done = self.prefixes.insert(token_pages, row[:num_full], lease.handle, lease.salt)
        self.tier.name(lease.names, token_pages, lease.salt)
        self.tier.entered(lease.names, done.pages, done.num_existing, token_pages, lease.salt)
        if not lease.salt:
            self._tell_stored(token_pages, done, lease.names)
        self.prefixes.lock(done.handle)
        self.prefixes.unlock(lease.handle)
        self._allocator.free(row[lease.num_shared : done.num_existing])
        self.table.put(lease.row, lease.num_shared, done.pages[lease.num_shared : done.num_existing])
        lease.handle, lease.num_shared = done.handle, len(done.pages)

    def sent(self, rows: Iterable[int]) -> None:
        """A step that carries what `PageTable.unsent` has of `rows` is launched next."""
        self.table.sent(rows)

    def land(
        self, token_ids: IntArray, first_page: int, num_pages: int, owner: str, salt: bytes = b""
    ) -> tuple[IntArray, npt.NDArray[Any] | None]:
        """Caches KV that was computed elsewhere, `num_pages` pages from `first_page` on, as a prefix of `token_ids`.

        Returns the pages to be filled before the next step, which stand for the last ones of those: what is cached by
        now is left out. If pages before `first_page` have left the pool for host memory, there are as many more in
        front, and what is to fill these. [] if the prefix before `first_page` is in neither tier. There must
        be as many pages available. Nothing is locked, so they may be evicted like any prefix. `owner` is a name for the
        report of a leak.
        """
        self._num_changes += 1
        token_pages = as_pages(token_ids, self.page_size)[: first_page + num_pages]
        match, names = self.prefixes.match(token_pages, salt), list[bytes]()
        num_cached = len(match.pages)
        self.tier.name(names, token_pages, salt)
        hosted = self.tier.run_of(names[:first_page], num_cached)
        if num_cached + len(hosted) < first_page or num_cached == len(token_pages):
            return match.pages[:0], None
        self.prefixes.lock(match.handle)
        pages = self._allocate(len(token_pages) - num_cached)
        self._last_owners.of_page[pages] = owner
        done = self.prefixes.insert(token_pages, np.concatenate((match.pages, pages)), None, salt)
        self.tier.entered(names, done.pages, done.num_existing, token_pages, salt)
        self.prefixes.unlock(match.handle)
        if not salt:
            self._tell_stored(token_pages, done, names)
        return pages, self.tier.load(hosted) if hosted else None

    def release(self, lease: Lease, token_ids: IntArray) -> None:
        """Ends the lease: full pages of `token_ids` go to the prefix cache, the rest and the row are freed."""
        self.share(lease, token_ids)
        self.snapshots.release(lease, len(token_ids))
        self.drop(lease)

    def drop(self, lease: Lease) -> None:
        """Ends the lease at once: own pages and the row are freed, the shared prefix is unlocked."""
        self._allocator.free(self.table.pages[lease.row, lease.num_shared : lease.num_pages])
        self.snapshots.drop(lease)
        self.prefixes.unlock(lease.handle)
        self.table.free_row(lease.row)

    def flush(self) -> None:
        """Drops every cached prefix that no request uses, and all that is in host memory."""
        self._num_changes += 1
        pages = self.prefixes.flush()
        self._allocator.free(pages)
        self.tier.flush(pages)
        if len(pages):
            if self.prefixes.num_pages:
                self._observer.removed(pages)
            else:
                self._observer.cleared()

    def retire(self, leases: Iterable[Lease]) -> None:
        """Lets no later request find what is cached now, under any salt: the weights that computed it are gone.

        Pages that `leases` hold stay theirs. They share nothing any more, not even with each other: what one computes
        now would be replaced by what another one has computed before.
        """
        self._allocator.free(self.prefixes.flush())
        self.tier.clear()
        self.num_retired += 1
        self._num_changes += 1
        self.prefixes.rename(retired(self.num_retired))
        for lease in leases:
            lease.is_retired = True
        self._observer.cleared()

    def go_on_from(self, former: CacheManager) -> None:
        """Counts exchanges of weights on from the cache in whose place this empty one comes."""
        self.num_retired = former.num_retired
        if self.num_retired:
            self.prefixes.rename(retired(self.num_retired))

    @property
    def is_original(self) -> bool:
        """Whether all that is cached was computed by the weights of the start."""
        return not self.num_retired

    def page_states(self, leases: Iterable[Lease]) -> npt.NDArray[np.uint8]:
        """`[num_pages - 1]` where each page but the dummy page is, a `PageState`; `leases` are all there are."""
        states = np.full(self.num_pages, PageState.EVICTABLE, np.uint8)
        states[self._allocator.free_pages()] = PageState.FREE
        for lease in leases:
            row = self.table.pages[lease.row]
            states[row[: lease.num_shared]] = PageState.LOCKED
            states[row[lease.num_shared : lease.num_pages]] = PageState.OWNED
        return states[DUMMY_PAGE + 1 :]

    def leaks(self, leases: Iterable[Lease], loading: Iterable[HostPage] = ()) -> list[str]:
        """What is wrong with pages, rows and locks, given all leases, and all host pages that requests wait for."""
        leases = list(leases)
        found = audit(self._allocator, self.table, self.prefixes, leases, self._last_owners)
        return found + self.snapshots.wrong(leases) + self.tier.wrong(self.prefixes, loading)

    def check(self, leases: Iterable[Lease], loading: Iterable[HostPage] = ()) -> None:
        """Raises AssertionError if `leaks` finds anything, with what it finds."""
        leaks = self.leaks(leases, loading)
        assert not leaks, "; ".join(leaks)

    def pages_for(self, num_tokens: int) -> int:
        """Pages that `num_tokens` tokens take."""
        return pages_for(num_tokens, self.page_size)

    def tokens_of(self, num_pages: int) -> int:
        """Tokens that `num_pages` pages hold."""
        return tokens_in(num_pages, self.page_size)

    def num_exclusive(self, lease: Lease) -> int:
        """Pages that come free or can be evicted when the lease ends: its own, and the prefix that it alone locks."""
        return lease.num_pages - lease.num_shared + self.prefixes.num_exclusive(lease.handle)

    def page_floor(self, num_tokens: int) -> int:
        """`num_tokens` rounded down to whole pages, in tokens."""
        return tokens_in(full_pages(num_tokens, self.page_size), self.page_size)

    def _allocate(self, count: int) -> IntArray:
        missing = count - self._allocator.num_free
        if missing > 0:
            evicted = self.prefixes.evict(missing)
            self.num_evicted += len(evicted)
            self._allocator.free(evicted)
            self._observer.removed(self._move_to_host(evicted))
        return self._allocator.allocate(count)

    def _move_to_host(self, evicted: IntArray) -> IntArray:
        """Returns those of the `evicted` pages that are in no tier; the others go on in host memory."""
        hosted, slots = self.tier.left(evicted)
        if not len(hosted):
            return evicted
        self._observer.moved(hosted, self.num_pages + slots)
        return np.setdiff1d(evicted, hosted)

    def _gone_from_host(self, slots: Sequence[int]) -> None:
        self._observer.removed(self.num_pages + np.array(slots, np.int32))

    def _tell_stored(self, token_pages: IntArray, done: Insertion, names: list[bytes]) -> None:
        """Tells the observer of the pages that the cache took, if any; those that are hosted were stored before."""
        first = done.num_existing
        if slots := self.tier.hosted_slots(names[first : len(done.pages)]):
            self._observer.moved(self.num_pages + np.array(slots, np.int32), done.pages[first : first + len(slots)])
            first += len(slots)
        if first < len(done.pages):
            parent = int(done.pages[first - 1]) if first else DUMMY_PAGE
            self._observer.stored(token_pages[first:], done.pages[first:], parent)
