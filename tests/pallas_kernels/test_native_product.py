"""Products in C++: right for all counts of rows and shapes, and refused where they can't run."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import group_by_expert, grouped_product
from pallas_kernels.native import library
from pallas_kernels.native.product import refuse, rows_product
from tests.grids import singly
from tests.pallas_kernels import native_cases

in_each_way = pytest.mark.parametrize("each_way", native_cases.WAYS, indirect=True)

pytestmark = pytest.mark.usefixtures("each_way")


def rows_and_weights(num_rows: int, num_out: int, num_in: int) -> tuple[jax.Array, jax.Array]:
    rng = np.random.default_rng(num_rows + num_out + num_in)
    x = jnp.asarray(rng.standard_normal((num_rows, num_in)), jnp.float32)
    return x, jnp.asarray(rng.standard_normal((num_out, num_in)), jnp.bfloat16)


def expected(x: jax.Array, weights: jax.Array) -> np.ndarray:
    return np.asarray(x.astype(jnp.bfloat16), np.float64) @ np.asarray(weights, np.float64).T


NUM_ROWS = [1, 7, 8, 9, 16, 17, 33, 49, 64, 65, 200, 520]
SHAPES = [(16, 32), (48, 96), (1024, 256), (4112, 64)]


@pytest.mark.parametrize(
    ("each_way", "num_rows", "shape"),
    singly(native_cases.WAYS, NUM_ROWS, SHAPES),
    indirect=["each_way"],
    ids=str,
)
def test_each_row_is_multiplied_with_all_weights(num_rows: int, shape: tuple[int, int]) -> None:
    num_out, num_in = shape
    x, weights = rows_and_weights(num_rows, num_out, num_in)
    out = jax.jit(rows_product)(x, weights)
    assert out.dtype == jnp.float32
    np.testing.assert_allclose(out, expected(x, weights), atol=2e-5 * num_in**0.5)


@in_each_way
def test_a_row_comes_out_the_same_whatever_stands_beside_it() -> None:
    x, weights = rows_and_weights(200, 128, 512)
    together = np.asarray(rows_product(x, weights))
    for count in (1, 8, 9, 16, 20, 33, 64, 130):
        np.testing.assert_array_equal(np.asarray(rows_product(x[:count], weights)), together[:count])


@in_each_way
def test_a_gated_product_is_the_activation_of_the_gates_results_times_those_of_up() -> None:
    x, weights = rows_and_weights(130, 2 * 80, 96)
    native_cases.assert_gates(
        lambda rows, activation: rows_product(rows, weights, activation=activation), x, counts=(1, 2, 8, 9, 13, 33, 64)
    )


@pytest.mark.parametrize("each_way", ["widened"], indirect=True)
def test_an_unknown_activation_of_a_gated_product_is_an_error() -> None:
    x, weights = rows_and_weights(3, 64, 32)
    with pytest.raises(jax.errors.JaxRuntimeError, match="a known activation"):
        rows_product(x, weights, activation="tanh").block_until_ready()


@in_each_way
def test_forcing_another_way_to_multiply_changes_the_order_of_sums_or_is_an_error() -> None:
    """Hence `way` does choose the way, and the tests here run what they say."""
    x, weights = rows_and_weights(20, 64, 512)
    out = np.asarray(rows_product(x, weights))
    np.testing.assert_array_equal(out, np.asarray(rows_product(x, weights, way=library.product_way())))
    if library.has_pairs():
        for other in {"paired", "widened"} - {library.product_way()}:
            assert (out != np.asarray(rows_product(x, weights, way=other))).any()
    else:
        for other, lack in (("paired", "without products of pairs"), ("tiles", "without tiles")):
            with pytest.raises(jax.errors.JaxRuntimeError, match=lack):
                rows_product(x, weights, way=other).block_until_ready()


@in_each_way
def test_a_row_of_nan_spoils_no_other() -> None:
    x, weights = rows_and_weights(20, 64, 64)
    out = np.asarray(rows_product(x.at[3].set(jnp.nan), weights))
    assert np.isnan(out[3]).all()
    np.testing.assert_array_equal(np.delete(out, 3, 0), np.delete(np.asarray(rows_product(x, weights)), 3, 0))


@in_each_way
def test_threads_that_call_at_once_get_their_own_results() -> None:
    product = jax.jit(rows_product)
    inputs = [rows_and_weights(8 + i, 512, 32 * (1 + i)) for i in range(6)]

    def repeatedly(i: int) -> float:
        x, weights = inputs[i]
        wanted = expected(x, weights)
        return max(float(np.abs(np.asarray(product(x, weights)) - wanted).max()) for _ in range(50))

    with ThreadPoolExecutor(len(inputs)) as pool:
        assert max(pool.map(repeatedly, range(len(inputs)))) < 1e-3


@in_each_way
def test_rows_of_an_expert_are_multiplied_as_if_its_weights_stood_alone() -> None:
    x, weights = rows_and_weights(200, 3 * 128, 512)
    stacked = weights.reshape(3, 128, 512)
    experts = jnp.asarray(np.repeat([0, 2, 1, 7], [3, 150, 30, 17])[:, None], jnp.int32)  # 7 is none
    out = np.asarray(grouped_product(x, group_by_expert(experts, 3), stacked, of_tokens=True, backend="native"))
    for first, last, place, expert in ((0, 3, 0, 0), (153, 183, 3, 1), (3, 153, 33, 2)):
        alone = np.asarray(rows_product(x[first:last], stacked[expert]))
        np.testing.assert_array_equal(out[place : place + last - first], alone)
    assert not out[183:].any()


@in_each_way
def test_rows_of_experts_with_float32_weights_are_not_rounded() -> None:
    counts = [1, 2, 3, 5, 8, 9, 16, 17, 33, 64, 65, 130]
    rng = np.random.default_rng(3)
    experts = np.repeat(np.arange(len(counts)), counts)
    x, weights = rng.standard_normal((len(experts), 80)), rng.standard_normal((len(counts), 48, 80))
    groups = group_by_expert(jnp.asarray(experts[:, None], jnp.int32), len(counts))
    rows, stacked = jnp.asarray(x, jnp.float32), jnp.asarray(weights, jnp.float32)
    out = np.asarray(grouped_product(rows, groups, stacked, backend="native"))
    exact = np.einsum("ti,toi->to", np.asarray(rows, np.float64), np.asarray(stacked, np.float64)[experts])
    np.testing.assert_allclose(out, exact, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize(
    ("x", "weights", "words"),
    [
        ((4, 64, "float32"), (32, 64, "float32"), "bfloat16 weights, not float32 and float32"),
        ((4, 64, "bfloat16"), (32, 64, "bfloat16"), "float32 rows"),
        ((4, 48, "float32"), (32, 48, "bfloat16"), "(32, 48); it takes multiples of (16, 32)"),
        ((4, 64, "float32"), (24, 64, "bfloat16"), "(24, 64)"),
    ],
)
def test_other_formats_and_shapes_are_refused(
    x: tuple[int, int, str], weights: tuple[int, int, str], words: str
) -> None:
    reason = refuse(jnp.zeros(x[:2], x[2]), jnp.zeros(weights[:2], weights[2]))
    assert reason is not None and words in reason
