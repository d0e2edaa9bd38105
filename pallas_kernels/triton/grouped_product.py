"""`grouped_product` and `gated_product` as a Pallas kernel for the Triton backend. Called through `triton.BACKEND`.

A program multiplies a tile of rows of one expert with some of its weight rows. Which tiles there are is computed on the
device, once for all products if `group_by_expert` is a kernel too, and the grid has as many programs as any choice of
experts may need; those without a tile end at once. A gated product's program takes as many weight rows, half of them
of the gate and half of what it multiplies, and stores their unit.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.experts import ACTIVATIONS, Groups, product_dtype, result_dtype, row_tiles
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


def refuse_gated_product(x: jax.Array, groups: Groups, weights: jax.Array) -> str | None:
    """Why this backend can't take x and weights `[E, 2 F, in]`, or None when it can."""
    if weights.dtype.itemsize == 1:
        return f"the weights are {weights.dtype}, whose results are scaled before a gate; it takes weights as they are"
    if weights.shape[1] % (2 * MIN_DOT):
        return f"the weights are {weights.shape}; it takes multiples of {(2 * MIN_DOT, MIN_DOT)}"
    return refuse_grouped_product(x, groups, weights)


@functools.partial(jax.jit, static_argnames=("of_tokens", "interpret"))
def grouped_product(x: jax.Array, groups: Groups, weights: jax.Array, of_tokens: bool, interpret: bool) -> jax.Array:
    """See `backend.GroupedProduct`."""
    return _product(x, groups, weights, None, of_tokens, interpret)


@functools.partial(jax.jit, static_argnames=("activation", "of_tokens", "interpret"))
def gated_product(
    x: jax.Array, groups: Groups, weights: jax.Array, activation: str, of_tokens: bool, interpret: bool
) -> jax.Array:
    """See `backend.GatedProduct`."""
    return _product(x, groups, weights, activation, of_tokens, interpret)


def _product(
    x: jax.Array, groups: Groups, weights: jax.Array, activation: str | None, of_tokens: bool, interpret: bool
) -> jax.Array:
    num_experts, num_out, num_in = weights.shape
    num_rows = rows_of_tiles(groups.num_places, num_experts)
    num_sides = 1 if activation is None else 2
    num_columns = _largest_factor(num_out // num_sides, _NUM_COLUMNS // num_sides)
    depth = _largest_factor(num_in, _BYTES_DEEP // product_dtype(x, weights).itemsize)
    tiles = groups.tiles if groups.tiles is not None and groups.tile_rows == num_rows else None
    if tiles is None:
        tiles, _ = row_tiles(groups, num_rows)
    sizes: dict[str, Any] = {"num_rows": num_rows, "num_columns": num_columns, "depth": depth}
    y: jax.Array = pl.pallas_call(
        functools.partial(_kernel, **sizes, of_tokens=of_tokens, activation=activation),
        out_shape=jax.ShapeDtypeStruct((groups.num_places, num_out // num_sides), result_dtype(x, weights)),
        grid=(len(tiles.experts), num_out // num_sides // num_columns),
        compiler_params=plgpu.CompilerParams(num_warps=8 if num_rows >= 64 else 4, num_stages=3),
        interpret=interpret,
        name="grouped_product" if activation is None else "gated_product",
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
    activation: str | None,
) -> None:
    tile = pl.program_id(0)
    expert, begin, end = experts_ref[tile], begins_ref[tile], ends_ref[tile]
    num_experts, num_out, num_in = weights_ref.shape
    place = begin + jnp.arange(num_rows, dtype=jnp.int32)
    is_row = place < end
    row = plgpu.load(tokens_ref.at[place], mask=is_row, other=0) if of_tokens else place
    first_column = pl.program_id(1) * num_columns
    # Of the product, or of the gate and of what it multiplies.
    first_weights = [first_column] if activation is None else [first_column, num_out // 2 + first_column]
    columns = [first + jnp.arange(num_columns, dtype=jnp.int32) for first in first_weights]
    # Places without an expert get zeros, and tiles that don't exist store nothing.
    steps = jnp.where((expert < num_experts) & (begin < end), jnp.int32(num_in // depth), jnp.int32(0))

    def add(step: jax.Array, totals: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        inputs = (step * depth, depth)
        left = load_rows(x_ref, (row,), is_row, inputs)
        rights = [load_rows(weights_ref, (expert, column), None, inputs).astype(left.dtype) for column in columns]
        # float32 stays float32: the default would round it to TF32.
        precision = lax.Precision.HIGHEST if left.dtype == jnp.float32 else None
        return tuple(
            total + lax.dot(left, right.T, precision=precision, preferred_element_type=jnp.float32)
            for total, right in zip(totals, rights, strict=True)
        )

    zeros = jnp.zeros((num_rows, num_columns), jnp.float32)
    out, *others = lax.fori_loop(jnp.int32(0), steps, add, (zeros,) * len(columns))
    if activation is not None:
        # Rounded first, as the results of a product would be.
        gate, up = (side.astype(y_ref.dtype).astype(jnp.float32) for side in (out, *others))
        out = ACTIVATIONS[activation](gate) * up
    store_rows(y_ref, (place,), is_row, out, (first_column, num_columns))
