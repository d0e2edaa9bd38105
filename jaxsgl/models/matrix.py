"""Matrices in any format of `WeightFormat`: numbers, and the scales that make weights of them.

A quantized matrix `down` has sibling parameters: `down` holds the numbers `[..., in]`, `down_scale` the scales
`[..., G]` in float32, one for each group of inputs of an output. Some formats add `down_zero` `[..., G]`, what stands
for zero, and `down_order` `[in]`, which input each column multiplies. A weight is `(number - zero) * scale`. A matrix
that is not quantized is one parameter, as ever. Where kernels take outputs side by side, all parts are as
`pallas_kernels.packed` arranges them.

Layers derive from `Matrices` and hand what `matrix` returns to `precision.product`. Never knows checkpoints: metadata
of each parameter says which part of a matrix it is, and `weights/quantized.py` makes it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from jaxsgl.models.quantization import FLOAT4, WeightFormat
from jaxsgl.models.tensor_parallel import all_parts, num_parts, part_index
from jaxsgl.models.units import unit_of
from pallas_kernels import (
    KernelChoice,
    ScaledMatrix,
    ScaledRows,
    float8_product,
    float8_rows,
    multiplies_float8,
    packed,
)
from pallas_kernels import quantized_product as product_of_groups
from pallas_kernels.choice import AUTO, AUTO_CHOICE, XLA
from pallas_kernels.dots import dot_precision
from pallas_kernels.experts import ACTIVATIONS
from pallas_kernels.native import packed_product
from pallas_kernels.native import product as native_product
from pallas_kernels.packed import PackedMatrix
from pallas_kernels.paged_kv import FLOAT8
from pallas_kernels.scaled import per_input, widened
from pallas_kernels.target import target_device

Axes: TypeAlias = tuple[str | None, ...]
PARTS = ("numbers", "scale", "zero", "order")
# Standard deviation of random numbers (drawn evenly) that use the whole range of a format.
_SPREAD = {"int8": 73.0, "int4": 4.0, "float4_e2m1fn": 2.9, "float8_e4m3fn": 1.0, "bfloat16": 1.0}
_ALL_BYTES = 128.0, 256 / 12**0.5  # mean and deviation of random ones
# With more rows XLA's copy of the scaled weights costs less time than the kernel loses to products without conversions:
# on an H200, int4 of 24,576 x 4,096 took the kernel 171 us with 256 rows and twice that with 512, and XLA 221 and 286.
# That was before int4 was packed; the packed kernel's limit is not measured.
MOST_ROWS_OF_KERNEL = 384

Rows: TypeAlias = jax.Array | ScaledRows  # `[T, D]`


@dataclass(frozen=True)
class Matrix:
    """A quantized matrix while a program is traced.

    Attributes:
      numbers: `[..., in]` in the format's dtype.
      scale: `[..., G]` float32.
      zero: `[..., G]` int8, or None for 0.
      order: `[in]` int32, the input that each column multiplies, or None for columns in their order.
      group: how many inputs share a scale; the last group may be cut.
      packing, widened_to: of numbers, scale and zero: see `WeightFormat`.
      cut_by: the logical axis of the columns of which these are one device's part; `order` then names inputs of all
        devices. None: they are all.
      kernels: what its products run on.
      row_bits: of the integers that kernels for integers on CPUs round activations to.
      block_outputs: how many outputs, of the last axis but one, share their scales.
    """

    numbers: jax.Array
    scale: jax.Array
    zero: jax.Array | None
    order: jax.Array | None
    group: int
    packing: str = ""
    widened_to: str = "bfloat16"
    cut_by: str | None = None
    kernels: KernelChoice = AUTO_CHOICE
    row_bits: int = 16
    block_outputs: int = 1

    @property
    def shape(self) -> tuple[int, ...]:
        """`[..., in]`."""
        return packed.unpacked_shape(self.packing, self.numbers.shape) if self.packing else self.numbers.shape

    @property
    def packed(self) -> PackedMatrix:
        """The parts of a packed matrix."""
        return PackedMatrix(self.numbers, self.scale, self.zero, self.group, self.packing)

    def unpacked(self) -> Matrix:
        """The same matrix with numbers of a byte, if it is packed."""
        if not self.packing:
            return self
        numbers, scale, zero = self.packed.unpacked()
        return replace(self, numbers=numbers, scale=scale, zero=zero, packing="")

    def rows(self, ids: jax.Array) -> Matrix:
        """The rows `ids` of the first axis, clipped to it."""
        if self.packing and self.numbers.ndim == 2:
            numbers, scale, zero = self.packed.of_outputs(ids)
            return replace(self, numbers=numbers, scale=scale, zero=zero, packing="", block_outputs=1)

        def take(array: jax.Array) -> jax.Array:
            return array.at[ids].get(mode="clip")

        zero = None if self.zero is None else take(self.zero)
        return replace(self, numbers=take(self.numbers), scale=take(self.scale), zero=zero, block_outputs=1)


Weights: TypeAlias = jax.Array | Matrix


class Matrices(nnx.Module):
    """A module with matrices in the format of its model."""

    def declare(
        self,
        name: str,
        shape: tuple[int, ...],
        axes: Axes,
        dtype: jnp.dtype,
        fmt: WeightFormat | None,
        *,
        fan_in: int,
        run: int | None = None,
        reordered: bool = False,
    ) -> None:
        """Declares the parameters of a matrix `[..., in]`, with `dtype` unless `fmt` says otherwise; no values yet.

        `axes` are the logical axes of `shape`. Random weights have the deviation 1 / sqrt(fan_in). `run` says how many
        outputs of a checkpoint follow each other, by default those of the last axis but one, and `reordered` whether
        they do so in another order.
        """
        std = 1 / math.sqrt(fan_in)
        if fmt is None:
            setattr(self, name, nnx.Param(jnp.zeros(shape, dtype), axes=axes, mean=0.0, std=std))
            return
        fmt = fmt.of_shape(shape, dtype.name)
        groups = (*shape[:-1], -(-shape[-1] // fmt.group_of(shape[-1])))
        spread = _SPREAD[FLOAT4 if fmt.packing in (packed.MXFP4_FRAGMENTS, packed.MXFP4_CODES) else fmt.numbers]
        # Where a part of the inputs may begin inside a group, scales aren't cut along the inputs.
        of_groups = axes if fmt.gives_whole_groups(shape[-1]) else (*axes[:-1], None)
        parts: dict[str, tuple[tuple[int, ...], Axes, DTypeLike, float, float]] = {
            "numbers": (shape, axes, fmt.numbers, 0.0, spread),
            "scale": (groups, of_groups, jnp.float32, std / spread, 0.0),
        }
        if fmt.has_zeros:
            parts["zero"] = groups, of_groups, jnp.int8, 0.0, 0.0
        if fmt.reorders:
            parts["order"] = shape[-1:], (None,), jnp.int32, 0.0, 0.0
        if fmt.packing in (packed.INT4, packed.INT8, packed.MXFP4):
            parts["numbers"] = shape, axes, jnp.uint8, *_ALL_BYTES
        if fmt.packing in packed.ON_GPUS:
            parts["numbers"] = shape, axes, jnp.uint32, 0.0, 0.0
            if fmt.has_zeros:
                parts["zero"] = *parts["zero"][:2], jnp.float32, 0.0, 0.0
        exponent = round(math.log2(std / spread)) + packed.MXFP4_BIAS
        if fmt.packing == packed.MXFP4_CODES:
            parts["numbers"] = shape, axes, jnp.int4, 0.0, _SPREAD["int4"]
        if fmt.packing in (packed.MXFP4, packed.MXFP4_CODES):
            parts["scale"] = groups, parts["scale"][1], jnp.uint8, float(exponent), 0.0
        if fmt.packing == packed.MXFP4_FRAGMENTS:  # parts of the inputs are whole blocks, and so are those of scales
            parts["scale"] = groups, axes, jnp.uint32, float(packed.mxfp4_pair(exponent)), 0.0
        for part, (dims, part_axes, kind, mean, deviation) in parts.items():
            zeros = jnp.zeros(packed.part_shape(fmt.packing, part, dims) if fmt.packing else dims, kind)
            param = nnx.Param(
                zeros, axes=part_axes, mean=mean, std=deviation, part=part, format=fmt, run=run, reordered=reordered
            )
            setattr(self, part_name(name, part), param)

    def matrix(self, name: str, kernels: KernelChoice = AUTO_CHOICE) -> Weights:
        """The matrix of that name: an array, or a `Matrix` if it is quantized, whose products run on `kernels`."""
        numbers: Any = getattr(self, name)
        if getattr(self, part_name(name, "scale"), None) is None:
            plain: jax.Array = numbers[...]
            return plain
        scale, zero, order = (self._part(name, part) for part in PARTS[1:])
        assert scale is not None
        fmt: WeightFormat = numbers.get_metadata("format")
        group = fmt.group_of(packed.unpacked_shape(fmt.packing, numbers[...].shape)[-1])
        run: int = numbers.get_metadata("run") or numbers[...].shape[-2]
        blocks = fmt.block_outputs(run, numbers.get_metadata("reordered"))
        whole = Matrix(numbers[...], scale, zero, order, group, fmt.packing, fmt.widened_to)
        whole = replace(whole, kernels=kernels, row_bits=fmt.row_bits, block_outputs=blocks)
        logical: str | None = numbers.get_metadata("axes")[-1]
        if logical is None or num_parts(logical) == 1:
            return whole
        has_own = getattr(self, part_name(name, "scale")).get_metadata("axes")[-1] is not None
        return _of_part(whole, logical) if has_own else _with_scales_of_part(_of_part(whole, logical), logical)

    def _part(self, name: str, part: str) -> jax.Array | None:
        param: nnx.Param[jax.Array] | None = getattr(self, part_name(name, part), None)
        return None if param is None else param[...]


def _of_part(matrix: Matrix, logical: str) -> Matrix:
    """The matrix whose numbers are this device's part of the inputs, with the order of these."""
    order, num_in = matrix.order, matrix.shape[-1]
    if order is not None:
        order = jax.lax.dynamic_slice_in_dim(order, part_index(logical) * num_in, num_in)
    return replace(matrix, order=order, cut_by=logical)


def _with_scales_of_part(matrix: Matrix, logical: str) -> Matrix:
    """The same with the scales of this device's part of the inputs, out of all.

    A part may begin inside a group. Its inputs are then in smaller groups, of which none has two scales.
    """
    scale, zero, num_in = matrix.scale, matrix.zero, matrix.shape[-1]
    side = packed.SIDES.get(matrix.packing)
    if scale.shape[-1] == (side or 1):
        return replace(matrix, group=num_in)
    group = math.gcd(num_in, matrix.group)
    first = part_index(logical) * num_in
    groups = (first + group * jnp.arange(num_in // group, dtype=jnp.int32)) // matrix.group

    def of_part(array: jax.Array) -> jax.Array:
        of_groups = packed.unpack_groups(matrix.packing, array) if side else array
        taken = of_groups.at[..., groups].get(mode="promise_in_bounds")
        return packed.pack_groups(matrix.packing, taken) if side else taken

    zero = None if zero is None else of_part(zero)
    return replace(matrix, scale=of_part(scale), zero=zero, group=group)


def group_of_part(group: int, num_inputs: int, num_devices: int) -> int:
    """How many inputs share a scale on each of the devices that share all inputs, as `Matrices.matrix` groups them."""
    if num_devices == 1:
        return group
    mine = num_inputs // num_devices
    return mine if group >= num_inputs else math.gcd(mine, group)


def part_name(name: str, part: str) -> str:
    """The name of a parameter that is a part of the matrix `name`."""
    return name if part == "numbers" else f"{name}_{part}"


def dequantized(weights: Weights, dtype: DTypeLike) -> jax.Array:
    """The weights `[..., in]` in `dtype`, their columns in the order of the inputs. Rounds once, from float32."""
    if not isinstance(weights, Matrix):
        return weights.astype(dtype)
    weights = weights.unpacked()
    values = widened(weights.numbers, weights.scale, weights.zero, weights.group, dtype)
    if weights.order is None:
        return values
    return jnp.zeros_like(values).at[..., weights.order].set(values)


def without_zeros(numbers: jax.Array, zero: jax.Array, group: int) -> jax.Array:
    """The numbers `[..., in]` less their groups' zero points `[..., G]`, in the numbers' dtype."""
    return numbers - per_input(zero, group, numbers.shape[-1]).astype(numbers.dtype)


def rounds_rows(dtype: DTypeLike, weights: Weights) -> bool:
    """Whether products of rows in `dtype` with the weights round the rows to float8.

    They do where a kernel multiplies float8 with float8: no conversion slows it down, and checkpoints in FP8 blocks are
    made for it ("activation_scheme": "dynamic").
    """
    if not isinstance(weights, Matrix) or weights.numbers.dtype != FLOAT8:
        return False
    return weights.order is None and multiplies_float8(dtype, _flat(weights), backend=weights.kernels.float8_product)


def gated_rows(gate_up: jax.Array, activation: str, weights: Weights) -> Rows:
    """activation(gate) * up of `[T, 2, F]`, for a product with the weights; if it rounds, in one kernel."""
    if gate_up.shape[1] == 2 and activation in ACTIVATIONS and rounds_rows(gate_up.dtype, weights):
        assert isinstance(weights, Matrix)
        return float8_rows(gate_up, activation, backend=weights.kernels.float8_product)
    return unit_of([gate_up[:, side] for side in range(gate_up.shape[1])], activation)


def quantized_product(x_TD: Rows, weights: Matrix, dtype: DTypeLike, *, in_parts: bool = False) -> jax.Array:
    """`x [T, D]` times `weights [..., D]`, as `precision.product` returns it: `[T, ...]` in `dtype`.

    With `in_parts` it may be parts, `[P, T, ...]` float32, as `precision.product_in_parts` returns them.

    On a CPU, int8 without zeros, bfloat16 and what is packed have kernels. Otherwise this multiplies in the format of
    x, with sums in float32. One scale per output is multiplied into the sums, and XLA converts the numbers as it
    multiplies; those of groups are `pallas_kernels.quantized_product`'s. Rows are rounded to float8 where
    `rounds_rows` says so.
    """
    if isinstance(x_TD, jax.Array) and rounds_rows(x_TD.dtype, weights):
        x_TD = float8_rows(x_TD, backend=weights.kernels.float8_product)
    if isinstance(x_TD, ScaledRows):
        of_float8 = weights.kernels.float8_product
        sums = float8_product(x_TD, _flat(weights), dtype, in_parts=in_parts, backend=of_float8)
        return sums.reshape(*sums.shape[:-1], *weights.shape[:-1])
    rows = _in_columns(x_TD, weights)
    out = _native_product(rows, weights)
    if out is None and weights.packing not in packed.ON_ACCELERATORS:
        weights = weights.unpacked()
    if out is None and (weights.packing or weights.scale.shape[-1] > 1 or weights.zero is not None):
        out = _grouped_product(rows, weights, dtype, in_parts)
        if out.ndim == 3:
            return out.reshape(len(out), len(x_TD), *weights.shape[:-1])
    if out is None:
        numbers = weights.numbers.reshape(-1, weights.shape[-1]).astype(rows.dtype)
        if native_product.refuse_float(rows, numbers) is None:
            out = native_product.float_product(rows, numbers)
        else:
            precision = dot_precision(rows)
            out = jnp.einsum("td,nd->tn", rows, numbers, precision=precision, preferred_element_type=jnp.float32)
        out = out * weights.scale.reshape(-1)
    return out.astype(dtype).reshape(len(x_TD), *weights.shape[:-1])


def native_gated_product(x_TD: Rows, gate_up: Weights, activation: str) -> jax.Array | None:
    """activation(gate(x)) * up(x) `[T, F]` float32 of weights `[2, F, D]`, by C++; None if a format has no kernel, or
    units have no gates.
    """
    if gate_up.shape[0] == 1 or activation not in ACTIVATIONS:
        return None
    if target_device().platform != "cpu" or not isinstance(x_TD, jax.Array) or x_TD.dtype != jnp.float32:
        return None
    if isinstance(gate_up, Matrix):
        return _native_product(_in_columns(x_TD, gate_up), gate_up, activation)
    flat = gate_up.reshape(-1, gate_up.shape[-1])
    if native_product.refuse(x_TD, flat) is not None or native_product.refuse_gate(len(flat)) is not None:
        return None
    return native_product.rows_product(x_TD, flat, activation=activation)


def _in_columns(x_TD: jax.Array, weights: Matrix) -> jax.Array:
    """x as the weights' columns want it, on a CPU in float32: XLA has no 16 bit dot for all CPUs."""
    rows = x_TD.astype(jnp.float32) if target_device().platform == "cpu" else x_TD
    if weights.order is None:
        return rows
    return (all_parts(rows, 1, weights.cut_by) if weights.cut_by else rows)[:, weights.order]


def _grouped_product(rows_TD: jax.Array, weights: Matrix, dtype: DTypeLike, in_parts: bool) -> jax.Array:
    """`[T, N]` in `dtype`, or parts of it `[P, T, N]` float32, where groups of inputs have scales or zeros."""
    chosen = weights.kernels.quantized_product
    are_many = target_device().platform == "gpu" and len(rows_TD) > MOST_ROWS_OF_KERNEL
    backend = XLA if chosen == AUTO and are_many else chosen
    flat = weights.packed.stacked(0) if weights.packing else _flat(weights)
    return product_of_groups(rows_TD, flat, dtype, in_parts=in_parts, backend=backend)


def _flat(weights: Matrix) -> ScaledMatrix:
    """The matrix with one axis of outputs."""

    def flat(part: jax.Array) -> jax.Array:
        return part.reshape(-1, part.shape[-1])

    zero = None if weights.zero is None else flat(weights.zero)
    return ScaledMatrix(flat(weights.numbers), flat(weights.scale), zero, weights.group, weights.block_outputs)


def _native_product(rows_TD: jax.Array, weights: Matrix, activation: str | None = None) -> jax.Array | None:
    """`[T, N]` float32 by a kernel in C++; None if the format has no kernel.

    With an activation it is a gated product, which has half as many results.
    """
    if activation is not None and weights.row_bits == native_product.TWO_WORDS:
        return None
    if weights.packing:
        flat = weights.packed.stacked(0)
        refused = activation is not None and weights.packing not in packed.SIDE_BY_SIDE
        if refused or packed_product.refuse(rows_TD, flat) is not None:
            return None
        return packed_product.product(rows_TD, flat, weights.widened_to, weights.row_bits, activation)
    if weights.zero is not None:
        return None
    numbers = weights.numbers.reshape(-1, weights.shape[-1])
    scale = weights.scale.reshape(len(numbers), -1)
    if activation is not None and native_product.refuse_gate(len(numbers)) is not None:
        return None
    if native_product.refuse_int8(rows_TD, numbers, scale, weights.group) is None:
        return native_product.int8_product(rows_TD, numbers, scale, weights.group, weights.row_bits, activation)
    if activation is None and scale.shape[1] == 1 and native_product.refuse(rows_TD, numbers) is None:
        return native_product.rows_product(rows_TD, numbers) * scale[:, 0]
    return None
