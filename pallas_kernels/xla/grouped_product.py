"""`grouped_product` and its kin in XLA: a loop over tiles of one expert's rows. Called through `xla.BACKEND`.

The fall-back anywhere. `lax.ragged_dot` is none: on CPUs and GPUs XLA makes a product with all experts of it.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from pallas_kernels.dots import dot_precision
from pallas_kernels.experts import Groups, product_dtype, result_dtype, row_tiles, with_bias
from pallas_kernels.packed import PackedMatrix
from pallas_kernels.scaled import ScaledMatrix, ScaledRows, widened

_TILE_ROWS = 16  # the same for all numbers of rows, so that a row's sums are made in the same way


def grouped_product(x: jax.Array, groups: Groups, weights: jax.Array, of_tokens: bool, interpret: bool) -> jax.Array:
    """See `backend.GroupedProduct`. Reads the weights once per tile, those of experts without rows never."""

    def matrix_of(expert: jax.Array) -> jax.Array:
        matrix: jax.Array = lax.dynamic_index_in_dim(weights, expert, keepdims=False)
        return matrix

    rows, dtype = x.astype(product_dtype(x, weights)), result_dtype(x, weights)
    return _by_tiles(rows, groups, matrix_of, weights.shape[1], dtype, of_tokens)


def packed_product(
    x: jax.Array,
    groups: Groups,
    weights: PackedMatrix,
    bias: jax.Array | None,
    of_tokens: bool,
    dtype: str,
    row_bits: int,
    interpret: bool,
) -> jax.Array:
    """See `backend.GroupedPackedProduct`. Weights of an expert are widened to `dtype` for each tile."""

    def matrix_of(expert: jax.Array) -> jax.Array:
        mine: PackedMatrix = jax.tree.map(lambda part: lax.dynamic_index_in_dim(part, expert, keepdims=False), weights)
        return mine.widened(dtype)

    y = _by_tiles(x.astype(dtype), groups, matrix_of, weights.shape[-2], x.dtype, of_tokens)
    return with_bias(y, bias, groups)


def grouped_scaled_product(
    x: jax.Array, groups: Groups, weights: ScaledMatrix, of_tokens: bool, interpret: bool
) -> jax.Array:
    """See `backend.GroupedScaledProduct`. Weights of an expert are widened to x's format for each tile."""

    def matrix_of(expert: jax.Array) -> jax.Array:
        mine: ScaledMatrix = jax.tree.map(lambda part: lax.dynamic_index_in_dim(part, expert, keepdims=False), weights)
        return widened(mine.numbers, mine.scale, mine.zero, mine.group, x.dtype)

    return _by_tiles(x, groups, matrix_of, weights.num_outputs, x.dtype, of_tokens)


def grouped_float8_product(
    rows: ScaledRows, groups: Groups, weights: ScaledMatrix, of_tokens: bool, interpret: bool
) -> jax.Array:
    """See `backend.GroupedFloat8Product`. Multiplies in float32, to which an expert's weights are widened by tile."""

    def matrix_of(expert: jax.Array) -> jax.Array:
        numbers, scale = (
            lax.dynamic_index_in_dim(part, expert, keepdims=False) for part in (weights.numbers, weights.scale)
        )
        return widened(numbers, scale, None, weights.group, jnp.float32)

    return _by_tiles(rows.values(jnp.float32), groups, matrix_of, weights.num_outputs, rows.dtype, of_tokens)


def _by_tiles(
    rows: jax.Array,
    groups: Groups,
    matrix_of: Callable[[jax.Array], jax.Array],
    num_out: int,
    dtype: DTypeLike,
    of_tokens: bool,
) -> jax.Array:
    tiles, num_tiles = row_tiles(groups, _TILE_ROWS)
    num_places = groups.num_places

    def multiply(index: jax.Array, y: jax.Array) -> jax.Array:
        places = tiles.begins[index] + jnp.arange(_TILE_ROWS, dtype=jnp.int32)
        is_mine = places < tiles.ends[index]
        of_place = groups.tokens.at[places].get(mode="clip") if of_tokens else places
        tile = rows.at[of_place].get(mode="clip")
        matrix = matrix_of(tiles.experts[index]).astype(rows.dtype)
        precision = dot_precision(rows)
        out = jnp.einsum("ri,oi->ro", tile, matrix, precision=precision, preferred_element_type=jnp.float32)
        return y.at[jnp.where(is_mine, places, num_places)].set(out.astype(dtype), mode="drop")

    return lax.fori_loop(0, num_tiles, multiply, jnp.zeros((num_places, num_out), dtype))
