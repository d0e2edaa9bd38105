"""`float8_rows` and `float8_product` in XLA, with which kernels are compared. Called through `xla.BACKEND`."""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.experts import ACTIVATIONS
from pallas_kernels.scaled import ScaledMatrix, ScaledRows, rounded_rows
from pallas_kernels.xla.quantized_product import quantized_product


def float8_rows(x: jax.Array, activation: str | None, interpret: bool) -> ScaledRows:
    """See `backend.Float8Rows`."""
    return rounded_rows(x if activation is None else ACTIVATIONS[activation](x[:, 0]) * x[:, 1])


def float8_product(
    rows: ScaledRows, weights: ScaledMatrix, dtype: DTypeLike, in_parts: bool, interpret: bool
) -> jax.Array:
    """See `backend.Float8Product`. Multiplies in float32."""
    return quantized_product(rows.values(jnp.float32), weights, dtype, in_parts, interpret)
