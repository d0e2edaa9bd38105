"""`paged_decode_attention` as plain XLA: a loop over equal shares of all KV tiles. Called through `xla.BACKEND`.

A tile is some consecutive tokens of one sequence. The tiles of all sequences form one list, and each iteration takes
the next few of it, whichever sequences they belong to (flash-decoding's split of the KV, walked in order). So short
sequences fill an iteration as well as long ones do. Each tile has its own softmax; those of one sequence are merged
by log-sum-exp into a running state per sequence. Tiles that several sequences share come first: `decode_shared`.

Many tiles go into an iteration, because an op inside a loop costs XLA's CPU back end a microsecond or two before it
does anything, and only an op over some hundred KB runs on several cores.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import tuning
from pallas_kernels.dots import dot_precision
from pallas_kernels.options import AttentionOptions, with_sinks
from pallas_kernels.paged_kv import PagedKv
from pallas_kernels.xla.common import UNSEEN, take
from pallas_kernels.xla.decode_shared import attend_shared, find_groups
from pallas_kernels.xla.decode_tiles import State, merge, no_softmaxes, read_tiles, tile_scores, tile_softmax


@functools.partial(jax.jit, static_argnames=("options", "interpret"))
def decode_attention(
    q: jax.Array, kv: PagedKv, sinks: jax.Array | None, options: AttentionOptions, interpret: bool
) -> jax.Array:
    """See `backend.Decode`. Time follows the sum of the lengths, not the width of the page table."""
    num_seqs, num_heads, head_dim = q.shape
    num_kv_heads, page_size = kv.num_kv_heads, kv.page_size
    blocks = tuning.blocks("paged_decode_attention", "xla", tuning.shape_class(q, kv))
    tile_pages = max(1, blocks["tile_tokens"] // page_size)
    grouped = q.reshape(num_seqs, num_kv_heads, -1, head_dim).astype(jnp.float32) * options.scale(head_dim)
    batch = max(1, blocks["batch_tokens"] // (tile_pages * page_size))
    sizes = (sinks, options, tile_pages, batch, dot_precision(q))
    joined = math.gcd(num_kv_heads, blocks["joined_heads"])
    if page_size == 1:
        # A page of one token is a row of all heads. Reading several heads as one saves more time than it costs to
        # multiply each head's queries with the others' keys and values, beside zeros.
        joined_shape = (-1, num_kv_heads // joined, 1, joined * head_dim)
        kv = dataclasses.replace(kv, k=kv.k.reshape(joined_shape), v=kv.v.reshape(joined_shape))
        out = _split_heads(_attend(_join_heads(grouped, joined), kv, *sizes), joined)
    else:
        out = _attend(grouped, kv, *sizes)
    return out.reshape(num_seqs, num_heads, head_dim).astype(q.dtype)


def _join_heads(q: jax.Array, joined: int) -> jax.Array:
    """`[S, K, G, H]` to `[S, K / j, j * G, j * H]`: each head's queries beside zeros for the heads joined to it."""
    num_seqs, num_kv_heads, num_groups, head_dim = q.shape
    own = jnp.eye(joined)[:, None, :, None]
    blocks = q.reshape(num_seqs, -1, joined, num_groups, 1, head_dim) * own
    return blocks.reshape(num_seqs, num_kv_heads // joined, joined * num_groups, joined * head_dim)


def _split_heads(out: jax.Array, joined: int) -> jax.Array:
    """The opposite of `_join_heads`; what a query got from the other heads is dropped."""
    num_seqs, num_joints, num_rows, row_dim = out.shape
    blocks = out.reshape(num_seqs, num_joints, joined, num_rows // joined, joined, row_dim // joined)
    return jnp.stack([blocks[:, :, head, :, head] for head in range(joined)], axis=2)


def _attend(
    q: jax.Array,
    kv: PagedKv,
    sinks: jax.Array | None,
    options: AttentionOptions,
    tile_pages: int,
    batch: int,
    precision: lax.Precision | None,
) -> jax.Array:
    """Scaled q `[S, K, G, H]`, sinks `[K * G]`; `batch` tiles of `tile_pages` pages an iteration. `[S, K, G, H]`."""
    num_seqs, num_kv_heads, num_groups, head_dim = q.shape
    page_size, page_table, lengths = kv.page_size, kv.page_table, kv.lengths
    tile_tokens = tile_pages * page_size
    state = no_softmaxes(num_seqs + batch, num_kv_heads, num_groups, head_dim)  # a slice at any one is inside
    may_share = num_seqs > 1 and options.sliding_window is None
    if may_share:
        groups = find_groups(page_table, lengths, page_size, tile_pages)
        q, page_table, lengths = (take(x, groups.order) for x in (q, page_table, lengths))
        kv = dataclasses.replace(kv, page_table=page_table, lengths=lengths)
        state = attend_shared(state, q, kv, groups, options, tile_pages, batch, precision)
    last = lengths - 1
    first = groups.tiles * tile_tokens if may_share else options.first_visible(last)
    num_tiles = jnp.where(lengths > 0, last // tile_tokens - first // tile_tokens + 1, 0)
    # Sums over a triangle and not `cumsum`, which XLA's CPU back end makes four kernels of.
    upto = jnp.arange(num_seqs)[:, None] >= jnp.arange(num_seqs)
    ends = jnp.sum(jnp.where(upto, num_tiles, 0), axis=1)
    # The running states are kept without gaps for padding rows, so that the sequences of an iteration are neighbours.
    place = jnp.sum(upto & (num_tiles > 0), axis=1) - 1
    of_seq = jnp.stack([first, last, place, first // tile_tokens - ends + num_tiles], axis=1)

    def add_tiles(i: jax.Array, state: State) -> State:
        item = i * batch + jnp.arange(batch)
        seq = jnp.minimum(jnp.sum(ends <= item[:, None], axis=1), num_seqs - 1)
        first, last, place, shift = (take(of_seq, seq)[:, j] for j in range(4))
        last = jnp.where(item < ends[-1], last, -1)
        kv_tile = item + shift
        # Past its end a sequence reads its last page again, which is in the processor's cache.
        page = kv_tile[:, None] * tile_pages + jnp.arange(tile_pages)
        page = jnp.minimum(page, jnp.maximum(last, 0)[:, None] // page_size)
        page_ids = take(page_table, (seq[:, None], page))
        position = kv_tile[:, None] * tile_tokens + jnp.arange(tile_tokens)
        seen = (position >= first[:, None]) & (position <= last[:, None])  # [B, tokens]
        k, v = read_tiles(kv.k, kv.v, page_ids, seen)
        scores = tile_scores(take(q, seq), k, options, precision)
        scores = jnp.where(seen[:, None, None], scores, UNSEEN)
        tiles = tile_softmax(scores, v, precision)
        return merge(state, place[0], batch, place, tiles, precision)

    top, total, acc = lax.fori_loop(0, (ends[-1] + batch - 1) // batch, add_tiles, state)
    place = jnp.maximum(place, 0)
    sinks = None if sinks is None else sinks.reshape(num_kv_heads, num_groups)
    out = take(acc, place) / jnp.maximum(take(with_sinks(total, top, sinks), place), 1)[..., None]
    out = jnp.where((lengths > 0)[:, None, None, None], out, 0)
    return take(out, groups.place) if may_share else out
