from __future__ import annotations

import hashlib

import numpy as np

from jaxsgl.cache.manager import CacheManager
from jaxsgl.cache.pages import IntArray, Lease, PageTable
from jaxsgl.cache.prefix import CacheObserver, NaiveCache, page_hashes
from jaxsgl.cache.radix import RadixCache


class Heard(CacheObserver):
    """An observer that records its notifications."""

    def __init__(self) -> None:
        self.events: list[tuple[str, list[int], int]] = []

    def stored(self, token_pages: IntArray, pages: IntArray, parent: int) -> None:
        assert len(token_pages) == len(pages)
        self.events.append(("stored", token_pages[:, 0].tolist(), parent))

    def removed(self, pages: IntArray) -> None:
        self.events.append(("removed", pages.tolist(), 0))

    def moved(self, pages: IntArray, to: IntArray) -> None:
        self.events.append(("moved", pages.tolist(), int(to[0])))

    def cleared(self) -> None:
        self.events.append(("cleared", [], 0))


def observed(num_pages: int = 12, radix: bool = True) -> tuple[CacheManager, Heard]:
    cache = CacheManager(num_pages, 4, PageTable(3, 8), RadixCache(4) if radix else NaiveCache())
    heard = Heard()
    cache.observe(heard)
    return cache, heard


def ids(n: int, start: int = 0) -> IntArray:
    return np.arange(start, start + n, dtype=np.int32)


def leased(cache: CacheManager, token_ids: IntArray) -> Lease:
    lease = cache.acquire(cache.match(token_ids))
    cache.grow(lease, len(token_ids))
    return lease


def test_a_hash_is_chained_over_all_tokens_before() -> None:
    tokens = ids(12).reshape(3, 4)
    first, second, third = page_hashes(tokens, None)
    digest = hashlib.blake2b(bytes(8) + tokens[0].tobytes(), digest_size=8).digest()
    assert first == int.from_bytes(digest, "little", signed=True)
    assert page_hashes(tokens[1:], first) == [second, third]
    assert page_hashes(tokens[1:], None) != [second, third]
    assert len({first, second, third, *page_hashes(tokens + 1, None)}) == 6


def test_hashes_are_signed_numbers_of_64_bits() -> None:
    hashes = page_hashes(ids(4000).reshape(1000, 4), None)
    assert min(hashes) < 0 < max(hashes)
    assert all(-(2**63) <= number < 2**63 for number in hashes)


def test_full_pages_are_reported_once_even_if_two_requests_compute_them() -> None:
    cache, heard = observed()
    first, second = leased(cache, ids(11)), leased(cache, ids(13))
    cache.share(first, ids(11))
    cache.share(second, ids(13))
    cache.release(first, ids(11))
    assert heard.events == [("stored", [0, 4], 0), ("stored", [8], int(cache.table.pages[second.row, 1]))]


def test_evictions_are_events_and_splits_are_not() -> None:
    cache, heard = observed(num_pages=7)
    cache.release(leased(cache, ids(16)), ids(16))
    cache.match(np.append(ids(8), [7, 7, 7, 7]))  # splits
    assert [kind for kind, *_ in heard.events] == ["stored"]
    other = leased(cache, ids(15, start=100))  # 4 pages: 2 are free
    kinds = [(kind, len(pages)) for kind, pages, _ in heard.events]
    assert kinds == [("stored", 4), ("removed", 2)]
    cache.check([other])


def test_a_flush_clears_everything_or_removes_the_unused_pages() -> None:
    cache, heard = observed()
    cache.flush()
    cache.release(leased(cache, ids(8)), ids(8))
    running = leased(cache, ids(8, start=50))
    cache.share(running, ids(8, start=50))
    cache.flush()
    cache.release(running, ids(8, start=50))
    cache.flush()
    assert [kind for kind, *_ in heard.events] == ["stored", "stored", "removed", "cleared"]


def test_a_cache_that_keeps_nothing_reports_no_events() -> None:
    cache, heard = observed(radix=False)
    cache.release(leased(cache, ids(11)), ids(11))
    cache.flush()
    assert heard.events == []
    assert list(cache.prefixes.edges()) == []
