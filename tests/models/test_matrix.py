"""Products with quantized matrices in every form, against float64; and what a module declares for them."""

from __future__ import annotations

import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxsgl.models.matrix import (
    MOST_ROWS_OF_KERNEL,
    Matrices,
    Matrix,
    dequantized,
    gated_rows,
    quantized_product,
)
from jaxsgl.models.precision import gated_product, product, product_in_parts
from jaxsgl.models.quantization import WeightFormat
from pallas_kernels import KernelChoice, ScaledRows, packed
from pallas_kernels.choice import AUTO_CHOICE
from pallas_kernels.native import library as native_library
from tests.pallas_kernels.lower_everything import on_a_device

FORMATS = {
    "int8": WeightFormat("load", "int8"),
    "fp8": WeightFormat("load", "float8_e4m3fn"),
    "fp8 in blocks, the last one cut": WeightFormat("fp8", "float8_e4m3fn", group=40),
    "int4 with zeros": WeightFormat("awq", "int4", group=32, has_zeros=True),
    "int4 reordered": WeightFormat("gptq", "int4", group=32, reorders=True),
    "int8 in groups with zeros, reordered": WeightFormat("gptq", "int8", group=32, has_zeros=True, reorders=True),
}
OUT, IN = (3, 8), 96


def random_matrix(fmt: WeightFormat, seed: int = 0, out: tuple[int, int] = OUT) -> tuple[Matrix, np.ndarray]:
    """A matrix of `[*out, 96]`, and its weights in float64 by the definition."""
    rng = np.random.default_rng(seed)
    group = fmt.group_of(IN)
    num_groups = -(-IN // group)
    is_float = "float" in fmt.numbers
    drawn = rng.standard_normal((*out, IN)) * 40 if is_float else rng.integers(-8, 8, (*out, IN))
    numbers = jnp.asarray(drawn, fmt.numbers)
    scale = rng.uniform(0.01, 0.1, (*out, num_groups)).astype(np.float32)
    zero = rng.integers(-8, 8, (*out, num_groups)).astype(np.int8) if fmt.has_zeros else None
    order = rng.permutation(IN).astype(np.int32) if fmt.reorders else None
    group_of = np.arange(IN) // group
    columns = np.asarray(numbers.astype(jnp.float32), np.float64)
    columns = (columns - (0 if zero is None else zero[..., group_of].astype(np.float64))) * scale[..., group_of]
    weights = columns
    if order is not None:
        weights = np.empty_like(columns)
        weights[..., order] = columns
    zeros, columns_of = (None if array is None else jnp.asarray(array) for array in (zero, order))
    return Matrix(numbers, jnp.asarray(scale), zeros, columns_of, group), weights


def packed_as(packing: str, matrix: Matrix) -> Matrix:
    zero = None if matrix.zero is None else packed.pack_groups(packing, matrix.zero)
    numbers, scale = packed.pack_numbers(packing, matrix.numbers), packed.pack_groups(packing, matrix.scale)
    return replace(matrix, numbers=numbers, scale=scale, zero=zero, packing=packing, row_bits=8)


@pytest.mark.parametrize("name", ["int8", "int8 in groups with zeros, reordered"])
def test_outputs_side_by_side_are_the_same_weights(name: str) -> None:
    matrix, weights = random_matrix(FORMATS[name], out=(3, 64))
    side_by_side = packed_as(packed.INT8, matrix)
    assert side_by_side.shape == matrix.shape
    np.testing.assert_array_equal(dequantized(side_by_side, jnp.float32), dequantized(matrix, jnp.float32))
    if native_library.multiplies_bytes():  # else no engine has such a matrix
        x = jnp.asarray(np.random.default_rng(1).standard_normal((5, IN)), jnp.float32)
        expected = np.einsum("td,god->tgo", np.asarray(x, np.float64), weights)
        np.testing.assert_allclose(product(x, side_by_side), expected, atol=2e-2 * np.abs(expected).max())

    def of_one(matrix: Matrix) -> Matrix:
        zero = None if matrix.zero is None else matrix.zero[1]
        return replace(matrix, numbers=matrix.numbers[1], scale=matrix.scale[1], zero=zero)

    ids = jnp.asarray([63, 0, 33, 64])  # the last one is none, and clipped
    for stack in (side_by_side, of_one(side_by_side)):
        same = matrix if stack is side_by_side else of_one(matrix)
        rows = np.asarray(dequantized(stack.rows(ids), jnp.float32))
        clipped = np.clip(ids, 0, len(same.numbers) - 1)
        np.testing.assert_array_equal(rows, np.asarray(dequantized(same, jnp.float32))[clipped])


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)
def test_a_product_is_that_with_the_dequantized_weights(fmt: WeightFormat) -> None:
    matrix, weights = random_matrix(fmt)
    x = np.random.default_rng(1).standard_normal((5, IN)).astype(np.float32)
    out = jax.jit(lambda x: product(x, matrix))(x)
    assert (out.shape, out.dtype) == ((5, *OUT), jnp.float32)
    expected = np.einsum("td,ghd->tgh", x.astype(np.float64), weights)
    np.testing.assert_allclose(out, expected, atol=1e-3 * np.abs(expected).max())
    np.testing.assert_allclose(product_in_parts(jnp.asarray(x), matrix), out, atol=1e-5)
    np.testing.assert_allclose(dequantized(matrix, jnp.float32), weights, rtol=1e-6)


@pytest.mark.parametrize("fmt", [None, *FORMATS.values()], ids=["bfloat16", *FORMATS])
def test_a_gated_product_is_the_activation_of_the_gate_times_up(fmt: WeightFormat | None) -> None:
    rng, gate_up = np.random.default_rng(1), None
    if fmt is None:
        plain = jnp.asarray(rng.standard_normal((2, 32, IN)), jnp.bfloat16)
        weights = np.asarray(plain, np.float64)
    else:
        gate_up, weights = random_matrix(fmt, out=(2, 32))
    x = jnp.asarray(rng.standard_normal((5, IN)) / 4, jnp.bfloat16).astype(jnp.float32)

    def gated(x: jax.Array) -> jax.Array:
        rows = gated_product(x, plain if gate_up is None else gate_up, "silu", jnp.zeros((8, 32)))
        assert isinstance(rows, jax.Array)
        return rows

    gate, up = np.einsum("td,gfd->gtf", np.asarray(x, np.float64), weights)
    expected = gate / (1 + np.exp(-gate)) * up
    np.testing.assert_allclose(jax.jit(gated)(x), expected, atol=2e-3 * np.abs(expected).max())
    in_one_kernel = fmt is None or (fmt.numbers == "int8" and not fmt.has_zeros)
    if native_library.load(native_library.INTEGERS) is None:
        assert ("logistic" not in str(jax.make_jaxpr(gated)(x))) == in_one_kernel


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)
def test_activations_in_bfloat16_are_summed_in_float32(fmt: WeightFormat) -> None:
    matrix, weights = random_matrix(fmt)
    x = jnp.asarray(np.random.default_rng(1).standard_normal((5, IN)), jnp.bfloat16)
    out = jax.jit(lambda x: quantized_product(x, matrix, jnp.float32))(x)
    expected = np.einsum("td,ghd->tgh", np.asarray(x, np.float64), weights)
    np.testing.assert_allclose(out, expected, atol=4e-3 * np.abs(expected).max())
    assert product(x, matrix).dtype == jnp.bfloat16


@pytest.mark.parametrize("num_rows", [8, 9])
@pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)
def test_accelerators_multiply_few_rows_group_by_group(fmt: WeightFormat, num_rows: int) -> None:
    matrix, weights = random_matrix(fmt)
    x = np.random.default_rng(1).standard_normal((num_rows, IN)).astype(np.float32)

    def multiply(x: jax.Array) -> jax.Array:
        return quantized_product(x, matrix, jnp.float32)

    with on_a_device("cuda", "NVIDIA H200", 132):
        out = jax.jit(multiply)(x)
        products = [eqn for eqn in jax.make_jaxpr(multiply)(x).eqns if eqn.primitive.name == "dot_general"]
    assert len(products) == (2 if fmt.group == 32 and num_rows == 8 else 1)
    expected = np.einsum("td,ghd->tgh", x.astype(np.float64), weights)
    np.testing.assert_allclose(out, expected, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize(("num_rows", "has_kernel"), [(1, True), (MOST_ROWS_OF_KERNEL, True), (385, False)])
def test_gpus_widen_weights_with_scales_of_groups_for_many_rows_only(num_rows: int, has_kernel: bool) -> None:
    x = jax.ShapeDtypeStruct((num_rows, IN), jnp.bfloat16)
    for fmt in FORMATS.values():
        matrix, _ = random_matrix(fmt)
        # 40 inputs are no whole tiles of a step; int4 is multiplied where it is packed, which 96 inputs can't be.
        assert multiplies_by_a_kernel(x, matrix) == (has_kernel and fmt.group == 32 and fmt.numbers != "int4")
    of_fragments = Matrix(jnp.zeros((3, 1, 128), jnp.uint32), jnp.ones((3, 1, 16)), None, None, 64, packed.FRAGMENTS)
    assert of_fragments.shape == (3, 16, 64)
    assert multiplies_by_a_kernel(jax.ShapeDtypeStruct((num_rows, 64), jnp.bfloat16), of_fragments) == has_kernel


def multiplies_by_a_kernel(x: jax.ShapeDtypeStruct, matrix: Matrix) -> bool:
    with on_a_device("cuda", "NVIDIA H200", 132):
        text = str(jax.make_jaxpr(lambda x: product(x, matrix))(x))
    return "pallas_call[" in text


def test_a_cpu_rounds_rows_for_integers_where_the_format_says_so() -> None:
    """By as much as 8 bits differ from 16 and from float32, the same for a scale per output and for groups of int4."""
    if not native_library.multiplies_bytes():
        pytest.skip("the processor has no products of bytes, or there are no kernels")
    x = jnp.asarray(np.random.default_rng(1).standard_normal((5, IN)), jnp.float32)
    for fmt in (WeightFormat("load", "int8"), WeightFormat("awq", "int4", group=32)):
        plain, weights = random_matrix(fmt.on_cpu("bfloat16"), out=(3, 32))
        expected = np.einsum("td,nod->tno", np.asarray(x, np.float64), weights)
        off = [
            np.linalg.norm(np.asarray(product(x, matrix)) - expected) / np.linalg.norm(expected)
            for matrix in (replace(plain, row_bits=32), plain, packed_as(packed.INT8, plain))
        ]
        assert off[0] < 5e-7 and 5e-6 < off[1] < 1e-4 and 1e-3 < off[2] < 2e-2, off


@pytest.mark.parametrize("backend", ["auto", "xla"])
def test_a_matrix_multiplies_on_the_kernels_of_the_layer(backend: str) -> None:
    layer = _Layer(WeightFormat("gptq", "int8", group=16, has_zeros=True))
    x = jax.ShapeDtypeStruct((20, 80), jnp.bfloat16)
    matrix = layer.matrix("down", KernelChoice(quantized_product=backend))
    with on_a_device("cuda", "NVIDIA H200", 132):
        text = str(jax.make_jaxpr(lambda x: product(x, matrix))(x))
    assert ("pallas_call[" in text) == (backend == "auto")


def float8_matrix(group: int, kernels: KernelChoice = AUTO_CHOICE) -> Matrix:
    numbers = jnp.asarray(np.random.default_rng(0).standard_normal((24, 256)), "float8_e4m3fn")
    return Matrix(numbers, jnp.full((24, 256 // group), 0.5, jnp.float32), None, None, group, kernels=kernels)


@pytest.mark.parametrize(
    ("kind", "num_rows", "kernels", "ops"),
    [
        ("NVIDIA H200", 1, AUTO_CHOICE, ["float8_rows", "float8_product"]),
        ("NVIDIA H200", 4096, AUTO_CHOICE, ["float8_rows", "float8_product"]),
        ("NVIDIA H200", 256, KernelChoice(float8_product="xla"), ["quantized_product"]),
        ("NVIDIA A100-SXM4-80GB", 256, AUTO_CHOICE, []),
    ],
)
def test_rows_are_rounded_where_a_kernel_multiplies_float8(
    kind: str, num_rows: int, kernels: KernelChoice, ops: list[str]
) -> None:
    x = jax.ShapeDtypeStruct((num_rows, 256), jnp.bfloat16)
    with on_a_device("cuda", kind, 132):
        text = str(jax.make_jaxpr(lambda x: product(x, float8_matrix(128, kernels)))(x))
    called = re.findall(r"\bname=(float8_\w+|quantized_product)\b", text)
    assert list(dict.fromkeys(called)) == ops


def test_a_gated_unit_is_rounded_by_the_kernel_that_makes_it() -> None:
    gate_up = jax.ShapeDtypeStruct((256, 2, 256), jnp.bfloat16)
    for kernels, kind in ((AUTO_CHOICE, ScaledRows), (KernelChoice(float8_product="xla"), jax.ShapeDtypeStruct)):
        with on_a_device("cuda", "NVIDIA H200", 132):
            made = jax.eval_shape(lambda x, k=kernels: gated_rows(x, "silu", float8_matrix(256, k)), gate_up)
        assert isinstance(made, kind)


def test_rounded_rows_are_multiplied_by_the_matrix() -> None:
    matrix = float8_matrix(128, KernelChoice(float8_product="reference"))
    x = jnp.asarray(np.random.default_rng(1).standard_normal((80, 256)), jnp.float32)
    found = np.asarray(product(x, matrix), np.float64)
    right = np.asarray(x, np.float64) @ np.asarray(dequantized(matrix, jnp.float32), np.float64).T
    assert 0.02 < np.linalg.norm(found - right) / np.linalg.norm(right) < 0.03  # the rounding of rows


def test_a_product_for_a_reader_that_adds_up_comes_in_parts_where_gpus_have_the_kernel() -> None:
    matrix, _ = random_matrix(WeightFormat("gptq", "int8", group=16, has_zeros=True))
    x = jax.ShapeDtypeStruct((1, IN), jnp.bfloat16)
    with on_a_device("cuda", "NVIDIA H200", 132):
        parts = jax.eval_shape(lambda x: product_in_parts(x, matrix), x)
        whole = jax.eval_shape(lambda x: product(x, matrix), x)
    assert (parts.shape, parts.dtype) == ((2, 1, *OUT), jnp.float32)  # the sums of 6 groups are cut in halves
    assert (whole.shape, whole.dtype) == ((1, *OUT), jnp.bfloat16)


class _Layer(Matrices):
    def __init__(self, fmt: WeightFormat | None) -> None:
        self.declare("down", (6, 80), (None, "ffn"), jnp.dtype(jnp.bfloat16), fmt, fan_in=80)


def declared(fmt: WeightFormat | None) -> dict[str, tuple[tuple[int, ...], str]]:
    _, params = nnx.split(nnx.eval_shape(lambda: _Layer(fmt)))
    return {str(path[0]): (param.shape, param.dtype.name) for path, param in nnx.to_flat_state(params)}


def test_the_parts_of_a_quantized_matrix_are_sibling_parameters() -> None:
    assert declared(None) == {"down": ((6, 80), "bfloat16")}
    assert declared(FORMATS["int8"]) == {"down": ((6, 80), "int8"), "down_scale": ((6, 1), "float32")}
    assert declared(FORMATS["int4 with zeros"]) == {
        "down": ((6, 80), "int4"),
        "down_scale": ((6, 3), "float32"),
        "down_zero": ((6, 3), "int8"),
    }
    assert declared(FORMATS["int4 reordered"])["down_order"] == ((80,), "int32")


def test_an_unquantized_matrix_is_its_parameter() -> None:
    layer = _Layer(None)
    assert layer.matrix("down") is layer.down[...]  # type: ignore[attr-defined]


def test_rows_that_are_chosen_share_no_scales() -> None:
    """Of a matrix of which each two outputs do."""
    scale = jnp.repeat(jnp.arange(1, 4, dtype=jnp.float32), 2)[:, None]
    matrix = Matrix(jnp.ones((6, 8), jnp.int8), scale, None, None, 8, block_outputs=2)
    chosen = matrix.rows(jnp.array([1, 2, 5]))
    assert chosen.block_outputs == 1 and chosen.scale[:, 0].tolist() == [1, 2, 3]
