"""Sum and norm of the residual stream, in one kernel and by XLA, are those of float64."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import add_and_norm, add_and_norm_in_float8, float8_rows
from pallas_kernels.norm import Biased, sum_parts
from tests.pallas_kernels.cases import assert_close
from tests.pallas_kernels.test_dispatch import on_an_h100

EPS = 1e-5


def arrays(size: int, num_parts: int, dtype: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
    """x, update and scales of three layers; num_parts 0 is an update that is whole."""
    rng = np.random.default_rng(size)
    parts, update_dtype = ((num_parts,), jnp.float32) if num_parts else ((), dtype)
    shapes = ((5, size), dtype), ((*parts, 5, size), update_dtype), ((3, size), dtype)
    x, update, scales = (jnp.asarray(rng.normal(size=shape), each) for shape, each in shapes)
    return x, update, scales


@pytest.mark.parametrize("backend", ["triton", "xla"])
@pytest.mark.parametrize(("size", "num_parts", "dtype"), [(64, 0, jnp.bfloat16), (100, 4, jnp.float32)])
def test_the_sum_and_its_norm_are_those_of_float64(size: int, num_parts: int, dtype: Any, backend: str) -> None:
    x, update, scales = arrays(size, num_parts, dtype)
    total, normed = add_and_norm(x, update, scales, 1, EPS, backend=backend, interpret=backend == "triton")
    wide = np.asarray(update, np.float64)
    exact = np.asarray(x, np.float64) + (wide.sum(axis=0) if num_parts else wide)
    assert total.dtype == normed.dtype == dtype
    assert_close(total, exact, dtype)
    right = exact / np.sqrt(np.mean(exact**2, axis=1, keepdims=True) + EPS) * np.asarray(scales, np.float64)[1]
    assert_close(normed, right, dtype)


@pytest.mark.parametrize("backend", ["triton", "xla"])
@pytest.mark.parametrize(("size", "num_parts", "dtype"), [(64, 3, jnp.bfloat16), (100, 0, jnp.float32)])
def test_a_bias_is_added_to_what_the_product_is_rounded_to(size: int, num_parts: int, dtype: Any, backend: str) -> None:
    x, update, scales = arrays(size, num_parts, dtype)
    bias = jnp.asarray(np.random.default_rng(1).normal(size=size), dtype)
    found = add_and_norm(x, Biased(update, bias), scales, 1, EPS, backend=backend, interpret=backend == "triton")
    right = add_and_norm(x, sum_parts(update, x) + bias, scales, 1, EPS, backend="xla")
    for each, expected in zip(found, right, strict=True):
        assert_close(each, np.asarray(expected, np.float64), dtype)
    np.testing.assert_array_equal(found[0], right[0])
    with pytest.raises(ValueError, match=rf"bias is \({size + 1},\); it must be \({size},\), as a row of x"):
        add_and_norm(x, Biased(update, jnp.zeros(size + 1)), scales, 1, EPS)


@pytest.mark.parametrize("num_parts", [0, 8])
def test_a_gpu_runs_one_kernel_that_adds_the_parts_up_and_finds_its_row(num_parts: int) -> None:
    with on_an_h100():
        text = str(
            jax.make_jaxpr(lambda x, update, scales: add_and_norm(x, update, scales, 2, EPS))(
                *arrays(64, num_parts, jnp.bfloat16)
            )
        )
    assert text.count("pallas_call") == 1
    assert "slice" not in text.split("pallas_call")[0]


@pytest.mark.parametrize("backend", ["triton", "xla"])
@pytest.mark.parametrize(("size", "num_parts"), [(128, 0), (384, 4)])
def test_the_norm_may_be_rounded_as_rows_of_a_product_in_float8(size: int, num_parts: int, backend: str) -> None:
    x, update, scales = arrays(size, num_parts, jnp.bfloat16)
    options: dict[str, Any] = {"backend": backend, "interpret": backend == "triton"}
    total, rounded = add_and_norm_in_float8(x, update, scales, 1, EPS, **options)
    right_total, normed = add_and_norm(x, update, scales, 1, EPS, **options)
    right = float8_rows(normed, backend="reference")
    np.testing.assert_array_equal(total, right_total)
    assert rounded.dtype == jnp.bfloat16
    np.testing.assert_allclose(rounded.scale, right.scale, rtol=1e-6)
    np.testing.assert_array_equal(rounded.values(jnp.float32), right.values(jnp.float32))


def test_wrong_arguments_are_named() -> None:
    x, update, scales = arrays(64, 0, jnp.bfloat16)
    with pytest.raises(ValueError, match=r"update is \(4, 64\) bfloat16; it must be \(5, 64\) bfloat16 as x"):
        add_and_norm(x, update[1:], scales, 0, EPS)
    with pytest.raises(ValueError, match=r"x is \(5, 64\); it must be \[T, D\] with a D that is a multiple of 128"):
        add_and_norm_in_float8(x, update, scales, 0, EPS)
    with pytest.raises(ValueError, match=r"scales \(3, 64\) \[L, D\] with a row 3"):
        add_and_norm(x, update, scales, 3, EPS)
