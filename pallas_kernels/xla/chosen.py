"""`choose_tokens` and `attend_to_chosen` in XLA. Called through `api.chosen`.

Choosing goes by tiles of queries of one sequence, which read its keys together; a tile's scores are one array over all
positions, filled piece by piece, of which `top_k` takes the largest, or kernels do both. Attention gathers the chosen
entries of a few queries at a time: the heads of one query share them, so that the products have N rows. What is kept at
once is bounded by the constants below, whatever the number of tokens.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.backend import ScoreTokens
from pallas_kernels.dots import dot_precision
from pallas_kernels.options import AttentionOptions
from pallas_kernels.paged_kv import BITS, PagedKv
from pallas_kernels.target import target_device
from pallas_kernels.token_index import IndexTiles, TokenIndex
from pallas_kernels.xla.common import UNSEEN, as_bits, from_bits, take

_CHOOSING = 16  # queries whose tokens are chosen at once
_MOST_KEPT = 2**26  # scores of these, where a kernel makes them: those of a decode of 256 rows at once
_ATTENDING = 8  # queries whose chosen entries are gathered at once
# Scores of heads that are made at once. An iteration costs an accelerator a round trip of the host: there it does more.
_MOST_SCORES = {"cpu": 2**20}
_MOST_ON_ACCELERATORS = 2**24


class Tiles(NamedTuple):
    """Tiles of queries, each of one sequence.

    Attributes:
      seqs: `[n]` the sequence of each.
      tokens: `[n, queries]` its tokens; one past the last where it has fewer.
      positions: `[n, queries]` their positions, -1 where it has fewer.
      number: of tiles that there are; what comes after them has no token.
    """

    seqs: jax.Array
    tokens: jax.Array
    positions: jax.Array
    number: jax.Array


def tiles_of(query_offsets: jax.Array, lengths: jax.Array, num_tokens: int, tile: int) -> Tiles:
    """As many tiles of `tile` queries as any step of these shapes may need."""
    num_seqs = len(lengths)
    num_queries = jnp.where(lengths > 0, query_offsets[1:] - query_offsets[:-1], 0)
    num_tiles = (num_queries + tile - 1) // tile
    # A sum over a triangle and not `cumsum`, which XLA's CPU back end makes four kernels of.
    upto = jnp.arange(num_seqs)[:, None] >= jnp.arange(num_seqs)
    ends = jnp.sum(jnp.where(upto, num_tiles, 0), axis=1)
    number = jnp.arange(min(num_tokens, num_seqs + num_tokens // tile))
    seqs = jnp.minimum(jnp.sum(ends <= number[:, None], axis=1), num_seqs - 1)
    begins = take(query_offsets[:-1] - (ends - num_tiles) * tile, seqs) + number * tile
    tokens = begins[:, None] + jnp.arange(tile)
    stops = take(query_offsets[1:], seqs)[:, None]
    is_mine = (tokens < stops) & (number < ends[-1])[:, None]
    positions = tokens + take(lengths, seqs)[:, None] - stops
    return Tiles(seqs, jnp.where(is_mine, tokens, num_tokens), jnp.where(is_mine, positions, -1), ends[-1])


@functools.partial(jax.jit, static_argnames=("first", "count", "scored", "interpret", "group"))
def choose_tokens(
    index: TokenIndex, query_offsets: jax.Array, kv: PagedKv, first: int, count: int, scored: ScoreTokens | None,
    interpret: bool, group: int = 1,
) -> jax.Array:  # fmt: skip
    """See `api.chosen`. Reads the keys of a sequence once for each `_CHOOSING` of its queries.

    `scored`: what scores and chooses by kernels; None: XLA does. `group`: the cache's entries are those of so many
    tokens each, which queries see from the last of these on; lengths count tokens, and what is returned entries.
    """
    num_tokens, num_seqs, page_size = len(index.queries), kv.num_seqs, kv.page_size
    tile = min(_CHOOSING, -(-num_tokens // num_seqs))
    tiles = tiles_of(query_offsets, kv.lengths, num_tokens, tile)
    batch = max(1, min(_CHOOSING // tile, num_seqs))
    if scored is not None:
        batch = max(1, min(_MOST_KEPT // (tile * kv.max_len), len(tiles.seqs)))
    most = _MOST_SCORES.get(target_device().platform, _MOST_ON_ACCELERATORS) // (batch * tile * index.num_heads)
    pages = kv.page_table.shape[1]
    tile_pages = max(1, min(pages, most // page_size))
    tile_len = tile_pages * page_size
    num_pieces = -(-pages // tile_pages)
    dtype = product_dtype(index.queries, kv)

    def add_scores(
        piece: jax.Array, scores: jax.Array, seqs: jax.Array, positions: jax.Array, q: jax.Array, weights: jax.Array
    ) -> jax.Array:
        # Past a sequence's end the table may name any page; such scores are left out below.
        columns = jnp.minimum(piece * tile_pages + jnp.arange(tile_pages), pages - 1)
        keys = _read_columns(kv.k, take(kv.page_table, (seqs[:, None], columns)), first, index.size)
        keys = from_bits(keys, kv.dtype).astype(dtype).reshape(batch, tile_len, index.size)
        of_heads = jnp.einsum("bqhi,bti->bqht", q, keys, precision=dot_precision(q), preferred_element_type=jnp.float32)
        found = jnp.sum(jax.nn.relu(of_heads) * weights[..., None], axis=2)
        at = piece * tile_len + jnp.arange(tile_len)
        found = jnp.where(at <= positions[..., None], found, -jnp.inf)
        return lax.dynamic_update_slice_in_dim(scores, found, piece * tile_len, axis=2)

    def choose(i: jax.Array, chosen: jax.Array) -> jax.Array:
        mine = jnp.minimum(i * batch + jnp.arange(batch), len(tiles.seqs) - 1)
        seqs, tokens, positions = (take(each, mine) for each in tiles[:3])
        positions = (positions + 1) // group - 1  # of the last entry that each sees
        inside = jnp.minimum(tokens, num_tokens - 1)
        asked = take(index.queries, inside).astype(dtype), take(index.weights, inside)
        if scored is None:
            fill = functools.partial(add_scores, seqs=seqs, positions=positions, q=asked[0], weights=asked[1])
            scores = jnp.full((batch, tile, num_pieces * tile_len), -jnp.inf)
            if num_pieces == 1:  # no loop, whose turns would cost an accelerator the host's time
                scores = fill(jnp.int32(0), scores)
            else:
                scores = lax.fori_loop(0, jnp.max(positions) // tile_len + 1, fill, scores)
            best, at = lax.top_k(scores, count)
            places = jnp.where(best > -jnp.inf, at.astype(jnp.int32), -1)
        else:
            places = scored(IndexTiles(*asked, positions, seqs), kv, first, count, interpret)
        return chosen.at[tokens].set(places, mode="drop")

    start = jnp.full((num_tokens, count), -1, jnp.int32)
    if len(tiles.seqs) <= batch:
        return choose(jnp.int32(0), start)
    # A kernel is for accelerators, which turn a loop without the host if its turns are known: at most a tile for each
    # sequence and the padding of the tokens are chosen for in vain.
    number = tiles.number if scored is None else len(tiles.seqs)
    return lax.fori_loop(0, (number + batch - 1) // batch, choose, start)


@functools.partial(jax.jit, static_argnames=("options", "interpret"))
def attend_to_chosen(
    q: jax.Array, chosen: jax.Array, query_offsets: jax.Array, kv: PagedKv, options: AttentionOptions, interpret: bool
) -> jax.Array:
    """See `backend.AttendToChosen`. Time follows the number of queries and of what they chose."""
    num_tokens, num_heads, head_dim = q.shape
    page_size, value_dim, batch = kv.page_size, options.value_dim or head_dim, min(_ATTENDING, num_tokens)
    seq_of_token = jnp.sum(query_offsets[1:] <= jnp.arange(num_tokens)[:, None], axis=1)
    seq_of_token = jnp.minimum(seq_of_token, kv.num_seqs - 1)
    dtype, scale, precision = product_dtype(q, kv), options.scale(head_dim), dot_precision(q)

    def attend(i: jax.Array, out: jax.Array) -> jax.Array:
        # The last ones are moved back to stay inside; some queries then attend twice, to the same tokens.
        begin = jnp.minimum(i * batch, num_tokens - batch)
        mine, places, seqs = (lax.dynamic_slice_in_dim(x, begin, batch) for x in (q, chosen, seq_of_token))
        is_chosen, at = places >= 0, jnp.maximum(places, 0)
        pages = take(kv.page_table, (seqs[:, None], at // page_size))
        entries = from_bits(read_rows(kv.k, pages, at % page_size, head_dim), kv.dtype)
        # A place that no query sees may hold NaN, which a weight of zero would not silence.
        entries = jnp.where(is_chosen[..., None], entries, 0).astype(dtype)
        rows = (mine.astype(jnp.float32) * scale).astype(dtype)
        scores = jnp.einsum("bnh,bkh->bnk", rows, entries, precision=precision, preferred_element_type=jnp.float32)
        scores = jnp.where(is_chosen[:, None], scores, UNSEEN)
        weights = jnp.where(is_chosen[:, None], jnp.exp(scores - jnp.max(scores, axis=2, keepdims=True)), 0)
        total = jnp.maximum(jnp.sum(weights, axis=2, keepdims=True), 1)  # the weight of the top score is 1
        read = jnp.einsum(
            "bnk,bkc->bnc", weights.astype(dtype), entries[..., :value_dim], precision=precision,
            preferred_element_type=jnp.float32,
        )  # fmt: skip
        return lax.dynamic_update_slice_in_dim(out, (read / total).astype(q.dtype), begin, axis=0)

    num_real = jnp.minimum(query_offsets[-1], num_tokens)
    nothing = jnp.zeros((num_tokens, num_heads, value_dim), q.dtype)
    return lax.fori_loop(0, (num_real + batch - 1) // batch, attend, nothing)


def product_dtype(q: jax.Array, kv: PagedKv) -> jnp.dtype:
    """What is multiplied: float32 on a CPU, but the numbers of a cache of `BITS`; elsewhere what queries are."""
    if target_device().platform != "cpu":
        return q.dtype
    return jnp.dtype(jnp.bfloat16 if kv.dtype == BITS else jnp.float32)


def _read_columns(pages: jax.Array, page_ids: jax.Array, first: int, size: int) -> jax.Array:
    """The numbers `first` .. `first + size` of all entries of the pages `[B, n]`: `[B, n, page_size, size]`."""
    return _gather(pages, (page_ids, None), (page_ids.ndim, page_ids.ndim + 1), (pages.shape[2], size), first)


def read_rows(pages: jax.Array, page_ids: jax.Array, offsets: jax.Array, size: int) -> jax.Array:
    """The first `size` numbers of the entries at `offsets [B, k]` of the pages `[B, k]`: `[B, k, size]`."""
    return _gather(pages, (page_ids, offsets), (page_ids.ndim,), (1, size), 0)


def _gather(
    pages: jax.Array,
    places: tuple[jax.Array, jax.Array | None],
    offset_dims: tuple[int, ...],
    sizes: tuple[int, int],
    first: int,
) -> jax.Array:
    """Slices of pages of one kv head, moved `as_bits`: indexing would copy the cache before it is cut."""
    page_ids, offsets = places
    zeros = jnp.zeros_like(page_ids)
    starts = jnp.stack([page_ids, zeros, zeros if offsets is None else offsets, jnp.full_like(zeros, first)], axis=-1)
    collapsed = (0, 1) if offsets is None else (0, 1, 2)
    numbers = lax.GatherDimensionNumbers(
        offset_dims=offset_dims, collapsed_slice_dims=collapsed, start_index_map=(0, 1, 2, 3)
    )
    return lax.gather(as_bits(pages), starts, numbers, (1, 1, *sizes), mode=lax.GatherScatterMode.PROMISE_IN_BOUNDS)
