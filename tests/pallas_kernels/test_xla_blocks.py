"""The XLA backend is right for any block sizes, not only for those in the tables, and never widens a narrow cache."""

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import paged_decode_attention, paged_extend_attention, store_kv, tuning
from pallas_kernels.specs import ArgSpec
from tests.pallas_kernels.cases import assert_close, build_case, dense_attention

# Empty and full sequences, window borders inside a tile, fewer and more tiles than a batch.
LENGTHS, NUM_QUERIES = [70, 0, 1, 33, 0, 64, 5], [9, 0, 1, 33, 0, 1, 5]


def case_of(page_size: int, sliding_window: int | None):
    spec = ArgSpec("blocks", 7, 52, 72 // page_size, page_size, 4, 2, 16, sliding_window=sliding_window)
    return build_case(spec, LENGTHS, NUM_QUERIES, shared_pages=2, seed=page_size)


@pytest.mark.parametrize(
    ("page_size", "tile_tokens", "batch_tokens", "joined_heads", "window"),
    [(1, 7, 21, 4, 21), (1, 64, 1024, 3, None), (8, 24, 1, 1, 21), (8, 1, 40, 2, None), (8, 512, 1024, 1, None)],
)
def test_decode_is_right_for_any_block_sizes(page_size, tile_tokens, batch_tokens, joined_heads, window) -> None:
    case = case_of(page_size, window)
    sizes = {"tile_tokens": tile_tokens, "batch_tokens": batch_tokens, "joined_heads": joined_heads}
    q, kv = case.decode_args()
    is_real = np.array(LENGTHS) > 0
    offsets = np.concatenate([[0], np.cumsum(is_real)])  # an extend gives padding no row
    expected = np.zeros(q.shape)
    expected[is_real] = dense_attention(q[is_real], offsets, kv, case.spec.options)
    with tuning.override("paged_decode_attention", "xla", sizes):
        actual = paged_decode_attention(q, kv, case.spec.options, backend="xla")
    assert_close(actual, expected, case.spec.dtype)


@pytest.mark.parametrize(
    ("page_size", "tile_queries", "tile_tokens", "window"),
    [(1, 5, 7, 21), (8, 1, 16, None), (8, 64, 80, 21), (8, 3, 1, 21)],
)
def test_extend_is_right_for_any_block_sizes(page_size, tile_queries, tile_tokens, window) -> None:
    case = case_of(page_size, window)
    sizes = {"min_tile_queries": tile_queries, "max_tile_queries": tile_queries, "tile_tokens": tile_tokens}
    args: Any = (*case.extend_args(), case.spec.options)
    expected = dense_attention(*args)
    with tuning.override("paged_extend_attention", "xla", sizes):
        actual = paged_extend_attention(*args, backend="xla")
    assert_close(actual, expected, case.spec.dtype)


@pytest.mark.parametrize("op", [store_kv, paged_decode_attention, paged_extend_attention])
@pytest.mark.parametrize("narrow", ["bfloat16", "float8"])
def test_a_narrow_cache_is_never_widened(op, narrow: str) -> None:
    """XLA's CPU back end moves no bfloat16 and no float8; converting the cache to move it would quadruple it."""
    spec = ArgSpec(narrow, 5, 11, 512, 16, 2, 2, 16, dtype=jnp.bfloat16, float8_cache=narrow == "float8")
    (args,) = (args for each, args, _ in spec.calls() if each is op)
    compiled = jax.jit(functools.partial(op, backend="xla")).lower(*args).compile()
    cache_shapes = (spec.num_pages, 2, 16, 16), (spec.num_pages * 2, 16, 16)
    in_hlo = [",".join(map(str, shape)) for shape in cache_shapes]
    types = {kind for shape in in_hlo for kind in re.findall(rf"(\w+)\[{shape}\]", compiled.as_text() or "")}
    assert types <= ({"f8e4m3fn", "u8"} if narrow == "float8" else {"bf16", "u16"})
    cache_bytes = spec.paged_kv().k.size * jnp.dtype(spec.cache_dtype).itemsize
    memory: Any = compiled.memory_analysis()
    assert memory.temp_size_in_bytes < 2.2 * cache_bytes  # the bits of K and V, once
