"""`grouped_packed_product` and its gated form of 4 bits packed for a GPU, as a Pallas kernel for the Triton backend.

Called through `triton.BACKEND`. A program makes a tile of outputs x rows of one expert. As in `packed_product` the
weights are the left operand; tiles of rows, and programs without one, are those of `grouped_product`. A gated product's
program has as many outputs of the gate as of what it multiplies, and stores their unit. Biases are added before that.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels import fragments, packed, tuning
from pallas_kernels.experts import GatedUnit, Groups, row_tiles
from pallas_kernels.packed import PackedMatrix
from pallas_kernels.triton.common import tile_rows_for
from pallas_kernels.triton.fragment_sums import depth_for, sums
from pallas_kernels.triton.fragment_tiles import PackedRefs, TileShape
from pallas_kernels.triton.group_by_expert import rows_of_tiles
from pallas_kernels.triton.tiles import load_rows

BITS = 4
# More rows would take all registers, with int4 on an A100 more: a step's sums are kept apart from those of both sides.
_MOST_GATED_ROWS = 64
_LEAST_COLUMNS = 64  # of a gate, with which no tile has outputs of both sides; F are inputs of the next product, too


def refuse(x: jax.Array, weights: PackedMatrix) -> str | None:
    """Why this backend can't multiply x and weights `[E, out, in]`, or None when it can."""
    if x.dtype.itemsize != 2:
        return f"the rows are {x.dtype}; it takes bfloat16 and float16"
    return None if weights.packing in packed.ON_GPUS else f"the weights are {weights.packing}, for other devices"


def refuse_gated(x: jax.Array, weights: PackedMatrix) -> str | None:
    """Why this backend can't multiply x and weights `[E, 2 F, in]`, or None when it can."""
    if weights.shape[1] % (2 * _LEAST_COLUMNS):
        return f"the weights are {weights.shape}; it takes multiples of {2 * _LEAST_COLUMNS} outputs"
    return refuse(x, weights)


@functools.partial(jax.jit, static_argnames=("of_tokens", "dtype", "row_bits", "interpret"))
def grouped_packed_product(
    x: jax.Array,
    groups: Groups,
    weights: PackedMatrix,
    bias: jax.Array | None,
    of_tokens: bool,
    dtype: str,
    row_bits: int,
    interpret: bool,
) -> jax.Array:
    """See `backend.GroupedPackedProduct`. Weights become x's dtype."""
    return _product(x, groups, weights, bias, None, of_tokens, interpret)


@functools.partial(jax.jit, static_argnames=("unit", "of_tokens", "interpret"))
def gated_packed_product(
    x: jax.Array,
    groups: Groups,
    weights: PackedMatrix,
    bias: jax.Array | None,
    unit: GatedUnit,
    of_tokens: bool,
    interpret: bool,
) -> jax.Array:
    """See `backend.GatedPackedProduct`. Of many rows XLA makes the unit after the product."""
    if rows_of_tiles(groups.num_places, groups.num_experts) > _MOST_GATED_ROWS:
        return unit(*jnp.split(_product(x, groups, weights, bias, None, of_tokens, interpret), 2, axis=1))
    return _product(x, groups, weights, bias, unit, of_tokens, interpret)


def _product(
    x: jax.Array,
    groups: Groups,
    weights: PackedMatrix,
    bias: jax.Array | None,
    unit: GatedUnit | None,
    of_tokens: bool,
    interpret: bool,
) -> jax.Array:
    _, num_out, num_in = weights.shape
    op, num_sides = ("grouped_packed_product", 1) if unit is None else ("gated_packed_product", 2)
    num_rows = rows_of_tiles(groups.num_places, groups.num_experts)
    sizes = tuning.blocks(op, "triton", tuning.ExpertClass(num_rows, BITS))
    num_columns = num_out // num_sides
    columns = sizes["tile_outputs"] // num_sides
    if unit is not None:
        columns = min(columns, num_columns & -num_columns)
    columns = tile_rows_for(columns)
    warps = min(sizes["num_warps"], columns // fragments.OUTPUTS)
    shape = TileShape(columns, depth_for(num_in, weights.group, sizes["tile_inputs"]), warps)
    tiles = groups.tiles if groups.tiles is not None and groups.tile_rows == num_rows else None
    if tiles is None:
        tiles, _ = row_tiles(groups, num_rows)
    refs = [weights.numbers, weights.scale, *(each for each in (weights.zero, bias) if each is not None)]
    y: jax.Array = pl.pallas_call(
        functools.partial(
            _kernel,
            shape=shape,
            tile_rows=num_rows,
            group=weights.group,
            packing=weights.packing,
            has_zeros=weights.zero is not None,
            of_tokens=of_tokens,
            unit=unit,
        ),
        out_shape=jax.ShapeDtypeStruct((groups.num_places, num_columns), x.dtype),
        grid=(len(tiles.experts), pl.cdiv(num_columns, columns)),
        compiler_params=plgpu.CompilerParams(num_warps=warps, num_stages=sizes["num_stages"]),
        interpret=interpret,
        name=op,
    )(x, groups.tokens, tiles.experts, tiles.begins, tiles.ends, *refs)
    return y


def _kernel(
    x_ref: Any,
    tokens_ref: Any,
    experts_ref: Any,
    begins_ref: Any,
    ends_ref: Any,
    numbers_ref: Any,
    scale_ref: Any,
    *others: Any,
    shape: TileShape,
    tile_rows: int,
    group: int,
    packing: str,
    has_zeros: bool,
    of_tokens: bool,
    unit: GatedUnit | None,
) -> None:
    *more_refs, y_ref = others
    zero_ref = more_refs.pop(0) if has_zeros else None
    tile = pl.program_id(0)
    expert, begin, end = experts_ref[tile], begins_ref[tile], ends_ref[tile]
    # Places without an expert get zeros, and tiles that don't exist store nothing.
    is_product = (expert < numbers_ref.shape[0]) & (begin < end)
    safe_expert = jnp.minimum(expert, numbers_ref.shape[0] - 1)
    refs = PackedRefs(numbers_ref, scale_ref, zero_ref, group, packing, (safe_expert,))
    num_places, num_columns = y_ref.shape
    place = begin + jnp.arange(tile_rows, dtype=jnp.int32)
    real_place = jnp.minimum(place, num_places - 1)  # others are read in the place of those that don't exist: no mask
    row = plgpu.load(tokens_ref.at[real_place]) if of_tokens else real_place
    outputs = pl.program_id(1)
    tiles = [outputs] if unit is None else [outputs, num_columns // shape.outputs + outputs]
    steps = jnp.where(is_product, jnp.int32(x_ref.shape[1] // shape.inputs), jnp.int32(0))

    def rows_of(first: Any, width: int) -> jax.Array:
        return load_rows(x_ref, (row,), None, (first, width))

    totals = sums(shape, refs, tiles, (jnp.int32(0), steps), rows_of, tile_rows, x_ref.dtype)
    column = outputs * shape.outputs + jnp.arange(shape.outputs, dtype=jnp.int32)
    is_column = column < num_columns
    # Rounded first, as the results of a product would be.
    sides = [total.astype(y_ref.dtype).astype(jnp.float32) for total in totals]
    for bias_ref in more_refs:
        for number, side in enumerate(sides):
            at = jnp.broadcast_to(safe_expert, column.shape), number * num_columns + column
            bias = plgpu.load(bias_ref.at[at], mask=is_column & is_product, other=0)
            sides[number] = side + bias.astype(jnp.float32)[:, None]
    out = (sides[0] if unit is None else unit(*sides)).T.astype(y_ref.dtype)
    where = tuple(jnp.broadcast_to(index, out.shape) for index in (place[:, None], column[None, :]))
    plgpu.store(y_ref.at[where], out, mask=(place < end)[:, None] & is_column[None, :])
