"""Rows times matrices whose inputs share scales in groups: right on every backend, and read as they are on GPUs."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bench.targets.hlo import OUTPUTS_OF_WORDS

from pallas_kernels import ScaledMatrix, fragments, quantized_product
from pallas_kernels.packed import PackedMatrix, fragments_of
from tests.grids import covering, daily
from tests.pallas_kernels.lower_everything import on_a_device

BYTES, NUMBERS = ("float8_e4m3fn", "int8"), ("float8_e4m3fn", "int4", "int8")


def random_weights(
    num_outputs: int, num_inputs: int, numbers: str, group: int, has_zeros: bool
) -> tuple[ScaledMatrix, np.ndarray]:
    """A matrix, and its weights in float64 by the definition; scales differ by a factor of 100, and one is 0."""
    rng = np.random.default_rng(num_outputs + num_inputs)
    shape, groups = (num_outputs, num_inputs), (num_outputs, num_inputs // group)
    drawn = rng.standard_normal(shape) * 40 if "float" in numbers else rng.integers(-8, 8, shape)
    stored = jnp.asarray(drawn, numbers)
    scale = np.exp(rng.uniform(np.log(1e-3), np.log(1e-1), groups)).astype(np.float32)
    scale[3, -1] = 0
    zero = rng.integers(-8, 8, groups).astype(np.int8) if has_zeros else None
    weights = np.asarray(stored.astype(jnp.float32), np.float64)
    if zero is not None:
        weights -= np.repeat(zero.astype(np.float64), group, axis=1)
    weights *= np.repeat(scale.astype(np.float64), group, axis=1)
    return ScaledMatrix(stored, jnp.asarray(scale), None if zero is None else jnp.asarray(zero), group), weights


def rows_of(num_rows: int, num_inputs: int, dtype: str = "bfloat16") -> jax.Array:
    return jnp.asarray(np.random.default_rng(num_rows).standard_normal((num_rows, num_inputs)), dtype)


def assert_right(found: jax.Array, x: jax.Array, weights: np.ndarray, tolerance: float) -> None:
    expected = np.asarray(x, np.float64) @ weights.T
    np.testing.assert_allclose(np.asarray(found, np.float64), expected, atol=tolerance * np.abs(expected).max())


@pytest.mark.parametrize(
    ("numbers", "group", "num_rows", "num_outputs", "has_zeros"),
    # Tiles have 16 to 128 rows and 64 or 128 outputs.
    daily(covering(BYTES, (32, 64, 128), (1, 20, 64, 100, 130), (64, 72, 136), (False, True)), every=4),
)
def test_the_kernel_for_gpus_scales_sums_of_groups(
    numbers: str, group: int, num_rows: int, num_outputs: int, has_zeros: bool
) -> None:
    matrix, weights = random_weights(num_outputs, 256, numbers, group, has_zeros and numbers != "float8_e4m3fn")
    x = rows_of(num_rows, 256)
    found = quantized_product(x, matrix, jnp.float32, backend="triton", interpret=True)
    assert (found.shape, found.dtype) == ((num_rows, num_outputs), jnp.float32)
    assert_right(found, x, weights, 1e-6)  # products are exact, and no weight is rounded


@pytest.mark.parametrize(
    ("group", "num_rows", "num_outputs", "has_zeros", "dtype"),
    # Groups of half a block to all inputs; tiles have 16 to 128 rows and 64 or 128 outputs.
    daily(
        covering((32, 64, 128, 192, 384), (1, 20, 64, 100, 130), (64, 80, 144), (False, True), ("bfloat16", "float16")),
        every=4,
    ),
)
def test_the_kernel_for_packed_int4_scales_sums_of_groups(
    group: int, num_rows: int, num_outputs: int, has_zeros: bool, dtype: str
) -> None:
    matrix, weights = random_weights(num_outputs, 384, "int4", group, has_zeros)
    x = rows_of(num_rows, 384, dtype)
    found = quantized_product(x, fragments_of(matrix), jnp.float32, backend="triton", interpret=True)
    assert (found.shape, found.dtype) == ((num_rows, num_outputs), jnp.float32)
    assert_right(found, x, weights, 1e-6)  # products are exact, and no weight is rounded


@pytest.mark.parametrize("shape", [(16, 64), (2, 48, 192)])
def test_fragments_hold_each_number_once(shape: tuple[int, ...]) -> None:
    numbers = jnp.asarray(np.random.default_rng(0).integers(-8, 8, shape), jnp.int4)
    words = fragments.pack_numbers(numbers)
    assert (words.dtype, words.size) == (jnp.uint32, numbers.size // 8)
    np.testing.assert_array_equal(fragments.unpack_numbers(words), numbers.astype(jnp.int8))
    assert fragments.OUTPUTS == OUTPUTS_OF_WORDS


def test_the_kernel_takes_rows_of_float16_and_rounds_once() -> None:
    matrix, weights = random_weights(64, 256, "float8_e4m3fn", 128, has_zeros=False)
    x = rows_of(20, 256, "float16")
    found = quantized_product(x, matrix, backend="triton", interpret=True)
    assert found.dtype == jnp.float16
    assert_right(found, x, weights, 5e-4)


def test_parts_add_up_to_the_product_on_devices_that_few_tiles_would_leave_idle() -> None:
    matrix, weights = random_weights(80, 512, "int8", 64, has_zeros=True)
    x = rows_of(20, 512)
    with on_a_device("cuda", "NVIDIA H200", 132):
        parts = quantized_product(x, matrix, in_parts=True, backend="triton", interpret=True)
        of_packed = quantized_product(x, fragments_of(matrix), in_parts=True, backend="triton", interpret=True)
    assert (parts.shape, parts.dtype) == ((8, 20, 80), jnp.float32)
    assert_right(np.asarray(parts, np.float64).sum(axis=0), x, weights, 1e-6)
    assert of_packed.shape == (8, 20, 80)
    assert_right(np.asarray(of_packed, np.float64).sum(axis=0), x, weights, 1e-6)


@pytest.mark.parametrize("numbers", NUMBERS)
@pytest.mark.parametrize("backend", ["reference", "xla"])
def test_other_backends_multiply_by_the_widened_weights(backend: str, numbers: str) -> None:
    matrix, weights = random_weights(24, 96, numbers, 32, has_zeros=numbers != "float8_e4m3fn")
    x = rows_of(5, 96, "float32")
    assert_right(quantized_product(x, matrix, backend=backend), x, weights, 1e-5)


@pytest.mark.parametrize("backend", ["reference", "xla"])
def test_other_backends_unpack(backend: str) -> None:
    matrix, weights = random_weights(48, 128, "int4", 32, has_zeros=True)
    x = rows_of(5, 128, "float32")
    assert_right(quantized_product(x, fragments_of(matrix), backend=backend), x, weights, 1e-5)


def chosen_ops(x: jax.Array, matrix: ScaledMatrix | PackedMatrix, kind: str = "NVIDIA H200") -> set[str]:
    with on_a_device("cuda", kind, 132):
        jaxpr = str(jax.make_jaxpr(lambda x: quantized_product(x, matrix))(x))
    return {name for name in ("pallas_call", "dot_general") if f" {name}[" in jaxpr}


def test_gpus_take_the_kernel_unless_it_refuses() -> None:
    matrix, _ = random_weights(64, 256, "int8", 64, has_zeros=True)
    assert "pallas_call" in chosen_ops(rows_of(33, 256), matrix)
    assert chosen_ops(rows_of(33, 256, "float32"), matrix) == {"dot_general"}
    cut = ScaledMatrix(matrix.numbers[:, :250], matrix.scale, matrix.zero, matrix.group)
    assert chosen_ops(rows_of(33, 250), cut) == {"dot_general"}
    of_four_bits, _ = random_weights(64, 256, "int4", 64, has_zeros=True)
    assert chosen_ops(rows_of(33, 256), of_four_bits) == {"dot_general"}
    assert "pallas_call" in chosen_ops(rows_of(33, 256), fragments_of(of_four_bits))
    assert chosen_ops(rows_of(33, 256, "float32"), fragments_of(of_four_bits)) == {"dot_general"}
    of_float8, _ = random_weights(64, 256, "float8_e4m3fn", 64, has_zeros=False)
    assert "pallas_call" in chosen_ops(rows_of(33, 256), of_float8)
    assert chosen_ops(rows_of(33, 256), of_float8, "NVIDIA A100-SXM4-80GB") == {"dot_general"}


@pytest.mark.parametrize(
    ("x", "match"),
    [
        (rows_of(4, 256, "float32"), "the rows are float32"),
        (rows_of(4, 240), r"x is \(4, 240\), numbers are \(64, 256\)"),
    ],
)
def test_wrong_arguments_are_named(x: jax.Array, match: str) -> None:
    matrix, _ = random_weights(64, 256, "int8", 128, has_zeros=False)
    with pytest.raises(ValueError, match=match):
        quantized_product(x, matrix, backend="triton", interpret=True)
