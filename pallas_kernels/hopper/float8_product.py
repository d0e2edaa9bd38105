"""`float8_product` for Hopper: many rows by a kernel of Pallas Mosaic GPU, few by Triton's. Called through
`hopper.BACKEND`.

As many programs as the chip has multiprocessors walk over the tiles. What limits Triton's kernel with many rows is the
second-level cache: 128 rows and 64 outputs need twice the bytes for a product of two numbers that 256 and 128 need.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.typing import DTypeLike

from pallas_kernels.hopper.common import refuse_device
from pallas_kernels.hopper.product_tiles import (
    BLOCK_ROWS,
    PIECE,
    TILE_OUTPUTS,
    Plan,
    Refs,
    Tile,
    Visit,
    launch,
    run,
)
from pallas_kernels.paged_kv import FLOAT8
from pallas_kernels.scaled import ROW_GROUP, ScaledMatrix, ScaledRows
from pallas_kernels.target import target_device
from pallas_kernels.triton import float8_product as triton

# With fewer rows Triton's kernel, whose sums may come in parts, keeps more multiprocessors busy. Not measured.
LEAST_ROWS = 256
# Time of a block of rows alone in its tile, over that of one of two: bytes read for each row, 2 to 1.5. Not measured.
_ALONE = 4 / 3


def refuse_float8_product(dtype: DTypeLike, weights: ScaledMatrix) -> str | None:
    """Why this backend can't multiply rows that were `dtype` with a matrix or a stack of them, or None if it can."""
    return refuse_device() or triton.refuse_float8_product(dtype, weights)


def refuse_weights(weights: ScaledMatrix) -> str | None:
    """Why Mosaic's kernels can't take a matrix or a stack of them that Triton's can."""
    if weights.num_outputs % TILE_OUTPUTS:
        return f"{weights.num_outputs} outputs; it takes multiples of {TILE_OUTPUTS}"
    if weights.scale.shape[-1] > 1 and weights.block_outputs % PIECE:
        return f"{weights.block_outputs} outputs share scales of groups; it takes multiples of {PIECE}"
    return None


def float8_product(
    rows: ScaledRows, weights: ScaledMatrix, dtype: DTypeLike, in_parts: bool, interpret: bool
) -> jax.Array:
    """See `backend.Float8Product`."""
    are_few = len(rows) < LEAST_ROWS or len(rows) % BLOCK_ROWS
    if are_few or refuse_weights(weights) is not None:
        return triton.float8_product(rows, weights, dtype, in_parts, interpret)
    return _product_of_many(rows, weights, jnp.dtype(dtype), interpret)


@functools.partial(jax.jit, static_argnames=("dtype", "interpret"))
def _product_of_many(rows: ScaledRows, weights: ScaledMatrix, dtype: Any, interpret: bool) -> jax.Array:
    num_blocks, num_tiles = _blocks_and_tiles(len(rows), weights.num_outputs)
    plan = Plan(
        num_blocks=num_blocks,
        num_programs=min(target_device().num_cores, num_tiles),
        cuts_rows=False,
        dtype=dtype,
        interpret=interpret,
        **of_weights(weights),
    )
    scale = weights.scale if plan.weight_group else weights.scale.reshape(-1)
    shape = len(rows), weights.num_outputs
    product: jax.Array = launch(plan, "float8_product_of_many", shape, _kernel)(
        rows.numbers, weights.numbers, rows.scale, scale
    )
    return product


def of_weights(weights: ScaledMatrix) -> dict[str, Any]:
    """What a plan has to know of a matrix, or of a stack of them."""
    return {
        "num_steps": weights.num_inputs // ROW_GROUP,
        "operands": FLOAT8,
        "weight_group": weights.group if weights.scale.shape[-1] > 1 else 0,
        "block_outputs": math.gcd(weights.block_outputs, TILE_OUTPUTS),
    }


def _blocks_and_tiles(num_rows: int, num_outputs: int) -> tuple[int, int]:
    """Blocks of rows in a tile, those with which the programs that take turns are done first, and how many tiles."""
    high, cores = num_rows // BLOCK_ROWS, target_device().num_cores
    tiles = {blocks: high // blocks * (num_outputs // TILE_OUTPUTS) for blocks in (2, 1) if high % blocks == 0}

    def cost(blocks: int) -> float:
        return pl.cdiv(tiles[blocks], cores) * blocks * (_ALONE if blocks == 1 else 1)

    best = min(tiles, key=cost)
    return best, tiles[best]


def _kernel(x: Any, weights: Any, x_scale: Any, w_scale: Any, out: Any, *, plan: Plan, **memory: Any) -> None:
    num_rows, num_outputs = out.shape
    high = num_rows // plan.tile_rows
    num_tiles, program = high * (num_outputs // TILE_OUTPUTS), lax.axis_index("program")
    mine = lax.div(num_tiles - program + plan.num_programs - 1, plan.num_programs)

    def walk(visit: Visit) -> jax.Array:
        """Tiles of the same outputs follow each other: all but the first find weights in the second-level cache."""

        def go(number: jax.Array, _: None) -> None:
            tile = program + number * plan.num_programs
            row, output = lax.rem(tile, high) * plan.tile_rows, lax.div(tile, high) * TILE_OUTPUTS
            visit(Tile(row, output, weights, plan.num_steps, w_scale), number * plan.num_steps)

        lax.fori_loop(0, mine, go, None)
        return mine * plan.num_steps

    run(plan, Refs(x, out, x_scale=x_scale, **memory), walk)
