"""`grouped_product` as a Pallas kernel for the Triton backend. Called through `triton.BACKEND`.

A program multiplies a tile of rows of one expert with some of its weight rows. Which tiles there are is computed on the
device, once for all products if `group_by_expert` is a kernel too, and the grid has as many programs as any choice of
experts may need; those without a tile end at once.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.experts import Groups, product_dtype, result_dtype, row_tiles
from pallas_kernels.paged_kv import FLOAT8
from pallas_kernels.target import target_device
from pallas_kernels.triton.common import MIN_DOT
from pallas_kernels.triton.group_by_expert import rows_of_tiles
from pallas_kernels.triton.tiles import load_rows, store_rows

# Chosen by hand: two stages and more of both sides fit 99 KiB of shared memory. Not measured.
_NUM_COLUMNS, _BYTES_DEEP = 128, 128
_MOST_BYTES = 2**31  # of weights of a byte each: see `tiles` for offsets


def refuse_grouped_product(x: jax.Array, groups: Groups, weights: jax.Array) -> str | None:
    """Why this backend can't take x and weights `[E, out, in]`, or None when it can."""
    if any(size % MIN_DOT for size in weights.shape[1:]):
        return f"the weights are {weights.shape}; it takes multiples of {(MIN_DOT, MIN_DOT)}"
    if weights.dtype.itemsize == 1 and weights.size > _MOST_BYTES:
        return f"the weights are {weights.size} {weights.dtype}; of those of a byte it takes {_MOST_BYTES}"
    if weights.dtype == FLOAT8 and not (target_device().converts_float8 or target_device().platform == "cpu"):
        return f"{target_device().kind} has no instructions for float8"
    return None


@functools.partial(jax.jit, static_argnames=("of_tokens", "interpret"))
def grouped_product(x: jax.Array, groups: Groups, weights: jax.Array, of_tokens: bool, interpret: bool) -> jax.Array:
    """See `backend.GroupedProduct`."""
    num_experts, num_out, num_in = weights.shape
    num_rows = rows_of_tiles(groups.num_places, num_experts)
    num_columns = _largest_factor(num_out, _NUM_COLUMNS)
    depth = _largest_factor(num_in, _BYTES_DEEP // product_dtype(x, weights).itemsize)
    tiles = groups.tiles if groups.tiles is not None and groups.tile_rows == num_rows else None
    if tiles is None:
        tiles, _ = row_tiles(groups, num_rows)
    y: jax.Array = pl.pallas_call(
        functools.partial(_kernel, num_rows=num_rows, num_columns=num_columns, depth=depth, of_tokens=of_tokens),
        out_shape=jax.ShapeDtypeStruct((groups.num_places, num_out), result_dtype(x, weights)),
        grid=(len(tiles.experts), num_out // num_columns),
        compiler_params=plgpu.CompilerParams(num_warps=8 if num_rows >= 64 else 4, num_stages=3),
        interpret=interpret,
        name="grouped_product",
    )(x.astype(product_dtype(x, weights)), groups.tokens, tiles.experts, tiles.begins, tiles.ends, weights)
    return y


def _largest_factor(size: int, most: int) -> int:
    """The largest power of two up to `most` that divides `size`."""
    return min(size & -size, most)


def _kernel(
    x_ref: Any,
    tokens_ref: Any,
    experts_ref: Any,
    begins_ref: Any,
    ends_ref: Any,
    weights_ref: Any,
    y_ref: Any,
    *,
    num_rows: int,
    num_columns: int,
    depth: int,
    of_tokens: bool,
) -> None:
    tile = pl.program_id(0)
    expert, begin, end = experts_ref[tile], begins_ref[tile], ends_ref[tile]
    num_experts, _, num_in = weights_ref.shape
    place = begin + jnp.arange(num_rows, dtype=jnp.int32)
    is_row = place < end
    row = plgpu.load(tokens_ref.at[place], mask=is_row, other=0) if of_tokens else place
    first_column = pl.program_id(1) * num_columns
    column = first_column + jnp.arange(num_columns, dtype=jnp.int32)
    # Places without an expert get zeros, and tiles that don't exist store nothing.
    steps = jnp.where((expert < num_experts) & (begin < end), jnp.int32(num_in // depth), jnp.int32(0))

    def add(step: jax.Array, total: jax.Array) -> jax.Array:
        inputs = (step * depth, depth)
        left = load_rows(x_ref, (row,), is_row, inputs)
        right = load_rows(weights_ref, (expert, column), None, inputs).astype(left.dtype)
        # float32 stays float32: the default would round it to TF32.
        precision = lax.Precision.HIGHEST if left.dtype == jnp.float32 else None
        return total + lax.dot(left, right.T, precision=precision, preferred_element_type=jnp.float32)

    total = lax.fori_loop(jnp.int32(0), steps, add, jnp.zeros((num_rows, num_columns), jnp.float32))
    store_rows(y_ref, (place,), is_row, total, (first_column, num_columns))
