"""Products with numbers and scales of groups on TPUs: of a matrix, and of experts. On its interpreter."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import (
    ScaledMatrix,
    group_by_expert,
    grouped_packed_product,
    grouped_product,
    grouped_scaled_product,
    quantized_product,
)
from pallas_kernels.experts import Choices, Groups
from pallas_kernels.packed import MXFP4, PackedMatrix, mxfp4_codes_of
from pallas_kernels.scaled import widened
from pallas_kernels.selftest.weights import scaled_weights
from pallas_kernels.tpu import products
from tests.grids import daily
from tests.pallas_kernels.lower_everything import TARGETS, on_a_device
from tests.pallas_kernels.test_grouped_product import CHOICES, NUM_EXPERTS, arrays, right

TPU: dict[str, Any] = {"backend": "mosaic_tpu", "interpret": True}


def groups_of(choices: str) -> Groups:
    return group_by_expert(jnp.asarray(CHOICES[choices], jnp.int32), NUM_EXPERTS)


def wide(weights: ScaledMatrix) -> jax.Array:
    return widened(weights.numbers, weights.scale, weights.zero, weights.group, jnp.float32)


def assert_near(found: jax.Array, expected: np.ndarray, tolerance: float) -> None:
    np.testing.assert_allclose(np.asarray(found, np.float64), expected, atol=tolerance * np.abs(expected).max())


@pytest.mark.parametrize(
    ("numbers", "group", "outputs", "inputs", "has_zeros", "choices", "of_tokens"),
    daily(
        [
            ("int4", 128, 200, 384, True, "spread", True),  # sums are scaled
            ("float8_e4m3fn", 128, 640, 320, False, "one expert", False),  # of a cut group; more rows than a tile
            ("int8", 384, 96, 384, True, "padding", True),  # one group
            ("int8", 32, 192, 320, False, "spread", False),  # weights are scaled; lanes that aren't full
            ("int4", 64, 130, 384, True, "one token", True),
            ("int8", 16, 64, 2176, True, "padding", True),  # more groups than lanes
            ("int8", 256, 64, 448, False, "nowhere", True),
        ],
        every=3,
    ),
)
def test_each_token_meets_the_scaled_weights_of_its_experts(
    numbers: str, group: int, outputs: int, inputs: int, has_zeros: bool, choices: str, of_tokens: bool
) -> None:
    weights = scaled_weights((NUM_EXPERTS, outputs, inputs), numbers, group, has_zeros)
    groups = groups_of(choices)
    x, _ = arrays(CHOICES[choices], outputs, inputs, "float32")
    rows = x if of_tokens else x[groups.tokens]
    found = grouped_scaled_product(rows, groups, weights, of_tokens=of_tokens, **TPU)
    assert found.shape == (groups.num_places, outputs)
    assert_near(found[groups.place_of], right(x, CHOICES[choices], wide(weights)), 1e-6)
    by_xla = grouped_scaled_product(rows, groups, weights, of_tokens=of_tokens, backend="xla")
    assert_near(by_xla[groups.place_of], right(x, CHOICES[choices], wide(weights)), 1e-5)


@pytest.mark.parametrize(("outputs", "inputs"), daily([(96, 320), (64, 4224)], every=2))
def test_experts_in_mxfp4_are_read_as_4_bits(outputs: int, inputs: int) -> None:
    """With a bias; the first weights of each row are all numbers there are, and the first scales the smallest ones."""
    rng = np.random.default_rng(1)
    pairs = rng.integers(0, 256, (NUM_EXPERTS, outputs, inputs // 2), np.uint8)
    pairs[:, :, :8] = np.arange(16, dtype=np.uint8).reshape(8, 2) @ np.array([1, 16], np.uint8)
    scale = rng.integers(121, 130, (NUM_EXPERTS, outputs, inputs // 32), np.uint8)
    scale[0, 0] = 1
    stored = jnp.asarray(pairs), jnp.asarray(scale)
    weights, published = mxfp4_codes_of(*stored), PackedMatrix(*stored, None, 32, MXFP4)
    assert weights.numbers.dtype == jnp.int4 and weights.scale.nbytes == scale.nbytes
    np.testing.assert_array_equal(weights.widened("float32"), published.widened("float32"))
    x, _ = arrays(CHOICES["padding"], outputs, inputs, "float32")
    groups, bias = groups_of("padding"), jnp.asarray(rng.standard_normal((NUM_EXPERTS, outputs)), jnp.float32)
    found, by_xla = (
        grouped_packed_product(x, groups, each, bias, of_tokens=True, dtype="float32", **how)
        for each, how in ((weights, TPU), (published, {"backend": "xla"}))
    )
    assert_near(found, np.asarray(by_xla, np.float64), 1e-5)  # float32 sums of up to 4,224 numbers in two orders


@pytest.mark.parametrize(("group", "tolerance"), [(128, 4e-3), (32, 6e-3)])
def test_rows_in_16_bits_add_up_in_32(group: int, tolerance: float) -> None:
    """The result is rounded once; small groups' weights, too."""
    weights = scaled_weights((NUM_EXPERTS, 128, 1024), "int4", group, True)
    x, _ = arrays(CHOICES["spread"], 128, 1024, "float32")
    groups = groups_of("spread")
    found = grouped_scaled_product(x.astype(jnp.bfloat16), groups, weights, of_tokens=True, **TPU)
    assert found.dtype == jnp.bfloat16
    rounded = x.astype(jnp.bfloat16).astype(jnp.float32)
    assert_near(found[groups.place_of], right(rounded, CHOICES["spread"], wide(weights)), tolerance)


@pytest.mark.parametrize("dtype", daily(["bfloat16", "int8", "float8_e4m3fn"], every=2))
def test_experts_without_scales_may_have_bytes_or_inputs_that_do_not_fill_the_lanes(dtype: str) -> None:
    x, weights = arrays(CHOICES["padding"], 192, 320, dtype)
    groups = groups_of("padding")
    found = grouped_product(x, groups, weights, of_tokens=True, **TPU)
    assert found.dtype == jnp.float32
    assert_near(found[groups.place_of], right(x, CHOICES["padding"], weights), 1e-6)


@pytest.mark.parametrize(
    ("num_rows", "numbers", "group", "has_zeros", "inputs"),
    daily(
        [(600, "int4", 256, True, 1344), (5, "float8_e4m3fn", 128, False, 384), (33, "int4", 32, True, 384)], every=2
    ),
)
def test_a_matrix_is_that_of_one_expert(num_rows: int, numbers: str, group: int, has_zeros: bool, inputs: int) -> None:
    weights = scaled_weights((300, inputs), numbers, group, has_zeros)
    x = jax.random.normal(jax.random.key(0), (num_rows, inputs)).astype(jnp.bfloat16)
    found = quantized_product(x, weights, jnp.float32, **TPU)
    assert (found.shape, found.dtype) == ((num_rows, 300), jnp.float32)
    assert_near(
        found, np.asarray(x, np.float64) @ np.asarray(wide(weights), np.float64).T, 1e-6 if group > 32 else 4e-3
    )


def test_experts_without_rows_are_not_read_and_rows_without_expert_are_zeros() -> None:
    weights = scaled_weights((NUM_EXPERTS, 128, 256), "int8", 128, False)
    is_used = jnp.isin(jnp.arange(NUM_EXPERTS), jnp.array([1, 3]))
    spoilt = ScaledMatrix(weights.numbers, jnp.where(is_used[:, None, None], weights.scale, jnp.nan), None, 128)
    x, _ = arrays(CHOICES["padding"], 128, 256, "float32")
    groups = groups_of("padding")
    found = grouped_scaled_product(x, groups, spoilt, of_tokens=True, **TPU)
    assert_near(found[groups.place_of], right(x, CHOICES["padding"], wide(weights)), 1e-6)
    has_expert = np.arange(groups.num_places) < int(groups.sizes.sum())
    assert not np.asarray(found)[~has_expert].any()


def test_a_tokens_choices_are_gathered_at_once() -> None:
    """And added up as on other devices."""
    rng = np.random.default_rng(2)
    rows, shares = (jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in ((12, 8), (4, 3)))
    choices = Choices(rows, jnp.asarray(rng.permutation(12).reshape(4, 3), jnp.int32), shares)
    kind, cores, _ = TARGETS["tpu"]
    with on_a_device("tpu", kind, cores):
        jaxpr = jax.make_jaxpr(Choices.total)(choices)
    assert str(jaxpr).count(" gather[") == 1
    (found,) = jax.core.eval_jaxpr(jaxpr.jaxpr, jaxpr.consts, *jax.tree.leaves(choices))
    np.testing.assert_allclose(found, choices.total(), rtol=1e-6)


def test_nothing_is_read_that_was_not_written() -> None:
    """The interpreter of TPUs fills what is not written with NaN: results, scratch, and what lies outside of arrays."""
    params: Any = pltpu.InterpretParams(uninitialized_memory="nan", out_of_bounds_reads="uninitialized")
    weights = scaled_weights((NUM_EXPERTS, 200, 320), "int8", 32, True)
    x, _ = arrays(CHOICES["spread"], 200, 320, "float32")
    groups = groups_of("spread")
    found = products.grouped_scaled_product(x, groups, weights, True, params)
    assert_near(found[groups.place_of], right(x, CHOICES["spread"], wide(weights)), 1e-6)


@pytest.mark.parametrize(
    ("shape", "numbers", "group", "dtype", "words"),
    [
        ((256, 256), "int4", 96, "bfloat16", "groups have 96 inputs; it takes divisors and multiples of 128"),
        ((256, 96), "int8", 32, "bfloat16", "have 96 inputs; it takes 128 or more"),
        ((256, 2880), "int8", 32, "bfloat16", "256 fill lanes better than 2880"),
        ((256, 256), "int8", 128, "float16", "rows in bfloat16 and float32, not float16"),
        ((2880, 2880), "int8", 32, "bfloat16", None),
        ((5760, 2880), "int8", 32, "bfloat16", None),  # a gate and what it multiplies
        ((256, 300), "float8_e4m3fn", 300, "float32", "fill lanes better"),
    ],
)
def test_what_the_kernel_does_not_take_is_named(
    shape: tuple[int, int], numbers: str, group: int, dtype: str, words: str | None
) -> None:
    described: Any = jax.eval_shape(lambda: scaled_weights((2, *shape), numbers, group, False))
    rows: Any = jax.ShapeDtypeStruct((4, shape[1]), jnp.dtype(dtype))
    reason = products.refuse_scaled_product(rows, described)
    assert reason is None if words is None else words in str(reason)


@pytest.mark.parametrize(("numbers", "group"), [("float8_e4m3fn", 128), ("int4", 32)])
def test_a_tpu_takes_it_by_itself(numbers: str, group: int) -> None:
    kind, cores, _ = TARGETS["tpu"]
    weights: Any = jax.eval_shape(lambda: scaled_weights((256, 512), numbers, group, False))
    stack: Any = jax.eval_shape(lambda: scaled_weights((NUM_EXPERTS, 256, 512), numbers, group, False))

    def multiply(x: jax.Array, weights: ScaledMatrix, stack: ScaledMatrix) -> list[jax.Array]:
        groups = groups_of("spread")
        return [quantized_product(x, weights), grouped_scaled_product(x, groups, stack, of_tokens=True)]

    with on_a_device("tpu", kind, cores):
        traced = jax.jit(multiply).trace(jax.ShapeDtypeStruct((37, 512), jnp.bfloat16), weights, stack)
        assert traced.lower(lowering_platforms=("tpu",)).as_text().count("tpu_custom_call") == 2
