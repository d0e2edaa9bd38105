"""`paged_extend_attention` as plain XLA: a loop over query tiles, inside it one over KV tiles. Called by `api` only.

A query tile holds queries of one sequence. The loop runs over the tiles that exist (a count known only on the
device), so that its time follows the work and not the padded shapes.
"""

import functools
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import tuning
from pallas_kernels.options import AttentionOptions
from pallas_kernels.xla_rows import attend_rows, dot_precision, first_visible, take


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
    num_seqs = lengths.shape[0]
    shape = tuning.shape_class(q.shape, k_pages.shape, k_pages.dtype, num_seqs, q.dtype)
    blocks = tuning.blocks("paged_extend_attention", "xla", shape)
    tile_queries = _tile_queries(num_tokens, num_seqs, blocks)
    tile_rows = tile_queries * (num_heads // num_kv_heads)
    # Many rows want a longer tile for their dot products; few do little with a tile, so that reading it decides.
    tile_tokens = blocks["tile_tokens_many_rows" if tile_rows >= blocks["many_rows"] else "tile_tokens"]
    tile_pages = max(1, tile_tokens // page_size)

    num_queries = query_offsets[1:] - query_offsets[:-1]
    num_tiles = (num_queries + tile_queries - 1) // tile_queries
    # A sum over a triangle and not `cumsum`, which XLA's CPU back end makes four kernels of.
    upto = jnp.arange(num_seqs)[:, None] >= jnp.arange(num_seqs)
    tiles_end = jnp.sum(jnp.where(upto, num_tiles, 0), axis=1)
    of_seq = jnp.stack(
        [query_offsets[:-1] - (tiles_end - num_tiles) * tile_queries, query_offsets[1:], lengths - query_offsets[1:]],
        axis=1,
    )

    def one_tile(i: jax.Array, out: jax.Array) -> jax.Array:
        seq = jnp.sum(tiles_end <= i)
        shift, queries_end, to_position = take(of_seq, seq)
        begin = shift + i * tile_queries
        end = jnp.minimum(begin + tile_queries, queries_end)
        # The last tile's slice is moved back to stay inside: it then holds tokens of earlier tiles too, and keeps them.
        slice_begin = jnp.minimum(begin, num_tokens - tile_queries)
        token = slice_begin + jnp.arange(tile_queries)
        is_mine = (token >= begin) & (token < end)
        position = jnp.where(is_mine, token + to_position, -1)
        rows = lax.dynamic_slice_in_dim(q, slice_begin, tile_queries, allow_negative_indices=False)
        rows = rows.reshape(tile_queries, num_kv_heads, -1, head_dim).swapaxes(0, 1)
        result = attend_rows(
            rows.reshape(num_kv_heads, tile_rows, head_dim).astype(jnp.float32) * options.sm_scale,
            jnp.repeat(position, tile_rows // tile_queries),
            (first_visible(begin + to_position, options), end - 1 + to_position),
            take(page_table, seq),
            k_pages,
            v_pages,
            tile_pages,
            options,
            dot_precision(q),
        )
        result = result.reshape(num_kv_heads, tile_queries, -1, head_dim).swapaxes(0, 1)
        result = result.reshape(tile_queries, num_heads, head_dim).astype(q.dtype)
        there = lax.dynamic_slice_in_dim(out, slice_begin, tile_queries, allow_negative_indices=False)
        result = jnp.where(is_mine[:, None, None], result, there)
        return lax.dynamic_update_slice_in_dim(out, result, slice_begin, axis=0, allow_negative_indices=False)

    return lax.fori_loop(0, tiles_end[-1], one_tile, jnp.zeros_like(q))


def _tile_queries(num_tokens: int, num_seqs: int, blocks: Mapping[str, int]) -> int:
    """Queries per tile: twice the mean per sequence, so that short ones waste little and long ones run fast.

    Twice, as a bucket of `num_seqs` holds fewer sequences mostly, and two tiles of a sequence read its KV twice.
    """
    mean = -(-num_tokens // num_seqs)
    rounded = -(-2 * mean // 4) * 4
    return min(num_tokens, max(blocks["min_tile_queries"], min(rounded, blocks["max_tile_queries"])))
