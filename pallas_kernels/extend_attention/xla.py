"""`paged_extend_attention` as plain XLA: a loop over query tiles, inside it one over KV tiles. Called by `api` only.

A query tile holds queries of one sequence. The loop runs over the tiles that exist (a count known only on the
device), so that its time follows the work and not the padded shapes.
"""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.online_softmax import attend_rows, pad_page_table
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
    """See `pallas_kernels.paged_extend_attention`."""
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads, page_size = k_pages.shape[1:3]
    num_groups = num_heads // num_kv_heads
    tile_queries = _tile_queries(num_tokens, lengths.shape[0])
    page_table = pad_page_table(page_table, page_size)
    q_padded = jnp.pad(q, ((0, tile_queries), (0, 0), (0, 0)))

    num_queries = query_offsets[1:] - query_offsets[:-1]
    tiles_end = jnp.cumsum((num_queries + tile_queries - 1) // tile_queries)

    def one_tile(i: jax.Array, out: jax.Array) -> jax.Array:
        seq = jnp.searchsorted(tiles_end, i, side="right", method="compare_all")
        tiles_of_seq = (num_queries[seq] + tile_queries - 1) // tile_queries
        index = (i - (tiles_end[seq] - tiles_of_seq)) * tile_queries + jnp.arange(tile_queries)
        is_real = index < num_queries[seq]
        position = jnp.where(is_real, lengths[seq] - num_queries[seq] + index, -1)
        begin = query_offsets[seq] + index[0]
        rows = lax.dynamic_slice_in_dim(q_padded, begin, tile_queries)
        rows = rows.reshape(tile_queries, num_kv_heads, num_groups, head_dim).transpose(1, 0, 2, 3)
        result = attend_rows(
            rows.reshape(num_kv_heads, tile_queries * num_groups, head_dim),
            jnp.repeat(position, num_groups),
            page_table[seq],
            k_pages,
            v_pages,
            options,
        )
        result = result.reshape(num_kv_heads, tile_queries, num_groups, head_dim).transpose(1, 0, 2, 3)
        # Rows past the sequence's end come out as zeros; a later tile overwrites them when another sequence owns them.
        return lax.dynamic_update_slice_in_dim(out, result.reshape(rows_shape).astype(q.dtype), begin, axis=0)

    rows_shape = (tile_queries, num_heads, head_dim)
    return lax.fori_loop(0, tiles_end[-1], one_tile, jnp.zeros_like(q_padded))[:num_tokens]


def _tile_queries(num_tokens: int, num_seqs: int) -> int:
    """Queries per tile: near the mean number per sequence, so that short ones waste little and long ones run fast."""
    tile = 8
    while tile < 64 and tile < num_tokens // max(num_seqs, 1):
        tile *= 2
    return tile
