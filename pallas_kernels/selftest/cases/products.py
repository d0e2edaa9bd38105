"""Cases of products with one matrix: in groups, in float8, and with sums in a fixed order.

Owns the rows and the numbers of matrices.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator

import jax
import jax.numpy as jnp

from pallas_kernels.api.products import float8_product, float8_rows, ordered_product, quantized_product
from pallas_kernels.choice import XLA
from pallas_kernels.packed import PackedMatrix
from pallas_kernels.scaled import ScaledMatrix, ScaledRows
from pallas_kernels.selftest.batches import normal
from pallas_kernels.selftest.case import FLOAT8_TOLERANCE, TOLERANCE, Case
from pallas_kernels.selftest.shapes import KernelShapes, MatrixShape
from pallas_kernels.selftest.weights import packed_weights, scaled_weights
from pallas_kernels.triton.row_sums import sums_of_rows

LONG_ROW = 50_000  # as the scores of a vocabulary
MATRIX_ROWS, MOST_OUTPUTS = ((5, 300), (33, 100)), 2000  # rows of matrices by turns, for each of a kernel's tiles
MANY_ROWS, MANY_OUTPUTS = (4096, 384), 2048  # of Hopper's kernel for many rows: tiles of two blocks, and of one


def quantized_cases(shapes: KernelShapes) -> Iterator[Case]:
    """Few rows and many times each matrix in groups, whole and as parts that are added up."""
    matrices = [each for each in shapes.matrices if each.is_in_groups]
    for number, matrix in enumerate(matrices):
        for num_rows in MATRIX_ROWS[number % len(MATRIX_ROWS)]:
            yield _quantized(shapes, matrix, num_rows, in_parts=number % 2 == 1)


def _quantized(shapes: KernelShapes, matrix: MatrixShape, num_rows: int, *, in_parts: bool) -> Case:
    weights = _weights(matrix)
    x = normal(jax.random.key(8), 1.0, shape=(num_rows, matrix.inputs), dtype=jnp.dtype(shapes.dtype))

    def call(x: jax.Array, backend: str, interpret: bool) -> list[jax.Array]:
        out = _quantized_jit(x, weights, in_parts=in_parts, backend=backend, interpret=interpret)
        return [out.sum(axis=0) if out.ndim == 3 else out]

    return Case(
        f"{num_rows} rows, {matrix.outputs} x {matrix.inputs} {matrix.numbers}",
        TOLERANCE[shapes.dtype],
        functools.partial(call, x),
        functools.partial(call, x.astype(jnp.float32), XLA, False),
    )


def float8_cases(shapes: KernelShapes) -> Iterator[Case]:
    """Rows that are rounded, by the kernel or by XLA, and multiplied; and gated units that are rounded."""
    matrices = [each for each in shapes.matrices if each.may_be_in_float8]
    for number, matrix in enumerate(matrices):
        num_rows = MATRIX_ROWS[0][1] if number % 2 == 0 else MATRIX_ROWS[1][1]
        yield _in_float8(shapes, matrix, num_rows, in_parts=number % 2 == 1)
        if number < len(MANY_ROWS):
            yield _in_float8(shapes, matrix, MANY_ROWS[number], MANY_OUTPUTS)
        yield _gated_rows(shapes, matrix, num_rows)


def _in_float8(
    shapes: KernelShapes,
    matrix: MatrixShape,
    num_rows: int,
    most_outputs: int = MOST_OUTPUTS,
    *,
    in_parts: bool = False,
) -> Case:
    weights = _weights(matrix, most_outputs)
    x = normal(jax.random.key(8), 1.0, shape=(num_rows, matrix.inputs), dtype=jnp.dtype(shapes.dtype))

    def call(x: jax.Array, backend: str, interpret: bool) -> list[jax.Array]:
        out = _float8_jit(_rows_jit(x, backend=backend, interpret=interpret), weights, in_parts, backend, interpret)
        return [out.sum(axis=0) if out.ndim == 3 else out]

    return Case(
        f"{num_rows} rows in float8, {matrix.outputs} x {matrix.inputs}",
        TOLERANCE["bfloat16"],
        functools.partial(call, x),
        functools.partial(call, x, XLA, False),
    )


def _gated_rows(shapes: KernelShapes, matrix: MatrixShape, num_rows: int) -> Case:
    x = normal(jax.random.key(8), 1.0, shape=(num_rows, 2, matrix.inputs), dtype=jnp.dtype(shapes.dtype))

    def call(x: jax.Array, backend: str, interpret: bool) -> list[jax.Array]:
        return [_rows_jit(x, activation="silu", backend=backend, interpret=interpret).values(jnp.float32)]

    return Case(
        f"{num_rows} gated rows of {matrix.inputs} in float8",
        FLOAT8_TOLERANCE,  # a number that lies between two others may become either
        functools.partial(call, x),
        functools.partial(call, x.astype(jnp.float32), XLA, False),
    )


def ordered_cases(shapes: KernelShapes) -> Iterator[Case]:
    """Products of few rows and of many, whose sums have parts or not; and sums of rows, short ones and long ones."""
    size, dtype = shapes.hidden_size, jnp.dtype(shapes.dtype)
    for num_rows, num_outputs in ((5, size), (300, size), (300, MOST_OUTPUTS)):
        keys = jax.random.split(jax.random.key(10))
        x = normal(keys[0], 1.0, shape=(num_rows, size), dtype=dtype)
        weights = normal(keys[1], 1.0, shape=(num_outputs, size), dtype=dtype)
        wide = x.astype(jnp.float32), weights.astype(jnp.float32)
        yield Case(
            f"{num_rows} rows, {num_outputs} x {size}",
            TOLERANCE[shapes.dtype],
            functools.partial(_ordered, x, weights),
            functools.partial(_ordered, *wide, XLA, False),
        )
    for length in (64, size, LONG_ROW):
        rows = normal(jax.random.key(11), 1.0, shape=(37, length), dtype=jnp.dtype(jnp.float32))
        yield Case(
            f"sums of {length} numbers",
            TOLERANCE["float32"],
            functools.partial(_summed, jnp.abs(rows)),
            functools.partial(_summed, jnp.abs(rows), XLA, False),
        )


def _ordered(x: jax.Array, weights: jax.Array, backend: str, interpret: bool) -> list[jax.Array]:
    return [_ordered_jit(x, weights, backend=backend, interpret=interpret)]


def _summed(rows: jax.Array, backend: str, interpret: bool) -> list[jax.Array]:
    if backend == XLA:
        return [jnp.stack([rows.sum(-1), (rows * rows).sum(-1)], axis=-1)]
    return [jnp.stack([sums_of_rows(rows, what, interpret) for what in ("sum", "squares")], axis=-1)]


def _weights(matrix: MatrixShape, most_outputs: int = MOST_OUTPUTS) -> ScaledMatrix | PackedMatrix:
    """As many outputs as show a kernel's tiles."""
    shape = min(matrix.outputs, most_outputs), matrix.inputs  # both are multiples of 16
    if matrix.packing:
        return packed_weights(matrix.packing, shape, matrix.group, matrix.has_zeros)
    blocks = math.gcd(matrix.block_outputs, shape[0])
    return scaled_weights(shape, matrix.numbers, matrix.group, matrix.has_zeros, block_outputs=blocks)


_quantized_jit = jax.jit(
    functools.partial(quantized_product, dtype=jnp.float32), static_argnames=("in_parts", "backend", "interpret")
)
_ordered_jit = jax.jit(functools.partial(ordered_product, dtype=jnp.float32), static_argnames=("backend", "interpret"))
_rows_jit = jax.jit(float8_rows, static_argnames=("activation", "backend", "interpret"))


@functools.partial(jax.jit, static_argnums=(2, 3, 4))
def _float8_jit(rows: ScaledRows, weights: ScaledMatrix, in_parts: bool, backend: str, interpret: bool) -> jax.Array:
    return float8_product(rows, weights, jnp.float32, in_parts=in_parts, backend=backend, interpret=interpret)
