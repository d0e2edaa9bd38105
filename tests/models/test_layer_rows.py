"""The rows of layers are those of their stacks, and a CPU compiles what reads them once for all layers."""

from __future__ import annotations

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxsgl.models.layers import LayerRows
from pallas_kernels.norm import rms_norm, scale_of

pytestmark = pytest.mark.device

EPS = 1e-6


def norms(num_layers: int, stack: jax.Array, x_TD: jax.Array, matrix_DD: jax.Array) -> jax.Array:
    """x normalized by each layer's row and multiplied with the matrix, one after the other."""
    rows = LayerRows(num_layers, jnp.argmax(x_TD, axis=-1), x_TD.dtype)
    for layer in range(num_layers):
        scales = rows.of(nnx.Param(stack), layer)
        assert scales is not None
        x_TD = rms_norm(x_TD, scale_of(*scales, x_TD.dtype), EPS) @ matrix_DD
    return x_TD


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_each_layer_reads_its_row(dtype: str) -> None:
    rng = np.random.default_rng(0)
    stack, x = jnp.asarray(rng.normal(size=(3, 6)), dtype), jnp.asarray(rng.normal(size=(2, 6)), jnp.float32)
    matrix = rng.normal(size=(6, 6)).astype(np.float32)
    expected = np.asarray(x)
    for row in np.asarray(stack.astype(jnp.float32)):
        expected = expected / np.sqrt(np.mean(expected**2, axis=-1, keepdims=True) + EPS) * row @ matrix
    np.testing.assert_allclose(jax.jit(partial(norms, 3))(stack, x, matrix), expected, rtol=1e-4)


def test_more_layers_are_no_more_code_to_compile() -> None:
    stack, x, matrix = jnp.ones((9, 6), jnp.bfloat16), jnp.ones((2, 6)), jnp.ones((6, 6))

    def code(num_layers: int) -> set[str]:
        return fused_code(jax.jit(partial(norms, num_layers)).lower(stack, x, matrix).compile().as_text())

    assert len(code(9)) == len(code(5)) > 1


def fused_code(text: str | None) -> set[str]:
    """The bodies of the program's fusions, without names."""
    assert text is not None
    bodies = re.findall(r"^%fused_computation.*?^}", text, re.DOTALL | re.MULTILINE)
    return {re.sub(r"metadata={[^}]*}|%[\w.]+|param_[\d.]+", "", body) for body in bodies}


def test_a_model_without_such_vectors_has_no_rows() -> None:
    assert LayerRows(4, jnp.arange(3), jnp.float32).of(None, 2) is None
