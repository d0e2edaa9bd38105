"""Attention to a window of tokens and to entries of groups of tokens (`grouped_tokens`) in XLA.

On every device it stores what is new, with the entries of the groups that the step's tokens end. Attention, where no
kernel takes its place, goes by a few queries of one sequence at a time: they read what an index chose; without one, the
entries of as many groups as the longest sequence can have that the cache holds. Called through `api.grouped`.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.dots import dot_precision
from pallas_kernels.grouped_tokens import (
    GroupedCache,
    GroupedQkv,
    GroupParts,
    Sums,
    no_tokens,
    num_sums,
    places_of,
    turn_pairs,
)
from pallas_kernels.norm import rms_norm
from pallas_kernels.options import AttentionOptions, with_sinks
from pallas_kernels.paged_kv import to_format
from pallas_kernels.target import target_device
from pallas_kernels.xla.chosen import read_rows, tiles_of
from pallas_kernels.xla.common import UNSEEN, from_bits, gather_tiles, take
from pallas_kernels.xla.store import store_pages

_QUERIES = 16  # that attend at once
_MOST_ENTRIES = 2**16  # of groups that are read at once


class _Tokens(NamedTuple):
    """Where the step's tokens are.

    Attributes:
      seqs: `[T]` the sequence of each.
      positions: `[T]` int32, -1 for padding.
      is_first: `[T]` whether it is the first one of its sequence in the step.
      slots: `[T]` int32 where it is stored.
    """

    seqs: jax.Array
    positions: jax.Array
    is_first: jax.Array
    slots: jax.Array


@functools.partial(jax.jit, static_argnames=("one_each",))
def store(
    qkv: GroupedQkv, cache: GroupedCache, slots: jax.Array, query_offsets: jax.Array, one_each: bool
) -> GroupedCache:
    """The cache with the step's tokens; see `api.grouped`. Padding has slots in page 0.

    `one_each`: each sequence has one token, or is padding.
    """
    num_tokens, page_size = len(slots), cache.tokens.shape[2]
    seqs, positions = places_of(query_offsets, cache.lengths, num_tokens)
    is_first = jnp.arange(num_tokens) == take(query_offsets, seqs)
    tokens = _Tokens(seqs, jnp.where(slots >= page_size, positions, -1), is_first, slots)
    new = to_format(qkv.entries[:, None], cache.tokens.dtype)
    cache = dataclasses.replace(cache, tokens=store_pages(cache.tokens, new, slots))
    if qkv.groups is None:
        return cache
    places = _places_of_single(qkv.groups, tokens) if one_each else _places(qkv.groups, tokens, len(cache.lengths))
    return _with_groups(qkv.groups, qkv.entries.shape[1], cache, tokens, places)


class _Places(NamedTuple):
    """The groups that have tokens in the step. Sequences come one after another, and so do groups of each.

    Attributes:
      first: `[places]` the first token of each in the step.
      last: `[places]` the last one.
      is_there: `[places]` whether a place stands for a group; only then do its other numbers mean something.
      sums: `[places, parts, W]` of these tokens.
    """

    first: jax.Array
    last: jax.Array
    is_there: jax.Array
    sums: Sums


def _places_of_single(parts: GroupParts, tokens: _Tokens) -> _Places:
    """The same where no group has two tokens: one place a token, and nothing to add up."""
    number = jnp.arange(len(tokens.slots), dtype=jnp.int32)
    gates = _gates(parts, tokens.positions)
    return _Places(number, number, tokens.positions >= 0, Sums(gates, jnp.ones_like(gates), parts.numbers))


def _places(parts: GroupParts, tokens: _Tokens, num_seqs: int) -> _Places:
    m, num_tokens = parts.size, len(tokens.slots)
    num_places = min(num_tokens, num_tokens // m + 2 * num_seqs)
    number = jnp.arange(num_tokens, dtype=jnp.int32)
    is_token = tokens.positions >= 0
    begins = is_token & (tokens.is_first | (tokens.positions % m == 0))
    place_of = jnp.where(is_token, jnp.cumsum(begins) - 1, num_places)
    nothing = jnp.zeros(num_places, jnp.int32)
    first = nothing.at[jnp.where(begins, place_of, num_places)].set(number, mode="drop")
    last = nothing.at[place_of].max(number, mode="drop")
    is_there = jnp.arange(num_places) < jnp.sum(begins)
    return _Places(first, last, is_there, _added_up(parts, tokens.positions, place_of, num_places))


def _with_groups(
    parts: GroupParts, head_dim: int, cache: GroupedCache, tokens: _Tokens, places: _Places
) -> GroupedCache:
    """The cache with the entries of groups that end in the step, and the sums of those that the step leaves open."""
    assert cache.groups is not None and cache.sums is not None
    m, page_size = parts.size, cache.tokens.shape[2]
    first, last, is_place, sums = places
    begin, end, opens = tokens.positions[first], tokens.positions[last], tokens.is_first[first]

    stored = _stored(cache, tokens.seqs[first], begin, parts.numbers.shape[1])
    continues = (opens & (begin % m != 0))[:, None, None]
    of_own = Sums(*(each[:, -parts.numbers.shape[1] :] for each in stored))
    sums = sums.merged(of_own).where(continues, sums)
    kept, whole = sums, sums.part(-1)
    if parts.numbers.shape[1] == 2:
        before = _of_group_before(sums.part(0), stored, continues[:, 0], (opens & (begin > 0))[:, None], opens[:, None])
        whole = before.merged(whole)
        kept = Sums(*(jnp.concatenate([one[:, None], two], axis=1) for one, two in zip(before, sums, strict=True)))
    entries = _finished(parts, head_dim, whole, begin - begin % m)
    closes = is_place & (end % m == m - 1)
    # What isn't kept is written into the dummy page.
    slot = tokens.slots[last]
    rows = jnp.where(closes, slot // m, 0)
    page = slot // page_size
    is_last = is_place & (page != jnp.append(jnp.where(is_place, page, -1)[1:], -1))
    of_page = jnp.stack(kept, axis=2).reshape(len(page), num_sums(parts.numbers.shape[1]), -1)
    return dataclasses.replace(
        cache,
        groups=store_pages(cache.groups, to_format(entries[:, None], cache.groups.dtype), rows),
        sums=cache.sums.at[jnp.where(is_last, page, 0)].set(of_page, mode="promise_in_bounds"),
    )


def _stored(cache: GroupedCache, seqs: jax.Array, begin: jax.Array, parts: int) -> Sums:
    """`[places, rows, W]` of the pages of the tokens before `begin`."""
    assert cache.sums is not None
    pages = take(cache.page_table, (seqs, jnp.maximum(begin - 1, 0) // cache.tokens.shape[2]))
    of_page = take(cache.sums, pages).reshape(len(seqs), num_sums(parts) // 3, 3, -1)
    return Sums(of_page[:, :, 0], of_page[:, :, 1], of_page[:, :, 2])


def _gates(parts: GroupParts, positions: jax.Array) -> jax.Array:
    """`[T, parts, W]` with what is added by the place in the group."""
    return parts.gates + take(parts.bias, jnp.maximum(positions, 0) % parts.size)


def _added_up(parts: GroupParts, positions: jax.Array, place_of: jax.Array, num_places: int) -> Sums:
    """`[places, parts, W]` of the step's tokens."""
    gates = _gates(parts, positions)
    nothing = jnp.zeros((num_places, *gates.shape[1:]), jnp.float32)
    top = no_tokens(nothing).top.at[place_of].max(gates, mode="drop")
    weights = jnp.exp(gates - take(top, jnp.minimum(place_of, num_places - 1)))
    total = nothing.at[place_of].add(weights, mode="drop")
    return Sums(top, total, nothing.at[place_of].add(weights * parts.numbers, mode="drop"))


def _of_group_before(first: Sums, stored: Sums, continues: jax.Array, follows: jax.Array, opens: jax.Array) -> Sums:
    """What the tokens of the group before give to each place `[places, W]`.

    `first` is what the tokens of a place give to the next one. A place that opens its sequence's part of the step has
    it stored, in the row that its own group was in if it goes on with that one.
    """
    shifted = Sums(*(jnp.roll(each, 1, axis=0) for each in first))
    unless_first = stored.part(1).where(follows, no_tokens(shifted.top).where(opens, shifted))
    return stored.part(0).where(continues, unless_first)


def _finished(parts: GroupParts, head_dim: int, sums: Sums, positions: jax.Array) -> jax.Array:
    """`[places, W]` float32: means, normalized and turned, of groups that begin at `positions`."""
    means = sums.read / jnp.maximum(sums.total, 1e-30)
    angles = positions[:, None].astype(jnp.float32) * parts.frequencies
    tables = jnp.cos(angles), jnp.sin(angles)
    sides = [(means[:, :head_dim], parts.scales[:head_dim]), (means[:, head_dim:], parts.scales[head_dim:])]
    made = [turn_pairs(rms_norm(side, scales, parts.eps), *tables) for side, scales in sides if side.shape[1]]
    return jnp.concatenate(made, axis=-1)


@functools.partial(jax.jit, static_argnames=("size", "options", "interpret"))
def attend_to_groups(
    q: jax.Array, chosen: jax.Array | None, query_offsets: jax.Array, cache: GroupedCache, size: int,
    sinks: jax.Array | None, options: AttentionOptions, interpret: bool,
) -> jax.Array:  # fmt: skip
    """See `backend.AttendToGroups`."""
    num_tokens, num_heads, head_dim = q.shape
    num_seqs, page_size = len(cache.lengths), cache.tokens.shape[2]
    window = options.longest_view(cache.page_table.shape[1] * page_size)
    tile = min(_QUERIES, -(-num_tokens // num_seqs))
    tiles = tiles_of(query_offsets, cache.lengths, num_tokens, tile)
    num_entries = cache.most_groups if chosen is None else tile * chosen.shape[1]
    batch = max(1, min(_QUERIES // tile, num_seqs, _MOST_ENTRIES // max(1, num_entries)))
    dtype = jnp.dtype(jnp.float32) if target_device().platform == "cpu" else q.dtype
    scale = options.scale(head_dim)
    product = functools.partial(jnp.einsum, precision=dot_precision(q), preferred_element_type=jnp.dtype(jnp.float32))

    def attend(i: jax.Array, out: jax.Array) -> jax.Array:
        mine = jnp.minimum(i * batch + jnp.arange(batch), len(tiles.seqs) - 1)
        seqs, tokens, positions = (take(each, mine) for each in tiles[:3])
        inside = jnp.minimum(tokens, num_tokens - 1)
        sides = [_window(cache, seqs, positions, window, head_dim)]
        if chosen is not None:
            sides.append(_chosen_groups(cache, seqs, take(chosen, inside), head_dim))
        elif cache.groups is not None:
            sides.append(_groups(size, cache, seqs, positions, head_dim))
        rows = (take(q, inside).astype(jnp.float32) * scale).astype(dtype)
        keys = [side.readable().astype(dtype) for side in sides]
        axes = ["bkh" if each.ndim == 3 else "bqkh" for each in keys]
        found = [product(f"bqnh,{of_keys}->bqnk", rows, each) for of_keys, each in zip(axes, keys, strict=True)]
        is_seen = jnp.concatenate([side.is_seen for side in sides], axis=-1)[:, :, None]
        scores = jnp.where(is_seen, jnp.concatenate(found, axis=-1), UNSEEN)
        top = jnp.max(scores, axis=-1)
        weights = jnp.where(is_seen, jnp.exp(scores - top[..., None]), 0)
        total = jnp.maximum(with_sinks(jnp.sum(weights, axis=-1), top, sinks), 1e-30)
        cuts = jnp.split(weights.astype(dtype), [found[0].shape[-1]], axis=-1)[: len(keys)]
        read = sum(product(f"bqnk,{each}->bqnh", *both) for each, *both in zip(axes, cuts, keys, strict=True))
        return out.at[tokens].set((read / total[..., None]).astype(out.dtype), mode="drop")

    nothing = jnp.zeros((num_tokens, num_heads, head_dim), q.dtype)
    if len(tiles.seqs) <= batch:
        return attend(jnp.int32(0), nothing)
    return lax.fori_loop(0, (tiles.number + batch - 1) // batch, attend, nothing)


class _Side(NamedTuple):
    """Some of what b tiles of q queries may see.

    Attributes:
      keys: `[b, n, H]`, the same for the queries of a tile; or `[b, q, n, H]`, those of each query.
      is_seen: `[b, q, n]` which of these a query sees.
    """

    keys: jax.Array
    is_seen: jax.Array

    def readable(self) -> jax.Array:
        """The keys without those that no query sees: they may be NaN, which a weight of zero would not silence."""
        is_read = self.is_seen if self.keys.ndim == 4 else jnp.any(self.is_seen, axis=1)
        return jnp.where(is_read[..., None], self.keys, 0)


def _window(cache: GroupedCache, seqs: jax.Array, positions: jax.Array, window: int, head_dim: int) -> _Side:
    """Entries of the tokens that tiles of queries may see. `positions [b, q]` of a tile follow one another."""
    page_size, max_len = cache.tokens.shape[2], cache.page_table.shape[1] * cache.tokens.shape[2]
    num_keys = window + positions.shape[1] - 1
    at = positions[:, :1] - window + 1 + jnp.arange(num_keys)
    inside = jnp.clip(at, 0, max_len - 1)
    pages = take(cache.page_table, (seqs[:, None], inside // page_size))
    keys = from_bits(read_rows(cache.tokens, pages, inside % page_size, head_dim), cache.tokens.dtype)
    here, key_at = positions[..., None], at[:, None]
    return _Side(keys, (key_at >= 0) & (key_at <= here) & (key_at > here - window))


def _groups(size: int, cache: GroupedCache, seqs: jax.Array, positions: jax.Array, head_dim: int) -> _Side:
    """Entries of groups that have ended, the query's own included."""
    assert cache.groups is not None
    entries = from_bits(gather_tiles(cache.groups, take(cache.page_table, seqs))[:, 0], cache.groups.dtype)
    is_seen = jnp.arange(entries.shape[1]) < ((positions + 1) // size)[..., None]
    return _Side(entries[..., :head_dim], is_seen)


def _chosen_groups(cache: GroupedCache, seqs: jax.Array, chosen: jax.Array, head_dim: int) -> _Side:
    """Entries of the groups `chosen [b, q, k]`."""
    assert cache.groups is not None
    at, in_page = jnp.maximum(chosen, 0).reshape(len(seqs), -1), cache.groups.shape[2]
    pages = take(cache.page_table, (seqs[:, None], at // in_page))
    entries = from_bits(read_rows(cache.groups, pages, at % in_page, head_dim), cache.groups.dtype)
    return _Side(entries.reshape(*chosen.shape, head_dim), chosen >= 0)
