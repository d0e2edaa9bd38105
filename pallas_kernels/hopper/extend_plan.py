"""Static sizes, refs and list of work of the Hopper extend kernel, shared by all of its warpgroups.

Owns `Plan`, `Refs`, `Item` and the walk over the items. Never knows what is done with an item. Called by `extend`,
`extend_producer` and `extend_consumer`.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.hopper.common import COPY_ROWS, WGMMA_ROWS
from pallas_kernels.options import AttentionOptions
from pallas_kernels.partition import BEGIN, END, POSITION, SEQUENCE

# Warpgroups that compute, each 64 rows of a query tile; one more copies.
NUM_CONSUMERS = 2
TILE_ROWS = NUM_CONSUMERS * WGMMA_ROWS


@dataclasses.dataclass(frozen=True)
class Plan:
    """The static side of one kernel."""

    options: AttentionOptions
    num_tokens: int
    """T, at least tile_queries, a multiple of COPY_ROWS."""
    num_kv_heads: int
    num_groups: int
    head_dim: int
    page_size: int
    num_tiles: int
    """Rows of the table of query tiles."""
    num_programs: int
    tile_tokens: int
    """KV tokens of a step."""
    num_stages: int
    """KV tiles that shared memory holds."""
    converts: bool
    """Whether the cache holds float8, which the producer converts."""
    interpret: bool

    def __post_init__(self) -> None:
        if self.tile_tokens % WGMMA_ROWS:
            raise ValueError(
                f"tile_tokens is {self.tile_tokens}; the producer clears and converts {WGMMA_ROWS} tokens at a time, "
                "so the block-size table has to give a multiple of that"
            )

    @property
    def tile_queries(self) -> int:
        """Queries of a tile, a multiple of COPY_ROWS; its rows go through them for group 0, then group 1, and so on."""
        return max_tile_queries(self.num_groups)

    @property
    def copy_tokens(self) -> int:
        """Tokens that one copy moves: a page, or the part of it that falls into one tile."""
        return math.gcd(self.page_size, self.tile_tokens)

    @property
    def copies_per_tile(self) -> int:
        """Copies that fill a KV tile."""
        return self.tile_tokens // self.copy_tokens

    @property
    def staging_columns(self) -> int:
        """Columns of the output that leave through shared memory at once."""
        return min(self.head_dim, 128)

    def barrier_of(self, turn: jax.Array, which: int) -> jax.Array:
        """The barrier of the turn-th KV tile's stage, for K (0) or V (1), in what Refs has 2 * num_stages of."""
        return which * self.num_stages + lax.rem(turn, self.num_stages)

    def query_pieces(self) -> list[tuple[int, int, int, int, int]]:
        """(warpgroup, row in it, group, first query, queries) of each copy of a query tile; warpgroups cut them."""
        pieces = []
        for group in range(self.num_groups):
            row, end = group * self.tile_queries, (group + 1) * self.tile_queries
            while row < end:
                count = min(end - row, WGMMA_ROWS - row % WGMMA_ROWS)
                pieces.append((row // WGMMA_ROWS, row % WGMMA_ROWS, group, row - group * self.tile_queries, count))
                row += count
        return pieces


def max_tile_queries(num_groups: int) -> int:
    """Queries that fit into a tile's rows with all heads of a kv head."""
    return TILE_ROWS // num_groups // COPY_ROWS * COPY_ROWS


@dataclasses.dataclass(frozen=True)
class Refs:
    """The kernel's memory. A stage of k_tiles or v_tiles is full after `arrived`, may be overwritten after `free`."""

    q: Any
    k_pages: Any
    v_pages: Any
    page_table: Any
    tiles: Any
    out: Any
    q_tile: Any
    """`[NUM_CONSUMERS, 64, H]`."""
    k_tiles: Any
    v_tiles: Any
    """`[num_stages, tile_tokens, H]`."""
    out_tile: Any
    """`[TILE_ROWS, staging_columns]`, rows one after the other, so that any number of them can be copied."""
    q_arrived: Any
    arrived: Any
    free: Any
    """`[2 * num_stages + 1]`: the stages of K, those of V, and in `free` the queries."""
    turn: Any
    """`[NUM_CONSUMERS]`: consumer i may start products after turn[i], which the other one gives it."""
    raw_arrived: Any
    """`[2]`, the producer's own: K and V that it changes before it hands them over."""
    sinks: Any = None
    """`[N]`, global memory; None where query heads have none."""
    raw_tiles: Any = None
    """`[2, tile_tokens, H]`: float8 K and V before their conversion."""


@dataclasses.dataclass(frozen=True)
class Item:
    """A query tile and a kv head: one unit of work."""

    kv_head: jax.Array
    seq: jax.Array
    begin: jax.Array
    """First token."""
    num_queries: jax.Array
    """0 or below: nothing to do."""
    position: jax.Array
    """Position of the first token."""
    low: jax.Array
    """The lowest KV position that any query sees."""
    first_tile: jax.Array
    """KV tile of low."""
    num_steps: jax.Array
    """KV tiles to go through; 0 for padding tokens, whose output is zeros."""

    @property
    def last(self) -> jax.Array:
        """Position of the last query, and the last KV position that any query sees."""
        return self.position + self.num_queries - 1

    def first_row(self, plan: Plan) -> jax.Array:
        """The token of a group's first row, a multiple of COPY_ROWS.

        For TMA the tokens of q are `[T / 8, 8]`, as the swizzled tile's rows are: it reads zeros in the place of rows
        that reach from one eight into the next. Near the array's end a tile reaches back, and not past the end.
        """
        aligned = lax.div(self.begin, jnp.int32(COPY_ROWS)) * COPY_ROWS
        return lax.min(aligned, plan.num_tokens - plan.tile_queries)


def for_each_item(plan: Plan, tiles_ref: Any, visit: Callable[[Item, jax.Array], None]) -> jax.Array:
    """Call visit(item, KV tiles of this program's earlier items) on each item of this program; returns all KV tiles.

    Items come longest first, and the programs take them in turns whose direction alternates: this evens out the sums.
    """
    num_items = plan.num_tiles * plan.num_kv_heads
    program = lax.axis_index("program")

    def one_round(i: jax.Array, done: jax.Array) -> jax.Array:
        place = jnp.where(lax.rem(i, 2) == 0, program, plan.num_programs - 1 - program)
        index = i * plan.num_programs + place
        item = _load_item(plan, tiles_ref, lax.min(index, num_items - 1), index < num_items)
        visit(item, done)
        return done + item.num_steps

    return lax.fori_loop(0, -(-num_items // plan.num_programs), one_round, jnp.int32(0))


def _load_item(plan: Plan, tiles_ref: Any, index: jax.Array, exists: jax.Array) -> Item:
    tile = lax.div(index, plan.num_kv_heads)
    begin, position = tiles_ref[tile, BEGIN], tiles_ref[tile, POSITION]
    num_queries = jnp.where(exists, tiles_ref[tile, END] - begin, 0)
    low, first_tile, num_steps = kv_steps(plan.options, plan.tile_tokens, position, num_queries)
    return Item(
        kv_head=lax.rem(index, plan.num_kv_heads),
        seq=tiles_ref[tile, SEQUENCE],
        begin=begin,
        num_queries=num_queries,
        position=position,
        low=low,
        first_tile=first_tile,
        num_steps=num_steps,
    )


def kv_steps(
    options: AttentionOptions, tile_tokens: int, position: jax.Array, num_queries: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The lowest KV position that num_queries queries from `position` on see, its KV tile, and how many KV tiles."""
    low = jnp.zeros_like(position)
    if options.sliding_window is not None:
        low = jnp.maximum(position - options.sliding_window + 1, 0)
    first_tile = lax.div(low, jnp.full_like(low, tile_tokens))
    # Padding stands at negative positions and sees nothing.
    seen = jnp.where(num_queries > 0, jnp.maximum(position + num_queries, 0), 0)
    end_tile = lax.div(seen + (tile_tokens - 1), jnp.full_like(seen, tile_tokens))
    return low, first_tile, jnp.maximum(end_tile - first_tile, 0)
