"""Products of activations and weights, in the form that is fastest on the device. Called by `layers` and `dense`.

On accelerators XLA and its libraries choose; a CPU needs help, see `product`. Knows nothing of layers.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.native import product as native
from pallas_kernels.target import target_device

FEW_ROWS = 128  # up to so many, packing the weights costs more than the multiplications save


def product(x_TD: jax.Array, weights: jax.Array, dtype: DTypeLike | None = None) -> jax.Array:
    """`x [T, D]` times `weights [..., D]`, as checkpoints store them: `[T, ...]` in `dtype` (default: x's).

    Multiplies in the weights' format and adds up in `dtype`.
    """
    dtype = dtype or x_TD.dtype
    matrix = weights.reshape(-1, weights.shape[-1])
    rows = x_TD.astype(weights.dtype)
    if dtype == jnp.float32 and native.refuse(x_TD, matrix) is None:
        out = native.rows_product(x_TD, matrix)
    elif target_device().platform == "cpu" and len(rows) <= FEW_ROWS:
        out = weights_first(rows, matrix, dtype)
    else:
        out = jnp.einsum("td,nd->tn", rows, matrix, preferred_element_type=dtype)
    return out.reshape(len(rows), *weights.shape[:-1])


def weights_first(x_TD: jax.Array, weights_ND: jax.Array, dtype: DTypeLike) -> jax.Array:
    """`x [T, D]` times `weights [N, D]`, as XLA's CPU library does it best for few rows: `[T, N]`.

    It packs its right operand before it multiplies, and so should be given the smaller one there; the barrier keeps XLA
    from turning the product around again. 16 bit vectors it multiplies 10 times slower than matrices of two rows.
    """
    twice = len(x_TD) == 1 and x_TD.dtype.itemsize == 2
    rows = jnp.concatenate([x_TD, x_TD]) if twice else x_TD
    out = jax.lax.optimization_barrier(jnp.einsum("nd,td->nt", weights_ND, rows, preferred_element_type=dtype)).T
    return out[:1] if twice else out
