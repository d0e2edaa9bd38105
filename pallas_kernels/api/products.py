"""Products of rows with one matrix: with weights that share scales in groups, in float8, or in a fixed order of sums.

Owns the checks of the arguments. Never knows whose weights these are, nor how a backend multiplies: it asks `dispatch`
for one and calls it.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.dispatch import choose_kernel, choose_kernel_or_xla, has_kernel, refusals_of
from pallas_kernels.dots import dot_precision
from pallas_kernels.experts import ACTIVATIONS
from pallas_kernels.packed import MXFP4_FRAGMENTS, ON_ACCELERATORS, SIDES, PackedMatrix
from pallas_kernels.paged_kv import FLOAT8
from pallas_kernels.scaled import ROW_GROUP, ScaledMatrix, ScaledRows


def quantized_product(
    x: jax.Array,
    weights: ScaledMatrix | PackedMatrix,
    dtype: DTypeLike | None = None,
    *,
    in_parts: bool = False,
    backend: str = "auto",
    interpret: bool = False,
) -> jax.Array:
    """Rows times a matrix whose inputs share scales in groups; returns `[T, O]` in `dtype` (default: x's).

    Numbers are converted to x's format and added up in float32. "xla" rounds the scaled weights to x's format, others
    scale the sums of groups.

    Args:
        x: `[T, I]`.
        weights: of O outputs and I inputs; a packed matrix is one of `packed.ON_ACCELERATORS`.
        dtype: of the result.
        in_parts: the caller adds up parts itself: where that is faster, the result is `[P, T, O]` float32, parts whose
            sum is the product.
        backend: a backend that has the op, or "auto".
        interpret: run a Pallas backend in its interpreter, on any platform.

    Raises:
        ValueError: shapes that don't fit each other, or a backend that can't run here.
    """
    _check(x, weights)
    multiply = choose_kernel(
        "quantized_product", lambda each: each.quantized_product, backend, x, weights, interpret=interpret
    )
    return multiply(x, weights, jnp.dtype(x.dtype if dtype is None else dtype), in_parts, interpret)


def _check(x: jax.Array, weights: ScaledMatrix | PackedMatrix) -> None:
    if isinstance(weights, PackedMatrix):
        if weights.packing not in ON_ACCELERATORS:
            taken = ", ".join(ON_ACCELERATORS)
            raise ValueError(f"the weights are packed as {weights.packing}; {taken} have this product")
        num_outputs, num_inputs = weights.shape
    else:
        num_outputs, num_inputs = weights.numbers.shape
    groups = -(-num_inputs // weights.group)
    side = SIDES.get(weights.packing, 1) if isinstance(weights, PackedMatrix) else 1
    is_mxfp4 = isinstance(weights, PackedMatrix) and weights.packing == MXFP4_FRAGMENTS
    lead = num_outputs // side, side * groups // (2 if is_mxfp4 else 1)
    of_groups = [each.shape for each in (weights.scale, weights.zero) if each is not None]
    if x.shape[1:] != (num_inputs,) or any(shape != lead for shape in of_groups):
        raise ValueError(
            f"x is {x.shape}, numbers are {weights.numbers.shape}, scales and zeros {of_groups}; of [O, I] = "
            f"{(num_outputs, num_inputs)} they must be [T, I], {weights.numbers.shape} and {lead}, with {groups} "
            f"groups of {weights.group}"
        )


def multiplies_float8(dtype: DTypeLike, weights: ScaledMatrix, *, backend: str = "auto") -> bool:
    """Whether a kernel multiplies rows in float8 with the weights on the target device; with "xla" none does.

    Args:
        dtype: of the rows before they are rounded.
        weights: of O outputs and I inputs.
        backend: as for `float8_product`.

    Raises:
        ValueError: a named backend that can't run here.
    """
    return has_kernel("float8_product", backend, refusals_of(lambda each: each.float8_product, dtype, weights))


def device_multiplies_float8(dtype: DTypeLike) -> bool:
    """Whether a kernel multiplies such rows in float8 on the target device, with weights of sizes that it takes."""
    numbers: Any = jax.ShapeDtypeStruct((ROW_GROUP, ROW_GROUP), FLOAT8)
    scale: Any = jax.ShapeDtypeStruct((ROW_GROUP, 1), jnp.float32)
    return multiplies_float8(dtype, ScaledMatrix(numbers, scale, None, ROW_GROUP))


def float8_rows(
    x: jax.Array, activation: str | None = None, *, backend: str = "auto", interpret: bool = False
) -> ScaledRows:
    """Rows rounded to float8, each group of `ROW_GROUP` numbers with a scale that brings the largest to 448.

    Args:
        x: `[T, I]` of whole groups; with an activation `[T, 2, I]`, gates and what they multiply, of which
            activation(gate) * up is rounded.
        activation: one of `ACTIVATIONS`, or None.
        backend: a backend that has `float8_product`, "xla", or "auto".
        interpret: run a Pallas backend in its interpreter, on any platform.

    Raises:
        ValueError: shapes that don't fit, or a backend that can't run here.
    """
    shape = (len(x), x.shape[-1]) if activation is None else (len(x), 2, x.shape[-1])
    if x.shape != shape or x.shape[-1] % ROW_GROUP or activation not in (None, *ACTIVATIONS):
        raise ValueError(
            f"x is {x.shape} and the activation {activation}; they must be [T, I] and None, or [T, 2, I] and one of "
            f"{', '.join(ACTIVATIONS)}, with an I that is a multiple of {ROW_GROUP}"
        )
    round_rows = choose_kernel("float8_product", lambda each: each.float8_rows, backend, interpret=interpret)
    return round_rows(x, activation, interpret)


def float8_product(
    rows: ScaledRows,
    weights: ScaledMatrix,
    dtype: DTypeLike | None = None,
    *,
    in_parts: bool = False,
    backend: str = "auto",
    interpret: bool = False,
) -> jax.Array:
    """Rows in float8 times a matrix of float8, both with scales; `[T, O]` in `dtype` (default: which the rows had).

    Args:
        rows: of `float8_rows`.
        weights: float8_e4m3fn without zero points, of O outputs and I inputs.
        dtype: of the result.
        in_parts: as for `quantized_product`.
        backend: a backend that has the op, "xla", or "auto".
        interpret: run a Pallas backend in its interpreter, on any platform.

    Raises:
        ValueError: shapes that don't fit each other, or a backend that can't run here.
    """
    if rows.numbers.shape[1:] != (weights.num_inputs,):
        shapes = f"rows are {rows.numbers.shape} and numbers are {weights.numbers.shape}"
        raise ValueError(f"{shapes}; they must be [T, I] and [O, I]")
    multiply = choose_kernel(
        "float8_product", lambda each: each.float8_product, backend, rows.dtype, weights, interpret=interpret
    )
    return multiply(rows, weights, jnp.dtype(dtype or rows.dtype), in_parts, interpret)


def ordered_product(
    x: jax.Array,
    weights: jax.Array,
    dtype: DTypeLike | None = None,
    *,
    in_parts: bool = False,
    backend: str = "auto",
    interpret: bool = False,
) -> jax.Array:
    """Rows times a matrix, `[T, O]` in `dtype` (default: x's), added up in float32 in one order for any number of rows.

    Args:
        x: `[T, I]`, rounded to the weights' dtype.
        weights: `[O, I]`.
        dtype: of the result.
        in_parts: it may be `[P, T, O]` float32 instead, for a reader that adds the parts in their order.
        backend: a backend that has the op, or "auto"; "xla" adds in any order.
        interpret: run a Pallas backend in its interpreter, on any platform.

    Raises:
        ValueError: shapes that don't fit each other, or a backend that can't run here.
    """
    if x.ndim != 2 or weights.ndim != 2 or x.shape[1] != weights.shape[1]:
        raise ValueError(f"x is {x.shape} and weights are {weights.shape}; they must be [T, I] and [O, I]")
    result = jnp.dtype(dtype or x.dtype)
    kernel = choose_kernel_or_xla(
        "ordered_product", lambda each: each.ordered_product, backend, x, weights, interpret=interpret
    )
    if kernel is not None:
        return kernel(x, weights, result, in_parts, interpret)
    rows = x.astype(weights.dtype)
    precision = dot_precision(x)
    out = jnp.einsum("td,nd->tn", rows, weights, precision=precision, preferred_element_type=jnp.float32)
    return out.astype(result)
