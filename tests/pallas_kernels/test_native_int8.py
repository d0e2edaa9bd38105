"""Products with int8 weights in C++: equal to the bit to integers in NumPy, whatever rows stand side by side."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import group_by_expert, grouped_product
from pallas_kernels.native import product
from pallas_kernels.native.grouped_product import grouped_int8_product
from pallas_kernels.native.product import refuse_int8
from tests.grids import singly
from tests.pallas_kernels import native_cases

WAYS = [way for way in native_cases.WAYS if way in ("widened", "narrow")]  # in registers of two widths
LARGEST, INPUTS_OF_BLOCK = {16: 32767, 8: 127}, {16: 512, 8: 128}  # of rows' integers, by their bits

pytestmark = pytest.mark.usefixtures("each_way")

NUM_ROWS = [1, 2, 3, 4, 5, 8, 9, 17, 33, 49, 64, 65, 130, 300]
SHAPES = [(16, 32, 0), (48, 1056, 0), (1024, 256, 128), (32, 160, 64), (4112, 64, 32)]  # out, in, group (0: one scale)


def int8_product(x: np.ndarray, numbers: np.ndarray, scale: np.ndarray, group: int, row_bits: int = 16) -> np.ndarray:
    out = product.int8_product(jnp.asarray(x), jnp.asarray(numbers), jnp.asarray(scale), group, row_bits)
    return np.asarray(out)


def inputs(num_rows: int, num_out: int, num_in: int, group: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(num_rows + num_out + num_in)
    x = (rng.standard_normal((num_rows, num_in)) * rng.uniform(0, 9, (num_rows, 1))).astype(np.float32)
    x[:, 7] *= 50
    numbers = rng.integers(-128, 128, (num_out, num_in)).astype(np.int8)
    num_groups = -(-num_in // group) if group else 1
    return x, numbers, rng.uniform(0.01, 0.1, (num_out, num_groups)).astype(np.float32)


def by_definition(
    x: np.ndarray,
    numbers: np.ndarray,
    scale: np.ndarray,
    group: int,
    row_bits: int = 16,
    zero: np.ndarray | None = None,
) -> np.ndarray:
    """Blocks rounded to integers and summed exactly, then added up in float32 from the first to the last.

    Numbers less what stands for zero are summed. A fused multiplication and addition rounds once: float64 holds the
    product of two float32 numbers exactly.
    """
    largest = np.float32(LARGEST[row_bits])
    block, out = group or INPUTS_OF_BLOCK[row_bits], np.zeros((len(x), len(numbers)), np.float32)
    for b, first in enumerate(range(0, x.shape[1], block)):
        part = x[:, first : first + block]
        most = np.abs(part).max(1, keepdims=True)
        integers = np.rint(part * (largest / most)).astype(np.float64)  # sums of them are exact
        weights = numbers[:, first : first + block].astype(np.float64)
        weights -= 0 if zero is None else zero[:, [b if group else 0]]
        dots = (integers @ weights.T).astype(np.float32)
        factor = most / largest * (scale[:, b] if group else np.float32(1))
        out = (factor.astype(np.float64) * dots + out).astype(np.float32)
    return out if group else out * scale[:, 0]


in_each_way = pytest.mark.parametrize("each_way", WAYS, indirect=True)


@pytest.mark.parametrize(
    ("each_way", "num_rows", "shape"),
    singly(WAYS, NUM_ROWS, SHAPES),
    indirect=["each_way"],
    ids=str,
)
def test_sums_of_blocks_are_exact(num_rows: int, shape: tuple[int, int, int]) -> None:
    num_out, num_in, group = shape
    x, numbers, scale = inputs(num_rows, num_out, num_in, group)
    out = int8_product(x, numbers, scale, group or num_in)
    np.testing.assert_array_equal(out, by_definition(x, numbers, scale, group))
    weights = numbers * (np.repeat(scale, group, 1)[:, :num_in] if group else scale).astype(np.float64)
    exact = x.astype(np.float64) @ weights.T
    assert np.linalg.norm(out - exact) < 1e-3 * np.linalg.norm(exact)


@in_each_way
@pytest.mark.parametrize("group", [0, 128])
def test_a_row_comes_out_the_same_whatever_stands_beside_it(group: int) -> None:
    x, numbers, scale = inputs(130, 128, 1024, group)
    together = int8_product(x, numbers, scale, group or 1024)
    for count in (1, 2, 3, 8, 9, 16, 33, 65):
        np.testing.assert_array_equal(int8_product(x[:count], numbers, scale, group or 1024), together[:count])


@in_each_way
@pytest.mark.parametrize("group", [0, 64])
def test_a_gated_product_is_the_activation_of_the_gates_results_times_those_of_up(group: int) -> None:
    x, numbers, scale = (jnp.asarray(each) for each in inputs(70, 2 * 80, 160, group))
    native_cases.assert_gates(
        lambda rows, activation: product.int8_product(rows, numbers, scale, group or 160, 16, activation), x / 50
    )


@in_each_way
def test_rows_get_the_products_with_the_weights_of_their_experts() -> None:
    rng = np.random.default_rng(0)
    x, numbers, _ = inputs(90, 3 * 48, 1056, 0)
    experts = rng.integers(0, 4, (90, 2))  # the last one is none
    experts[:70, 0] = 1  # more rows than are packed at a time
    experts[:, 1] = np.where(np.arange(90) == 5, 2, 3)
    groups = group_by_expert(jnp.asarray(experts, jnp.int32), 3)
    weights = numbers.reshape(3, 48, 1056)
    out = np.asarray(grouped_product(jnp.asarray(x), groups, jnp.asarray(weights), of_tokens=True, backend="native"))
    ones = np.ones((48, 1), np.float32)
    of_experts = [int8_product(x, weights[expert], ones, 1056) for expert in range(3)] + [np.zeros((90, 48))]
    for (token, choice), expert in np.ndenumerate(experts):
        np.testing.assert_array_equal(out[groups.place_of[token, choice]], of_experts[expert][token])


@pytest.mark.parametrize("each_way", ["widened"], indirect=True)
@pytest.mark.parametrize("group", [0, 96])
def test_two_words_are_as_exact_as_float32(group: int) -> None:
    """In any company, and for each expert; the last block of inputs is cut."""
    x, numbers, scale = inputs(9, 48, 1056, group)
    out = int8_product(x, numbers, scale, group or 1056, 32)
    weights = numbers * (np.repeat(scale, group, 1) if group else scale).astype(np.float64)
    exact = x.astype(np.float64) @ weights.T
    assert np.linalg.norm(out - exact) < 3e-7 * np.linalg.norm(exact)
    np.testing.assert_array_equal(int8_product(x[4:5], numbers, scale, group or 1056, 32), out[4:5])
    groups = group_by_expert(jnp.full((9, 1), 1, jnp.int32), 2)
    both = jnp.stack([jnp.zeros_like(numbers), jnp.asarray(numbers)])
    of_expert = np.asarray(grouped_int8_product(jnp.asarray(x), groups, both, True, 32))
    ones = np.ones((48, 1), np.float32)
    np.testing.assert_array_equal(of_expert, int8_product(x, numbers, ones, 1056, 32))


@in_each_way
def test_rows_of_zeros_nan_and_large_numbers_spoil_no_other() -> None:
    x, numbers, scale = inputs(20, 64, 512, 0)
    plain = int8_product(x, numbers, scale, 512)
    x[3], x[4], x[5, 9], x[6] = np.nan, 0, np.inf, 1e30 * np.sign(x[6])
    numbers[0], scale[0] = -128, 1e-6
    out = int8_product(x, numbers, scale, 512)
    assert np.isnan(out[3]).all() and np.isnan(out[5]).all() and (out[4] == 0).all()
    np.testing.assert_array_equal(out[6], by_definition(x[6:7], numbers, scale, 0)[0])
    others = [0, 1, 2, *range(7, 20)]
    np.testing.assert_array_equal(out[others, 1:], plain[others, 1:])


@pytest.mark.parametrize("each_way", ["widened"], indirect=True)
def test_other_formats_and_shapes_are_refused() -> None:
    def reason(x_dtype: str, dtype: str, dims: tuple[int, int], groups: int, group: int) -> str:
        x, numbers = jnp.zeros((4, dims[1]), x_dtype), jnp.zeros(dims, dtype)
        return refuse_int8(x, numbers, jnp.zeros((dims[0], groups)), group) or ""

    assert "float32 rows and int8 numbers" in reason("bfloat16", "int8", (32, 64), 1, 64)
    assert "float32 rows and int8 numbers" in reason("float32", "int4", (32, 64), 1, 64)
    assert "(24, 64); it takes multiples of (16, 32)" in reason("float32", "int8", (24, 64), 1, 64)
    assert "groups have 48 inputs" in reason("float32", "int8", (32, 96), 2, 48)
    assert "groups have 1024 inputs" in reason("float32", "int8", (32, 2048), 2, 1024)
    assert reason("float32", "int8", (32, 2048), 1, 2048) == ""
