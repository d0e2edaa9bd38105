"""KV splits: enough of them to fill a chip, even by real length, and merged without a trace."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.partition import EMPTY_LSE, choose_num_splits, merge_splits, split_tiles

quick = settings(max_examples=60, deadline=None, derandomize=True, database=None)
parts: Any = split_tiles  # takes numbers as well as arrays of them


def num_splits(num_seqs: int, longest_kv: int) -> int:
    return choose_num_splits(num_seqs, 8, longest_kv, min_tokens=128, programs_at_once=400)


def test_a_batch_that_fills_the_chip_is_not_split() -> None:
    assert num_splits(256, 4096) == 1


def test_a_single_sequence_is_split_until_the_chip_is_full() -> None:
    assert num_splits(1, 16384) * 8 >= 0.8 * 400


def test_short_sequences_are_not_cut_below_the_minimum() -> None:
    assert num_splits(1, 512) == 4
    assert num_splits(1, 1) == 1


def test_more_splits_bound_what_one_program_reads_of_a_long_sequence() -> None:
    assert num_splits(40, 32768) >= 8
    assert num_splits(40, 32768) * 40 * 8 <= 8 * 400


@given(st.integers(0, 3000), st.integers(0, 3000), st.integers(1, 12), st.sampled_from([16, 64]))
@quick
def test_splits_cover_every_tile_once_and_evenly(first: int, more: int, splits: int, tile: int) -> None:
    last = first + more
    ranges = [tuple(map(int, parts((first, last), s, splits, tile))) for s in range(splits)]
    tiles = [t for begin, end in ranges for t in range(begin, end)]
    assert tiles == list(range(first // tile, last // tile + 1))
    sizes = [end - begin for begin, end in ranges if begin < end]
    assert max(sizes) == -(-len(tiles) // splits)


def test_a_padding_row_has_empty_splits_only() -> None:
    assert all(begin >= end for begin, end in (parts((0, -1), s, 4, 64) for s in range(4)))


@pytest.mark.parametrize("splits", [1, 2, 7])
def test_merged_splits_equal_one_softmax_and_empty_ones_count_nothing(splits: int) -> None:
    rng = np.random.default_rng(splits)
    scores = rng.normal(size=(splits, 3, 4, 8)) * 20
    values = rng.normal(size=(splits, 3, 4, 8, 16))
    is_empty = rng.random((splits, 3, 1)) < 0.4
    is_empty[:, 0], is_empty[0, 1] = True, False  # a padding row, and one that has something

    weights = np.exp2(scores)
    lse = np.where(is_empty, EMPTY_LSE, np.log2(weights.sum(-1)))
    partials = np.einsum("xsnl,xsnlh->xsnh", weights / weights.sum(-1, keepdims=True), values)
    partials[np.broadcast_to(is_empty, lse.shape)] = np.nan  # never written
    merged = np.asarray(merge_splits(jnp.asarray(partials, jnp.float32), jnp.asarray(lse, jnp.float32)))

    weights *= ~is_empty[..., None]
    expected = np.einsum("xsnl,xsnlh->snh", weights, values)[1:] / weights.sum((0, 3))[1:, :, None]
    np.testing.assert_allclose(merged[1:], expected, rtol=1e-4, atol=1e-5)
    assert (merged[0] == 0).all()
