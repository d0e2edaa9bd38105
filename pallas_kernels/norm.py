"""RMSNorm, and the sum of the residual stream that precedes it, as XLA computes them: the definition of `add_and_norm`.

Owns the arithmetic of norms over an array's last axis. Never knows layers. Used by models, and by `qkv` for heads.
"""

import jax
import jax.numpy as jnp


def rms_norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    """The last axis of x brought to unit mean square (arXiv 1910.07467), times `scale`; statistics in float32."""
    x32 = x.astype(jnp.float32)
    inverse_rms = jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    return (x32 * inverse_rms).astype(x.dtype) * scale


def row_of(stack: jax.Array, row: int, dtype: jnp.dtype) -> jax.Array:
    """Row `row` of an array of vectors, in `dtype`.

    Converted before it is cut: XLA's CPU backend would make an array of its own of each row that is cut in 16 bits.
    """
    return stack.astype(dtype)[row]


def add_then_norm(
    x: jax.Array, update: jax.Array, scales: jax.Array, row: int, eps: float
) -> tuple[jax.Array, jax.Array]:
    """See `add_and_norm`."""
    if update.ndim > x.ndim:
        update = jnp.sum(update, axis=0).astype(x.dtype)
    x = x + update
    return x, rms_norm(x, row_of(scales, row, x.dtype), eps)
