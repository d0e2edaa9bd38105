"""`grouped_float8_product` for Hopper: many rows of an expert by a kernel of Pallas Mosaic GPU, few by Triton's. Called
through `hopper.BACKEND`.

A tile is some rows of one expert and 128 of its outputs. TMA copies rows that lie side by side, from a multiple of 8
on: so rows of tokens are gathered first, and a tile may begin with rows of the expert before, and end with some of the
next one's, which it doesn't write.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.experts import Groups, row_tiles
from pallas_kernels.hopper.common import COPY_ROWS, WGMMA_ROWS, gpu_kernel
from pallas_kernels.hopper.float8_product import of_weights, refuse_weights
from pallas_kernels.hopper.float8_tiles import (
    BLOCK_ROWS,
    NUM_CONSUMERS,
    TILE_OUTPUTS,
    Plan,
    Refs,
    Tile,
    Visit,
    run,
    scratch,
)
from pallas_kernels.scaled import ScaledMatrix, ScaledRows
from pallas_kernels.target import target_device
from pallas_kernels.triton import grouped_float8_product as triton

# Rows of an expert on average from which on Triton's tiles have 128 rows. Not measured.
LEAST_AVERAGE = WGMMA_ROWS + 1


def grouped_float8_product(
    rows: ScaledRows, groups: Groups, weights: ScaledMatrix, of_tokens: bool, interpret: bool
) -> jax.Array:
    """See `backend.GroupedFloat8Product`."""
    are_few = groups.num_places < LEAST_AVERAGE * groups.num_experts or groups.num_places % COPY_ROWS
    if are_few or refuse_weights(weights) is not None:
        return triton.grouped_float8_product(rows, groups, weights, of_tokens, interpret)
    return _product_of_many(rows, groups, weights, of_tokens, interpret)


@functools.partial(jax.jit, static_argnames=("of_tokens", "interpret"))
def _product_of_many(
    rows: ScaledRows, groups: Groups, weights: ScaledMatrix, of_tokens: bool, interpret: bool
) -> jax.Array:
    num_blocks = 1 if groups.num_places <= groups.num_experts * BLOCK_ROWS else 2
    # As many as a tile has behind the first one's eight, wherever that begins in it.
    tiles, _ = row_tiles(groups, num_blocks * BLOCK_ROWS - COPY_ROWS)
    width = weights.num_outputs // TILE_OUTPUTS
    plan = Plan(
        num_blocks=num_blocks,
        num_programs=min(target_device().num_cores, len(tiles.experts) * width),
        cuts_rows=True,
        dtype=rows.dtype,
        interpret=interpret,
        **of_weights(weights),
    )
    numbers, of_rows = rows.numbers, rows.scale
    if of_tokens:
        numbers = numbers.at[groups.tokens].get(mode="promise_in_bounds")
        of_rows = of_rows.at[:, groups.tokens].get(mode="promise_in_bounds")
    if interpret:  # TMA leaves out what lies after the last row
        numbers = jnp.pad(numbers, ((0, plan.tile_rows), (0, 0)))
        of_rows = jnp.pad(of_rows, ((0, 0), (0, plan.tile_rows)))
    of_outputs = weights.scale if plan.weight_group else weights.scale[..., 0]
    product: jax.Array = gpu_kernel(
        functools.partial(_kernel, plan=plan),
        name="grouped_float8_product_of_many",
        out_type=jax.ShapeDtypeStruct((groups.num_places, weights.num_outputs), rows.dtype),
        scratch_types=scratch(plan),
        grid=(plan.num_programs,),
        grid_names=("program",),
        num_warpgroups=NUM_CONSUMERS + 1,
        warpgroup_name="warpgroup",
        interpret=interpret,
        reduction_scratch_bytes=0,
    )(numbers, weights.numbers, of_rows, of_outputs, *tiles)
    return product


def _kernel(
    x: Any,
    weights: Any,
    x_scale: Any,
    w_scale: Any,
    experts: Any,
    begins: Any,
    ends: Any,
    out: Any,
    *,
    plan: Plan,
    **memory: Any,
) -> None:
    num_experts, num_outputs, _ = weights.shape
    width, program = num_outputs // TILE_OUTPUTS, lax.axis_index("program")
    mine = lax.div(experts.shape[0] * width - program + plan.num_programs - 1, plan.num_programs)

    def walk(visit: Visit) -> jax.Array:
        """Tiles of the same rows follow each other, and then those of the same expert: what they read they share."""

        def go(number: jax.Array, done: jax.Array) -> jax.Array:
            tile = program + number * plan.num_programs
            of_rows, output = lax.div(tile, width), lax.rem(tile, width) * TILE_OUTPUTS
            expert, begin, end = experts[of_rows], begins[of_rows], ends[of_rows]
            # Places without an expert get zeros, and tiles that don't exist store nothing.
            num_steps = jnp.where((expert < num_experts) & (begin < end), jnp.int32(plan.num_steps), jnp.int32(0))
            row, real = lax.div(begin, COPY_ROWS) * COPY_ROWS, lax.min(expert, num_experts - 1)
            visit(Tile(row, output, weights.at[real], w_scale.at[real], num_steps, begin, end), done)
            return done + num_steps

        end: jax.Array = lax.fori_loop(0, mine, go, jnp.int32(0))
        return end

    run(plan, Refs(x, x_scale, out, **memory), walk)
