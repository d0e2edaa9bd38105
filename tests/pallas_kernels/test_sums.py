"""Sums of rows: right against float64, and the same to the bit for any number of rows."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxsgl.models.precision import product
from pallas_kernels import sums
from pallas_kernels.native import library
from pallas_kernels.norm import rms_norm
from pallas_kernels.routing import Router, choose_by_xla
from tests.compiling import as_users_compile
from tests.grids import daily

pytestmark = [pytest.mark.device, pytest.mark.usefixtures("native_runs_here"), as_users_compile]

NUM_ROWS = 40
COUNTS = daily((33, 2, 3, 1, 4, 8, 7, 16, 24), every=3)


def numbers(length: int, num_rows: int = NUM_ROWS) -> jax.Array:
    return 3 * jax.random.normal(jax.random.key(length), (num_rows, length))


@pytest.mark.parametrize("length", [1, 7, 16, 63, 64, 192, 1003, 40_000])
def test_sums_are_those_of_float64(length: int) -> None:
    x = numbers(length)
    wide = np.asarray(x, np.float64)
    scale = np.abs(wide).sum(-1)
    assert np.all(np.abs(np.asarray(sums.row_sums(x)) - wide.sum(-1)) <= 1e-6 * scale)
    np.testing.assert_allclose(sums.mean_squares(x)[:, 0], (wide**2).mean(-1), rtol=1e-6)
    np.testing.assert_allclose(sums.softmax(x), np.exp(wide) / np.exp(wide).sum(-1, keepdims=True), rtol=3e-5)
    np.testing.assert_allclose(sums.log_sum_exp(x), np.log(np.exp(wide).sum(-1)), rtol=1e-5)


def test_axes_before_the_last_are_rows() -> None:
    x = numbers(50).reshape(2, 4, 5, 50)
    assert sums.row_sums(x).shape == (2, 4, 5) and sums.row_sums(x, keepdims=True).shape == (2, 4, 5, 1)
    np.testing.assert_array_equal(sums.row_sums(x).reshape(-1), sums.row_sums(x.reshape(-1, 50)))
    np.testing.assert_array_equal(sums.log_sum_exp(x, keepdims=True)[..., 0], sums.log_sum_exp(x))


def test_tokens_that_are_impossible_weigh_nothing_and_nan_stays() -> None:
    x = jnp.array([[0.0, -jnp.inf, 0.0], [jnp.nan, 1.0, 2.0]])
    first, second = sums.log_sum_exp(x)
    assert first == jnp.log(2.0) and jnp.isnan(second)


@pytest.mark.parametrize("length", daily([192, 512, 1024], every=2))
@pytest.mark.parametrize(
    "function",
    [
        lambda x: rms_norm(x, jnp.full(x.shape[-1], 0.7), 1e-6),
        sums.log_sum_exp,
        sums.softmax,
        lambda x: choose_by_xla(Router(4, renormalize=True), x)[1],
        lambda x: product(x, numbers(x.shape[-1], 12), jnp.float32),
        lambda x: product(x, numbers(x.shape[-1], 1).astype(jnp.bfloat16), jnp.float32),
    ],
    ids=["norm", "log_sum_exp", "softmax", "router", "float32 product", "bfloat16 product"],
)
def test_a_row_is_the_same_to_the_bit_with_any_number_of_others(
    function: Callable[[jax.Array], jax.Array], length: int
) -> None:
    x, compiled = numbers(length), jax.jit(function)
    together = np.asarray(compiled(x))
    for count in COUNTS:
        np.testing.assert_array_equal(np.asarray(compiled(x[:count])), together[:count], err_msg=f"{count} rows")


@pytest.mark.parametrize(
    "function", [sums.log_sum_exp, lambda x: sums.logs(jnp.exp(x[:, 0]))], ids=["of sums", "alone"]
)
def test_a_logarithm_is_the_same_to_the_bit_with_any_number_of_others(
    function: Callable[[jax.Array], jax.Array],
) -> None:
    """One in twenty would differ in its last bit were it XLA's; so it takes many rows to see it."""
    x, compiled = numbers(7, num_rows=390), jax.jit(function)
    together = np.asarray(compiled(x))
    for count in (3, 5, 13, 15):
        apart = [np.asarray(compiled(x[begin : begin + count])) for begin in range(0, 390 - count + 1, count)]
        np.testing.assert_array_equal(np.concatenate(apart), together[: count * len(apart)], err_msg=f"{count} rows")


def test_without_the_kernels_jax_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "load", lambda: "there is no compiler")
    x = numbers(100)
    np.testing.assert_array_equal(sums.row_sums(x), jnp.sum(x, axis=-1))
    np.testing.assert_array_equal(sums.softmax(x), jax.nn.softmax(x, axis=-1))
    assert sums.mean_squares_of_all(x) is None
