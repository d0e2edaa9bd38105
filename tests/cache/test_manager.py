from __future__ import annotations

import numpy as np
import pytest

from jaxsgl.cache.manager import CacheManager
from jaxsgl.cache.pages import IntArray, PageTable
from jaxsgl.cache.prefix import NaiveCache
from jaxsgl.cache.radix import RadixCache


def manager(num_pages: int = 12, page_size: int = 4, rows: int = 3, radix: bool = True) -> CacheManager:
    prefixes = RadixCache(page_size) if radix else NaiveCache()
    return CacheManager(num_pages, page_size, PageTable(rows, 8), prefixes)


def ids(n: int, start: int = 0) -> IntArray:
    return np.arange(start, start + n, dtype=np.int32)


def test_a_fully_cached_prompt_still_leaves_a_token_to_compute() -> None:
    cache = manager()
    lease = cache.acquire(cache.match(ids(8)))
    cache.grow(lease, 8)
    cache.release(lease, ids(8))
    assert len(cache.match(ids(8)).pages) == 1  # of two: the last token must be computed, and pages are whole
    assert len(cache.match(ids(9)).pages) == 2


def test_sharing_frees_the_duplicate_and_renames_it_in_the_row() -> None:
    cache = manager()
    first = cache.acquire(cache.match(ids(8)))
    second = cache.acquire(cache.match(ids(8)))
    cache.grow(first, 8)
    cache.grow(second, 9)
    cache.share(first, ids(8))
    free_before = cache.num_free
    cache.share(second, ids(8))
    assert cache.num_free == free_before + 2
    assert cache.table.pages[second.row, :2].tolist() == cache.table.pages[first.row, :2].tolist()
    cache.check([first, second])


def test_only_pages_that_another_request_has_computed_are_to_be_sent_to_the_device() -> None:
    """The step that computes a request's own pages tells them. A row that is given back owes nothing."""
    cache = manager()
    first, second = (cache.acquire(cache.match(ids(12))) for _ in range(2))
    for lease in (first, second):
        cache.grow(lease, 9)
        cache.share(lease, ids(9))
    rows = [first.row, second.row]
    shared = cache.table.pages[first.row, :2].tolist()
    expected = [[second.row, i, page] for i, page in enumerate(shared)]
    assert cache.table.unsent([first.row]).size == 0
    assert cache.table.unsent(rows).T.tolist() == expected
    third = cache.acquire(cache.match(ids(9)))
    expected += [[third.row, i, page] for i, page in enumerate(shared)]
    assert cache.table.unsent([*rows, third.row]).T.tolist() == expected
    cache.sent(rows)
    assert cache.table.unsent([*rows, third.row]).T.tolist() == expected[2:]
    cache.drop(third)
    assert cache.acquire(cache.match(ids(3))).row == third.row
    assert cache.table.unsent([third.row]).size == 0


def test_growing_evicts_prefixes_that_no_request_uses() -> None:
    cache = manager(num_pages=5)
    lease = cache.acquire(cache.match(ids(16)))
    cache.grow(lease, 16)
    cache.release(lease, ids(16))
    assert (cache.num_free, cache.num_available) == (0, 4)
    other = cache.acquire(cache.match(ids(9, start=50)))
    cache.grow(other, 9)
    cache.check([other])
    assert len(cache.match(ids(16)).pages) == 1  # the tail went first


def test_without_a_radix_tree_all_pages_come_back_at_the_end() -> None:
    cache = manager(radix=False)
    lease = cache.acquire(cache.match(ids(8)))
    cache.grow(lease, 10)
    cache.share(lease, ids(8))
    cache.check([lease])
    cache.release(lease, ids(10))
    assert cache.num_free == 11
    assert len(cache.match(ids(8)).pages) == 0


@pytest.mark.parametrize("damage", ["lost page", "page in two places", "stale entry", "lost row", "forgotten lock"])
def test_the_integrity_check_finds_damage(damage: str) -> None:
    cache = manager()
    lease = cache.acquire(cache.match(ids(8)))
    cache.grow(lease, 8)
    cache.check([lease])
    if damage == "lost page":
        lease.num_pages -= 1
        cache.table.pages[lease.row, 1] = 0
    elif damage == "page in two places":
        cache.table.pages[lease.row, 0] = cache.table.pages[lease.row, 1]
    elif damage == "stale entry":
        cache.table.pages[lease.row, 5] = 3
    elif damage == "lost row":
        cache.table.take_row()
    else:
        cache.share(lease, ids(8))
        cache.prefixes.lock(lease.handle)
        cache.release(lease, ids(8))
    with pytest.raises(AssertionError):
        cache.check([] if damage == "forgotten lock" else [lease])
