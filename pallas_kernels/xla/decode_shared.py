"""Decode attention over pages that several sequences share, each read once for all of them. Called by `decode`.

Sequences whose page tables begin alike form a group; the whole tiles that all of a group share are read for `SEATS`
of its sequences at a time (after Hydragen, arXiv 2402.05099, and cascade inference in FlashInfer, arXiv 2501.01005).
Without such sequences the loop has no iterations. Owns which sequences share what; never knows what else a sequence
attends to.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.options import AttentionOptions
from pallas_kernels.paged_kv import PagedKv
from pallas_kernels.xla.common import take
from pallas_kernels.xla.decode_tiles import State, merge, read_tiles, tile_scores, tile_softmax

SEATS = 4  # sequences that read a tile together


class Groups(NamedTuple):
    """Which sequences share leading tiles. In `order` a group's sequences are neighbours, those of length 0 come last.

    Attributes:
      order: `[S]` the sequence at each place.
      place: `[S]` the place of each sequence.
      group: `[S]` by place: a number that a group's sequences have in common.
      tiles: `[S]` by place: leading tiles that the whole group shares; 0 for a sequence alone.
      seat: `[S]` by place: the sequence's number within its group.
    """

    order: jax.Array
    place: jax.Array
    group: jax.Array
    tiles: jax.Array
    seat: jax.Array


def find_groups(page_table: jax.Array, lengths: jax.Array, page_size: int, tile_pages: int) -> Groups:
    """Groups by `page_table [S, P]`; the page of a sequence's last token is never shared."""
    num_seqs, num_pages = page_table.shape
    number = jnp.arange(num_seqs)
    there = lengths > 0
    alike = (page_table[:, 0] == page_table[:, :1]) & there & there[:, None]
    group = jnp.where(there, jnp.argmax(alike, axis=1), num_seqs)
    is_before = (group < group[:, None]) | ((group == group[:, None]) & (number < number[:, None]))
    place = jnp.sum(is_before, axis=1)
    order = jnp.sum(jnp.where(place == number[:, None], number, 0), axis=1)
    differs = page_table != take(page_table, jnp.minimum(group, num_seqs - 1))
    same_pages = jnp.min(jnp.where(differs, jnp.arange(num_pages), num_pages), axis=1)
    same_pages = jnp.minimum(same_pages, (lengths - 1) // page_size)
    of_group = jnp.min(jnp.where(alike, same_pages, num_pages), axis=1)
    tiles = jnp.where(jnp.sum(alike, axis=1) > 1, of_group // tile_pages, 0)
    seat = jnp.sum(is_before & (group == group[:, None]), axis=1)
    return Groups(order, place, *(take(x, order) for x in (group, tiles, seat)))


def attend_shared(
    state: State,
    q: jax.Array,
    kv: PagedKv,
    groups: Groups,
    options: AttentionOptions,
    tile_pages: int,
    batch: int,
    precision: lax.Precision | None,
) -> State:
    """Merge the shared tiles of all groups into `state`; q `[S, K, G, H]`, page table and lengths by place.

    An iteration takes the next `batch` of the list of (tile, up to `SEATS` sequences).
    """
    num_seqs, num_kv_heads, num_groups, head_dim = q.shape
    number = jnp.arange(num_seqs)
    counts = jnp.where(groups.seat % SEATS == 0, groups.tiles, 0)
    ends = jnp.sum(jnp.where(number[:, None] >= number, counts, 0), axis=1)

    def add_tiles(i: jax.Array, state: State) -> State:
        item = i * batch + jnp.arange(batch)
        first = jnp.minimum(jnp.sum(ends <= item[:, None], axis=1), num_seqs - 1)  # place of the first seat
        is_tile = item < ends[-1]
        tile = jnp.where(is_tile, item - take(ends - counts, first), 0)
        page_ids = take(kv.page_table, (first[:, None], tile[:, None] * tile_pages + jnp.arange(tile_pages)))
        places = first[:, None] + jnp.arange(SEATS)  # [B, seats]
        taken = is_tile[:, None] & (places < num_seqs)
        places = jnp.minimum(places, num_seqs - 1)
        taken &= take(groups.group, places) == take(groups.group, first)[:, None]
        rows = take(q, places).swapaxes(1, 2).reshape(batch, num_kv_heads, -1, head_dim)
        k, v = read_tiles(kv.k, kv.v, page_ids, None)  # what a whole group shares is seen by all of it
        scores = tile_scores(rows, k, options, precision)

        def by_seat(x: jax.Array) -> jax.Array:
            x = x.reshape(batch, num_kv_heads, SEATS, num_groups, *x.shape[3:])
            return x.swapaxes(1, 2).reshape(-1, num_kv_heads, num_groups, *x.shape[4:])

        top, total, acc = (by_seat(x) for x in tile_softmax(scores, v, precision))
        # Empty seats get the softmax of other queries, and tiles beyond the list perhaps of NaN.
        return merge(state, jnp.int32(0), num_seqs, places.reshape(-1), (top, total, acc), precision, taken.reshape(-1))

    done: State = lax.fori_loop(0, (ends[-1] + batch - 1) // batch, add_tiles, state)
    return done
