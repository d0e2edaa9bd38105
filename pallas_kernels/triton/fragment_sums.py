"""Sums of products of packed weights with rows, in a loop along the inputs.

Owns the order of what such a loop does, and where sums are scaled. Never knows where rows come from, nor what becomes
of sums. Called by `packed_product` and `grouped_packed_product`.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from pallas_kernels import fragments
from pallas_kernels.packed import MXFP4_FACTOR
from pallas_kernels.triton.fragment_tiles import PackedRefs, TileShape

RowsOf = Callable[[Any, int], jax.Array]  # `[R, width]` of the inputs from a first one on


def depth_for(num_inputs: int, group: int, most: int) -> int:
    """Inputs of a step: it lies in one group, or is a block of two."""
    groups = num_inputs | group
    return max(fragments.INPUTS, min(most, groups & -groups))


def sums(
    shape: TileShape,
    refs: PackedRefs,
    tiles: Sequence[Any],
    steps: tuple[Any, Any],
    rows_of: RowsOf,
    num_rows: int,
    dtype: DTypeLike,
) -> tuple[jax.Array, ...]:
    """Of each of these tiles of outputs `[outputs, R]` float32, over so many steps (second) from a first one on."""
    first, count = steps
    zeros = (jnp.zeros((shape.outputs, num_rows), jnp.float32),) * len(tiles)

    def block(step: jax.Array) -> jax.Array:
        return (first + step) * (shape.inputs // fragments.INPUTS)

    def dot(left: jax.Array, rows: jax.Array) -> jax.Array:
        return lax.dot(left, rows.T, preferred_element_type=jnp.float32)

    def add_floats(step: jax.Array, totals: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        rows = rows_of(block(step) * fragments.INPUTS, shape.inputs)
        lefts = [shape.floats(refs, tile, block(step), dtype) for tile in tiles]
        # Subtracted, which Triton doesn't hand to the product as what it adds to: see below.
        return tuple(total - dot(left, rows) for total, left in zip(totals, lefts, strict=True))

    def scales(step: jax.Array) -> tuple[tuple[jax.Array, ...], ...]:
        return tuple(shape.scales(refs, tile, block(step)) for tile in tiles)

    def add_integers(step: jax.Array, carry: tuple[tuple[jax.Array, ...], Any]) -> tuple[Any, ...]:
        totals, of_tiles = carry
        begin = block(step) * fragments.INPUTS
        lefts = [shape.numbers(refs, tile, block(step), dtype) for tile in tiles]
        # Sums of a group are scaled and added by themselves: handed to the product as what it adds to, they would make
        # Triton cut it in two, of which the second waits for the first.
        for half in range(refs.halves):
            width = lefts[0][half].shape[1]
            rows = rows_of(begin, width)
            scaled = (dot(left[half], rows) * scale[half][:, None] for left, scale in zip(lefts, of_tiles, strict=True))
            totals = tuple(total + more for total, more in zip(totals, scaled, strict=True))
            begin += width
        # Read a step ahead: nothing waits for the scales of the next group.
        return totals, scales(jnp.minimum(step + 1, count - 1))

    if refs.has_floats:
        totals: tuple[jax.Array, ...] = lax.fori_loop(jnp.int32(0), count, add_floats, zeros)
        factor = MXFP4_FACTOR if jnp.dtype(dtype) == jnp.bfloat16 else 1.0  # see `TileShape.floats`
        return tuple(total * -factor for total in totals)
    totals, _ = lax.fori_loop(jnp.int32(0), count, add_integers, (zeros, scales(jnp.int32(0))))
    return totals
