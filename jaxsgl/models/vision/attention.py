"""Attention within images that lie packed on one axis: each patch attends to all patches of its own image.

Queries are taken in blocks, so that scores of all pairs never stand in memory at once. Called by `tower.py`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

BLOCK = 256  # queries whose scores stand in memory at once
FAR = -1e30  # in the place of scores between images: no minus infinity, so that padding yields no NaN


def segment_attention(q_PNH: jax.Array, k_PNH: jax.Array, v_PNH: jax.Array, segments: jax.Array) -> jax.Array:
    """`[P, N, H]`: softmax of q . k / sqrt(H) over keys of the same segment `[P]`, in float32, times v."""
    count, num_heads, head_dim = q_PNH.shape
    scale = head_dim**-0.5
    block = BLOCK if count % BLOCK == 0 else count

    def of_block(part: tuple[jax.Array, jax.Array]) -> jax.Array:
        queries, of_queries = part
        scores = jnp.einsum("qnh,knh->nqk", queries, k_PNH, preferred_element_type=jnp.float32) * scale
        shares = jax.nn.softmax(jnp.where(of_queries[:, None] == segments, scores, FAR), axis=-1)
        return jnp.einsum("nqk,knh->qnh", shares.astype(v_PNH.dtype), v_PNH)

    blocks = q_PNH.reshape(-1, block, num_heads, head_dim), segments.reshape(-1, block)
    out: jax.Array = jax.lax.map(of_block, blocks) if count > block else of_block((q_PNH, segments))[None]
    return out.reshape(count, num_heads, head_dim)
