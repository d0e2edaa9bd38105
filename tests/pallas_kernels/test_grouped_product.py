"""Rows times the weights of their experts: right on every backend, and each row independent of the others."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import add_choices, group_by_expert, grouped_product
from pallas_kernels.experts import row_tiles
from pallas_kernels.native import library
from tests.grids import covering, daily
from tests.pallas_kernels.cases import assert_close

NUM_EXPERTS = 5
# Experts of each token: all of them, a part, one for all tokens (more rows than a tile), none for some.
CHOICES = {
    "spread": np.random.default_rng(0).permuted(np.tile(np.arange(NUM_EXPERTS), (37, 1)), axis=1)[:, :2],
    "one expert": np.full((150, 1), 3),
    "one token": np.array([[4, 0, 2]]),
    "padding": np.where(np.arange(40)[:, None] % 3 == 0, [[1, 3]], NUM_EXPERTS),
    "nowhere": np.full((3, 2), -1),
}
BACKENDS = ("xla", "native")
DTYPES = ["float32", "bfloat16", "int8", "float8_e4m3fn"]


def arrays(experts: np.ndarray, num_out: int, num_in: int, dtype: Any) -> tuple[jax.Array, jax.Array]:
    rng = np.random.default_rng(num_out + num_in)
    x = jnp.asarray(rng.normal(size=(len(experts), num_in)), jnp.float32)
    shape = (NUM_EXPERTS, num_out, num_in)
    return x, jnp.asarray(rng.integers(-128, 128, shape) if dtype == "int8" else rng.normal(size=shape), dtype)


def right(x: jax.Array, experts: np.ndarray, weights: jax.Array) -> np.ndarray:
    """`[T, k, out]` in float64; zeros where a choice is no expert."""
    rows = np.asarray(x if weights.dtype.itemsize == 1 else x.astype(weights.dtype), np.float64)
    out = np.zeros((*experts.shape, weights.shape[1]))
    for (token, choice), expert in np.ndenumerate(experts):
        if 0 <= expert < NUM_EXPERTS:
            out[token, choice] = np.asarray(weights[expert], np.float64) @ rows[token]
    return out


def assert_close_to_integers(found: np.ndarray, expected: np.ndarray, dtype: Any) -> None:
    """Rows are rounded to integers of 16 bits (`product_int8.cc`)."""
    np.testing.assert_allclose(found, expected, atol=2e-4 * np.abs(expected).max())


def refuse_native_elsewhere(backend: str) -> None:
    if backend == "native" and (reason := library.load()):
        pytest.skip(reason)


@pytest.mark.parametrize(
    ("backend", "choices", "shape", "dtype"),
    [
        case
        for case in covering(["reference", *BACKENDS], list(CHOICES), [(48, 64), (112, 96)], DTYPES)
        if (case[0], case[3]) != ("native", "float8_e4m3fn")  # XLA multiplies these
    ],
)
def test_each_token_is_multiplied_with_its_experts(
    backend: str, choices: str, shape: tuple[int, int], dtype: str
) -> None:
    refuse_native_elsewhere(backend)
    experts = CHOICES[choices]
    x, weights = arrays(experts, *shape, dtype)
    groups = group_by_expert(jnp.asarray(experts, jnp.int32), NUM_EXPERTS)
    expected = right(x, experts, weights)
    by_place = np.asarray(grouped_product(x[groups.tokens], groups, weights, backend=backend))
    check = assert_close_to_integers if (backend, dtype) == ("native", "int8") else assert_close
    check(by_place[np.asarray(groups.place_of)], expected, jnp.float32)
    by_token = np.asarray(grouped_product(x, groups, weights, of_tokens=True, backend=backend))
    np.testing.assert_array_equal(by_token, by_place)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_a_token_gets_the_same_sum_whatever_stands_beside_it(backend: str, dtype: str) -> None:
    refuse_native_elsewhere(backend)
    rng = np.random.default_rng(1)
    experts = rng.permuted(np.tile(np.arange(NUM_EXPERTS), (200, 1)), axis=1)[:, :3]
    x, weights = arrays(experts, 64, 96, dtype)
    shares = jnp.asarray(rng.random((200, 3)), jnp.float32)

    def sums(count: int, others: int = 0) -> np.ndarray:
        """Of the first tokens, beside some that go nowhere."""
        chosen = np.concatenate([experts[:count], np.full((others, 3), NUM_EXPERTS)])
        groups = group_by_expert(jnp.asarray(chosen, jnp.int32), NUM_EXPERTS)
        y = grouped_product(x[: count + others], groups, weights, of_tokens=True, backend=backend)
        return np.asarray(add_choices(y, groups, shares[: count + others]))[:count]

    together = sums(200)
    for count, others in daily(((1, 7), (1, 0), (20, 3), (6, 0), (130, 20), (64, 0)), every=2):
        np.testing.assert_array_equal(sums(count, others), together[:count])


def test_experts_without_rows_are_not_read() -> None:
    """Weights of NaN would spoil even a product with zero."""
    experts = CHOICES["padding"]
    x, weights = arrays(experts, 48, 64, "float32")
    used = np.isin(np.arange(NUM_EXPERTS), [1, 3])
    spoilt = jnp.where(jnp.asarray(used)[:, None, None], weights, jnp.nan)
    groups = group_by_expert(jnp.asarray(experts, jnp.int32), NUM_EXPERTS)
    for backend in BACKENDS:
        refuse_native_elsewhere(backend)
        found = grouped_product(x, groups, spoilt, of_tokens=True, backend=backend)
        assert_close(np.asarray(found)[np.asarray(groups.place_of)], right(x, experts, weights), jnp.float32)


def test_tiles_hold_every_place_once_and_one_expert_each() -> None:
    for experts in CHOICES.values():
        groups = group_by_expert(jnp.asarray(experts, jnp.int32), NUM_EXPERTS)
        for num_rows in (1, 4, 16):
            tiles, num_tiles = row_tiles(groups, num_rows)
            held = [
                (place, int(expert))
                for expert, begin, end in zip(*map(np.asarray, tiles[:3]), strict=True)
                for place in range(begin, end)
            ]
            assert held == list(enumerate(np.asarray(groups.experts).tolist()))
            assert max(np.asarray(tiles.ends - tiles.begins)) <= num_rows
            assert (np.asarray(tiles.experts)[: int(num_tiles)] < NUM_EXPERTS).all()
            assert (np.asarray(tiles.experts)[int(num_tiles) :] == NUM_EXPERTS).all()


@pytest.mark.parametrize(
    ("choices", "shape", "dtype", "of_tokens"),
    daily([("padding", (48, 64), "bfloat16", True), ("one expert", (112, 96), "float32", False),
           ("spread", (48, 64), "int8", True), ("spread", (32, 16), "float32", True),
           ("padding", (32, 64), "float8_e4m3fn", True), ("one token", (16, 64), "bfloat16", False)], every=2),
)  # fmt: skip
def test_the_kernel_for_gpus_multiplies_each_token_with_its_experts(
    choices: str, shape: tuple[int, int], dtype: str, of_tokens: bool
) -> None:
    experts = CHOICES[choices]
    x, weights = arrays(experts, *shape, dtype)
    groups = group_by_expert(jnp.asarray(experts, jnp.int32), NUM_EXPERTS)
    rows = x if of_tokens else x[groups.tokens]
    found = grouped_product(rows, groups, weights, of_tokens=of_tokens, backend="triton", interpret=True)
    assert_close(np.asarray(found)[np.asarray(groups.place_of)], right(x, experts, weights), jnp.float32)


@pytest.mark.parametrize("choices", daily(["padding", "one expert"], every=2))
def test_the_kernel_for_tpus_multiplies_each_token_with_its_experts(choices: str) -> None:
    experts = CHOICES[choices]
    x, weights = arrays(experts, 256, 128, "float32")
    groups = group_by_expert(jnp.asarray(experts, jnp.int32), NUM_EXPERTS)
    found = grouped_product(x, groups, weights, of_tokens=True, backend="mosaic_tpu", interpret=True)
    assert_close(np.asarray(found)[np.asarray(groups.place_of)], right(x, experts, weights), jnp.float32)


def test_wrong_shapes_are_named() -> None:
    experts = CHOICES["spread"]
    x, weights = arrays(experts, 48, 64, "float32")
    groups = group_by_expert(jnp.asarray(experts, jnp.int32), NUM_EXPERTS)
    with pytest.raises(ValueError, match=r"x is \(37, 64\) .* must be \[74, in\] and \[5, out, in\]"):
        grouped_product(x, groups, weights)
    with pytest.raises(ValueError, match="multiples of"):
        grouped_product(x, groups, weights[:, :7], of_tokens=True, backend="native")
