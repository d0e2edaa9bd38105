"""`quantized_product` of 4 bits packed for a GPU, as a Pallas kernel for the Triton backend.

Called through `quantized_product`. A program makes a tile of outputs x rows. The weights are the left operand, because
Hopper's wgmma takes that one from registers, where four bits become floats: nothing is written wider.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jax.typing import DTypeLike

from pallas_kernels import fragments, packed, tuning
from pallas_kernels.packed import PackedMatrix
from pallas_kernels.parts import num_parts_of
from pallas_kernels.triton.common import tile_rows_for
from pallas_kernels.triton.fragment_sums import depth_for, sums
from pallas_kernels.triton.fragment_tiles import PackedRefs, TileShape
from pallas_kernels.triton.tiles import load_rows

BITS = 4


def refuse(x: jax.Array, weights: PackedMatrix) -> str | None:
    """Why this backend can't multiply x and the weights, or None when it can."""
    if x.dtype.itemsize != 2:
        return f"the rows are {x.dtype}; it takes bfloat16 and float16"
    return None if weights.packing in packed.ON_GPUS else f"the weights are {weights.packing}, for other devices"


@functools.partial(jax.jit, static_argnames=("dtype", "in_parts", "interpret"))
def product(x: jax.Array, weights: PackedMatrix, dtype: DTypeLike, in_parts: bool, interpret: bool) -> jax.Array:
    """See `backend.QuantizedProduct`."""
    (num_rows, num_inputs), num_outputs = x.shape, weights.shape[0]
    sizes = tuning.blocks("quantized_product", "triton", tuning.product_class(num_rows, weights.group, BITS))
    tile_outputs = tile_rows_for(sizes["tile_outputs"])
    warps = min(sizes["num_warps"], tile_outputs // fragments.OUTPUTS)
    depth = depth_for(num_inputs, weights.group, sizes["tile_inputs"])
    tiles = pl.cdiv(num_rows, sizes["tile_rows"]), pl.cdiv(num_outputs, tile_outputs)
    num_parts = num_parts_of(tiles[0] * tiles[1], num_inputs // depth) if in_parts else 1
    parts = [each for each in (weights.numbers, weights.scale, weights.zero) if each is not None]
    y: jax.Array = pl.pallas_call(
        functools.partial(
            _kernel,
            shape=TileShape(tile_outputs, depth, warps),
            tile_rows=sizes["tile_rows"],
            group=weights.group,
            packing=weights.packing,
        ),
        out_shape=jax.ShapeDtypeStruct(
            (num_parts, num_rows, num_outputs), jnp.dtype(jnp.float32 if num_parts > 1 else dtype)
        ),
        # Programs that share weights follow each other, so that all but the first find them in the second-level cache.
        grid=(*tiles, num_parts),
        compiler_params=plgpu.CompilerParams(num_warps=warps, num_stages=sizes["num_stages"]),
        interpret=interpret,
        name="quantized_product",
    )(x, *parts)
    return y if num_parts > 1 else y.reshape(num_rows, num_outputs)


def _kernel(
    x_ref: Any,
    numbers_ref: Any,
    scale_ref: Any,
    *others: Any,
    shape: TileShape,
    tile_rows: int,
    group: int,
    packing: str,
) -> None:
    (*zero_refs, y_ref) = others
    refs = PackedRefs(numbers_ref, scale_ref, zero_refs[0] if zero_refs else None, group, packing)
    num_parts, num_rows, num_outputs = y_ref.shape
    row = pl.program_id(0) * tile_rows + jnp.arange(tile_rows, dtype=jnp.int32)
    tile, part = pl.program_id(1), pl.program_id(2)
    steps = x_ref.shape[1] // shape.inputs // num_parts
    real_row = jnp.minimum(row, num_rows - 1)  # the last one in the place of those that don't exist: no mask

    def rows_of(first: Any, width: int) -> jax.Array:
        return load_rows(x_ref, (real_row,), None, (first, width))

    (total,) = sums(shape, refs, [tile], (part * steps, jnp.int32(steps)), rows_of, tile_rows, x_ref.dtype)
    out = total.T.astype(y_ref.dtype)
    output = tile * shape.outputs + jnp.arange(shape.outputs, dtype=jnp.int32)
    where = tuple(jnp.broadcast_to(index, out.shape) for index in (part, row[:, None], output[None, :]))
    plgpu.store(y_ref.at[where], out, mask=(row < num_rows)[:, None] & (output < num_outputs)[None, :])
