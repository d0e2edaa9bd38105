"""Every form of a product that is timed is the product."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bench.figures.products import forms

from pallas_kernels import packed
from tests.scripts.running import run_script


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.int8, jnp.uint8])
@pytest.mark.parametrize("rows", [1, 5])
def test_all_forms_give_the_product(rows: int, dtype: jnp.dtype) -> None:
    keys = jax.random.split(jax.random.key(0))
    numbers = jnp.int8 if dtype == jnp.uint8 else dtype
    x, weights = jax.random.normal(keys[0], (rows, 64)), (9 * jax.random.normal(keys[1], (64, 64))).astype(numbers)
    rounded = x if numbers == jnp.int8 else x.astype(dtype)
    right = np.asarray(rounded, np.float64) @ np.asarray(weights, np.float64).T
    weights = packed.pack_numbers(packed.INT8, weights) if dtype == jnp.uint8 else weights
    found = forms(x, weights)
    assert len(found) > 1 or numbers == jnp.int8  # it may have no kernel here
    errors = {"into bfloat16": 1e-2, "rows of 16 bits": 1e-3, "rows of 8 bits": 2e-2}
    for name, form in found.items():
        rounding = next((error for end, error in errors.items() if name.endswith(end)), 1e-6)
        error = np.linalg.norm(np.asarray(form(x, weights), np.float64) - right) / np.linalg.norm(right)
        assert error < rounding, name


def test_the_script_prints_a_line_for_each_form(tmp_path: Path) -> None:
    file = tmp_path / "products.json"
    flags = ["--rows", 2, "--weights", "32x64", "--repeats", 1, "--json", file]
    shown = run_script("bench products", *flags).stdout
    rows = json.loads(file.read_text())["rows"]
    assert {"float32", "bfloat16", "bfloat16, weights first"} <= {row["form"] for row in rows}
    for row in rows:
        assert row["flops_per_s"] == pytest.approx(2 * 2 * 32 * 64 / row["seconds"])
        assert f"  {row['form']:<30}{1e3 * row['seconds']:>9.3f}" in shown
