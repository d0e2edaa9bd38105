from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxsgl.cache.pages import IntArray, as_pages
from jaxsgl.cache.radix import RadixCache
from tests.cache_mirror import cached_prefixes


def token_pages(tokens: list[int], page_size: int = 1) -> IntArray:
    return as_pages(np.array(tokens, dtype=np.int32), page_size)


def page_ids(*ids: int) -> IntArray:
    return np.array(ids, dtype=np.int32)


def test_a_match_is_the_longest_cached_prefix_in_whole_pages() -> None:
    tree = RadixCache(page_size=2)
    tree.insert(token_pages([1, 2, 3, 4, 5, 6], 2), page_ids(10, 11, 12))
    assert tree.match(token_pages([1, 2, 3, 4, 5, 9], 2)).pages.tolist() == [10, 11]
    assert tree.match(token_pages([1, 9, 3, 4], 2)).pages.tolist() == []
    assert tree.match(token_pages([1, 2, 3, 4, 5, 6, 7, 8], 2)).pages.tolist() == [10, 11, 12]
    assert sorted(tree.owned_pages().tolist()) == [10, 11, 12]


def test_inserting_a_partly_cached_sequence_takes_only_the_new_tail() -> None:
    tree = RadixCache(page_size=1)
    tree.insert(token_pages([1, 2, 3]), page_ids(10, 11, 12))
    done = tree.insert(token_pages([1, 2, 7, 8]), page_ids(20, 21, 22, 23))
    assert done.num_existing == 2
    assert done.pages.tolist() == [10, 11, 22, 23]
    assert sorted(tree.owned_pages().tolist()) == [10, 11, 12, 22, 23]


def test_a_lock_keeps_a_prefix_and_its_ancestors() -> None:
    tree = RadixCache(page_size=1)
    deep = tree.insert(token_pages([1, 2, 3]), page_ids(10, 11, 12)).handle
    tree.insert(token_pages([1, 5]), page_ids(20, 21))
    tree.lock(deep)
    assert tree.num_evictable == 1
    assert tree.evict(100).tolist() == [21]
    tree.unlock(deep)
    assert sorted(tree.evict(100).tolist()) == [10, 11, 12]


def test_a_handle_stays_valid_when_its_node_is_split() -> None:
    tree = RadixCache(page_size=1)
    handle = tree.insert(token_pages([1, 2, 3, 4]), page_ids(10, 11, 12, 13)).handle
    tree.lock(handle)
    tree.match(token_pages([1, 2, 9]))  # splits after two pages
    assert tree.num_evictable == 0
    tree.owned_pages()
    tree.unlock(handle)
    assert tree.num_evictable == 4


def test_locks_are_counted() -> None:
    tree = RadixCache(page_size=1)
    handle = tree.insert(token_pages([1]), page_ids(10)).handle
    tree.lock(handle)
    tree.lock(handle)
    tree.unlock(handle)
    assert tree.evict(1).tolist() == []
    tree.unlock(handle)
    assert tree.evict(1).tolist() == [10]


def test_the_least_recently_used_leaf_goes_first() -> None:
    tree = RadixCache(page_size=1)
    for token in range(4):
        tree.insert(token_pages([token]), page_ids(10 + token))
    tree.match(token_pages([0]))
    tree.match(token_pages([2]))
    assert [tree.evict(1).tolist() for _ in range(4)] == [[11], [13], [10], [12]]


def test_eviction_takes_only_as_much_of_a_tail_as_is_needed() -> None:
    tree = RadixCache(page_size=1)
    tree.insert(token_pages([1, 2, 3, 4]), page_ids(10, 11, 12, 13))
    assert tree.evict(1).tolist() == [13]
    assert tree.match(token_pages([1, 2, 3, 4])).pages.tolist() == [10, 11, 12]
    tree.owned_pages()


def test_a_parent_can_be_evicted_once_its_children_are_gone() -> None:
    tree = RadixCache(page_size=1)
    tree.insert(token_pages([1, 2]), page_ids(10, 11))
    tree.insert(token_pages([1, 3]), page_ids(20, 21))
    assert sorted(tree.evict(3).tolist()) == [10, 11, 21]
    assert tree.num_pages == 0


def test_flush_keeps_what_is_locked() -> None:
    tree = RadixCache(page_size=1)
    handle = tree.insert(token_pages([1, 2]), page_ids(10, 11)).handle
    tree.insert(token_pages([3]), page_ids(12))
    tree.lock(handle)
    assert tree.flush().tolist() == [12]
    assert tree.num_pages == 2


@settings(max_examples=150)
@given(
    page_size=st.sampled_from([1, 2, 5]),
    ops=st.lists(
        st.tuples(
            st.sampled_from(["insert", "match", "evict", "lock", "unlock"]),
            st.lists(st.integers(0, 1), max_size=12),
            st.sampled_from([b"", b"salt", bytes(8)]),  # the last one looks like tokens
        ),
        max_size=40,
    ),
)
def test_the_tree_agrees_with_a_dictionary_of_prefixes(page_size: int, ops: list[tuple[str, list[int], bytes]]) -> None:
    tree = RadixCache(page_size)
    # Salt and prefix that ends at a page border -> the page of its last tokens.
    page_of: dict[tuple[bytes, tuple[int, ...]], int] = {}
    locks: list[tuple[object, int]] = []
    next_page = 1

    def cached_prefix(tokens: list[int], salt: bytes) -> list[int]:
        found = []
        for end in range(page_size, len(tokens) + 1, page_size):
            if (salt, tuple(tokens[:end])) not in page_of:
                break
            found.append(page_of[salt, tuple(tokens[:end])])
        return found

    for op, tokens, salt in ops:
        rows = token_pages(tokens, page_size)
        if op == "insert":
            fresh = list(range(next_page, next_page + len(rows)))
            next_page += len(rows)
            existing = cached_prefix(tokens, salt)
            done = tree.insert(rows, page_ids(*fresh), salt=salt)
            assert done.num_existing == len(existing)
            assert done.pages.tolist() == existing + fresh[len(existing) :]
            for i, page in enumerate(done.pages.tolist()):
                page_of[salt, tuple(tokens[: (i + 1) * page_size])] = page
        elif op == "match":
            assert tree.peek(rows, salt).num_pages == len(cached_prefix(tokens, salt))
            assert tree.match(rows, salt).pages.tolist() == cached_prefix(tokens, salt)
        elif op == "evict":
            before = tree.num_evictable
            freed = set(tree.evict(len(tokens)).tolist())
            assert len(freed) == min(len(tokens), before)
            page_of = {prefix: page for prefix, page in page_of.items() if page not in freed}
        elif op == "lock":
            match = tree.match(rows, salt)
            tree.lock(match.handle)
            locks.append((match.handle, len(match.pages)))
        elif locks:
            tree.unlock(locks.pop()[0])
        assert sorted(tree.owned_pages().tolist()) == sorted(page_of.values())
        assert sorted(cached_prefixes(tree.edges()).values()) == sorted(prefix for salt, prefix in page_of if not salt)
        assert not locks or tree.num_pages - tree.num_evictable >= max(pages for _, pages in locks)


def seconds_per_eviction(num_leaves: int) -> float:
    tree = RadixCache(page_size=1)
    for leaf in range(num_leaves):
        tree.insert(token_pages([leaf]), page_ids(leaf + 1))
    best = float("inf")
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(100):
            tree.evict(1)
        best = min(best, (time.perf_counter() - start) / 100)
    return best


def test_evicting_from_a_tree_fifty_times_larger_is_not_much_slower() -> None:
    assert seconds_per_eviction(50_000) < 10 * seconds_per_eviction(1_000)


@pytest.mark.parametrize("damage", ["locks", "count", "heap"])
def test_the_integrity_check_finds_damage(damage: str) -> None:
    tree = RadixCache(page_size=1)
    node = tree.insert(token_pages([1, 2]), page_ids(10, 11)).handle
    if damage == "locks":
        node.locks += 1  # type: ignore[attr-defined]
    elif damage == "count":
        tree._num_pages += 1
    else:
        node.in_heap = False  # type: ignore[attr-defined]
    with pytest.raises(AssertionError):
        tree.owned_pages()


def test_a_prefix_with_a_single_lock_grows_without_new_edges() -> None:
    tree = RadixCache(page_size=1)
    handle = tree.insert(token_pages([1, 2]), page_ids(10, 11)).handle
    tree.lock(handle)
    assert tree.insert(token_pages([1, 2, 3]), page_ids(10, 11, 12), handle).handle is handle
    assert (tree.num_pages, tree.num_evictable) == (3, 0)
    tree.lock(handle)  # another lock holds it as well: its end must stay where it is
    longer = tree.insert(token_pages([1, 2, 3, 4]), page_ids(10, 11, 12, 13), handle)
    assert longer.handle is not handle
    assert longer.pages.tolist() == [10, 11, 12, 13]
    tree.unlock(handle)
    beside = tree.insert(token_pages([1, 2, 3, 5]), page_ids(10, 11, 12, 14), handle)
    assert beside.handle not in (handle, longer.handle), "others go on from its end"
    tree.unlock(handle)
    assert tree.num_evictable == 5
    assert sorted(tree.owned_pages().tolist()) == [10, 11, 12, 13, 14]


def test_an_outline_has_what_is_in_use_and_then_what_was_used_last() -> None:
    tree = RadixCache(page_size=1)
    old = tree.insert(token_pages([1, 2, 3]), page_ids(10, 11, 12)).handle
    tree.insert(token_pages([1, 2, 4]), page_ids(20, 21, 22))
    for first in range(100, 110):
        tree.insert(token_pages([first, 1]), page_ids(first, first + 100))
    tree.lock(old)
    nodes = tree.outline(5)
    assert nodes[:2] == [(-1, 2, 1, 2), (0, 1, 1, 0)]  # [1, 2], in use by way of its child, and the child [3]
    assert nodes[2:] == [(-1, 2, 0, 0)] * 3
    assert sum(node.num_pages for node in tree.outline(100)) == tree.num_pages
