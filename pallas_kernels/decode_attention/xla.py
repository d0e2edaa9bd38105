"""`paged_decode_attention` as plain XLA: a loop over equal shares of all KV tiles. Called by `api` only.

A tile is some consecutive tokens of one sequence. The tiles of all sequences form one list, and each iteration takes
the next few of it, whichever sequences they belong to (flash-decoding's split of the KV, walked in order): so short
sequences fill an iteration as well as long ones do. Each tile has its own softmax; those of one sequence are merged
by log-sum-exp into a running state per sequence. Tiles that several sequences share come before, see `xla_shared`.

Why so many at once: an op inside a loop costs XLA's CPU back end a microsecond or two before it does anything, and
only an op over some hundred KB runs on several cores.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import softmax_state, tuning
from pallas_kernels.decode_attention.xla_shared import attend_shared, find_groups
from pallas_kernels.decode_attention.xla_tiles import read_tiles
from pallas_kernels.options import AttentionOptions
from pallas_kernels.xla_rows import UNSEEN, dot_precision, first_visible, take


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
    blocks = tuning.blocks(
        "paged_decode_attention", "xla", tuning.shape_class(q.shape, k_pages.shape, k_pages.dtype, num_seqs, q.dtype)
    )
    tile_pages = max(1, blocks["tile_tokens"] // page_size)
    grouped = q.reshape(num_seqs, num_kv_heads, -1, head_dim).astype(jnp.float32) * options.sm_scale
    batch = max(1, blocks["batch_tokens"] // (tile_pages * page_size))
    args = (page_table, lengths, options, tile_pages, batch, dot_precision(q))
    joined = math.gcd(num_kv_heads, blocks["joined_heads"])
    if page_size == 1:
        # A page of one token is a row of all heads. Reading several heads as one saves more time than it costs to
        # multiply each head's queries with the others' keys and values, beside zeros.
        joined_shape = (-1, num_kv_heads // joined, 1, joined * head_dim)
        k_pages, v_pages = k_pages.reshape(joined_shape), v_pages.reshape(joined_shape)
        out = _split_heads(_attend(_join_heads(grouped, joined), k_pages, v_pages, *args), joined)
    else:
        out = _attend(grouped, k_pages, v_pages, *args)
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
    k_pages: jax.Array,
    v_pages: jax.Array,
    page_table: jax.Array,
    lengths: jax.Array,
    options: AttentionOptions,
    tile_pages: int,
    batch: int,
    precision: lax.Precision | None,
) -> jax.Array:
    """Scaled q `[S, K, G, H]`, `batch` tiles of `tile_pages` pages an iteration; returns float32 `[S, K, G, H]`."""
    num_seqs, num_kv_heads, num_groups, head_dim = q.shape
    page_size = k_pages.shape[2]
    tile_tokens = tile_pages * page_size
    state = softmax_state.start(num_seqs + batch, num_kv_heads, num_groups, head_dim)  # a slice at any one is inside
    may_share = num_seqs > 1 and options.sliding_window is None
    if may_share:
        groups = find_groups(page_table, lengths, page_size, tile_pages)
        q, page_table, lengths = (take(x, groups.order) for x in (q, page_table, lengths))
        state = attend_shared(state, q, k_pages, v_pages, page_table, groups, options, tile_pages, batch, precision)
    last = lengths - 1
    first = groups.tiles * tile_tokens if may_share else first_visible(last, options)
    num_tiles = jnp.where(lengths > 0, last // tile_tokens - first // tile_tokens + 1, 0)
    # Sums over a triangle and not `cumsum`, which XLA's CPU back end makes four kernels of.
    upto = jnp.arange(num_seqs)[:, None] >= jnp.arange(num_seqs)
    ends = jnp.sum(jnp.where(upto, num_tiles, 0), axis=1)
    # The running states are kept without gaps for padding rows, so that the sequences of an iteration are neighbours.
    place = jnp.sum(upto & (num_tiles > 0), axis=1) - 1
    of_seq = jnp.stack([first, last, place, first // tile_tokens - ends + num_tiles], axis=1)

    def add_tiles(i: jax.Array, state: softmax_state.State) -> softmax_state.State:
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
        k, v = read_tiles(k_pages, v_pages, page_ids, seen)
        scores = softmax_state.tile_scores(take(q, seq), k, options, precision)
        scores = jnp.where(seen[:, None, None], scores, UNSEEN)
        tiles = softmax_state.tile_softmax(scores, v, precision)
        return softmax_state.merge(state, place[0], batch, place, tiles, precision)

    _, total, acc = lax.fori_loop(0, (ends[-1] + batch - 1) // batch, add_tiles, state)
    place = jnp.maximum(place, 0)
    out = take(acc, place) / jnp.maximum(take(total, place), 1)[..., None]
    out = jnp.where((lengths > 0)[:, None, None, None], out, 0)
    return take(out, groups.place) if may_share else out
