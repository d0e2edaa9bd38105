from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxsgl.weights import finite
from jaxsgl.weights.finite import is_finite


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"])
def test_any_number_that_is_not_finite_is_found(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finite, "CHUNK", 64)
    numbers = np.random.default_rng(0).standard_normal((7, 33)).astype(jnp.dtype(dtype))
    numbers[0, :3] = [jnp.finfo(dtype).max, jnp.finfo(dtype).min, jnp.finfo(dtype).smallest_subnormal]
    assert is_finite(jnp.asarray(numbers)) and finite._is_finite_there(jnp.asarray(numbers))
    bad: list[Any] = [np.nan, -np.nan] if dtype == "float8_e4m3fn" else [np.nan, -np.nan, np.inf, -np.inf]
    for place in ((0, 0), (3, 17), (6, 32)):
        for number in bad:
            broken = numbers.copy()
            broken[place] = number
            assert not is_finite(jnp.asarray(broken)) and not finite._is_finite_there(jnp.asarray(broken))


def test_integers_and_empty_arrays_are_finite() -> None:
    assert is_finite(jnp.full((2, 2), -1, jnp.int8)) and is_finite(jnp.zeros((0, 4))) and is_finite(jnp.float32(1))
