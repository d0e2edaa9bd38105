"""Products in float8 for Hopper in their interpreter: walks over tiles, scales, rows that a tile has of other experts.

They run where `test_hopper_extend.py` says, which runs them with its own.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import (
    Groups,
    ScaledMatrix,
    ScaledRows,
    float8_product,
    float8_rows,
    gated_product,
    grouped_float8_product,
    grouped_product,
)
from pallas_kernels.experts import ACTIVATIONS, sort_by_expert
from pallas_kernels.hopper import float8_product as of_matrix
from pallas_kernels.hopper import grouped_product as of_experts
from pallas_kernels.scaled import rounded_rows
from pallas_kernels.triton.gather_rows import gather_rows
from tests.grids import daily
from tests.pallas_kernels.lower_everything import on_a_device
from tests.pallas_kernels.test_hopper_extend import assert_no_races, interpreted

pytestmark = pytest.mark.foreign

FLOAT8 = "float8_e4m3fn"
H200 = functools.partial(on_a_device, "cuda", "NVIDIA H200")


def weights_of(shape: tuple[int, ...], group: int, block_outputs: int) -> tuple[ScaledMatrix, np.ndarray]:
    """A matrix `[O, I]` or a stack of them, and what it means in float64."""
    rng = np.random.default_rng(sum(shape))
    numbers = jnp.asarray(rng.normal(size=shape), FLOAT8)
    blocks = (*shape[:-2], shape[-2] // block_outputs, shape[-1] // group)
    scale = rng.uniform(0.1, 1, blocks).repeat(block_outputs, axis=-2).astype(np.float32)
    values = np.asarray(numbers, np.float64) * scale.repeat(group, axis=-1)
    return ScaledMatrix(numbers, jnp.asarray(scale), None, group, block_outputs), values


def rows_of(num_rows: int, num_inputs: int) -> jax.Array:
    """Groups whose sizes differ by a factor of 100."""
    rng = np.random.default_rng(num_rows)
    sizes = np.exp(rng.uniform(np.log(0.1), np.log(10), (1, -(-num_inputs // 128)))).repeat(128, 1)[:, :num_inputs]
    return jnp.asarray(rng.normal(size=(num_rows, num_inputs)) * sizes, jnp.bfloat16)


def groups_of(sizes: tuple[int, ...]) -> Groups:
    """Two choices of each token, at random; as many of each expert as are named, and a few of none."""
    num_places = -(-sum(sizes) // 8) * 8
    chosen = np.repeat(np.arange(len(sizes) + 1), [*sizes, num_places - sum(sizes)])
    experts = np.random.default_rng(num_places).permutation(chosen).reshape(-1, 2)
    return sort_by_expert(jnp.asarray(experts, jnp.int32), len(sizes))


def by_experts(rows: np.ndarray, groups: Groups, weights: np.ndarray, of_tokens: bool) -> np.ndarray:
    """`[M, out]` in float64; zeros where a place has no expert."""
    by_place = rows[np.asarray(groups.tokens)] if of_tokens else rows
    with_zeros = np.concatenate([weights, np.zeros((1, *weights.shape[1:]))])
    return np.stack(
        [with_zeros[expert] @ row for expert, row in zip(np.asarray(groups.experts), by_place, strict=True)]
    )


def assert_equal_but_for_rounding(found: jax.Array, expected: np.ndarray) -> None:
    tolerance = {"bfloat16": 4e-3, "float16": 5e-4, "float32": 1e-6}[found.dtype.name]
    np.testing.assert_allclose(np.asarray(found, np.float64), expected, atol=tolerance * np.abs(expected).max())


@interpreted
@pytest.mark.parametrize(
    ("num_rows", "shape", "group", "block_outputs", "dtype", "num_cores"),
    daily(
        [
            (512, (256, 512), 128, 128, "bfloat16", 3),  # two blocks of rows in a tile, several tiles of a program
            (384, (128, 768), 768, 1, "float16", 132),  # one block; a scale for each output
            (256, (384, 384), 128, 64, "float32", 1),
            (256, (384, 512), 256, 384, "bfloat16", 132),  # blocks of weights that are larger than a tile
        ],
        every=2,
    ),
)
def test_many_rows_are_multiplied_exactly(
    num_rows: int, shape: tuple[int, int], group: int, block_outputs: int, dtype: str, num_cores: int
) -> None:
    matrix, values = weights_of(shape, group, block_outputs)
    rows = float8_rows(rows_of(num_rows, shape[1]), backend="xla")
    with H200(num_cores):
        found = float8_product(rows, matrix, jnp.dtype(dtype), backend="mosaic_gpu", interpret=True)
    assert_no_races()
    assert_equal_but_for_rounding(found, np.asarray(rows.values(jnp.float32), np.float64) @ values.T)


@interpreted
@pytest.mark.parametrize(
    ("sizes", "num_inputs", "group", "block_outputs", "of_tokens"),
    daily(
        [
            ((123, 0, 70, 259), 256, 128, 128, True),  # an expert without rows, and places without an expert
            ((300, 129), 384, 384, 1, False),
            ((64, 8, 121), 256, 128, 64, True),
        ],
        every=2,
    ),
)
def test_each_row_is_multiplied_with_its_expert(
    sizes: tuple[int, ...], num_inputs: int, group: int, block_outputs: int, of_tokens: bool, monkeypatch: Any
) -> None:
    monkeypatch.setattr(of_experts, "LEAST_AVERAGE", 1)
    groups = groups_of(sizes)
    matrix, values = weights_of((len(sizes), 256, num_inputs), group, block_outputs)
    whole = rounded_rows(rows_of(groups.num_tokens if of_tokens else groups.num_places, num_inputs))
    rows = ScaledRows(whole.numbers, whole.scale, jnp.dtype("bfloat16"))
    with H200(5):
        call = functools.partial(grouped_float8_product, of_tokens=of_tokens, backend="mosaic_gpu", interpret=True)
        found = call(rows, groups, matrix)
    assert_no_races()
    expected = by_experts(np.asarray(rows.values(jnp.float32), np.float64), groups, values, of_tokens)
    assert_equal_but_for_rounding(found, expected)
    assert not np.asarray(found, np.float64)[np.asarray(groups.experts) == len(sizes)].any()


@interpreted
@pytest.mark.parametrize(
    ("sizes", "num_inputs", "activation", "dtype"),
    daily(
        [
            ((123, 0, 70, 259), 256, "silu", "bfloat16"),
            ((300, 129), 192, None, "bfloat16"),
            ((64, 8, 121), 128, "gelu_tanh", "float16"),
        ],
        every=2,
    ),
)
def test_rows_in_16_bits_are_multiplied_with_their_experts_and_gated(
    sizes: tuple[int, ...], num_inputs: int, activation: str | None, dtype: str, monkeypatch: Any
) -> None:
    monkeypatch.setattr(of_experts, "LEAST_AVERAGE", 1)
    monkeypatch.setattr(of_experts, "LEAST_OUTPUTS", 256)
    groups = groups_of(sizes)
    is_gated = activation is not None
    x = rows_of(groups.num_tokens if is_gated else groups.num_places, num_inputs).astype(dtype)
    rng = np.random.default_rng(5)
    weights = jnp.asarray(rng.normal(size=(len(sizes), 256, num_inputs)) / num_inputs**0.5, dtype)
    options: dict[str, Any] = {"backend": "mosaic_gpu", "interpret": True}
    with H200(5):
        if activation is None:
            found = grouped_product(x, groups, weights, **options)
        else:
            found = gated_product(x, groups, weights, activation, of_tokens=True, **options)
    assert_no_races()
    expected = by_experts(np.asarray(x, np.float64), groups, np.asarray(weights, np.float64), is_gated)
    if activation is not None:
        gate, up = np.split(expected, 2, axis=1)
        expected = np.asarray(ACTIVATIONS[activation](jnp.asarray(gate, jnp.float32)), np.float64) * up
    np.testing.assert_allclose(np.asarray(found, np.float64), expected, atol=1e-2 * np.abs(expected).max())
    assert not np.asarray(found, np.float64)[np.asarray(groups.experts) == len(sizes)].any()


@pytest.mark.parametrize("sizes", [(123, 0, 70, 259), (0, 0, 8), (1, 247, 248, 249, 496)])
def test_tiles_hold_every_place_once_and_one_expert_each(sizes: tuple[int, ...]) -> None:
    groups, own = groups_of(sizes), of_experts._own_rows(2)
    held = []
    for tile, (after, start, last) in enumerate(zip(*map(np.asarray, of_experts._tiles(groups, own)), strict=True)):
        begin = min(start + (tile - start // own - (after - 1)) * own, last)  # as `_kernel` has it
        held += [(place, after - 1) for place in range(begin, min(begin + own, last))]
    assert held == list(enumerate(np.asarray(groups.experts).tolist()))


@pytest.mark.parametrize("in_float8", [False, True])
def test_prompts_of_a_mixture_are_lowered_to_these_kernels(in_float8: bool) -> None:
    """4,096 tokens of Qwen3-30B-A3B, whose 128 experts get 256 rows each on average."""

    def array(*shape: int, dtype: Any = jnp.int32) -> Any:
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))

    groups = Groups(array(32_768), array(32_768), array(128), array(4096, 8))
    x, weights = array(4096, 2048, dtype=jnp.bfloat16), array(128, 1536, 2048, dtype=jnp.bfloat16)

    def of_float8(x: jax.Array, groups: Groups, weights: ScaledMatrix) -> jax.Array:
        return grouped_float8_product(float8_rows(x), groups, weights, of_tokens=True)

    def gated(x: jax.Array, groups: Groups, weights: jax.Array) -> jax.Array:
        return gated_product(x, groups, weights, "silu", of_tokens=True)

    function: Any = of_float8 if in_float8 else gated
    with H200(132):
        matrices: Any = described((128, 1536, 2048), 128, 128) if in_float8 else weights
        text = jax.jit(function).trace(x, groups, matrices).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@mosaic_gpu") == 1 and "stablehlo.gather" not in text


@pytest.mark.parametrize("in_float8", [False, True])
def test_rows_of_tokens_are_copied_to_the_places_that_have_an_expert(in_float8: bool) -> None:
    groups = groups_of((5, 0, 12))
    x = rows_of(groups.num_tokens, 384)
    rounded = rounded_rows(x)
    rows, scale = (rounded.numbers, rounded.scale) if in_float8 else (x, None)
    found, of_places = gather_rows(rows, scale, groups, interpret=True)
    real = np.asarray(groups.experts) < 3
    assert found.dtype == rows.dtype and real.sum() == 17 < groups.num_places
    tokens = np.asarray(groups.tokens)[real]
    np.testing.assert_array_equal(np.asarray(found, np.float32)[real], np.asarray(rows, np.float32)[tokens])
    if scale is not None:
        np.testing.assert_array_equal(np.asarray(of_places)[:, real], np.asarray(scale)[:, tokens])


def described(shape: tuple[int, ...], group: int, block_outputs: int) -> ScaledMatrix:
    numbers: Any = jax.ShapeDtypeStruct(shape, jnp.dtype(FLOAT8))
    scale: Any = jax.ShapeDtypeStruct((*shape[:-1], shape[-1] // group), jnp.float32)
    return ScaledMatrix(numbers, scale, None, group, block_outputs)


@pytest.mark.parametrize(
    ("num_rows", "matrix", "is_mosaics"),
    [
        (4096, described((6144, 4096), 128, 128), True),
        (256, described((6144, 4096), 4096, 1), True),
        (128, described((6144, 4096), 128, 128), False),
        (520, described((6144, 4096), 128, 128), False),
        (4096, described((6144, 4096), 128, 1), False),
        (4096, described((6080, 4096), 128, 64), False),
    ],
)
def test_few_rows_and_other_sizes_are_left_to_triton(
    num_rows: int, matrix: ScaledMatrix, is_mosaics: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = []
    monkeypatch.setattr(of_matrix, "_product_of_many", lambda *_: taken.append("mosaic"))
    monkeypatch.setattr("pallas_kernels.triton.float8_product.float8_product", lambda *_: taken.append("triton"))
    numbers: Any = jax.ShapeDtypeStruct((num_rows, 4096), jnp.dtype(FLOAT8))
    scale: Any = jax.ShapeDtypeStruct((32, num_rows), jnp.float32)
    rows = ScaledRows(numbers, scale, jnp.dtype("bfloat16"))
    with H200(132):
        float8_product(rows, matrix)
    assert taken == ["mosaic" if is_mosaics else "triton"]


@pytest.mark.parametrize(
    ("num_tokens", "num_outputs", "is_mosaics"),
    [(4096, 1536, True), (1040, 1536, True), (1024, 1536, False), (4096, 384, False), (4096, 1504, False)],
)
def test_few_rows_of_an_expert_and_narrow_parts_are_left_to_triton(
    num_tokens: int, num_outputs: int, is_mosaics: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 128 experts, of which each token chooses eight."""
    taken = []
    monkeypatch.setattr(of_experts, "_product_of_many", lambda *_: taken.append("mosaic"))
    monkeypatch.setattr("pallas_kernels.triton.grouped_product.gated_product", lambda *_: taken.append("triton"))

    def array(*shape: int, dtype: Any = jnp.int32) -> Any:
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))

    places = array(8 * num_tokens)
    x, weights = array(num_tokens, 2048, dtype=jnp.bfloat16), array(128, num_outputs, 2048, dtype=jnp.bfloat16)
    with H200(132):
        gated_product(x, Groups(places, places, array(128), array(num_tokens, 8)), weights, "silu", of_tokens=True)
    assert taken == ["mosaic" if is_mosaics else "triton"]
