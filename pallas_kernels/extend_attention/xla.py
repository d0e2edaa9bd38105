"""`paged_extend_attention` as plain XLA: a loop over query tiles, inside it one over KV tiles. Called by `api` only.

A query tile holds queries of one sequence. The loop runs over the tiles that exist (a count known only on the
device), so that its time follows the work and not the padded shapes.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.options import AttentionOptions
from pallas_kernels.xla_rows import attend_rows, first_visible, pad_page_table, pages_per_tile


@functools.partial(jax.jit, static_argnames="options")
def extend_attention(
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    page_table: jax.Array,
    lengths: jax.Array,
    query_offsets: jax.Array,
    options: AttentionOptions,
) -> jax.Array:
    """See `pallas_kernels.paged_extend_attention`. Tiles that length, causality or window exclude are not read."""
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads, page_size = k_pages.shape[1:3]
    num_groups = num_heads // num_kv_heads
    tile_queries = _tile_queries(num_tokens, lengths.shape[0])
    tile_pages = pages_per_tile(page_size, tile_queries * num_groups)
    page_table = pad_page_table(page_table, tile_pages)
    q = jnp.pad(q, ((0, tile_queries), (0, 0), (0, 0)))  # so that the last tile's slice stays inside

    num_queries = query_offsets[1:] - query_offsets[:-1]
    num_tiles = (num_queries + tile_queries - 1) // tile_queries
    tiles_end = jnp.cumsum(num_tiles)

    def one_tile(i: jax.Array, out: jax.Array) -> jax.Array:
        seq = jnp.sum(tiles_end <= i)
        of_seq = (lengths, query_offsets[1:], num_queries, tiles_end, num_tiles)
        length, queries_end, count, end, tiles = (array.at[seq].get(mode="promise_in_bounds") for array in of_seq)
        done = (i - end + tiles) * tile_queries  # queries of this sequence in earlier tiles
        begin = queries_end - count + done
        first = length - count + done
        last = jnp.minimum(first + tile_queries, length) - 1
        row = first + jnp.arange(tile_queries)
        position = jnp.repeat(jnp.where(row <= last, row, -1), num_groups)
        rows = lax.dynamic_slice_in_dim(q, begin, tile_queries, allow_negative_indices=False)
        rows = rows.reshape(tile_queries, num_kv_heads, num_groups, head_dim).swapaxes(0, 1)
        result = attend_rows(
            rows.reshape(num_kv_heads, tile_queries * num_groups, head_dim),
            position,
            (first_visible(first, options), last),
            page_table.at[seq].get(mode="promise_in_bounds"),
            k_pages,
            v_pages,
            tile_pages,
            options,
        )
        result = result.reshape(num_kv_heads, tile_queries, num_groups, head_dim).swapaxes(0, 1)
        result = result.reshape(tile_queries, num_heads, head_dim).astype(q.dtype)
        # Rows past the sequence's end are zeros here; the tile of the sequence that owns them comes later.
        return lax.dynamic_update_slice_in_dim(out, result, begin, axis=0, allow_negative_indices=False)

    return lax.fori_loop(0, tiles_end[-1], one_tile, jnp.zeros_like(q))[:num_tokens]


def _tile_queries(num_tokens: int, num_seqs: int) -> int:
    """Queries per tile: near the mean per sequence, so that short ones waste little and long ones run fast."""
    tile_queries = 16
    while tile_queries < 128 and tile_queries < num_tokens // num_seqs:
        tile_queries *= 2
    return tile_queries
