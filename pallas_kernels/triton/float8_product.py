"""`float8_product` as a Pallas kernel for the Triton backend. Called through `triton.BACKEND`.

A program makes a tile of outputs x rows. A step multiplies a group of inputs, float8 with float8, and adds the result
to the sums in float32, times the scales of the group: those of the rows and those of the outputs. Nothing is converted.
The weights are the left operand, whose side of `wgmma` has 64 rows at least.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jax.typing import DTypeLike

from pallas_kernels import tuning
from pallas_kernels.parts import num_parts_of
from pallas_kernels.scaled import ROW_GROUP, ScaledMatrix, ScaledRows, refuse_rounding
from pallas_kernels.target import target_device
from pallas_kernels.triton.common import MOST_ROWS_WITHOUT_WGMMA, tile_rows_for
from pallas_kernels.triton.float8_dot import float8_dot, is_possible
from pallas_kernels.triton.tiles import load_rows

# A multiprocessor holds one program of 8 warps, or two of 4; each part more costs a write and a read of the sums. Those
# of few rows are small, and more programs have more weights on their way.
_PROGRAMS_PER_CORE, _OF_FEW_ROWS, _FEW_ROWS = 0.75, 1.5, 64


def refuse_float8_product(dtype: DTypeLike, weights: ScaledMatrix) -> str | None:
    """Why this backend can't multiply rows that were `dtype` with a matrix or a stack of them, or None if it can."""
    device = target_device()
    if jnp.dtype(dtype).itemsize != 2:
        return f"the rows are {jnp.dtype(dtype)}; it takes bfloat16 and float16"
    refused = refuse_rounding(weights)
    if refused is not None:
        return refused
    if not (device.converts_float8 or device.platform == "cpu"):
        return f"{device.kind} doesn't multiply float8"
    if tile_rows_for(2 * MOST_ROWS_WITHOUT_WGMMA) <= MOST_ROWS_WITHOUT_WGMMA:
        return "ptxas may compile its wgmma to wrong code"
    return None if is_possible() else f"JAX {jax.__version__} doesn't say which products may have sums of few bits"


@functools.partial(jax.jit, static_argnames=("dtype", "in_parts", "interpret"))
def float8_product(
    rows: ScaledRows, weights: ScaledMatrix, dtype: DTypeLike, in_parts: bool, interpret: bool
) -> jax.Array:
    """See `backend.Float8Product`."""
    num_rows, num_outputs, num_groups = len(rows), weights.num_outputs, weights.num_inputs // ROW_GROUP
    sizes = tuning.blocks("float8_product", "triton", tuning.product_class(num_rows, weights.group, 8))
    tiles = pl.cdiv(num_rows, sizes["tile_rows"]), pl.cdiv(num_outputs, sizes["tile_outputs"])
    wanted = _OF_FEW_ROWS if num_rows <= _FEW_ROWS else _PROGRAMS_PER_CORE
    num_parts = num_parts_of(tiles[0] * tiles[1], num_groups, wanted) if in_parts else 1
    y: jax.Array = pl.pallas_call(
        functools.partial(
            _kernel, tile_rows=sizes["tile_rows"], tile_outputs=sizes["tile_outputs"], group=weights.group
        ),
        out_shape=jax.ShapeDtypeStruct(
            (num_parts, num_rows, num_outputs), jnp.dtype(jnp.float32 if num_parts > 1 else dtype)
        ),
        # Programs that share weights follow each other, so that all but the first find them in the second-level cache.
        grid=(*tiles, num_parts),
        compiler_params=plgpu.CompilerParams(num_warps=sizes["num_warps"], num_stages=sizes["num_stages"]),
        interpret=interpret,
        name="float8_product",
    )(rows.numbers, weights.numbers, rows.scale, weights.scale)
    return y if num_parts > 1 else y.reshape(num_rows, num_outputs)


def _kernel(
    x_ref: Any,
    w_ref: Any,
    x_scale_ref: Any,
    w_scale_ref: Any,
    y_ref: Any,
    *,
    tile_rows: int,
    tile_outputs: int,
    group: int,
) -> None:
    num_parts, num_rows, num_outputs = y_ref.shape
    row = pl.program_id(0) * tile_rows + jnp.arange(tile_rows, dtype=jnp.int32)
    output = pl.program_id(1) * tile_outputs + jnp.arange(tile_outputs, dtype=jnp.int32)
    part = pl.program_id(2)
    steps = x_scale_ref.shape[0] // num_parts
    first = part * steps
    # The last ones are read in the place of those that don't exist, which needs no mask.
    real_row, real_output = jnp.minimum(row, num_rows - 1), jnp.minimum(output, num_outputs - 1)

    def scales(of_rows: jax.Array) -> tuple[jax.Array, jax.Array]:
        of_weights = lax.div(of_rows * ROW_GROUP, jnp.int32(group))
        return plgpu.load(w_scale_ref.at[real_output, of_weights]), plgpu.load(x_scale_ref.at[of_rows, real_row])

    def add(step: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        total, w_scale, x_scale = carry
        columns = (first + step) * ROW_GROUP, ROW_GROUP
        left, right = load_rows(w_ref, (real_output,), None, columns), load_rows(x_ref, (real_row,), None, columns)
        # Read a step ahead: nothing waits for the scales of the next group.
        of_next = scales(first + jnp.minimum(step + 1, steps - 1))
        return total + float8_dot(left, right) * w_scale[:, None] * x_scale[None, :], *of_next

    start = jnp.zeros((tile_outputs, tile_rows), jnp.float32), *scales(first)
    total, *_ = lax.fori_loop(jnp.int32(0), jnp.int32(steps), add, start)
    tile = total.T.astype(y_ref.dtype)
    where = tuple(jnp.broadcast_to(index, tile.shape) for index in (part, row[:, None], output[None, :]))
    plgpu.store(y_ref.at[where], tile, mask=(row < num_rows)[:, None] & (output < num_outputs)[None, :])
