"""`grouped_product`, `gated_product` and `grouped_float8_product` for Hopper: many rows of an expert by a kernel of
Pallas Mosaic GPU, few by Triton's. Called through `hopper.BACKEND`.

A tile is some rows of one expert and 128 of its outputs, or 64 gates and what they multiply. TMA copies rows that lie
side by side, from a multiple of 8 on: so rows of tokens are gathered first, and a tile may begin with rows of the
expert before, and end with some of the next one's, which it doesn't write.
"""

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.experts import WITHOUT_GATES, Groups, product_dtype, result_dtype, starts_of, unit_of
from pallas_kernels.hopper.common import COPY_ROWS, WGMMA_ROWS, refuse_device
from pallas_kernels.hopper.float8_product import of_weights, refuse_weights
from pallas_kernels.hopper.product_tiles import (
    BLOCK_ROWS,
    STEP_BYTES,
    TILE_OUTPUTS,
    Plan,
    Refs,
    Tile,
    Visit,
    launch,
    run,
)
from pallas_kernels.scaled import ScaledMatrix, ScaledRows
from pallas_kernels.target import target_device
from pallas_kernels.triton import grouped_float8_product as triton_float8
from pallas_kernels.triton import grouped_product as triton
from pallas_kernels.triton.gather_rows import gather_rows

# Rows of an expert on average from which on Triton's tiles have 128 rows. Not measured.
LEAST_AVERAGE = WGMMA_ROWS + 1
# With fewer outputs rows of 16 bits take longer to gather, at a copy's bandwidth, than their products are expected to
# gain, by 0.45 and 0.68 of 788 TFLOP/s. Not measured.
LEAST_OUTPUTS = 512
# Both of `ACTIVATIONS` are the gate times a sigmoid of this: tanh(u) = 2 sigmoid(2 u) - 1.
_IN_SIGMOID: Mapping[str, Callable[[jax.Array], jax.Array]] = {
    "silu": lambda gate: gate,
    "gelu_tanh": lambda gate: gate * (2 * math.sqrt(2 / math.pi) * (1 + 0.044715 * gate * gate)),
}


def refuse_grouped_product(x: jax.Array, groups: Groups, weights: jax.Array) -> str | None:
    """Why this backend can't take x and weights `[E, out, in]`, or None when it can."""
    return refuse_device() or triton.refuse_grouped_product(x, groups, weights)


def refuse_gated_product(x: jax.Array, groups: Groups, weights: jax.Array, activation: str) -> str | None:
    """Why this backend can't take x and weights `[E, U F, in]`, or None when it can."""
    return refuse_device() or triton.refuse_gated_product(x, groups, weights, activation)


def grouped_product(x: jax.Array, groups: Groups, weights: jax.Array, of_tokens: bool, interpret: bool) -> jax.Array:
    """See `backend.GroupedProduct`."""
    if _are_few(groups) or not _has_tiles(weights, of_tokens):
        return triton.grouped_product(x, groups, weights, of_tokens, interpret)
    return _product_of_many(x, groups, weights, None, of_tokens, interpret)


def gated_product(
    x: jax.Array, groups: Groups, weights: jax.Array, activation: str, of_tokens: bool, interpret: bool
) -> jax.Array:
    """See `backend.GatedProduct`. Units without gates of many rows are XLA's, which reads and writes them once more."""
    if activation in WITHOUT_GATES and not _are_few(groups) and _has_tiles(weights, of_tokens):
        return unit_of([grouped_product(x, groups, weights, of_tokens, interpret)], activation)
    if _are_few(groups) or not _has_tiles(weights, of_tokens):
        return triton.gated_product(x, groups, weights, activation, of_tokens, interpret)
    return _product_of_many(x, groups, weights, activation, of_tokens, interpret)


def grouped_float8_product(
    rows: ScaledRows, groups: Groups, weights: ScaledMatrix, of_tokens: bool, interpret: bool
) -> jax.Array:
    """See `backend.GroupedFloat8Product`."""
    if _are_few(groups) or refuse_weights(weights) is not None:
        return triton_float8.grouped_float8_product(rows, groups, weights, of_tokens, interpret)
    return _float8_product_of_many(rows, groups, weights, of_tokens, interpret)


def _are_few(groups: Groups) -> bool:
    return groups.num_places < LEAST_AVERAGE * groups.num_experts or groups.num_places % COPY_ROWS != 0


def _has_tiles(weights: jax.Array, of_tokens: bool) -> bool:
    _, num_outputs, num_inputs = weights.shape
    if weights.dtype.itemsize != 2 or num_outputs % TILE_OUTPUTS or num_inputs * 2 % STEP_BYTES:
        return False
    return num_outputs >= LEAST_OUTPUTS or not of_tokens


@functools.partial(jax.jit, static_argnames=("activation", "of_tokens", "interpret"))
def _product_of_many(
    x: jax.Array, groups: Groups, weights: jax.Array, activation: str | None, of_tokens: bool, interpret: bool
) -> jax.Array:
    dtype = result_dtype(x, weights)
    rows = x.astype(product_dtype(x, weights))
    if of_tokens:
        rows, _ = gather_rows(rows, None, groups, interpret)
    return _launched(
        "grouped_product" if activation is None else "gated_product",
        groups,
        rows,
        weights,
        num_steps=weights.shape[2] * weights.dtype.itemsize // STEP_BYTES,
        operands=weights.dtype,
        dtype=dtype,
        interpret=interpret,
        unit=None if activation is None else functools.partial(_unit, activation, dtype),
    )


@functools.partial(jax.jit, static_argnames=("of_tokens", "interpret"))
def _float8_product_of_many(
    rows: ScaledRows, groups: Groups, weights: ScaledMatrix, of_tokens: bool, interpret: bool
) -> jax.Array:
    sizes = of_weights(weights)
    numbers, scale = rows.numbers, rows.scale
    if of_tokens:
        numbers, of_places = gather_rows(numbers, scale, groups, interpret)
        assert of_places is not None
        scale = of_places
    w_scale = weights.scale if sizes["weight_group"] else weights.scale[..., 0]
    return _launched(
        "grouped_float8_product", groups, numbers, weights.numbers, scale, w_scale,
        dtype=rows.dtype, interpret=interpret, **sizes,
    )  # fmt: skip


def _unit(activation: str, dtype: Any, total: jax.Array) -> jax.Array:
    """activation(gate) * up of sums `[64, 128]`, rounded first, as the results of a product would be."""
    half = TILE_OUTPUTS // 2
    gate, up = (side.astype(dtype).astype(jnp.float32) for side in (total[:, :half], total[:, half:]))
    return gate / (1.0 + jnp.exp(-_IN_SIGMOID[activation](gate))) * up


def _launched(
    name: str,
    groups: Groups,
    rows: jax.Array,
    weights: jax.Array,
    *scales: jax.Array,
    interpret: bool,
    dtype: Any,
    **sizes: Any,
) -> jax.Array:
    """The product of rows of places; scales are those of the rows, and of the weights."""
    num_blocks = 1 if groups.num_places <= groups.num_experts * BLOCK_ROWS else 2
    tiles = _tiles(groups, _own_rows(num_blocks))
    width = weights.shape[1] // TILE_OUTPUTS
    num_programs = min(target_device().num_cores, len(tiles[0]) * width)
    plan = Plan(
        num_blocks=num_blocks, num_programs=num_programs, cuts_rows=True, dtype=dtype, interpret=interpret, **sizes
    )
    if interpret:  # TMA leaves out what lies after the last row
        rows = jnp.pad(rows, ((0, plan.tile_rows), (0, 0)))
        scales = (*(jnp.pad(each, ((0, 0), (0, plan.tile_rows))) for each in scales[:1]), *scales[1:])
    shape = groups.num_places, width * plan.results
    product: jax.Array = launch(plan, f"{name}_of_many", shape, _kernel)(rows, weights, *tiles, *scales)
    return product


def _own_rows(num_blocks: int) -> int:
    """How many rows of a tile are an expert's at most: its first row is any of the first eight."""
    return num_blocks * BLOCK_ROWS - COPY_ROWS


def _tiles(groups: Groups, num_rows: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`[n]` int32 each: the expert of each tile of `num_rows` places, plus 1, and its first place and the next one's.

    Those of expert e are kept from its first place over `num_rows`, plus e, on, as `group_by_expert` keeps its own. One
    reduction makes all three, which is one kernel of XLA's.
    """
    starts, num_experts = starts_of(groups), groups.num_experts
    first = lax.div(starts, jnp.int32(num_rows)) + jnp.arange(num_experts + 1, dtype=jnp.int32)
    index = jnp.arange(groups.num_places // num_rows + num_experts + 1, dtype=jnp.int32)
    has_begun = first <= index[:, None]
    last = jnp.int32(groups.num_places)
    counted = has_begun.astype(jnp.int32), jnp.where(has_begun, starts, 0), jnp.where(has_begun, last, starts)

    def join(a: tuple[jax.Array, ...], b: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        return a[0] + b[0], lax.max(a[1], b[1]), lax.min(a[2], b[2])

    experts, begins, ends = lax.reduce(counted, (jnp.int32(0), jnp.int32(0), last), join, (1,))
    return experts, begins, ends


def _kernel(
    x: Any, weights: Any, experts: Any, starts: Any, ends: Any, *others: Any, plan: Plan, **memory: Any
) -> None:
    *scales, out = others
    x_scale, w_scale = scales or (None, None)
    num_experts, num_outputs, _ = weights.shape
    width, own, program = num_outputs // TILE_OUTPUTS, _own_rows(plan.num_blocks), lax.axis_index("program")
    mine = lax.div(experts.shape[0] * width - program + plan.num_programs - 1, plan.num_programs)

    def walk(visit: Visit) -> jax.Array:
        """Tiles of the same rows follow each other, and then those of the same expert: what they read they share."""

        def go(number: jax.Array, done: jax.Array) -> jax.Array:
            tile = program + number * plan.num_programs
            of_rows, output = lax.div(tile, width), lax.rem(tile, width) * plan.results
            expert, start, last = experts[of_rows] - 1, starts[of_rows], ends[of_rows]
            begin = lax.min(start + (of_rows - lax.div(start, own) - expert) * own, last)
            end = lax.min(begin + own, last)
            # Places without an expert get zeros, and tiles that don't exist store nothing.
            num_steps = jnp.where((expert < num_experts) & (begin < end), jnp.int32(plan.num_steps), jnp.int32(0))
            row, real = lax.div(begin, COPY_ROWS) * COPY_ROWS, lax.min(expert, num_experts - 1)
            of_weights = None if w_scale is None else w_scale.at[real]
            visit(Tile(row, output, weights.at[real], num_steps, of_weights, begin, end), done)
            return done + num_steps

        end: jax.Array = lax.fori_loop(0, mine, go, jnp.int32(0))
        return end

    run(plan, Refs(x, out, x_scale=x_scale, **memory), walk)
