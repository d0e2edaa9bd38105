"""`ordered_product` as a Pallas kernel for the Triton backend. Called through `triton.BACKEND`.

A program makes a tile of rows x outputs. Tiles are of one size whatever the number of rows, and so are the parts into
which the sums are cut: those follow from the weights' shape, so that few rows keep the multiprocessors busy. Few rows
have a program for each part; many have one for all parts of a tile, which adds them in the order in which they are
added here otherwise.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jax.typing import DTypeLike

from pallas_kernels.triton.common import MIN_DOT, tile_rows_for
from pallas_kernels.triton.tiles import load_rows

# Chosen by hand: four stages of both sides fit 99 KiB of shared memory. Not measured.
_TILE_ROWS, _TILE_OUTPUTS, _BYTES_DEEP = 64, 128, 128
_MOST_PARTS, _MIN_PART = 8, 512  # parts of a sum, and the fewest inputs that one should have
_TILES = 128  # as many programs should have work: multiprocessors of the GPUs that matter, a number for all of them
_ROWS_IN_PARTS = 4 * _TILE_ROWS  # up to as many rows, parts have programs of their own


def refuse_ordered_product(x: jax.Array, weights: jax.Array) -> str | None:
    """Why this backend can't take x `[T, I]` and weights `[O, I]`, or None when it can."""
    if weights.shape[1] % MIN_DOT:
        return f"the weights have {weights.shape[1]} inputs; it takes multiples of {MIN_DOT}"
    if weights.dtype.itemsize not in (2, 4) or not jnp.issubdtype(weights.dtype, jnp.floating):
        return f"the weights are {weights.dtype}; it takes float32, bfloat16 and float16"
    return None


@functools.partial(jax.jit, static_argnames=("dtype", "in_parts", "interpret"))
def ordered_product(x: jax.Array, weights: jax.Array, dtype: DTypeLike, in_parts: bool, interpret: bool) -> jax.Array:
    """See `backend.OrderedProduct`."""
    num_rows, (num_outputs, num_inputs) = len(x), weights.shape
    depth = min(num_inputs & -num_inputs, _BYTES_DEEP // weights.dtype.itemsize)
    num_parts = parts_of(num_outputs, num_inputs)
    spread = num_parts if num_rows <= _ROWS_IN_PARTS else 1
    tile_rows = tile_rows_for(_TILE_ROWS)
    y: jax.Array = pl.pallas_call(
        functools.partial(_kernel, tile_rows=tile_rows, depth=depth, num_parts=num_parts // spread),
        out_shape=jax.ShapeDtypeStruct((spread, num_rows, num_outputs), jnp.float32 if spread > 1 else dtype),
        # Programs that share weights follow each other, so that all but the first find them in the second-level cache.
        grid=(pl.cdiv(num_rows, tile_rows), pl.cdiv(num_outputs, _TILE_OUTPUTS), spread),
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=4 if weights.dtype.itemsize == 2 else 2),
        interpret=interpret,
        name="ordered_product",
    )(x.astype(weights.dtype), weights)
    return y if in_parts and spread > 1 else functools.reduce(jnp.add, list(y)).astype(dtype)


def parts_of(num_outputs: int, num_inputs: int) -> int:
    """Parts of each sum, a power of two; whatever the number of rows."""
    tiles = pl.cdiv(num_outputs, _TILE_OUTPUTS)
    parts = 1
    while 2 * parts <= _MOST_PARTS and parts * tiles < _TILES and num_inputs % (2 * parts * _MIN_PART) == 0:
        parts *= 2
    return parts


def _kernel(x_ref: Any, weights_ref: Any, y_ref: Any, *, tile_rows: int, depth: int, num_parts: int) -> None:
    """Adds up `num_parts` parts of a tile."""
    spread, num_rows, num_outputs = y_ref.shape
    row = pl.program_id(0) * tile_rows + jnp.arange(tile_rows, dtype=jnp.int32)
    output = pl.program_id(1) * _TILE_OUTPUTS + jnp.arange(_TILE_OUTPUTS, dtype=jnp.int32)
    steps = x_ref.shape[1] // depth // (spread * num_parts)
    # The last ones are read in the place of those that don't exist, which needs no mask.
    real_row, real_output = jnp.minimum(row, num_rows - 1), jnp.minimum(output, num_outputs - 1)
    # float32 stays float32: the default would round it to TF32.
    precision = lax.Precision.HIGHEST if weights_ref.dtype == jnp.float32 else None

    def add(step: jax.Array, total: jax.Array) -> jax.Array:
        left = load_rows(x_ref, (real_row,), None, (step * depth, depth))
        right = load_rows(weights_ref, (real_output,), None, (step * depth, depth))
        return total + lax.dot(left, right.T, precision=precision, preferred_element_type=jnp.float32)

    def of_part(part: jax.Array) -> jax.Array:
        return lax.fori_loop(part * steps, (part + 1) * steps, add, jnp.zeros((tile_rows, _TILE_OUTPUTS), jnp.float32))

    first = pl.program_id(2)  # 0 where a program has all parts
    total = of_part(first)
    if num_parts > 1:
        total = lax.fori_loop(jnp.int32(1), jnp.int32(num_parts), lambda part, sums: sums + of_part(part), total)
    tile = total.astype(y_ref.dtype)
    where = tuple(jnp.broadcast_to(index, tile.shape) for index in (first, row[:, None], output[None, :]))
    plgpu.store(y_ref.at[where], tile, mask=(row < num_rows)[:, None] & (output < num_outputs)[None, :])
