"""Rows rounded to float8 in groups, and their products with float8 weights: exact but for the rounding."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import ScaledMatrix, ScaledRows, float8_product, float8_rows, multiplies_float8
from tests.grids import covering, daily
from tests.pallas_kernels.lower_everything import on_a_device
from tests.pallas_kernels.test_quantized_product import assert_right, random_weights, rows_of

FLOAT8 = "float8_e4m3fn"


def rounded(x: jax.Array, backend: str = "triton", activation: str | None = None) -> ScaledRows:
    return float8_rows(x, activation, backend=backend, interpret=True)


def uneven_rows(num_rows: int, num_inputs: int) -> jax.Array:
    """Groups whose sizes differ by a factor of 1,000, one of zeros, and one number far larger than the rest."""
    rows = np.array(rows_of(num_rows, num_inputs), np.float64)
    rows *= np.exp(np.random.default_rng(1).uniform(np.log(1e-2), np.log(10), (1, num_inputs // 128))).repeat(128, 1)
    rows[0, :128] = 0
    rows[-1, -1] = 5000
    return jnp.asarray(rows, jnp.bfloat16)


@pytest.mark.parametrize("backend", ["xla", "triton", "reference"])
def test_each_group_of_128_numbers_is_rounded_by_its_largest(backend: str) -> None:
    x = uneven_rows(5, 384)
    rows = rounded(x, backend)
    assert (rows.numbers.dtype.name, rows.scale.shape, rows.dtype.name) == (FLOAT8, (3, 5), "bfloat16")
    wide = np.asarray(x, np.float64).reshape(5, 3, 128)
    np.testing.assert_allclose(rows.scale.T[1:], np.abs(wide).max(axis=2)[1:] / 448, rtol=1e-6)
    off = np.abs(np.asarray(rows.values(jnp.float32), np.float64).reshape(wide.shape) - wide)
    # Half of the last of 4 bits, or of the least number of the format.
    assert (off <= np.maximum(np.abs(wide) / 16 * 1.001, np.asarray(rows.scale).T[..., None] * 2.0**-10)).all()


def test_the_rounding_of_random_rows_is_off_by_less_than_three_percent() -> None:
    x = rows_of(64, 1024)
    found, wide = (np.asarray(each, np.float64) for each in (rounded(x).values(jnp.float32), x))
    error = np.linalg.norm(found - wide) / np.linalg.norm(wide)
    assert 0.02 < error < 0.03


def test_the_kernel_gates_before_it_rounds() -> None:
    x = jnp.asarray(np.random.default_rng(2).standard_normal((6, 2, 384)), jnp.bfloat16)
    found = rounded(x, "triton", "silu")
    right = rounded(x, "reference", "silu")
    np.testing.assert_allclose(found.scale, right.scale, rtol=1e-2)
    np.testing.assert_allclose(found.values(jnp.float32), right.values(jnp.float32), rtol=0.13, atol=1e-3)


@pytest.mark.parametrize(
    ("group", "num_rows", "num_outputs", "in_parts"),
    daily(covering((128, 256, 512), (1, 64, 100, 130, 300), (64, 72, 136), (False, True)), every=3),
)
def test_the_kernel_for_gpus_multiplies_the_rounded_rows_exactly(
    group: int, num_rows: int, num_outputs: int, in_parts: bool
) -> None:
    matrix, weights = random_weights(num_outputs, 512, FLOAT8, group, has_zeros=False)
    rows = rounded(uneven_rows(num_rows, 512))
    with on_a_device("cuda", "NVIDIA H200", 132):
        found = float8_product(rows, matrix, jnp.float32, in_parts=in_parts, backend="triton", interpret=True)
    if in_parts:
        assert found.shape[1:] == (num_rows, num_outputs) and found.shape[0] == 4
        found = found.sum(axis=0)
    assert_right(found, rows.values(jnp.float32), weights, 1e-6)


@pytest.mark.parametrize("backend", ["xla", "reference"])
def test_other_backends_multiply_the_rounded_rows_too(backend: str) -> None:
    matrix, weights = random_weights(24, 256, FLOAT8, 128, has_zeros=False)
    rows = rounded(rows_of(5, 256), backend)
    assert_right(float8_product(rows, matrix, jnp.float32, backend=backend), rows.values(jnp.float32), weights, 1e-5)


def test_a_product_is_off_by_the_rounding_of_its_rows() -> None:
    matrix, weights = random_weights(136, 1024, FLOAT8, 128, has_zeros=False)
    x = rows_of(70, 1024)
    found = np.asarray(float8_product(rounded(x), matrix, backend="triton", interpret=True), np.float64)
    right = np.asarray(x, np.float64) @ weights.T
    assert 0.02 < np.linalg.norm(found - right) / np.linalg.norm(right) < 0.03


def shape_of(numbers: str = FLOAT8, group: int = 128, num_inputs: int = 512, *, zeros: bool = False) -> ScaledMatrix:
    groups = (64, num_inputs // group)
    shapes = ((64, num_inputs), numbers), (groups, "float32"), (groups, "int8")
    weights, scale, zero = (jax.ShapeDtypeStruct(shape, jnp.dtype(kind)) for shape, kind in shapes)
    return ScaledMatrix(weights, scale, zero if zeros else None, group)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("kind", "weights", "dtype", "has"),
    [
        ("NVIDIA H200", shape_of(), "bfloat16", True),
        ("NVIDIA H100 80GB HBM3", shape_of(group=512), "float16", True),
        ("NVIDIA A100-SXM4-80GB", shape_of(), "bfloat16", False),
        ("NVIDIA H200", shape_of(), "float32", False),
        ("NVIDIA H200", shape_of("int8"), "bfloat16", False),
        ("NVIDIA H200", shape_of(group=64), "bfloat16", False),
        ("NVIDIA H200", shape_of(group=96, num_inputs=192), "bfloat16", False),
        ("NVIDIA H200", shape_of(zeros=True), "bfloat16", False),
    ],
)
def test_gpus_that_multiply_float8_take_what_the_kernel_takes(
    kind: str, weights: ScaledMatrix, dtype: str, has: bool
) -> None:
    with on_a_device("cuda", kind, 132):
        assert multiplies_float8(jnp.dtype(dtype), weights) == has
        assert not multiplies_float8(jnp.dtype(dtype), weights, backend="xla")


def test_a_cpu_rounds_no_rows() -> None:
    assert not multiplies_float8(jnp.dtype(jnp.bfloat16), shape_of())


def test_a_named_kernel_that_cannot_run_is_refused() -> None:
    with on_a_device("cuda", "NVIDIA A100-SXM4-80GB", 108), pytest.raises(ValueError, match="doesn't multiply float8"):
        multiplies_float8(jnp.dtype(jnp.bfloat16), shape_of(), backend="triton")


@pytest.mark.parametrize(("shape", "activation"), [((4, 200), None), ((4, 2, 256), None), ((4, 256), "silu")])
def test_rows_of_no_whole_groups_are_refused(shape: tuple[int, ...], activation: str | None) -> None:
    with pytest.raises(ValueError, match=r"with an I that is a multiple of 128"):
        float8_rows(jnp.zeros(shape), activation)


def test_rows_that_do_not_fit_the_weights_are_refused() -> None:
    matrix, _ = random_weights(64, 256, FLOAT8, 128, has_zeros=False)
    with pytest.raises(ValueError, match=r"rows are \(4, 384\)"):
        float8_product(rounded(rows_of(4, 384), "xla"), matrix, backend="xla")
