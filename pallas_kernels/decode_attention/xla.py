"""`paged_decode_attention` as plain XLA: a loop over sequences, inside it one over KV tiles. Called by `api` only."""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.options import AttentionOptions
from pallas_kernels.xla_rows import attend_rows, first_visible, pad_page_table, pages_per_tile


@functools.partial(jax.jit, static_argnames="options")
def decode_attention(
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    page_table: jax.Array,
    lengths: jax.Array,
    options: AttentionOptions,
) -> jax.Array:
    """See `pallas_kernels.paged_decode_attention`. Time follows the sum of the lengths, not the table's width."""
    num_seqs, num_heads, head_dim = q.shape
    num_kv_heads, page_size = k_pages.shape[1:3]
    num_groups = num_heads // num_kv_heads
    tile_pages = pages_per_tile(page_size, num_groups)

    def one_sequence(args: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
        q_s, page_ids, length = args
        last = length - 1
        position = jnp.full((num_groups,), last)
        kv_range = (first_visible(last, options), last)
        return attend_rows(q_s, position, kv_range, page_ids, k_pages, v_pages, tile_pages, options)

    grouped = q.reshape(num_seqs, num_kv_heads, num_groups, head_dim)
    out = lax.map(one_sequence, (grouped, pad_page_table(page_table, tile_pages), lengths))
    return out.reshape(num_seqs, num_heads, head_dim).astype(q.dtype)
