"""`grouped_product`, `gated_product` and both with shared experts as a Pallas kernel for the Triton backend.

Called through `triton.BACKEND`.

A program multiplies a tile of rows of one expert with some of its weight rows. Which tiles there are is computed on the
device, once for all products if `group_by_expert` is a kernel too, and the grid has as many programs as any choice of
experts may need; those without a tile end at once. A gated product's program takes as many weight rows, half of them
of the gate and half of what it multiplies, and stores their unit; without gates, of what becomes a unit. The weights of
shared experts are an array of their own; a program reads one of both, in two loops of which one has no steps, since no
loop with a condition would be pipelined.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels import tuning
from pallas_kernels.experts import (
    Groups,
    UnitWeights,
    product_dtype,
    result_dtype,
    row_tiles,
    unit_of,
    unit_rows,
)
from pallas_kernels.paged_kv import FLOAT8
from pallas_kernels.scaled import MOST_NUMBERS
from pallas_kernels.target import target_device
from pallas_kernels.triton.common import MIN_DOT
from pallas_kernels.triton.group_by_expert import rows_of_tiles
from pallas_kernels.triton.tiles import load_rows, store_rows


def refuse_grouped_product(x: jax.Array, groups: Groups, weights: jax.Array) -> str | None:
    """Why this backend can't take x and weights `[E, out, in]`, or None when it can."""
    if any(size % MIN_DOT for size in weights.shape[1:]):
        return f"the weights are {weights.shape}; it takes multiples of {(MIN_DOT, MIN_DOT)}"
    if weights.dtype.itemsize == 1 and weights.size > MOST_NUMBERS:
        return f"the weights are {weights.size} {weights.dtype}; of those of a byte it takes {MOST_NUMBERS}"
    if weights.dtype == FLOAT8 and not (target_device().converts_float8 or target_device().platform == "cpu"):
        return f"{target_device().kind} has no instructions for float8"
    return None


def refuse_gated_product(x: jax.Array, groups: Groups, weights: jax.Array, activation: str) -> str | None:
    """Why this backend can't take x and weights `[E, U F, in]`, or None when it can."""
    if weights.dtype.itemsize == 1:
        return f"the weights are {weights.dtype}, whose results are scaled before a gate; it takes weights as they are"
    step = unit_rows(activation) * MIN_DOT
    if weights.shape[1] % step:
        return f"the weights are {weights.shape}; it takes multiples of {(step, MIN_DOT)}"
    return refuse_grouped_product(x, groups, weights)


def refuse_products_with_shared(experts: UnitWeights, shared: UnitWeights) -> str | None:
    """Why this backend can't take weights `[E, U F, in]` and `[E, out, F]` with `[U, n F, in]` and `[out, n F]`."""
    weights = *experts, *shared
    if any(each.dtype.itemsize == 1 for each in weights) or len({each.dtype for each in weights}) > 1:
        return (
            f"the weights are {', '.join(each.dtype.name for each in weights)}; it takes one format of more than a byte"
        )
    side = experts.gate_up.shape[1] // shared.gate_up.shape[0]
    if any(size % MIN_DOT for each in weights for size in (side, *each.shape[1:])):
        return f"the weights are {experts.gate_up.shape} and {experts.down.shape}; it takes multiples of {MIN_DOT}"
    return None


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


@functools.partial(jax.jit, static_argnames=("activation", "interpret"))
def products_with_shared(
    x: jax.Array, groups: Groups, experts: UnitWeights, shared: UnitWeights, activation: str, interpret: bool
) -> jax.Array:
    """See `backend.ProductsWithShared`."""
    num_shared = groups.num_experts - len(experts.down)
    gate_up = shared.gate_up.reshape(unit_rows(activation), num_shared, -1, x.shape[1])
    down = shared.down.reshape(len(shared.down), num_shared, -1)
    hidden = _product(x, groups, experts.gate_up, activation, True, interpret, gate_up)
    return _product(hidden, groups, experts.down, None, False, interpret, down)


def _product(
    x: jax.Array,
    groups: Groups,
    weights: jax.Array,
    activation: str | None,
    of_tokens: bool,
    interpret: bool,
    shared: jax.Array | None = None,
) -> jax.Array:
    """Weights of shared experts are `[U, n, F, in]` of a gated product, else `[out, n, in]`."""
    _, num_out, num_in = weights.shape
    num_rows = rows_of_tiles(groups.num_places, groups.num_experts)
    num_sides = 1 if activation is None else unit_rows(activation)
    tuned = "grouped_product" if num_sides == 1 else "gated_product"
    blocks = tuning.blocks(tuned, "triton", tuning.ExpertClass(num_rows, 8 * weights.dtype.itemsize))
    num_columns = _largest_factor(num_out // num_sides, blocks["tile_outputs"] // num_sides)
    depth = _largest_factor(num_in, blocks["tile_bytes"] // product_dtype(x, weights).itemsize)
    tiles = groups.tiles if groups.tiles is not None and groups.tile_rows == num_rows else None
    if tiles is None:
        tiles, _ = row_tiles(groups, num_rows)
    sizes: dict[str, Any] = {"num_rows": num_rows, "num_columns": num_columns, "depth": depth}
    y: jax.Array = pl.pallas_call(
        functools.partial(_kernel, **sizes, of_tokens=of_tokens, activation=activation),
        out_shape=jax.ShapeDtypeStruct((groups.num_places, num_out // num_sides), result_dtype(x, weights)),
        grid=(len(tiles.experts), num_out // num_sides // num_columns),
        compiler_params=plgpu.CompilerParams(num_warps=blocks["num_warps"], num_stages=blocks["num_stages"]),
        interpret=interpret,
        name="grouped_product" if activation is None else "gated_product",
    )(
        x.astype(product_dtype(x, weights)), groups.tokens, tiles.experts, tiles.begins, tiles.ends, weights,
        *([] if shared is None else [shared]),
    )  # fmt: skip
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
    *refs: Any,
    num_rows: int,
    num_columns: int,
    depth: int,
    of_tokens: bool,
    activation: str | None,
) -> None:
    *shared_refs, y_ref = refs
    tile = pl.program_id(0)
    expert, begin, end = experts_ref[tile], begins_ref[tile], ends_ref[tile]
    num_experts, num_out, num_in = weights_ref.shape
    place = begin + jnp.arange(num_rows, dtype=jnp.int32)
    is_row = place < end
    row = plgpu.load(tokens_ref.at[place], mask=is_row, other=0) if of_tokens else place
    first_column = pl.program_id(1) * num_columns
    # Of the product, or of the gate and of what it multiplies.
    num_sides = 1 if activation is None else unit_rows(activation)
    first_weights = [side * (num_out // num_sides) + first_column for side in range(num_sides)]
    columns = [first + jnp.arange(num_columns, dtype=jnp.int32) for first in first_weights]

    def steps_if(is_here: jax.Array) -> jax.Array:
        # Places without an expert get zeros, and tiles that don't exist store nothing.
        return jnp.where(is_here & (begin < end), jnp.int32(num_in // depth), jnp.int32(0))

    def added(totals: tuple[jax.Array, ...], steps: jax.Array, ref: Any, weight_rows: list[Any]) -> tuple[Any, ...]:
        """The totals with as many steps of the products of rows of weights."""

        def add(step: jax.Array, totals: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            inputs = (step * depth, depth)
            left = load_rows(x_ref, (row,), is_row, inputs)
            rights = [load_rows(ref, index, None, inputs).astype(left.dtype) for index in weight_rows]
            # float32 stays float32: the default would round it to TF32.
            precision = lax.Precision.HIGHEST if left.dtype == jnp.float32 else None
            return tuple(
                total + lax.dot(left, right.T, precision=precision, preferred_element_type=jnp.float32)
                for total, right in zip(totals, rights, strict=True)
            )

        done: tuple[Any, ...] = lax.fori_loop(jnp.int32(0), steps, add, totals)
        return done

    steps = steps_if(expert < num_experts)
    zeros = jnp.zeros((num_rows, num_columns), jnp.float32)
    totals = added((zeros,) * len(columns), steps, weights_ref, [(expert, column) for column in columns])
    for ref in shared_refs:
        number = expert - num_experts
        of_sides = [(side, number, columns[0]) for side in range(len(columns))]
        weight_rows = [(columns[0], number)] if activation is None else of_sides
        totals = added(totals, steps_if((number >= 0) & (number < ref.shape[1])), ref, weight_rows)
    out = totals[0]
    if activation is not None:
        # Rounded first, as the results of a product would be.
        out = unit_of([side.astype(y_ref.dtype).astype(jnp.float32) for side in totals], activation)
    store_rows(y_ref, (place,), is_row, out, (first_column, num_columns))
