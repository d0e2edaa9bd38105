"""`paged_extend_attention` as plain XLA: a loop over query tiles, inside it one over KV tiles.

Owns the cutting of ragged queries into tiles and the running softmax of one tile. Called through `xla.BACKEND`.

A query tile holds queries of one sequence. The loop runs over the tiles that exist (a count known only on the
device), so that its time follows the work and not the padded shapes.
"""

import functools
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import tuning
from pallas_kernels.dots import dot_precision
from pallas_kernels.options import AttentionOptions, places_of_biases, with_sinks
from pallas_kernels.paged_kv import BITS, PagedKv
from pallas_kernels.xla.common import UNSEEN, as_bits, from_bits, gather_tiles, soft_cap, take

# As slices, more pages than this take longer to compile than they save.
_MOST_SLICES = 8


@functools.partial(jax.jit, static_argnames=("options", "interpret"))
def extend_attention(
    q: jax.Array,
    query_offsets: jax.Array,
    kv: PagedKv,
    sinks: jax.Array | None,
    options: AttentionOptions,
    interpret: bool,
    seen: jax.Array | None = None,
    biases: jax.Array | None = None,
) -> jax.Array:
    """See `backend.Extend` and `ExtendBiased`. Tiles that length, causality or window exclude are not read."""
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads, num_seqs, lengths = kv.num_kv_heads, kv.num_seqs, kv.lengths
    blocks = tuning.blocks("paged_extend_attention", "xla", tuning.shape_class(q, kv))
    tile_queries = _tile_queries(num_tokens, num_seqs, blocks)
    tile_rows = tile_queries * (num_heads // num_kv_heads)
    # With many rows the dot products dominate, which favour a longer tile; with few rows, reading the tile does.
    tile_tokens = blocks["tile_tokens_many_rows" if tile_rows >= blocks["many_rows"] else "tile_tokens"]
    tile_pages = max(1, tile_tokens // kv.page_size)

    num_queries = query_offsets[1:] - query_offsets[:-1]
    num_tiles = (num_queries + tile_queries - 1) // tile_queries
    # A sum over a triangle and not `cumsum`, which XLA's CPU back end makes four kernels of.
    upto = jnp.arange(num_seqs)[:, None] >= jnp.arange(num_seqs)
    tiles_end = jnp.sum(jnp.where(upto, num_tiles, 0), axis=1)
    of_seq = jnp.stack(
        [query_offsets[:-1] - (tiles_end - num_tiles) * tile_queries, query_offsets[1:], lengths - query_offsets[1:]],
        axis=1,
    )

    # The rows of a tile: its queries, each with the query heads of the kv head.
    sink_of_row = None if sinks is None else jnp.tile(sinks.reshape(num_kv_heads, -1), (1, tile_queries))

    def one_tile(i: jax.Array, out: jax.Array) -> jax.Array:
        seq = jnp.sum(tiles_end <= i)
        shift, queries_end, to_position = take(of_seq, seq)
        begin = shift + i * tile_queries
        end = jnp.minimum(begin + tile_queries, queries_end)
        # The last tile's slice is moved back to stay inside; tokens of earlier tiles in it keep their outputs.
        slice_begin = jnp.minimum(begin, num_tokens - tile_queries)
        token = slice_begin + jnp.arange(tile_queries)
        is_mine = (token >= begin) & (token < end)
        position = jnp.where(is_mine, token + to_position, -1)
        until = position
        if seen is not None:
            stops = lax.dynamic_slice_in_dim(seen, slice_begin, tile_queries, allow_negative_indices=False)
            until = jnp.where(is_mine, stops - 1, -1)
        rows = lax.dynamic_slice_in_dim(q, slice_begin, tile_queries, allow_negative_indices=False)
        rows = rows.reshape(tile_queries, num_kv_heads, -1, head_dim).swapaxes(0, 1)
        result = _attend_rows(
            rows.reshape(num_kv_heads, tile_rows, head_dim).astype(jnp.float32) * options.scale(head_dim),
            jnp.repeat(position, tile_rows // tile_queries),
            jnp.repeat(until, tile_rows // tile_queries),
            (options.first_visible(begin + to_position), end - 1 + to_position if seen is None else jnp.max(until)),
            take(kv.page_table, seq),
            kv,
            sink_of_row,
            biases,
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

    The factor is 2 because a bucket of `num_seqs` mostly holds fewer sequences, and because a sequence that is cut into
    two tiles has its KV read twice.
    """
    mean = -(-num_tokens // num_seqs)
    rounded = -(-2 * mean // 4) * 4
    return min(num_tokens, max(blocks["min_tile_queries"], min(rounded, blocks["max_tile_queries"])))


def _attend_rows(
    q: jax.Array,
    position: jax.Array,
    until: jax.Array,
    kv_range: tuple[jax.Array, jax.Array],
    page_ids: jax.Array,
    kv: PagedKv,
    sinks: jax.Array | None,
    biases: jax.Array | None,
    tile_pages: int,
    options: AttentionOptions,
    precision: lax.Precision | None,
) -> jax.Array:
    """Scaled float32 rows q `[K, R, H]` at `position [R]` over the pages `page_ids [P]` of one sequence.

    They see up to `until [R]`, their position or after it. `kv_range` is the first and the last KV position that a row
    sees; only tiles that touch it are read, `tile_pages` pages each. `sinks` is `[K, R]`. A row at position -1 sees
    nothing and yields zeros. Returns float32 `[K, R, H]`.
    """
    page_size = kv.page_size
    first, last = kv_range
    # The numbers of a cache of bits are multiplied as bfloat16, by numbers of that format.
    dtype = jnp.dtype(jnp.bfloat16 if kv.dtype == BITS else jnp.float32)
    rows = q.astype(dtype)
    tile_tokens = tile_pages * page_size

    def add_tile(tile: jax.Array, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        top, total, acc = state
        # Past the range the last page is read again: the table may end there.
        ids = take(page_ids, jnp.minimum(tile * tile_pages + jnp.arange(tile_pages), last // page_size))
        kv_position = tile * tile_tokens + jnp.arange(tile_tokens)
        k = _read_tile(kv.k, ids)
        # Places that no row sees may hold NaN, which a weight of zero would not silence.
        v = jnp.where(((kv_position >= first) & (kv_position <= last))[:, None], _read_tile(kv.v, ids), 0)
        k, v = (from_bits(tile, kv.dtype).astype(dtype) for tile in (k, v))
        scores = jnp.einsum("krh,kth->krt", rows, k, precision=precision, preferred_element_type=jnp.float32)
        scores = soft_cap(scores, options)
        if biases is not None:
            of_heads = biases.reshape(len(rows), -1, biases.shape[1])  # [K, G, 2 B + 1]
            distance = kv_position - position[:: of_heads.shape[1], None]
            added = jnp.take(of_heads, places_of_biases(biases, distance), axis=2)  # [K, G, queries, tokens]
            scores += added.swapaxes(1, 2).reshape(scores.shape)
        seen = kv_position <= until[:, None]
        if options.sliding_window is not None:
            seen &= kv_position > position[:, None] - options.sliding_window
        scores = jnp.where(seen, scores, UNSEEN)
        new_top = jnp.maximum(top, jnp.max(scores, axis=2))
        # A row that has seen nothing yet collects weights of 1 here; its first real score shrinks them to 0.
        weights = jnp.exp(scores - new_top[..., None])
        shrink = jnp.exp(top - new_top)
        total = total * shrink + jnp.sum(weights, axis=2)
        added = jnp.einsum(
            "krt,kth->krh", weights.astype(dtype), v, precision=precision, preferred_element_type=jnp.float32
        )
        acc = acc * shrink[..., None] + added
        return new_top, total, acc

    start = (
        jnp.full(q.shape[:2], UNSEEN, jnp.float32),
        jnp.zeros(q.shape[:2], jnp.float32),
        jnp.zeros(q.shape, jnp.float32),
    )
    end = (last + tile_tokens) // tile_tokens
    top, total, acc = lax.fori_loop(first // tile_tokens, end, add_tile, start)
    # A row that sees something has a total of at least 1, the weight of its top score.
    total = with_sinks(total, top, sinks)
    return jnp.where((position >= 0)[:, None], acc / jnp.maximum(total, 1)[..., None], 0)


def _read_tile(pages: jax.Array, ids: jax.Array) -> jax.Array:
    """The pages `ids [n]` as `[K, n * page_size, H]`, moved `as_bits`."""
    _, num_kv_heads, page_size, head_dim = pages.shape
    if ids.shape[0] > _MOST_SLICES:
        tile = gather_tiles(as_bits(pages), ids)
    else:
        sizes = (1, num_kv_heads, page_size, head_dim)
        tile = jnp.concatenate(
            [
                lax.dynamic_slice(as_bits(pages), (page, 0, 0, 0), sizes, allow_negative_indices=False)[0]
                for page in ids
            ],
            axis=1,
        )
    return tile
