"""`paged_decode_attention` as plain XLA: a loop over sequences, inside it one over KV tiles. Called by `api` only."""

import jax
from jax import lax

from pallas_kernels.online_softmax import attend_rows, pad_page_table
from pallas_kernels.options import AttentionOptions


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
    grouped = q.reshape(num_seqs, num_kv_heads, num_groups, head_dim)

    def one_sequence(args: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
        q_s, page_ids, length = args
        position = lax.broadcast(length - 1, (num_groups,))
        return attend_rows(q_s, position, page_ids, k_pages, v_pages, options).astype(q.dtype)

    out = lax.map(one_sequence, (grouped, pad_page_table(page_table, page_size), lengths))
    return out.reshape(num_seqs, num_heads, head_dim)
