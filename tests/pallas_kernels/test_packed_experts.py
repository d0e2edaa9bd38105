"""Rows times experts of 4 bits that are packed for GPUs: right by kernel and by XLA, and read as they are."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import (
    GatedUnit,
    Groups,
    ScaledMatrix,
    fragments,
    gated_packed_product,
    group_by_expert,
    grouped_packed_product,
    packed,
    quantized_product,
)
from pallas_kernels.packed import PackedMatrix
from tests.grids import covering, daily
from tests.pallas_kernels.lower_everything import on_a_device

NUM_EXPERTS = 3
SPREAD = np.random.default_rng(0).permuted(np.tile(np.arange(NUM_EXPERTS), (21, 1)), axis=1)[:, :2]
# Experts of each token: a part of them, one for all (more rows than a tile), none for some.
CHOICES = {
    "spread": SPREAD,
    "one": np.full((140, 1), 2),
    "padding": np.where(np.arange(21)[:, None] % 3 == 0, SPREAD, NUM_EXPERTS),
}
UNITS = {"silu": GatedUnit("silu"), "limits": GatedUnit(limit=2.0, alpha=1.7)}
_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def mxfp4(shape: tuple[int, ...], codes: np.ndarray, scales: tuple[int, int] = (110, 129)) -> tuple[PackedMatrix, ...]:
    """As published and as fragments, of these codes."""
    rng = np.random.default_rng(1)
    drawn = rng.choice(codes, shape).astype(np.uint8)
    numbers, scale = drawn[..., ::2] | drawn[..., 1::2] << 4, rng.integers(*scales, (*shape[:-1], shape[-1] // 32))
    parts = jnp.asarray(numbers), jnp.asarray(scale, jnp.uint8)
    return PackedMatrix(*parts, None, 32, packed.MXFP4), packed.mxfp4_fragments_of(*parts)


def codes_for(dtype: str) -> np.ndarray:
    """All; but XLA takes subnormal bfloat16 for 0 on a CPU, and those of 0.5 are that before they are scaled."""
    codes = np.arange(16)
    return codes[np.abs(_E2M1) != 0.5] if dtype == "bfloat16" else codes


def int4(shape: tuple[int, ...], group: int) -> PackedMatrix:
    rng, groups = np.random.default_rng(1), (*shape[:-1], shape[-1] // group)
    zero = jnp.asarray(rng.integers(-8, 8, groups), jnp.int8)
    scale = jnp.asarray(rng.uniform(0.5, 1.5, groups), jnp.float32)
    return packed.fragments_of(ScaledMatrix(jnp.asarray(rng.integers(-8, 8, shape), jnp.int4), scale, zero, group))


def right(x: jax.Array, groups: Groups, weights: PackedMatrix) -> np.ndarray:
    """`[M, out]` in float64, of tokens; zeros at places without an expert."""
    rows, wide = np.asarray(x, np.float64), np.asarray(weights.widened(jnp.float32), np.float64)
    pairs = zip(np.asarray(groups.tokens), np.asarray(groups.experts), strict=True)
    return np.stack([wide[e] @ rows[t] if e < NUM_EXPERTS else np.zeros(wide.shape[1]) for t, e in pairs])


def random_bias(num_out: int, dtype: str = "bfloat16") -> jax.Array:
    return jnp.asarray(np.random.default_rng(3).normal(size=(NUM_EXPERTS, num_out)), dtype)


def plus(sums: np.ndarray, bias: jax.Array, groups: Groups) -> np.ndarray:
    """With the bias of the places' experts."""
    experts = np.asarray(groups.experts)
    return sums + np.append(np.asarray(bias, np.float64), np.zeros((1, bias.shape[1])), axis=0)[experts]


def assert_close(found: jax.Array, expected: np.ndarray, tolerance: float) -> None:
    np.testing.assert_allclose(np.asarray(found, np.float64), expected, atol=tolerance * np.abs(expected).max())


@pytest.mark.parametrize(("shape", "scales"), [((16, 64), (0, 161)), ((2, 48, 192), (100, 130))])
def test_fragments_hold_what_is_published_in_mxfp4(shape: tuple[int, ...], scales: tuple[int, int]) -> None:
    published, kept = mxfp4(shape, np.arange(16), scales)
    assert kept.shape == published.shape == shape and kept.num_groups == shape[-1] // 32
    assert (kept.numbers.nbytes, kept.scale.nbytes) == (published.numbers.nbytes, 2 * published.scale.nbytes)
    np.testing.assert_array_equal(kept.widened(jnp.float32), published.widened(jnp.float32))
    codes = jnp.asarray(np.random.default_rng(2).integers(0, 16, shape), jnp.uint8)
    np.testing.assert_array_equal(fragments.unpack_e2m1(fragments.pack_e2m1(codes)), codes)


@pytest.mark.parametrize(("dtype", "num_rows"), [("float16", 20), ("bfloat16", 70)])
def test_a_matrix_in_mxfp4_is_multiplied_without_rounding(dtype: str, num_rows: int) -> None:
    published, kept = mxfp4((80, 192), codes_for(dtype), (110, 129) if dtype == "bfloat16" else (110, 125))
    x = jnp.asarray(np.random.default_rng(0).normal(size=(num_rows, 192)), dtype)
    found = quantized_product(x, kept, jnp.float32, backend="triton", interpret=True)
    assert_close(found, np.asarray(x, np.float64) @ np.asarray(published.widened(jnp.float32), np.float64).T, 1e-6)


@pytest.mark.parametrize(
    ("kind", "choices", "dtype", "of_tokens"),
    daily(
        covering(("mxfp4", 32, 64, 128), list(CHOICES), ("bfloat16", "float16"), (False, True)),
        every=3,
    ),
)
def test_each_token_is_multiplied_with_its_experts(kind: str | int, choices: str, dtype: str, of_tokens: bool) -> None:
    shape = (NUM_EXPERTS, 80, 128)
    weights = int4(shape, kind) if isinstance(kind, int) else mxfp4(shape, codes_for(dtype), (110, 125))[1]
    groups = group_by_expert(jnp.asarray(CHOICES[choices], jnp.int32), NUM_EXPERTS)
    x = jnp.asarray(np.random.default_rng(0).normal(size=(groups.num_tokens, 128)), dtype)
    expected = right(x, groups, weights)
    rows = x if of_tokens else x[groups.tokens]
    bias = random_bias(80, dtype) if choices != "one" else None
    expected = expected if bias is None else plus(expected, bias, groups)
    found = grouped_packed_product(rows, groups, weights, bias, of_tokens=of_tokens, backend="triton", interpret=True)
    assert found.dtype == x.dtype
    roundings = 1 if bias is None else 2
    assert_close(found, expected, roundings * {"bfloat16": 4e-3, "float16": 5e-4}[dtype])
    by_xla = grouped_packed_product(
        rows.astype(jnp.float32), groups, weights, bias, of_tokens=of_tokens, dtype="float32", backend="xla"
    )
    assert_close(by_xla, expected, 1e-5)


@pytest.mark.parametrize(
    ("kind", "unit", "choices", "has_bias"),
    daily(covering(("mxfp4", 64), list(UNITS), list(CHOICES), (False, True)), every=2),
)
def test_a_gated_product_adds_biases_and_makes_the_unit(
    kind: str | int, unit: str, choices: str, has_bias: bool
) -> None:
    """Of many rows with integers XLA makes it."""
    shape = (NUM_EXPERTS, 2 * 64, 128)
    weights = int4(shape, kind) if isinstance(kind, int) else mxfp4(shape, codes_for("bfloat16"), (120, 127))[1]
    groups = group_by_expert(jnp.asarray(CHOICES[choices], jnp.int32), NUM_EXPERTS)
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(groups.num_tokens, 128)) / 16, jnp.bfloat16)
    bias = random_bias(2 * 64) if has_bias else None
    sums = right(x, groups, weights)
    sums = sums if bias is None else plus(sums, bias, groups)
    expected = np.asarray(UNITS[unit](*jnp.split(jnp.asarray(sums, jnp.float32), 2, axis=1)), np.float64)
    found = gated_packed_product(
        x, groups, weights, UNITS[unit], bias, of_tokens=True, backend="triton", interpret=True
    )
    assert found.shape == (groups.num_places, 64)
    assert_close(found, expected, 2e-2)
    wide = gated_packed_product(
        x.astype(jnp.float32), groups, weights, UNITS[unit], bias, of_tokens=True, dtype="float32", backend="xla"
    )
    assert_close(wide, expected, 1e-5)


@pytest.mark.parametrize("kind", ["NVIDIA H200", "NVIDIA A100-SXM4-80GB"])
def test_gpus_take_the_kernel(kind: str) -> None:
    weights = mxfp4((NUM_EXPERTS, 128, 128), np.arange(16))[1]
    groups = group_by_expert(jnp.asarray(CHOICES["spread"], jnp.int32), NUM_EXPERTS)

    def products(x: jax.Array) -> jax.Array:
        gated = gated_packed_product(x, groups, weights, UNITS["silu"], of_tokens=True)
        whole = grouped_packed_product(x, groups, weights, of_tokens=True)
        return gated.sum() + whole.sum()

    x = jax.ShapeDtypeStruct((21, 128), jnp.bfloat16)
    with on_a_device("cuda", kind, 132):
        text = jax.jit(products).trace(x).lower(lowering_platforms=("cuda",)).as_text()
    for name in ("gated_packed_product", "grouped_packed_product"):
        assert text.count(f'name = "{name}"') == 1, text
