"""What `paged_extend_attention` means: gather each token's whole sequence, mask, softmax. Judges the other backends."""

import jax
import jax.numpy as jnp

from pallas_kernels import bfloat16_bits
from pallas_kernels.options import AttentionOptions


def extend_attention(
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    page_table: jax.Array,
    lengths: jax.Array,
    query_offsets: jax.Array,
    options: AttentionOptions,
) -> jax.Array:
    """See `pallas_kernels.paged_extend_attention`; memory `[T, K, P * page_size, H]`, so for small shapes only."""
    if k_pages.dtype == bfloat16_bits.DTYPE:
        k_pages, v_pages = bfloat16_bits.to_numbers(k_pages), bfloat16_bits.to_numbers(v_pages)
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads = k_pages.shape[1]
    token = jnp.arange(num_tokens)
    # The sequence of a token: how many sequences end at or before it. Padding tokens come out as S.
    owner = jnp.sum(token[:, None] >= query_offsets[None, 1:], axis=1)
    is_real = owner < lengths.shape[0]
    owner = jnp.where(is_real, owner, 0)
    position = lengths[owner] - query_offsets[owner + 1] + token

    k = _gather(k_pages, page_table[owner])  # [T, K, L, H]
    v = _gather(v_pages, page_table[owner])
    kv_position = jnp.arange(k.shape[2])
    seen = is_real[:, None] & (kv_position <= position[:, None])
    if options.sliding_window is not None:
        seen &= kv_position > position[:, None] - options.sliding_window
    seen = seen[:, None, None, :]  # [T, 1, 1, L]

    # Unused places may hold NaN, and 0 * NaN is NaN: they are cleared, not only weighted by zero.
    v = jnp.where(seen.squeeze(2)[..., None], v, 0)
    grouped = q.astype(jnp.float32).reshape(num_tokens, num_kv_heads, -1, head_dim)
    scores = jnp.einsum("tkgh,tklh->tkgl", grouped, k, precision="highest") * options.sm_scale
    if options.logit_soft_cap is not None:
        scores = options.logit_soft_cap * jnp.tanh(scores / options.logit_soft_cap)
    scores = jnp.where(seen, scores, -jnp.inf)
    top = jnp.max(scores, axis=-1, keepdims=True)
    weights = jnp.where(seen, jnp.exp(scores - top), 0)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    weights = weights / jnp.where(total > 0, total, 1)
    out = jnp.einsum("tkgl,tklh->tkgh", weights, v, precision="highest")
    return out.reshape(num_tokens, num_heads, head_dim).astype(q.dtype)


def _gather(pages: jax.Array, page_ids: jax.Array) -> jax.Array:
    """`[T, P]` page ids to float32 `[T, K, P * page_size, H]`."""
    _, num_kv_heads, page_size, head_dim = pages.shape
    num_tokens, num_pages_per_token = page_ids.shape
    gathered = jnp.swapaxes(pages[page_ids], 1, 2).astype(jnp.float32)  # [T, K, P, page_size, H]
    return gathered.reshape(num_tokens, num_kv_heads, num_pages_per_token * page_size, head_dim)
