"""`quantized_product` as a Pallas kernel for the Triton backend. Called through `triton.BACKEND`.

A program makes a tile of outputs x rows. The weights are the left operand, because Hopper's wgmma takes that one from
registers, where they are converted: they are read as they are, and never written wider. Sums are kept in units of the
scale of the group at hand, so that a new group multiplies them by the ratio of two scales; there is one accumulator.
Packed int4 has a kernel of its own.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jax.typing import DTypeLike

from pallas_kernels import tuning
from pallas_kernels.packed import PackedMatrix
from pallas_kernels.paged_kv import FLOAT8
from pallas_kernels.parts import num_parts_of
from pallas_kernels.scaled import MOST_NUMBERS, ScaledMatrix
from pallas_kernels.target import target_device
from pallas_kernels.triton import packed_product
from pallas_kernels.triton.common import MIN_DOT, tile_rows_for
from pallas_kernels.triton.tiles import load_rows

_NUMBERS = (jnp.int8, FLOAT8)
# Scales nearer to 0 count as this one: a ratio of scales has to be finite, and weights of 1e-22 add nothing.
_SMALLEST_SCALE = 2.0**-80


def refuse_quantized_product(x: jax.Array, weights: ScaledMatrix | PackedMatrix) -> str | None:
    """Why this backend can't multiply x and the weights, or None when it can."""
    if isinstance(weights, PackedMatrix):
        return packed_product.refuse(x, weights)
    numbers, group = weights.numbers, weights.group
    if x.dtype.itemsize != 2:
        return f"the rows are {x.dtype}; it takes bfloat16 and float16"
    if numbers.dtype not in _NUMBERS:
        return f"the weights are {numbers.dtype}; it takes int8, {FLOAT8.dtype}, and int4 that is packed"
    if group % MIN_DOT or weights.num_inputs % group:
        return f"{weights.num_inputs} inputs are in groups of {group}; it takes whole groups of multiples of {MIN_DOT}"
    if numbers.size > MOST_NUMBERS:
        return f"the weights are {numbers.size} {numbers.dtype}; it takes {MOST_NUMBERS}"
    if numbers.dtype == FLOAT8 and not (target_device().converts_float8 or target_device().platform == "cpu"):
        return f"{target_device().kind} has no instructions for float8"
    return None


@functools.partial(jax.jit, static_argnames=("dtype", "in_parts", "interpret"))
def quantized_product(
    x: jax.Array, weights: ScaledMatrix | PackedMatrix, dtype: DTypeLike, in_parts: bool, interpret: bool
) -> jax.Array:
    """See `backend.QuantizedProduct`."""
    if isinstance(weights, PackedMatrix):
        return packed_product.product(x, weights, dtype, in_parts, interpret)
    num_rows, num_outputs = x.shape[0], weights.num_outputs
    sizes = tuning.blocks("quantized_product", "triton", tuning.product_class(num_rows, weights.group, 8))
    tile_outputs = tile_rows_for(sizes["tile_outputs"])
    depth = min(sizes["tile_inputs"], weights.group & -weights.group)
    tiles = pl.cdiv(num_rows, sizes["tile_rows"]), pl.cdiv(num_outputs, tile_outputs)
    num_parts = num_parts_of(tiles[0] * tiles[1], weights.scale.shape[1]) if in_parts else 1
    y: jax.Array = pl.pallas_call(
        functools.partial(
            _kernel, tile_rows=sizes["tile_rows"], tile_outputs=tile_outputs, depth=depth, group=weights.group
        ),
        out_shape=jax.ShapeDtypeStruct(
            (num_parts, num_rows, num_outputs), jnp.dtype(jnp.float32 if num_parts > 1 else dtype)
        ),
        # Programs that share weights follow each other, so that all but the first find them in the second-level cache.
        grid=(*tiles, num_parts),
        compiler_params=plgpu.CompilerParams(num_warps=sizes["num_warps"], num_stages=sizes["num_stages"]),
        interpret=interpret,
        name="quantized_product",
    )(x, weights.numbers, weights.scale, *(() if weights.zero is None else (weights.zero,)))
    return y if num_parts > 1 else y.reshape(num_rows, num_outputs)


def _kernel(
    x_ref: Any,
    numbers_ref: Any,
    scale_ref: Any,
    *others: Any,
    tile_rows: int,
    tile_outputs: int,
    depth: int,
    group: int,
) -> None:
    (*zero_refs, y_ref) = others
    num_parts, num_rows, num_outputs = y_ref.shape
    row = pl.program_id(0) * tile_rows + jnp.arange(tile_rows, dtype=jnp.int32)
    output = pl.program_id(1) * tile_outputs + jnp.arange(tile_outputs, dtype=jnp.int32)
    part = pl.program_id(2)
    steps = x_ref.shape[1] // depth // num_parts
    # The last ones are read in the place of those that don't exist, which needs no mask.
    real_row, real_output = jnp.minimum(row, num_rows - 1), jnp.minimum(output, num_outputs - 1)

    def begin(step: jax.Array) -> jax.Array:
        return (part * steps + step) * depth

    def of_group(ref: Any, step: jax.Array) -> jax.Array:
        """The outputs' scales or zeros."""
        return plgpu.load(ref.at[real_output, lax.div(begin(step), jnp.int32(group))])

    def scales(step: jax.Array) -> jax.Array:
        scale = of_group(scale_ref, step)
        return jnp.where(jnp.abs(scale) < _SMALLEST_SCALE, _SMALLEST_SCALE, scale)

    def add(step: jax.Array, carry: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
        total, ratio, scale = carry
        # Handed on from the step before, they would make Triton convert the weights by way of shared memory.
        zeros = [of_group(ref, step) for ref in zero_refs]
        rows = load_rows(x_ref, (real_row,), None, (begin(step), depth))
        left = _weights(numbers_ref, real_output, begin(step), depth, rows.dtype, zeros)
        product = lax.dot(left, rows.T, preferred_element_type=jnp.float32)
        # Read a step ahead: no product waits for the scales of its group. The unit of the sums is no value of its own:
        # Triton copies nothing ahead in a loop that hands on what it was handed.
        next_scale = scales(jnp.minimum(step + 1, steps - 1))
        return product + total * ratio[:, None], scale / next_scale, next_scale

    start = jnp.zeros((tile_outputs, tile_rows), jnp.float32), jnp.ones(tile_outputs, jnp.float32), scales(jnp.int32(0))
    total, _, unit = lax.fori_loop(jnp.int32(0), jnp.int32(steps), add, start)
    tile = (total * unit[:, None]).T.astype(y_ref.dtype)
    where = tuple(jnp.broadcast_to(index, tile.shape) for index in (part, row[:, None], output[None, :]))
    plgpu.store(y_ref.at[where], tile, mask=(row < num_rows)[:, None] & (output < num_outputs)[None, :])


def _weights(
    ref: Any, output: jax.Array, first: jax.Array, depth: int, dtype: DTypeLike, zeros: Sequence[jax.Array]
) -> jax.Array:
    """`[tile_outputs, depth]` numbers less zeros, of inputs from `first` on; exact in 16 bits."""
    left = load_rows(ref, (output,), None, (first, depth)).astype(dtype)
    for zero in zeros:
        left -= zero.astype(dtype)[:, None]
    return left
