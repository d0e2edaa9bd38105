"""Tiles of a decode as plain XLA: reading them, their softmaxes, and merging those into running ones of sequences.

Owns the order and format in which pages reach the dot products, and the running softmax. Never knows which tiles are
read for which sequences. Called by `decode` and `decode_shared`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.options import AttentionOptions
from pallas_kernels.paged_kv import BITS, FLOAT8_BITS, to_numbers
from pallas_kernels.xla.common import UNSEEN, as_bits, from_bits, gather_tiles, soft_cap, take

# Of n softmaxes: top score and sum of weights `[n, K, G]`, and weighted values `[n, K, G, H]`; all float32.
State: TypeAlias = tuple[jax.Array, jax.Array, jax.Array]


def read_tiles(
    k_pages: jax.Array, v_pages: jax.Array, page_ids: jax.Array, seen: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """Keys, and values in float32, of the pages `page_ids [B, n]`; each `[B, K, n * page_size, H]`.

    Values are 0 in places that `seen [B, n * page_size]` excludes: they may hold NaN, which no weight would silence.
    Keys of a cache of `BITS` are bfloat16, others float32.
    """
    if k_pages.dtype == BITS:
        return _read_bits(k_pages, page_ids, to_numbers), _read_values_of_bits(v_pages, page_ids, seen)
    if k_pages.dtype == FLOAT8_BITS:
        return _read_bits(k_pages, page_ids, _float8_widened), _read_values_of_bits(v_pages, page_ids, seen)
    k, v = (from_bits(gather_tiles(as_bits(x), page_ids), x.dtype).astype(jnp.float32) for x in (k_pages, v_pages))
    return k, v if seen is None else jnp.where(seen[:, None, :, None], v, 0)


def _read_values_of_bits(pages: jax.Array, page_ids: jax.Array, seen: jax.Array | None) -> jax.Array:
    _, num_kv_heads, page_size, head_dim = pages.shape
    batch, num_pages = page_ids.shape

    def widened(bits: jax.Array) -> jax.Array:
        numbers = _float8_widened(bits) if bits.dtype == FLOAT8_BITS else _bfloat16_widened(bits)
        if seen is None:
            return numbers
        places = seen.reshape(batch, 1, num_pages, page_size, 1)
        places = jnp.broadcast_to(places, (batch, num_kv_heads, num_pages, page_size, head_dim)).reshape(bits.shape)
        return jnp.where(places, numbers, 0)

    return _read_bits(pages, page_ids, widened)


def _bfloat16_widened(bits: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(bits.astype(jnp.uint32) << 16, jnp.float32)


def _float8_widened(bits: jax.Array) -> jax.Array:
    return to_numbers(bits).astype(jnp.float32)


def _read_bits(pages: jax.Array, page_ids: jax.Array, convert: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """Pages of a cache of bits, converted, as `[B, K, n * page_size, H]`.

    XLA's CPU back end gathers four times slower where it knows that pages end up as four axes, since then it counts
    them for each number. Hence the branch: XLA doesn't look into it, and can't know that it is always taken.
    """
    num_pages, num_kv_heads, page_size, head_dim = pages.shape
    batch = page_ids.shape[0]
    rows = (page_ids[:, None, :] * num_kv_heads + jnp.arange(num_kv_heads)[:, None]).reshape(-1)

    def gathered() -> jax.Array:
        return convert(take(pages.reshape(num_pages * num_kv_heads, page_size * head_dim), rows))

    nothing = jnp.zeros((len(rows), page_size * head_dim), jax.eval_shape(gathered).dtype)
    tiles = lax.cond(page_ids[0, 0] >= 0, gathered, lambda: nothing)
    return tiles.reshape(batch, num_kv_heads, -1, head_dim)


def no_softmaxes(num_states: int, num_kv_heads: int, num_groups: int, head_dim: int) -> State:
    """Softmaxes over nothing, to which tiles are merged."""
    rows = (num_states, num_kv_heads, num_groups)
    return jnp.full(rows, UNSEEN), jnp.zeros(rows), jnp.zeros((*rows, head_dim))


def tile_scores(q: jax.Array, k: jax.Array, options: AttentionOptions, precision: lax.Precision | None) -> jax.Array:
    """Float32 scores `[B, K, R, t]` of scaled rows `[B, K, R, H]` and keys `[B, K, t, H]`, in the keys' format."""
    scores = jnp.einsum(
        "bkrh,bkth->bkrt", q.astype(k.dtype), k, precision=precision, preferred_element_type=jnp.float32
    )
    return soft_cap(scores, options)


def tile_softmax(scores: jax.Array, v: jax.Array, precision: lax.Precision | None) -> State:
    """The softmax of each row of `scores [B, K, R, t]` over values `[B, K, t, H]`."""
    top = jnp.max(scores, axis=3)
    weights = jnp.exp(scores - top[..., None])
    return top, jnp.sum(weights, axis=3), jnp.einsum("bkrt,bkth->bkrh", weights, v, precision=precision)


def merge(
    state: State,
    begin: jax.Array,
    count: int,
    place: jax.Array,
    tiles: State,
    precision: lax.Precision | None,
    counts: jax.Array | None = None,
) -> State:
    """Merge the softmaxes of B tiles into `state`, by log-sum-exp.

    Tile b belongs to the state at place `[B]` b; all places lie in begin .. begin + count - 1. With `counts [B]`, tiles
    where it is false are left out, whatever they hold.
    """
    tile_top, tile_total, tile_acc = tiles
    if counts is not None:
        tile_top = jnp.where(counts[:, None, None], tile_top, UNSEEN)
        tile_total = jnp.where(counts[:, None, None], tile_total, 0)
        tile_acc = jnp.where(counts[:, None, None, None], tile_acc, 0)
    top, total, acc = (lax.dynamic_slice_in_dim(a, begin, count, allow_negative_indices=False) for a in state)
    owns = place - begin == jnp.arange(count)[:, None]  # [state, tile]
    owns_rows = owns[:, :, None, None]
    new_top = jnp.maximum(top, jnp.max(jnp.where(owns_rows, tile_top, UNSEEN), axis=1))
    factor = jnp.exp(tile_top - take(new_top, place - begin))
    shrink = jnp.exp(top - new_top)
    total = total * shrink + jnp.sum(jnp.where(owns_rows, factor * tile_total, 0), axis=1)
    shares = (factor[..., None] * tile_acc).reshape(len(place), -1)
    added = jnp.matmul(owns.astype(jnp.float32), shares, precision=precision)
    acc = acc * shrink[..., None] + added.reshape(acc.shape)
    new_top, total, acc = (
        lax.dynamic_update_slice_in_dim(a, n, begin, axis=0, allow_negative_indices=False)
        for a, n in zip(state, (new_top, total, acc), strict=True)
    )
    return new_top, total, acc
