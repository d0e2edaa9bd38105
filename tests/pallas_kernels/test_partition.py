"""A decode's items: enough of them to fill a chip, even by the real lengths, and merged without a trace."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.hopper.common import COPY_ROWS
from pallas_kernels.hopper.extend_plan import Item, Plan
from pallas_kernels.options import AttentionOptions
from pallas_kernels.partition import (
    SplitPlan,
    chain_items,
    most_splits,
    plan_splits,
    query_tiles,
    split_sequences,
)
from pallas_kernels.specs import ArgSpec
from tests.pallas_kernels.lower_everything import on_a_device

quick = settings(max_examples=60, derandomize=True, database=None)
SIZES = {"min_split_tokens": 128, "tile_tokens": 64, "programs_per_core": 2}
EVERYTHING = AttentionOptions()
split = jax.jit(split_sequences, static_argnums=(0, 2))


def plan_for(num_seqs: int, max_len: int = 40_960, options: AttentionOptions = EVERYTHING) -> SplitPlan:
    """The plan of a decode with 8 kv heads on an H200: 33 items of each head run at once."""
    spec = ArgSpec("", num_seqs, num_seqs, max_len // 64, 64, 8, 2, 128, dtype=jnp.bfloat16)
    with on_a_device("cuda", "NVIDIA H200", 132):
        return plan_splits(spec.paged_kv(), options, SIZES)


def items_of(plan: SplitPlan, lengths: list[int], options: AttentionOptions = EVERYTHING) -> list[tuple[int, ...]]:
    """Sequence, first tile, the tile after the last, position and number of each item that holds tiles."""
    items, count = jax.tree.map(np.asarray, split(plan, jnp.array(lengths, jnp.int32), options))
    assert items.shape == (plan.num_items, 5)
    found = [tuple(map(int, item)) for item in items if item[1] < item[2]]
    if plan.max_splits > 1:
        for seq in range(len(lengths)):
            assert [item[4] for item in found if item[0] == seq] == list(range(count[seq]))
        assert count.max() <= plan.max_splits
    return found


def num_items(num_seqs: int, length: int, max_len: int = 40_960) -> int:
    return len(items_of(plan_for(num_seqs, max_len), [length] * num_seqs))


tiles_of = jax.jit(query_tiles, static_argnums=(2, 3, 4))
NUM_TOKENS = (1, 37, 90, 245)  # of batches, padding included; few, since each is compiled


@quick
@given(
    st.lists(st.integers(0, 40), min_size=6, max_size=6), st.sampled_from([1, 40]),
    st.sampled_from([(8, 1), (16, 8), (8, 8)]),
)  # fmt: skip
def test_query_tiles_hold_each_token_once_in_its_aligned_rows(
    counts: list[int], most: int, sizes: tuple[int, int]
) -> None:
    tile_queries, align = sizes
    counts = [min(count, most) for count in counts]
    num_tokens = next(n for n in NUM_TOKENS if n >= sum(counts))
    offsets = np.cumsum([0, *counts], dtype=np.int32)
    lengths = np.array(counts, np.int32) + 100
    tiles = np.asarray(tiles_of(jnp.asarray(lengths), jnp.asarray(offsets), num_tokens, tile_queries, align))
    found = []
    for seq, begin, end, position in tiles.tolist():
        found += list(range(begin, end))
        if begin >= end:
            continue
        assert end <= begin // align * align + tile_queries
        assert begin % align == 0 or begin in offsets
        if begin >= offsets[-1]:
            assert position <= -num_tokens
        else:
            assert offsets[seq] <= begin < end <= offsets[seq + 1] and position == 100 + begin - offsets[seq]
    assert found == list(range(num_tokens))


def test_on_hopper_queries_are_copied_from_multiples_of_a_tiles_height_and_not_past_the_end() -> None:
    """TMA reads zeros in the place of rows that reach into the next eight; interpreters read the rows."""

    plan = Plan(EVERYTHING, 64, 1, 5, 64, 64, 3, 1, 64, 1, converts=False, interpret=False)
    assert plan.tile_queries == 24
    for begin in range(64):
        zero = jnp.int32(0)
        item = Item(zero, zero, jnp.int32(begin), zero, zero, zero, zero, zero)
        first = int(item.first_row(plan))
        assert first % COPY_ROWS == 0 and first <= begin and first + 24 <= 64


def test_the_width_of_the_page_table_cuts_nothing() -> None:
    for num_seqs in (32, 64, 128):
        assert num_items(num_seqs, 1024) == num_items(num_seqs, 1024, max_len=1024) == num_seqs


def test_one_long_sequence_is_split_until_the_chip_is_full() -> None:
    assert num_items(1, 40_960) == num_items(1, 40_960, max_len=131_072) == 32  # of 33 at once; 20 tiles each


def test_many_sequences_are_not_split_and_have_no_second_pass() -> None:
    assert plan_for(256).max_splits == 1 and plan_for(256).num_items == 256


def test_short_sequences_are_not_cut_below_the_minimum() -> None:
    assert num_items(1, 512) == 4
    assert num_items(1, 1) == 1


def test_a_long_sequence_among_short_ones_is_cut_and_they_are_not() -> None:
    sizes = [end - begin for _, begin, end, *_ in items_of(plan_for(32), [1024] * 5 + [32_768] + [1024] * 26)]
    assert sizes == [64] * 8 + [16] * 31  # the largest first


def test_a_window_bounds_the_splits_and_what_they_read() -> None:
    windowed = AttentionOptions(sliding_window=1000)
    plan = plan_for(1, options=windowed)
    assert plan.max_splits == 7
    assert [item[1:3] for item in items_of(plan, [4030], windowed)] == [
        (47, 50),
        (50, 53),
        (53, 56),
        (56, 59),
        (59, 62),
        (62, 63),
    ]


# Items at once, tile, window and fewest tiles, for six sequences; few, since each is compiled.
PLANS = [(1, 64, None, 1), (4, 16, 100, 1), (12, 64, 1000, 2), (12, 16, None, 5)]


@given(st.lists(st.integers(0, 3000), min_size=6, max_size=6), st.sampled_from(PLANS))
@quick
def test_items_hold_every_tile_in_view_once(lengths: list[int], shape: tuple[int, int, int | None, int]) -> None:
    at_once, tile, window, min_tiles = shape
    plan = SplitPlan(6 + at_once, most_splits(6, at_once), at_once, min_tiles, tile)
    plan = dataclasses.replace(plan, num_items=min(plan.num_items, 6 * plan.max_splits))
    items = items_of(plan, lengths, AttentionOptions(sliding_window=window))
    for seq, length in enumerate(lengths):
        mine = [item for item in items if item[0] == seq]
        first = 0 if window is None else max(0, length - window)
        tiles = [t for _, begin, end, *_ in mine for t in range(begin, end)]
        assert tiles == (list(range(first // tile, (length - 1) // tile + 1)) if length else [])
        assert all(item[3] == length - 1 for item in mine)
        sizes = [end - begin for _, begin, end, *_ in mine]
        assert len(sizes) < 2 or (min(sizes[:-1]) == max(sizes) and len(sizes) <= -(-len(tiles) // min_tiles))
    assert [item[2] - item[1] for item in items[:1]] == sorted(item[2] - item[1] for item in items)[-1:]


@functools.partial(jax.jit, static_argnums=0)
def chains_and_items(plan: SplitPlan, lengths: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    splits = split_sequences(plan, lengths, EVERYTHING)
    return jnp.asarray(chain_items(plan, splits)), splits.items, splits.counts


@given(st.lists(st.integers(0, 9), min_size=40, max_size=40), st.sampled_from([1, 5, 12]), st.sampled_from([1, 2]))
@quick
def test_chains_hold_every_item_once_and_not_more_than_their_share(
    lengths: list[int], at_once: int, max_splits: int
) -> None:
    """Lengths are powers of two, so that some sequences are as long as all others together."""
    plan = SplitPlan(min(40 * max_splits, 40 + at_once), max_splits, at_once, 1, 4)
    assert plan.is_chained
    plan_lengths = jnp.array([2**length if length else 0 for length in lengths], jnp.int32)
    first, items, counts = map(np.asarray, chains_and_items(plan, plan_lengths))
    assert first.shape == (plan.num_chains + 1,)
    assert first[0] == 0 and first[-1] == counts.sum() and (np.diff(first) >= 0).all()
    costs = items[: counts.sum(), 2] - items[: counts.sum(), 1] + 1
    for begin, end in itertools.pairwise(first):
        left, shortest = costs[begin:].sum(), costs.sum() / 4
        assert costs[begin : end - 1].sum() <= max(left, shortest) / at_once + 1
    assert not np.diff(np.diff(first) == 0, prepend=False).cumsum().max(initial=0) > 1  # empty ones come last


def test_chains_of_a_large_batch_are_few_and_the_last_ones_short() -> None:
    """256 rows of 1k tokens on an H200: 8 rounds of programs would become 4, a row each in the last of them."""
    plan = plan_for(256)
    first = np.asarray(chains_and_items(plan, jnp.full(256, 1024))[0])
    sizes = np.diff(first)[np.diff(first) > 0]
    assert len(sizes) <= 120 and plan.num_chains <= 160
    assert sizes[0] == 7 and (sizes[-60:] == 1).all() and (np.diff(sizes) <= 0).all()


@pytest.mark.parametrize(("num_seqs", "is_chained"), [(1, False), (8, False), (32, False), (128, True)])
def test_batches_of_few_items_have_no_chains(num_seqs: int, is_chained: bool) -> None:
    assert plan_for(num_seqs).is_chained is is_chained


def test_the_places_of_many_items_are_those_of_few() -> None:
    """Splits in fixed order of many long sequences; thousands are not compared pair by pair."""
    fixed = SplitPlan(300 * 16, 16, 5, 1, 4, is_fixed=True)
    lengths = jnp.asarray(np.random.default_rng(1).integers(1, 64, 300), jnp.int32)
    first, _, counts = map(np.asarray, chains_and_items(fixed, lengths))
    assert fixed.num_items > 4096 and counts.sum() == (-(-np.asarray(lengths) // 4)).sum()
    few = dataclasses.replace(fixed, num_items=4000)
    expected = np.asarray(chains_and_items(few, lengths)[0])
    np.testing.assert_array_equal(first, expected)
