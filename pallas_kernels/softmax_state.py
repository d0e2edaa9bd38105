"""Running softmaxes of sequences, and how those of tiles are merged into them, for the XLA decode. Knows no pages."""

from __future__ import annotations

from typing import TypeAlias

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.options import AttentionOptions
from pallas_kernels.xla_rows import UNSEEN, soft_cap, take

# Of n softmaxes: top score and sum of weights `[n, K, G]`, and weighted values `[n, K, G, H]`; all float32.
State: TypeAlias = tuple[jax.Array, jax.Array, jax.Array]


def start(num_states: int, num_kv_heads: int, num_groups: int, head_dim: int) -> State:
    """Softmaxes of nothing."""
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
    """`state` with the softmaxes of B tiles.

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
