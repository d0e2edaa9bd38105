"""`score_tokens` as Pallas kernels for the Triton backend: a program per (tile of tokens, tile of queries).

A program loads the keys of its tokens once for all of its queries, which are of one sequence. The heads of a query are
the rows of a product with them, whose positive parts are weighed and added up. Positions that no query of a tile sees
get no score. By the scores `best_places` chooses. Called through `triton.BACKEND`.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels import tuning
from pallas_kernels.paged_kv import QUERY_DTYPES, PagedKv
from pallas_kernels.token_index import IndexTiles, TokenIndex
from pallas_kernels.triton.best_places import best_places
from pallas_kernels.triton.common import MIN_DOT, tile_rows_for
from pallas_kernels.triton.tiles import load_rows

# The most heads of an index: blocks of them are unrolled.
MOST_HEADS = 128


def refuse_score_tokens(index: TokenIndex, kv: PagedKv) -> str | None:
    """Why this backend can't take the index and the cache, or None when it can."""
    if kv.dtype not in QUERY_DTYPES:
        return f"the cache holds {kv.dtype}, of which it can't read keys"
    if index.size < MIN_DOT or index.size & (index.size - 1):
        return f"the index's keys have {index.size} numbers; it takes powers of two from {MIN_DOT}"
    if index.num_heads > MOST_HEADS:
        return f"the index has {index.num_heads} heads; it takes at most {MOST_HEADS}"
    return None


def score_tokens(tiles: IndexTiles, kv: PagedKv, first: int, count: int, interpret: bool) -> jax.Array:
    """See `backend.ScoreTokens`."""
    scores = _scores(tiles, kv, first, interpret)
    num_tiles, tile, length = scores.shape
    places = best_places(scores.reshape(-1, length), tiles.positions.reshape(-1) + 1, count, interpret)
    return places.reshape(num_tiles, tile, count)


@functools.partial(jax.jit, static_argnames=("first", "interpret"))
def _scores(tiles: IndexTiles, kv: PagedKv, first: int, interpret: bool) -> jax.Array:
    """`[n, queries, max_len or more]` float32; any number at positions that a query doesn't see."""
    num_tiles, tile, num_heads, _ = tiles.queries.shape
    shape = tuning.shape_class(jax.ShapeDtypeStruct((num_tiles, *tiles.queries.shape[2:]), tiles.queries.dtype), kv)
    blocks = tuning.blocks("score_tokens", "triton", shape)
    tile_tokens = blocks["tile_tokens"]
    num_pieces = pl.cdiv(kv.max_len, tile_tokens)
    num_rows = min(tile_rows_for(blocks["head_rows"]), max(MIN_DOT, pl.next_power_of_2(num_heads)))
    out: jax.Array = pl.pallas_call(
        functools.partial(
            _kernel,
            page_size=kv.page_size,
            first=first,
            tile_tokens=tile_tokens,
            num_rows=num_rows,
            head_blocks=pl.cdiv(num_heads, num_rows),
        ),
        out_shape=jax.ShapeDtypeStruct((num_tiles, tile, num_pieces * tile_tokens), jnp.float32),
        grid=(num_pieces, num_tiles),
        compiler_params=plgpu.CompilerParams(num_warps=blocks["num_warps"], num_stages=blocks["num_stages"]),
        interpret=interpret,
        name="score_tokens",
    )(tiles.queries, tiles.weights, tiles.positions, tiles.seqs, kv.k.reshape(-1, kv.head_dim), kv.page_table)
    return out


def _kernel(
    queries_ref: Any, weights_ref: Any, positions_ref: Any, seqs_ref: Any, entries_ref: Any, page_table_ref: Any,
    out_ref: Any, *, page_size: int, first: int, tile_tokens: int, num_rows: int, head_blocks: int,
) -> None:  # fmt: skip
    _, num_queries, num_heads, size = queries_ref.shape
    piece, tile = pl.program_id(0), pl.program_id(1)
    seq, at = seqs_ref[tile], piece * tile_tokens + jnp.arange(tile_tokens, dtype=jnp.int32)
    places = jnp.arange(pl.next_power_of_2(num_queries), dtype=jnp.int32)
    # Past the last query's position nothing is read: entries there may hold NaN, and the table any page.
    last = jnp.max(plgpu.load(positions_ref.at[tile, places], mask=places < num_queries, other=-1))
    is_seen = at <= last
    page = plgpu.load(page_table_ref.at[seq, lax.div(at, jnp.int32(page_size))], mask=is_seen, other=0)
    slot = page * page_size + lax.rem(at, jnp.int32(page_size))
    keys = load_rows(entries_ref, (slot,), is_seen, (first, size)).astype(queries_ref.dtype)
    precision = lax.Precision.HIGHEST if keys.dtype == jnp.float32 else None

    def score(query: jax.Array, _: None) -> None:
        found = jnp.zeros((tile_tokens,), jnp.float32)
        for block in range(head_blocks):
            head = block * num_rows + jnp.arange(num_rows, dtype=jnp.int32)
            q = load_rows(queries_ref, (tile, query, head), head < num_heads)
            weights = plgpu.load(weights_ref.at[tile, query, head], mask=head < num_heads, other=0.0)
            of_heads = lax.dot(q, keys.T, precision=precision, preferred_element_type=jnp.float32)
            found += jnp.sum(jnp.maximum(of_heads, 0.0) * weights[:, None], axis=0)
        plgpu.store(out_ref.at[tile, query, at], found)

    pl.when(piece * tile_tokens <= last)(lambda: lax.fori_loop(0, num_queries, score, None))
