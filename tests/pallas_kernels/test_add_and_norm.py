"""Sum and norm of the residual stream, in one kernel and by XLA, are those of float64."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import add_and_norm, add_and_norm_in_float8, float8_rows
from pallas_kernels.norm import Biased, Finished, sum_parts
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


@pytest.mark.parametrize("backend", ["triton", "xla"])
@pytest.mark.parametrize(
    ("size", "num_parts", "centred", "factor"), [(64, 3, False, None), (100, 0, False, 0.3), (100, 3, True, 0.7)]
)
def test_an_update_is_centred_then_normalized_then_scaled(
    size: int, num_parts: int, centred: bool, factor: float | None, backend: str
) -> None:
    x, update, scales = arrays(size, num_parts, jnp.float32)
    own = scales + 1
    finished = Finished((update,), own, 2, EPS, centred, factor)
    total, normed = add_and_norm(x, finished, scales, 1, EPS, backend=backend, interpret=backend == "triton")
    exact = np.asarray(update, np.float64)
    exact = exact.sum(axis=0) if num_parts else exact
    if centred:
        exact -= exact.mean(axis=1, keepdims=True)
    exact = exact / np.sqrt(np.mean(exact**2, axis=1, keepdims=True) + EPS) * np.asarray(own, np.float64)[2]
    exact = np.asarray(x, np.float64) + exact * (factor or 1)
    assert_close(total, exact, jnp.float32)
    right = exact / np.sqrt(np.mean(exact**2, axis=1, keepdims=True) + EPS) * np.asarray(scales, np.float64)[1]
    assert_close(normed, right, jnp.float32)


@pytest.mark.parametrize("backend", ["triton", "xla"])
def test_updates_are_added_up_before_their_sum_is_rounded(backend: str) -> None:
    x, update, scales = arrays(64, 3, jnp.bfloat16)
    bias = jnp.full(64, 300, jnp.bfloat16)  # among which a bfloat16 keeps no fraction
    updates = Biased(update, bias), jnp.full_like(x, -300)
    total, normed = add_and_norm(
        x * 0, Finished(updates), scales, 1, EPS, backend=backend, interpret=backend == "triton"
    )
    exact = np.asarray(update, np.float64).sum(axis=0)
    assert_close(total, exact, jnp.bfloat16)
    right = exact / np.sqrt(np.mean(exact**2, axis=1, keepdims=True) + EPS) * np.asarray(scales, np.float64)[1]
    assert_close(normed, right, jnp.bfloat16)


@pytest.mark.parametrize("backend", ["triton", "xla"])
def test_a_norm_may_have_a_bias(backend: str) -> None:
    x, update, scales = arrays(100, 3, jnp.float32)
    options: dict[str, Any] = {"backend": backend, "interpret": backend == "triton"}
    total, normed = add_and_norm(x, update, scales, 1, EPS, biases=scales - 2, **options)
    plain_total, plain = add_and_norm(x, update, scales, 1, EPS, backend="xla")
    assert_close(total, np.asarray(plain_total, np.float64), jnp.float32)
    assert_close(normed, np.asarray(plain + scales[1] - 2, np.float64), jnp.float32)
    with pytest.raises(ValueError, match=r"biases are \(2, 100\); they must be \(3, 100\), as the scales"):
        add_and_norm(x, update, scales, 1, EPS, biases=scales[:2], **options)


@pytest.mark.parametrize("backend", ["triton", "xla"])
@pytest.mark.parametrize("has_norm", [False, True])
def test_a_stream_is_multiplied_by_its_factor_after_the_update(has_norm: bool, backend: str) -> None:
    x, update, scales = arrays(100, 3, jnp.bfloat16)
    factors = jnp.asarray([[9.0], [0.3], [9.0]], jnp.bfloat16)
    own, row = (scales + 1, 2) if has_norm else (None, None)
    finished = Finished((update,), own, row, EPS, stream_factors=factors, stream_row=1)
    total, normed = add_and_norm(x, finished, scales, 1, EPS, backend=backend, interpret=backend == "triton")
    exact = np.asarray(update, np.float64).sum(axis=0)
    if own is not None:
        exact = exact / np.sqrt(np.mean(exact**2, axis=1, keepdims=True) + EPS) * np.asarray(own, np.float64)[2]
    exact = (np.asarray(x, np.float64) + exact) * float(factors[1, 0])
    assert_close(total, exact, jnp.bfloat16)
    exact = np.asarray(total, np.float64)
    right = exact / np.sqrt(np.mean(exact**2, axis=1, keepdims=True) + EPS) * np.asarray(scales, np.float64)[1]
    assert_close(normed, right, jnp.bfloat16)
    with pytest.raises(ValueError, match=r"row None of \(3, 1\); it must be a row of \[L, 1\]"):
        add_and_norm(x, dataclasses.replace(finished, stream_row=None), scales, 1, EPS)


@pytest.mark.parametrize("backend", ["triton", "xla"])
def test_an_update_is_centred_before_it_is_rounded(backend: str) -> None:
    x, update, scales = arrays(64, 3, jnp.bfloat16)
    bias = jnp.full(64, 300, jnp.bfloat16)  # among which a bfloat16 keeps no fraction
    finished = Finished((Biased(update, bias),), centred=True)
    total, _ = add_and_norm(x * 0, finished, scales, 1, EPS, backend=backend, interpret=backend == "triton")
    exact = np.asarray(update, np.float64).sum(axis=0)
    assert_close(total, exact - exact.mean(axis=1, keepdims=True), jnp.bfloat16)


@pytest.mark.parametrize("num_parts", [0, 8])
@pytest.mark.parametrize("is_finished", [False, True])
def test_a_gpu_runs_one_kernel_that_adds_the_parts_up_and_finds_its_rows(num_parts: int, is_finished: bool) -> None:
    def run(x: jax.Array, update: jax.Array, scales: jax.Array) -> Any:
        finished = Finished((update,), scales, 1, EPS, True, 0.5, stream_factors=jnp.ones((3, 1)), stream_row=2)
        return add_and_norm(x, finished if is_finished else update, scales, 2, EPS)

    with on_an_h100():
        text = str(jax.make_jaxpr(run)(*arrays(64, num_parts, jnp.bfloat16)))
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
    with pytest.raises(
        ValueError, match=r"the updates' norm takes row None of \(3, 64\); it must be a row of \[L, 64\]"
    ):
        add_and_norm(x, Finished((update,), scales), scales, 0, EPS)
