"""Products with the weights of experts, or of one matrix of a few bits, on TPUs. Called through `tpu.BACKEND`.

XLA would write widened weights to memory, at several times the traffic of the product, and loop over experts' tiles;
`lax.ragged_dot` wants weights `[E, in, out]`: with those of checkpoints, XLA makes a transposed copy of all of them at
each call (768 MiB for 128 experts of 1536 x 2048, seen in a compiled program for a v5e). This kernel reads numbers as
they lie and widens them in VMEM, a tile of an expert's outputs with all inputs.

Rows are in tiles as they stand, and a tile meets each expert that has rows in it, as in JAX's own kernel (megablox),
whose search for them takes some fifty small operations, and this one's five. `product_tiles` is the kernel.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import next_power_of_2
from jax.experimental.pallas import tpu as pltpu
from jax.typing import DTypeLike

from pallas_kernels.experts import Groups, product_dtype, result_dtype, with_bias
from pallas_kernels.packed import MXFP4_CODES, PackedMatrix
from pallas_kernels.paged_kv import FLOAT8
from pallas_kernels.scaled import ScaledMatrix
from pallas_kernels.tpu.common import LANES, vmem_limit_bytes
from pallas_kernels.tpu.product_tiles import BEGIN, END, EXPERT, TILE, multiply_tile

# Rows and outputs of a tile, inputs of a step, numbers and bytes of rows of a tile, chosen by hand. Not measured.
_MOST_ROWS, _MOST_ROWS_OF_EXPERT, _MOST_OUTPUTS, _MOST_DEPTH = 512, 128, 512, 512
_MOST_NUMBERS, _MOST_ROW_BYTES = 4 << 20, 8 << 20
_SMALLEST_ROWS = 16  # of a native tile of bfloat16
_SUBLANES = 32  # of a native tile of bytes
_NUMBERS = (jnp.dtype(jnp.int4), jnp.dtype(jnp.int8), FLOAT8)


def refuse_quantized_product(x: jax.Array, weights: ScaledMatrix | PackedMatrix) -> str | None:
    """Why this backend can't multiply x and one matrix, or None when it can."""
    return refuse_packed_product(x, weights) if isinstance(weights, PackedMatrix) else refuse_scaled_product(x, weights)


def refuse_packed_product(x: jax.Array, weights: PackedMatrix) -> str | None:
    """Why this backend can't multiply x and packed weights `[.., out, in]`, or None when it can."""
    if weights.packing != MXFP4_CODES:
        return f"the weights are {weights.packing}, for other devices"
    return _refuse(x, weights.numbers)


def refuse_scaled_product(x: jax.Array, weights: ScaledMatrix) -> str | None:
    """Why this backend can't multiply x and weights `[.., out, in]`, or None when it can."""
    if weights.numbers.dtype not in _NUMBERS:
        return f"it takes int4, int8 and float8_e4m3fn, not {weights.numbers.dtype}"
    group, num_inputs = weights.group, weights.num_inputs
    if group < num_inputs and group % LANES and LANES % group:
        return f"groups have {group} inputs; it takes divisors and multiples of {LANES}"
    return _refuse(x, weights.numbers)


def refuse_grouped_product(x: jax.Array, groups: Groups, weights: jax.Array) -> str | None:
    """Why this backend can't take x and weights `[E, out, in]`, or None when it can."""
    if weights.dtype not in (jnp.bfloat16, jnp.float32, jnp.int8, FLOAT8):
        return f"it takes bfloat16, float32, int8 and float8_e4m3fn weights, not {weights.dtype}"
    return _refuse(x, weights)


def _refuse(x: jax.Array, numbers: jax.Array) -> str | None:
    """The same of numbers `[.., out, in]` with any scales.

    Where the inputs fill fewer lanes than the outputs would, XLA keeps a matrix transposed, and a kernel, which wants
    it row-major, would read a copy that is made at each call.
    """
    if x.dtype not in (jnp.bfloat16, jnp.float32):
        return f"it takes rows in bfloat16 and float32, not {x.dtype}"
    num_outputs, num_inputs = numbers.shape[-2:]
    if num_inputs < LANES:
        return f"the weights have {num_inputs} inputs; it takes {LANES} or more"
    # A gate and what it multiplies are kept side by side, `[2, out, in]`.
    if not any(_is_row_major(outputs, num_inputs) for outputs in (num_outputs, num_outputs // 2)):
        return f"the weights are {numbers.shape}, of which {num_outputs} fill lanes better than {num_inputs}"
    return None


def _is_row_major(num_outputs: int, num_inputs: int) -> bool:
    """Whether XLA keeps `[.., out, in]` so: it pads the last axis to lanes, the one before to 32 bytes of sublanes."""

    def size(rows: int, lanes: int) -> int:
        return -(-rows // _SUBLANES) * _SUBLANES * -(-lanes // LANES) * LANES

    return size(num_outputs, num_inputs) <= size(num_inputs, num_outputs)


def quantized_product(
    x: jax.Array, weights: ScaledMatrix | PackedMatrix, dtype: DTypeLike, in_parts: bool, interpret: bool
) -> jax.Array:
    """See `backend.QuantizedProduct`. The matrix is that of one expert, which has all rows."""
    one = _Weights.of(jax.tree.map(lambda part: part[None], weights))
    sizes = jnp.full(1, len(x), jnp.int32)
    return _product(x, sizes, one, jnp.dtype(dtype), _MOST_ROWS, "quantized_product", interpret)


def grouped_scaled_product(
    x: jax.Array, groups: Groups, weights: ScaledMatrix, of_tokens: bool, interpret: bool
) -> jax.Array:
    """See `backend.GroupedScaledProduct`."""
    return _of_experts(x[groups.tokens] if of_tokens else x, groups, _Weights.of(weights), x.dtype, interpret)


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
    """See `backend.GroupedPackedProduct`. Multiplies in x's dtype."""
    y = _of_experts(x[groups.tokens] if of_tokens else x, groups, _Weights.of(weights), x.dtype, interpret)
    return with_bias(y, bias, groups)


def grouped_product(x: jax.Array, groups: Groups, weights: jax.Array, of_tokens: bool, interpret: bool) -> jax.Array:
    """See `backend.GroupedProduct`."""
    rows = (x[groups.tokens] if of_tokens else x).astype(product_dtype(x, weights))
    plain = _Weights(weights, (), weights.shape[-1], are_codes=False)
    return _of_experts(rows, groups, plain, result_dtype(x, weights), interpret)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Weights:
    """Numbers `[E, O, I]`; of groups scales `[E, O, G]`, and zeros if there are some, or nothing at all."""

    numbers: jax.Array
    of_groups: tuple[jax.Array, ...]
    group: int = dataclasses.field(metadata={"static": True})
    are_codes: bool = dataclasses.field(metadata={"static": True})
    """Whether the numbers are codes of e2m1, and scales are bytes."""

    @classmethod
    def of(cls, weights: ScaledMatrix | PackedMatrix) -> _Weights:
        of_groups = (weights.scale,) if weights.zero is None else (weights.scale, weights.zero)
        return cls(weights.numbers, of_groups, weights.group, isinstance(weights, PackedMatrix))


def _of_experts(rows: jax.Array, groups: Groups, weights: _Weights, dtype: DTypeLike, interpret: bool) -> jax.Array:
    most_rows, name = _MOST_ROWS_OF_EXPERT, "grouped_scaled_product"
    y = _product(rows, groups.sizes, weights, jnp.dtype(dtype), most_rows, name, interpret)
    # It writes no rows after those of the last expert.
    has_expert = jnp.arange(groups.num_places) < jnp.sum(groups.sizes)
    return jnp.where(has_expert[:, None], y, 0)


@functools.partial(jax.jit, static_argnames=("dtype", "most_rows", "name", "interpret"))
def _product(
    rows: jax.Array,
    sizes: jax.Array,
    weights: _Weights,
    dtype: jnp.dtype,
    most_rows: int,
    name: str,
    interpret: bool,
) -> jax.Array:
    """Rows `[M, I]`, the first `sizes[0]` of them times the first of the weights, and so on: `[M, O]`."""
    numbers, of_groups, group = weights.numbers, weights.of_groups, weights.group
    num_rows, (num_outputs, num_inputs) = len(rows), numbers.shape[1:]
    fitting = next_power_of_2(_MOST_ROW_BYTES // (num_inputs * rows.dtype.itemsize) + 1) // 2
    tile_rows = max(min(next_power_of_2(num_rows), fitting, most_rows), _SMALLEST_ROWS)
    tile_outputs = _tile_outputs(num_outputs, num_inputs)
    rows = jnp.pad(rows, ((0, -num_rows % tile_rows), (0, 0)))
    visits, num_visits = _visits(sizes, len(rows) // tile_rows, tile_rows)
    num_groups, is_spread = -(-num_inputs // group), group < LANES
    shape = (tile_outputs, -(-num_groups // LANES) * LANES) if is_spread else (num_groups, tile_outputs)
    # Scales that multiply sums are read where they are. Zeros are widened first, and what is spread is turned.
    scratch = [pltpu.VMEM(shape, jnp.float32) for _ in (of_groups if is_spread else of_groups[1:])]
    blocks = [
        pltpu.VMEM((2, tile_rows, num_inputs), rows.dtype),
        pltpu.VMEM((2, tile_outputs, num_inputs), jnp.int8 if numbers.dtype.itemsize == 1 else numbers.dtype),
        pltpu.VMEM((2 * len(of_groups), num_groups, tile_outputs), jnp.float32),
        pltpu.VMEM((4, tile_rows, tile_outputs), jnp.float32),  # the result, twice, and sums
    ]

    def of_rows(_: Any, visit: Any, visits: Any) -> tuple[Any, ...]:
        return visits[TILE, visit], 0

    def of_numbers(out: Any, visit: Any, visits: Any) -> tuple[Any, ...]:
        return visits[EXPERT, visit], out, 0

    def of_scales(out: Any, visit: Any, visits: Any) -> tuple[Any, ...]:
        return visits[EXPERT, visit], 0, out

    def of_result(out: Any, visit: Any, visits: Any) -> tuple[Any, ...]:
        return visits[TILE, visit], out

    y = pl.pallas_call(
        functools.partial(
            multiply_tile,
            num_of_groups=len(of_groups),
            group=group,
            are_codes=weights.are_codes,
            depth=_depth(num_inputs, group),
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(-(-num_outputs // tile_outputs), num_visits),  # an expert's follow each other: it is read once
            in_specs=[
                pl.BlockSpec((tile_rows, num_inputs), of_rows),
                pl.BlockSpec((1, tile_outputs, num_inputs), of_numbers),
                *(pl.BlockSpec((1, num_groups, tile_outputs), of_scales) for _ in of_groups),
            ],
            out_specs=pl.BlockSpec((tile_rows, tile_outputs), of_result),
            scratch_shapes=scratch,
        ),
        out_shape=jax.ShapeDtypeStruct((len(rows), num_outputs), dtype),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary", "arbitrary"),  # rows that experts share are written twice
            vmem_limit_bytes=vmem_limit_bytes([*blocks, *scratch]),
        ),
        interpret=interpret,
        name=name,
    )(visits, rows, numbers, *(each.swapaxes(1, 2) for each in of_groups))
    return y[:num_rows]


def _visits(sizes: jax.Array, num_tiles: int, tile_rows: int) -> tuple[jax.Array, jax.Array]:
    """Which expert meets which tile of rows, as `multiply_tile` reads it, and how many do."""
    num_experts = len(sizes)
    ends = _cumulated(sizes)
    begins = ends - sizes
    first_tiles = begins // tile_rows
    counts = jnp.where(sizes > 0, (ends - 1) // tile_rows - first_tiles + 1, 0)
    ends_of_visits = _cumulated(counts)
    before = ends_of_visits - counts
    visit = jnp.arange(num_tiles + num_experts - 1, dtype=jnp.int32)[:, None]
    is_its = (before <= visit) & (visit < ends_of_visits)  # [visits, E]
    of_experts = {
        EXPERT: jnp.arange(num_experts, dtype=jnp.int32), TILE: first_tiles - before + visit, BEGIN: begins, END: ends
    }  # fmt: skip
    found = [jnp.sum(jnp.where(is_its, of_experts[row], 0), axis=1, dtype=jnp.int32) for row in sorted(of_experts)]
    return jnp.stack(found), ends_of_visits[-1]


def _cumulated(counts: jax.Array) -> jax.Array:
    """`jnp.cumsum`, of which XLA makes several kernels."""
    index = jnp.arange(len(counts))
    return jnp.sum(jnp.where(index <= index[:, None], counts, 0), axis=1, dtype=jnp.int32)


def _tile_outputs(num_outputs: int, num_inputs: int) -> int:
    """A multiple of the lanes, of which a tile's numbers have not too many bytes."""
    fitting = max(_MOST_NUMBERS // num_inputs // LANES * LANES, LANES)
    return min(-(-num_outputs // LANES) * LANES, fitting, _MOST_OUTPUTS)


def _depth(num_inputs: int, group: int) -> int:
    """Inputs of a step: whole lanes, the same number in each step, and of one group where that is wider."""
    inside = num_inputs // LANES * LANES if group % LANES or group >= num_inputs else group
    return next(depth for depth in range(_MOST_DEPTH, 0, -LANES) if inside % depth == 0)
