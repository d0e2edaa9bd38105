"""Decode reads pages that sequences share once for several of them; groups and outputs are right."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import AttentionOptions, PagedKv, paged_decode_attention, tuning
from pallas_kernels.xla.decode_shared import find_groups
from tests.grids import count, covering, daily
from tests.pallas_kernels.cases import assert_close
from tests.pallas_kernels.texts import LONGEST, NUM_SEQS, TEXTS, lay_out, random_texts, unseen_places

NUM_KV_HEADS, NUM_GROUPS, HEAD_DIM = 2, 2, 16


def decode_args(texts: list[str], page_size: int, cache_dtype: str, seed: int) -> tuple[jax.Array, PagedKv]:
    """float32 queries, a cache in `cache_dtype` with NaN wherever no sequence sees it, page table, lengths."""
    rng = np.random.default_rng(seed)
    table, lengths = lay_out(texts, page_size, seed)
    shape = (1 + NUM_SEQS * LONGEST // page_size, NUM_KV_HEADS, page_size, HEAD_DIM)
    unseen = unseen_places(table, lengths, page_size)
    cache = (np.where(unseen[:, None, :, None], np.nan, rng.normal(size=shape)) for _ in range(2))
    q = rng.normal(size=(NUM_SEQS, NUM_KV_HEADS * NUM_GROUPS, HEAD_DIM))
    ints = (jnp.asarray(a, jnp.int32) for a in (table, lengths))
    return jnp.asarray(q, jnp.float32), PagedKv(*(jnp.asarray(pages, cache_dtype) for pages in cache), *ints)


@functools.cache
def compiled(backend: str, **options: Any):
    return jax.jit(functools.partial(paged_decode_attention, backend=backend, options=AttentionOptions(**options)))


def check(texts: list[str], page_size: int, cache_dtype: str, seed: int, **options: Any) -> None:
    args = decode_args(texts, page_size, cache_dtype, seed)
    assert_close(compiled("xla", **options)(*args), compiled("reference", **options)(*args), "float32")


@pytest.mark.parametrize(
    ("name", "page_size", "cache_dtype"), covering(list(TEXTS), [1, 16, 64], ["float32", "float16"])
)
def test_decode_over_shared_pages_equals_the_reference(name: str, page_size: int, cache_dtype: str) -> None:
    for seed in range(count(1, 2)):
        check(TEXTS[name], page_size, cache_dtype, seed)


@pytest.mark.parametrize(("page_size", "option", "value"), [(1, "logit_soft_cap", 1.5), (16, "sliding_window", 70)])
@pytest.mark.parametrize("name", ["groups of 1 to 9", "nested", "equal to the end"])
def test_a_cap_and_a_window_hold_over_shared_pages(name: str, page_size: int, option: str, value: float) -> None:
    check(TEXTS[name], page_size, "float16", 3, **{option: value})


@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_decode_over_any_tree_of_texts_equals_the_reference(page_size: int) -> None:
    @settings(max_examples=15, derandomize=True, database=None)
    @given(random_texts(), st.integers(0, 2**32 - 1))
    def prop(texts: list[str], seed: int) -> None:
        check(texts, page_size, "float16" if seed % 2 else "float32", seed)

    prop()


@pytest.mark.parametrize(
    ("page_size", "tile_tokens", "batch_tokens", "joined_heads"),
    daily([(1, 16, 1, 1), (16, 48, 96, 1), (1, 32, 352, 2)], every=2),
)
def test_sharing_is_right_for_any_block_sizes(
    page_size: int, tile_tokens: int, batch_tokens: int, joined_heads: int
) -> None:
    sizes = {"tile_tokens": tile_tokens, "batch_tokens": batch_tokens, "joined_heads": joined_heads}
    args = [decode_args(TEXTS[name], page_size, "float32", 5) for name in ("groups of 1 to 9", "nested")]
    expected = [compiled("reference")(*a) for a in args]
    with tuning.override("paged_decode_attention", "xla", sizes):
        actual = [paged_decode_attention(*a, backend="xla") for a in args]
    for ours, theirs in zip(actual, expected, strict=True):
        assert_close(ours, theirs, "float32")


PAGE_SIZE, TILE_PAGES = 4, 2


_find = jax.jit(find_groups, static_argnums=(2, 3))


def groups_of(rows: list[list[int]], lengths: list[int]) -> dict[tuple[int, ...], int]:
    """Sequences of each group and the tiles that it shares; checks that all numbers of `Groups` fit together."""
    found = _find(jnp.asarray(rows), jnp.asarray(lengths), PAGE_SIZE, TILE_PAGES)
    order, place, group, tiles, seat = (np.asarray(x).tolist() for x in found)
    assert sorted(order) == list(range(len(rows))) and [place[s] for s in order] == list(range(len(rows)))
    num_real = sum(length > 0 for length in lengths)
    assert all(lengths[s] > 0 for s in order[:num_real])
    assert not any(tiles[num_real:])
    members: dict[int, list[int]] = {}
    for i in range(num_real):
        assert seat[i] == len(members.setdefault(group[i], []))
        assert not members[group[i]] or (group[i], tiles[i]) == (group[i - 1], tiles[i - 1])
        members[group[i]].append(order[i])
    assert not set(group[num_real:]) & set(members)
    return {tuple(sorted(members[number])): tiles[group.index(number)] for number in members}


A, B = [1, 2, 3, 4, 5, 6], [11, 12, 13, 14, 15, 16]


@pytest.mark.parametrize(
    ("rows", "lengths", "groups"),
    [
        pytest.param([A, B, A, B, [7] * 6], [24, 24, 24, 23, 24], {(0, 2): 2, (1, 3): 2, (4,): 0}, id="two and one"),
        pytest.param([[*A[:5], 9], A], [24, 24], {(0, 1): 2}, id="part of a tile is not shared"),
        pytest.param([[*A[:3], 9, 9, 9], A], [24, 24], {(0, 1): 1}, id="up to the first other page"),
        pytest.param([[1, 9, *A[2:]], A], [24, 24], {(0, 1): 0}, id="equal pages after another are not shared"),
        pytest.param([[9, *A[1:]], A], [24, 24], {(0,): 0, (1,): 0}, id="another first page"),
        pytest.param([A, A], [16, 16], {(0, 1): 1}, id="not the page of the last token"),
        pytest.param([A, A], [17, 17], {(0, 1): 2}, id="but all before it"),
        pytest.param([A, A, A], [24, 9, 24], {(0, 1, 2): 1}, id="the shortest decides"),
        pytest.param([A, A], [4, 4], {(0, 1): 0}, id="one page each"),
        pytest.param([A, A[:4] + B[:2], A[:2] + B[:4], A], [24] * 4, {(0, 1, 2, 3): 1}, id="nested: what all share"),
        pytest.param([A, A, B, A], [0, 24, 24, 24], {(1, 3): 2, (2,): 0}, id="padding that leads"),
        pytest.param([A, B, A], [24, 24, 0], {(0,): 0, (1,): 0}, id="padding is no company"),
        pytest.param([B, A, B], [0, 0, 0], {}, id="only padding"),
        pytest.param([B, *[A] * 9], [24] * 10, {(0,): 0, tuple(range(1, 10)): 2}, id="nine"),
    ],
)
def test_groups_share_the_whole_tiles_that_all_of_them_begin_with(
    rows: list[list[int]], lengths: list[int], groups: dict[tuple[int, ...], int]
) -> None:
    assert groups_of(rows, lengths) == groups
