"""Rows rounded to float8 times the float8 weights of their experts: exact but for the rounding, on every backend."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import (
    ScaledMatrix,
    ScaledRows,
    experts_multiply_float8,
    float8_rows,
    group_by_expert,
    grouped_float8_product,
)
from pallas_kernels.experts import Groups
from pallas_kernels.triton.grouped_float8_product import grouped_float8_product as kernel
from tests.grids import covering, daily
from tests.pallas_kernels.lower_everything import on_a_device
from tests.pallas_kernels.test_grouped_product import CHOICES, NUM_EXPERTS

FLOAT8 = "float8_e4m3fn"
NUM_IN = 384


def stack(num_outputs: int, group: int, num_inputs: int = NUM_IN) -> tuple[ScaledMatrix, np.ndarray]:
    """Weights of experts, and what they mean in float64. Scales of outputs and groups differ by a factor of 10."""
    rng = np.random.default_rng(num_outputs + group)
    numbers = jnp.asarray(rng.normal(size=(NUM_EXPERTS, num_outputs, num_inputs)), FLOAT8)
    scale = jnp.asarray(rng.uniform(0.1, 1, (NUM_EXPERTS, num_outputs, num_inputs // group)), jnp.float32)
    values = np.asarray(numbers, np.float64) * np.asarray(scale, np.float64).repeat(group, axis=2)
    return ScaledMatrix(numbers, scale, None, group), values


def rows_of(experts: np.ndarray, num_inputs: int = NUM_IN) -> jax.Array:
    """A row for each token, of groups whose sizes differ by a factor of 100."""
    rng = np.random.default_rng(3)
    sizes = np.exp(rng.uniform(np.log(0.1), np.log(10), (1, num_inputs // 128))).repeat(128, 1)
    return jnp.asarray(rng.normal(size=(len(experts), num_inputs)) * sizes, jnp.bfloat16)


def right(rows: Any, experts: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """`[T, k, out]` in float64; zeros where a choice is no expert."""
    wide = np.asarray(rows, np.float64)
    out = np.zeros((*experts.shape, weights.shape[1]))
    for (token, choice), expert in np.ndenumerate(experts):
        if 0 <= expert < NUM_EXPERTS:
            out[token, choice] = weights[expert] @ wide[token]
    return out


def grouped(experts: np.ndarray) -> Groups:
    return group_by_expert(jnp.asarray(experts, jnp.int32), NUM_EXPERTS)


def multiply(rows: ScaledRows, groups: Groups, matrix: ScaledMatrix, of_tokens: bool, backend: str) -> jax.Array:
    if backend == "triton":  # which refuses rows of 32 bits, whose results are too large
        return kernel(rows, groups, matrix, of_tokens, interpret=True)
    return grouped_float8_product(rows, groups, matrix, of_tokens=of_tokens, backend=backend)


@pytest.mark.parametrize(
    ("backend", "choices", "num_outputs", "group", "of_tokens"),
    daily(
        covering(["triton", "xla", "reference"], list(CHOICES), [64, 72, 208], [128, 384], [True, False]), every=2
    ),
)  # fmt: skip
def test_each_token_is_multiplied_with_its_experts(
    backend: str, choices: str, num_outputs: int, group: int, of_tokens: bool
) -> None:
    experts = CHOICES[choices]
    matrix, weights = stack(num_outputs, group)
    groups = grouped(experts)
    x = rows_of(experts)
    rounded = float8_rows(x, backend="xla")
    exact = ScaledRows(rounded.numbers, rounded.scale, jnp.dtype(jnp.float32))  # so that results are not rounded
    rows = exact if of_tokens else ScaledRows(exact.numbers[groups.tokens], exact.scale[:, groups.tokens], exact.dtype)
    found = multiply(rows, groups, matrix, of_tokens, backend)
    expected = right(rounded.values(jnp.float32), experts, weights)
    off = np.abs(np.asarray(found, np.float64)[np.asarray(groups.place_of)] - expected)
    assert off.max() <= 1e-6 * max(np.linalg.norm(expected, axis=-1).max(), 1)


def test_a_product_is_off_by_the_rounding_of_its_rows() -> None:
    experts = CHOICES["padding"]
    matrix, weights = stack(64, 128)
    x = rows_of(experts)
    groups = grouped(experts)
    rows = float8_rows(x, backend="triton", interpret=True)
    found = grouped_float8_product(rows, groups, matrix, of_tokens=True, backend="triton", interpret=True)
    assert found.dtype == jnp.bfloat16
    expected = right(x, experts, weights)
    off = np.asarray(found, np.float64)[np.asarray(groups.place_of)] - expected
    assert 0.02 < np.linalg.norm(off) / np.linalg.norm(expected) < 0.03


def test_experts_without_rows_are_not_read() -> None:
    """Weights and scales of NaN would spoil even a product with zero."""
    experts = CHOICES["padding"]
    matrix, weights = stack(64, 128)
    used = jnp.asarray(np.isin(np.arange(NUM_EXPERTS), [1, 3]))[:, None, None]
    numbers = jnp.where(used, matrix.numbers, jnp.asarray(jnp.nan, FLOAT8))
    spoilt = ScaledMatrix(numbers, jnp.where(used, matrix.scale, jnp.nan), None, matrix.group)
    rows, groups = float8_rows(rows_of(experts), backend="xla"), grouped(experts)
    for backend in ("triton", "xla"):
        found = grouped_float8_product(rows, groups, spoilt, of_tokens=True, backend=backend, interpret=True)
        expected = right(rows.values(jnp.float32), experts, weights)
        by_choice = np.asarray(found, np.float64)[np.asarray(groups.place_of)]
        np.testing.assert_allclose(by_choice, expected, atol=1e-2 * np.abs(expected).max())


def shape_of(group: int = 128, num_inputs: int = 512, num_experts: int = 4, num_outputs: int = 64) -> ScaledMatrix:
    dims = (num_experts, num_outputs)
    numbers: Any = jax.ShapeDtypeStruct((*dims, num_inputs), jnp.dtype(FLOAT8))
    scale: Any = jax.ShapeDtypeStruct((*dims, num_inputs // group), jnp.float32)
    return ScaledMatrix(numbers, scale, None, group)


@pytest.mark.parametrize(
    ("kind", "weights", "dtype", "has"),
    [
        ("NVIDIA H200", shape_of(), "bfloat16", True),
        ("NVIDIA H200", shape_of(group=512), "float16", True),
        ("NVIDIA A100-SXM4-80GB", shape_of(), "bfloat16", False),
        ("NVIDIA H200", shape_of(), "float32", False),
        ("NVIDIA H200", shape_of(group=64), "bfloat16", False),  # as parts of a block are
        ("NVIDIA H200", shape_of(num_inputs=7168, num_experts=256, num_outputs=4096), "bfloat16", False),  # offsets
    ],
)
def test_gpus_that_multiply_float8_take_what_the_kernel_takes(
    kind: str, weights: ScaledMatrix, dtype: str, has: bool
) -> None:
    with on_a_device("cuda", kind, 132):
        assert experts_multiply_float8(jnp.dtype(dtype), weights) == has
        assert not experts_multiply_float8(jnp.dtype(dtype), weights, backend="xla")


def test_rows_that_do_not_fit_the_weights_are_refused() -> None:
    matrix, _ = stack(64, 128)
    rows = float8_rows(jnp.zeros((4, 256)), backend="xla")
    with pytest.raises(ValueError, match=r"rows are \(4, 256\)"):
        grouped_float8_product(rows, grouped(np.zeros((4, 2), int)), matrix, of_tokens=True)
