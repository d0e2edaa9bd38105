"""`grouped_float8_product` as a Pallas kernel for the Triton backend. Called through `triton.BACKEND`.

A program makes a tile of one expert's outputs x a tile of its rows, as `float8_product` makes one of a matrix: each
step multiplies a group of inputs, float8 with float8, and adds it times the scales of both. Tiles of rows are those of
`grouped_product`. Weights are the left operand, whose side of `wgmma` has 64 rows at least: an expert of few rows
takes tiles of 16.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels import tuning
from pallas_kernels.experts import Groups, row_tiles
from pallas_kernels.scaled import ROW_GROUP, ScaledMatrix, ScaledRows
from pallas_kernels.triton.float8_dot import float8_dot
from pallas_kernels.triton.group_by_expert import rows_of_tiles
from pallas_kernels.triton.tiles import load_rows


@functools.partial(jax.jit, static_argnames=("of_tokens", "interpret"))
def grouped_float8_product(
    rows: ScaledRows, groups: Groups, weights: ScaledMatrix, of_tokens: bool, interpret: bool
) -> jax.Array:
    """See `backend.GroupedFloat8Product`."""
    num_rows = rows_of_tiles(groups.num_places, groups.num_experts)
    shape = tuning.ExpertClass(num_rows, 8 * weights.numbers.dtype.itemsize)
    sizes = tuning.blocks("grouped_float8_product", "triton", shape)
    tiles = groups.tiles if groups.tiles is not None and groups.tile_rows == num_rows else None
    if tiles is None:
        tiles, _ = row_tiles(groups, num_rows)
    tile_outputs = sizes["tile_outputs"]
    y: jax.Array = pl.pallas_call(
        functools.partial(
            _kernel, num_rows=num_rows, tile_outputs=tile_outputs, group=weights.group, of_tokens=of_tokens
        ),
        out_shape=jax.ShapeDtypeStruct((groups.num_places, weights.num_outputs), rows.dtype),
        # Tiles of one expert follow each other: all but the first find its weights in the second-level cache.
        grid=(len(tiles.experts), pl.cdiv(weights.num_outputs, tile_outputs)),
        compiler_params=plgpu.CompilerParams(num_warps=sizes["num_warps"], num_stages=sizes["num_stages"]),
        interpret=interpret,
        name="grouped_float8_product",
    )(
        rows.numbers, rows.scale, groups.tokens, tiles.experts, tiles.begins, tiles.ends, weights.numbers, weights.scale
    )  # fmt: skip
    return y


def _kernel(
    x_ref: Any,
    x_scale_ref: Any,
    tokens_ref: Any,
    experts_ref: Any,
    begins_ref: Any,
    ends_ref: Any,
    w_ref: Any,
    w_scale_ref: Any,
    y_ref: Any,
    *,
    num_rows: int,
    tile_outputs: int,
    group: int,
    of_tokens: bool,
) -> None:
    tile = pl.program_id(0)
    expert, begin, end = experts_ref[tile], begins_ref[tile], ends_ref[tile]
    num_experts, num_outputs, num_inputs = w_ref.shape
    place = begin + jnp.arange(num_rows, dtype=jnp.int32)
    output = pl.program_id(1) * tile_outputs + jnp.arange(tile_outputs, dtype=jnp.int32)
    # The last ones are read in the place of those that don't exist, which needs no mask.
    real_place = jnp.minimum(place, jnp.maximum(end - 1, 0))
    real_output, real_expert = jnp.minimum(output, num_outputs - 1), jnp.minimum(expert, num_experts - 1)
    row = plgpu.load(tokens_ref.at[real_place]) if of_tokens else real_place
    num_groups = num_inputs // ROW_GROUP
    # Places without an expert get zeros, and tiles that don't exist store nothing.
    steps = jnp.where((expert < num_experts) & (begin < end), jnp.int32(num_groups), jnp.int32(0))

    def scales(of_rows: jax.Array) -> tuple[jax.Array, jax.Array]:
        of_weights = lax.div(of_rows * ROW_GROUP, jnp.int32(group))
        of_outputs = plgpu.load(w_scale_ref.at[real_expert, real_output, of_weights])
        return of_outputs, plgpu.load(x_scale_ref.at[of_rows, row])

    def add(step: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        total, w_scale, x_scale = carry
        columns = step * ROW_GROUP, ROW_GROUP
        left = load_rows(w_ref, (real_expert, real_output), None, columns)
        right = load_rows(x_ref, (row,), None, columns)
        # Read a step ahead: nothing waits for the scales of the next group.
        of_next = scales(jnp.minimum(step + 1, num_groups - 1))
        return total + float8_dot(left, right) * w_scale[:, None] * x_scale[None, :], *of_next

    start = jnp.zeros((tile_outputs, num_rows), jnp.float32), *scales(jnp.int32(0))
    total, *_ = lax.fori_loop(jnp.int32(0), steps, add, start)
    of_rows = total.T.astype(y_ref.dtype)
    where = tuple(jnp.broadcast_to(index, of_rows.shape) for index in (place[:, None], output[None, :]))
    plgpu.store(y_ref.at[where], of_rows, mask=(place < end)[:, None] & (output < num_outputs)[None, :])
