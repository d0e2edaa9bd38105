"""Products with packed weights in C++: those of their numbers to the bit, whatever rows stand side by side."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import Groups, group_by_expert, grouped_packed_product, grouped_product, packed
from pallas_kernels.native import packed_product
from pallas_kernels.packed import FLOAT8, INT4, INT8, MXFP4, PackedMatrix
from pallas_kernels.target import processor_flags
from tests.grids import singly
from tests.pallas_kernels import native_cases
from tests.pallas_kernels.test_native_int8 import WAYS, by_definition

pytestmark = pytest.mark.usefixtures("each_way")

VNNI = {"avx512_vnni", "avx_vnni"}
# How the library is compiled (registers have two widths), how weights are packed, and the bits of rows.
FORMS = [
    *((way, INT4, 16) for way in WAYS),
    *(
        (way, packing, 8)
        for way in ("widened", "narrow bytes", "tiles")
        for packing in (INT4, INT8)
        if VNNI & processor_flags()
    ),
]
ERROR = {16: 1e-3, 8: 5e-2}  # of a product's norm; an input 50 times as large as the others costs 8 bits much
NUM_ROWS = [1, 2, 3, 5, 7, 8, 9, 13, 31, 35, 300]  # in registers up to 8 are multiplied at a time
SHAPES = [(32, 32, 0, False), (96, 1056, 0, True), (64, 160, 64, True), (1056, 256, 128, False)]  # group 0: one scale


def matrix(
    packing: str, lead: tuple[int, ...], num_out: int, num_in: int, group: int, zeros: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Numbers, scales and zeros."""
    rng = np.random.default_rng(num_out + num_in)
    num_groups, end = -(-num_in // group) if group else 1, {INT4: 8, INT8: 128}[packing]
    scale = rng.uniform(0.01, 0.1, (*lead, num_out, num_groups)).astype(np.float32)
    zero = rng.integers(-end, end, (*lead, num_out, num_groups)) * zeros
    return rng.integers(-end, end, (*lead, num_out, num_in)).astype(np.int8), scale, zero.astype(np.int8)


def packed_matrix(
    packing: str, numbers: np.ndarray, scale: np.ndarray, zero: np.ndarray, group: int, zeros: bool
) -> PackedMatrix:
    parts = (packed.pack_numbers(packing, jnp.asarray(numbers)), packed.pack_groups(packing, jnp.asarray(scale)))
    of_zero = packed.pack_groups(packing, jnp.asarray(zero)) if zeros else None
    return PackedMatrix(*parts, of_zero, group or numbers.shape[-1], packing)


def rows(num_rows: int, num_in: int) -> np.ndarray:
    rng = np.random.default_rng(num_rows)
    x = (rng.standard_normal((num_rows, num_in)) * rng.uniform(0, 9, (num_rows, 1))).astype(np.float32)
    x[:, 7] *= 50
    return x


@pytest.mark.parametrize(
    ("each_way", "packing", "row_bits", "num_rows", "shape"),
    [(*form, *case) for form, *case in singly(FORMS, NUM_ROWS, SHAPES)],
    indirect=["each_way"],
    ids=str,
)
def test_sums_of_blocks_are_exact(
    packing: str, row_bits: int, num_rows: int, shape: tuple[int, int, int, bool]
) -> None:
    num_out, num_in, group, zeros = shape
    numbers, scale, zero = matrix(packing, (), num_out, num_in, group, zeros)
    x, weights = rows(num_rows, num_in), packed_matrix(packing, numbers, scale, zero, group, zeros)
    out = np.asarray(packed_product.product(jnp.asarray(x), weights, row_bits=row_bits))
    np.testing.assert_array_equal(out, by_definition(x, numbers, scale, group, row_bits, zero))
    exact = x.astype(np.float64) @ np.asarray(weights.widened("float32"), np.float64).T
    assert np.linalg.norm(out - exact) < ERROR[row_bits] * np.linalg.norm(exact)


@pytest.mark.parametrize("each_way", ["widened"], indirect=True)
@pytest.mark.parametrize("group", [64, 0])
def test_two_words_times_int4_are_as_exact_as_float32(group: int) -> None:
    parts, x = matrix(INT4, (), 32, 576, group, True), rows(9, 576)
    numbers, scale, zero = (each.astype(np.float64) for each in parts)
    size = group or 576
    weights = (numbers - np.repeat(zero, size, 1)) * np.repeat(scale, size, 1)
    packed = packed_matrix(INT4, *parts, group, True)
    out = np.asarray(packed_product.product(jnp.asarray(x), packed, row_bits=32))
    exact = x.astype(np.float64) @ weights.T
    assert np.linalg.norm(out - exact) < 3e-7 * np.linalg.norm(exact)
    np.testing.assert_array_equal(packed_product.product(jnp.asarray(x[4:5]), packed, row_bits=32), out[4:5])


in_each_form = pytest.mark.parametrize(("each_way", "packing", "row_bits"), FORMS, indirect=["each_way"], ids=str)


@in_each_form
def test_a_row_comes_out_the_same_in_any_company(packing: str, row_bits: int) -> None:
    weights = packed_matrix(packing, *matrix(packing, (), 64, 512, 64, True), 64, True)
    x = jnp.asarray(rows(70, 512))
    together = np.asarray(packed_product.product(x, weights, row_bits=row_bits))
    for count in (1, 2, 3, 5, 6, 9, 33):
        alone = np.asarray(packed_product.product(x[:count], weights, row_bits=row_bits))
        np.testing.assert_array_equal(alone, together[:count])


@in_each_form
@pytest.mark.parametrize("group", [0, 64])
def test_a_gated_product_is_the_activation_of_the_gates_results_times_those_of_up(
    packing: str, row_bits: int, group: int
) -> None:
    weights = packed_matrix(packing, *matrix(packing, (), 2 * 64, 192, group, True), group, True)
    native_cases.assert_gates(
        lambda x, activation: packed_product.product(x, weights, row_bits=row_bits, activation=activation),
        jnp.asarray(rows(40, 192)) / 50,
    )


@in_each_form
def test_rows_get_the_products_with_the_integers_of_their_experts(packing: str, row_bits: int) -> None:
    weights = packed_matrix(packing, *matrix(packing, (3,), 64, 320, 64, True), 64, True)
    x, groups = jnp.asarray(rows(40, 320)), _groups(40, 3)
    out = np.asarray(grouped_packed_product(x, groups, weights, of_tokens=True, row_bits=row_bits, backend="native"))
    for (token, choice), place in np.ndenumerate(groups.place_of):
        expert = int(groups.experts[place])
        expected = 0
        if expert < 3:
            one = jax.tree.map(lambda part, expert=expert: part[expert], weights)
            expected = np.asarray(packed_product.product(x[token : token + 1], one, row_bits=row_bits))[0]
        np.testing.assert_array_equal(out[place], expected, err_msg=f"{token} {choice}")


@in_each_form
def test_rows_of_zeros_nan_and_large_numbers_spoil_no_other(packing: str, row_bits: int) -> None:
    numbers, scale, zero = matrix(packing, (), 64, 512, 0, False)
    weights, x = packed_matrix(packing, numbers, scale, zero, 0, False), rows(20, 512)
    plain = np.asarray(packed_product.product(jnp.asarray(x), weights, row_bits=row_bits))
    x[3], x[4], x[5, 9], x[6] = np.nan, 0, np.inf, 1e30 * np.sign(x[6])
    out = np.asarray(packed_product.product(jnp.asarray(x), weights, row_bits=row_bits))
    assert np.isnan(out[3]).all() and np.isnan(out[5]).all() and (out[4] == 0).all()
    np.testing.assert_array_equal(out[6], by_definition(x[6:7], numbers, scale, 0, row_bits)[0])
    others = [0, 1, 2, *range(7, 20)]
    np.testing.assert_array_equal(out[others], plain[others])


def _groups(num_tokens: int, num_experts: int) -> Groups:
    """Two choices each; the last expert is none."""
    experts = np.random.default_rng(0).integers(0, num_experts + 1, (num_tokens, 2))
    experts[: num_tokens // 2, 0] = 1
    return group_by_expert(jnp.asarray(experts, jnp.int32), num_experts)


KINDS = [(MXFP4, 32, 1), (FLOAT8, 128, 1), (FLOAT8, 32, 16), (FLOAT8, 96, 176), (FLOAT8, 2208, 1)]
"""How numbers are packed, and how many inputs and outputs share a scale."""


def floats(packing: str, group: int, outputs: int, num_experts: int = 3) -> PackedMatrix:
    """Matrices 176 by 2208, of which a task's blocks of rows, lines of weights and lines of scales aren't whole."""
    rng = np.random.default_rng(1)
    shape, num_in = (num_experts, 176), 2208
    if packing == MXFP4:
        codes, scale = rng.integers(0, 256, (*shape, num_in // 2)), rng.integers(0, 140, (*shape, num_in // 32))
        return PackedMatrix(jnp.asarray(codes, jnp.uint8), jnp.asarray(scale, jnp.uint8), None, 32, MXFP4)
    numbers = jnp.asarray(rng.integers(0, 256, (*shape, num_in)), jnp.uint8).view(jnp.float8_e4m3fn)
    numbers = numbers.at[:, 20:].set(jnp.nan_to_num(numbers[:, 20:].astype(jnp.float32)).astype(numbers.dtype))
    scale = rng.uniform(0.1, 1, (num_experts, -(-176 // outputs), -(-num_in // group))).astype(np.float32)
    return PackedMatrix(numbers, jnp.asarray(scale.repeat(outputs, axis=1)[:, :176]), None, group, FLOAT8)


@pytest.mark.parametrize(
    ("each_way", "kind", "dtype", "num_rows"),
    singly(native_cases.WAYS, KINDS, ["bfloat16", "float32"], [1, 5, 8, 90]),
    indirect=["each_way"],
    ids=str,
)
def test_floats_are_multiplied_as_if_they_had_been_widened_before(
    kind: tuple[str, int, int], dtype: str, num_rows: int
) -> None:
    weights = floats(*kind)
    x, groups = jnp.asarray(rows(num_rows, 2208)), _groups(num_rows, 3)
    out = grouped_packed_product(x, groups, weights, of_tokens=True, dtype=dtype, backend="native")
    in_xla = grouped_packed_product(x, groups, weights, of_tokens=True, dtype=dtype, backend="xla")
    np.testing.assert_allclose(in_xla, out, atol=1e-2 * np.nanmax(np.abs(out)))
    if weights.num_groups > 1:
        expected = grouped_product(x, groups, weights.widened(dtype), of_tokens=True, backend="native")
    else:
        sums = grouped_product(x, groups, weights.numbers.astype(dtype), of_tokens=True, backend="native")
        expected = sums * weights.scale[..., 0].at[groups.experts].get(mode="fill", fill_value=0)
    np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize(("each_way", "kind"), singly(native_cases.WAYS, KINDS), indirect=["each_way"], ids=str)
def test_a_row_times_floats_comes_out_the_same_in_any_company(kind: tuple[str, int, int]) -> None:
    weights = jax.tree.map(lambda part: part[0], floats(*kind, num_experts=1))
    x = jnp.asarray(rows(70, 2208))
    together = np.asarray(packed_product.product(x, weights))
    for count in (1, 2, 3, 6, 8, 9, 33):
        np.testing.assert_array_equal(np.asarray(packed_product.product(x[:count], weights)), together[:count])


@pytest.mark.parametrize("each_way", ["widened"], indirect=True)
def test_other_sizes_and_rows_are_refused() -> None:
    def reason(packing: str, shape: tuple[int, int], group: int) -> str:
        return packed.refuse(packing, shape, group) or ""

    assert "the weights are (48, 64); int4 takes multiples of (32, 32)" in reason(INT4, (48, 64), 64)
    assert "groups have 48 inputs" in reason(INT4, (32, 96), 48)
    assert "groups have 1024 inputs" in reason(INT4, (32, 2048), 1024)
    assert "the weights are (40, 64); float8 takes multiples of (16, 32)" in reason(FLOAT8, (40, 64), 32)
    assert "the weights are (96, 64); int8 takes multiples of (64, 64)" in (packed.refuse(INT8, (96, 64), 64, 2) or "")
    assert reason(INT4, (32, 2048), 2048) == reason(MXFP4, (16, 64), 32) == reason(FLOAT8, (16, 2880), 128) == ""
    weights = floats(MXFP4, 32, 1)
    assert "float32 rows, not bfloat16" in (packed_product.refuse(jnp.zeros((1, 160), jnp.bfloat16), weights) or "")
