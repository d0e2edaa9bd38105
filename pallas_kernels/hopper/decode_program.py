"""One program of the Hopper decode: the queries of a kv head over the KV tiles of the items of a chain.

Owns the copies from pages to shared memory, their waits, and the running softmax. Never knows the grid, or where a
result goes. Called by `decode`; the package's docstring says why every wait is enough.

One warpgroup does everything. K and V each have a ring of tiles in shared memory, and a barrier per tile of a ring:
a copy into the tile announces its bytes there, one wait per round of the ring consumes them. The copy of a later tile
into the same place starts when the product that read it is done, so that no second barrier is needed. Copies go through
the chain's tiles as if they were one item's: while an item ends, the first tiles of the next one are on their way.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper.common import SWIZZLE_BYTES, WGMMA_ROWS, in_layout, iota, matmul, scalar_of
from pallas_kernels.hopper.scores import LOWEST, shape_scores, to_matrix
from pallas_kernels.options import AttentionOptions
from pallas_kernels.partition import BEGIN, END, POSITION, SEQUENCE

# Columns of a swizzled tile of 2-byte numbers.
_SWIZZLED_COLUMNS = SWIZZLE_BYTES // 2

# For each copy that makes up a tile: page, and first token in it.
Pages = tuple[tuple[jax.Array, jax.Array | int], ...]


@dataclasses.dataclass(frozen=True)
class Ring:
    """The tiles of K, or of V, on their way through shared memory."""

    pages_ref: Any
    """`[num_pages, K, page_size, H]`, global memory."""
    tiles: Any
    """`[stages, tile, H]`, shared memory."""
    arrived: Any
    """A barrier per stage; each expects as many arrivals as a tile has copies."""
    wide: Any
    """`[tile, H]` of the queries' dtype, shared memory, where `wgmma` can't take the tiles as they are; else None."""
    kv_head: jax.Array

    def start(self, stage: Any, pages: Pages) -> None:
        """Start the copies of one tile. Nothing may be reading the stage any more."""
        num_tokens = self.tiles.shape[1] // len(pages)
        for copy, (page, offset) in enumerate(pages):
            source = self.pages_ref.at[page, self.kv_head, pl.ds(offset, num_tokens)]
            target = self.tiles.at[stage, pl.ds(copy * num_tokens, num_tokens)]
            plgpu.copy_gmem_to_smem(source, target, self.arrived.at[stage])

    def wait(self, stage: Any, *, interpret: bool) -> Any:
        """Wait until the tile last started for this stage is there, and return what to multiply; once per start.

        That is the stage itself, or the wide tile holding its numbers: then the stage is free for the next start.
        """
        plgpu.barrier_wait(self.arrived.at[stage])
        if self.wide is None:
            return self.tiles.at[stage]
        head_dim = self.wide.shape[1]
        columns = float8_columns(head_dim)
        for column in range(0, head_dim, columns):
            part = self.tiles.at[stage, :, pl.ds(column, columns)]
            found = in_layout(part[...], plgpu.Layout.WGMMA, interpret=interpret)
            # Through float16, the only type that the chip converts float8 to.
            self.wide[:, pl.ds(column, columns)] = found.astype(jnp.float16).astype(self.wide.dtype)
        plgpu.commit_smem()
        return self.wide


def float8_columns(head_dim: int) -> int:
    """Columns of the swizzled tiles that a float8 cache is copied to: as wide as the head and the registers allow."""
    return SWIZZLE_BYTES if head_dim == SWIZZLE_BYTES else SWIZZLE_BYTES // 2


class Cursor(NamedTuple):
    """The tile whose copies start next, or started last: always a ring's length ahead of the one that is computed."""

    item: jax.Array
    tile: jax.Array
    end: jax.Array
    """The tile after the item's last. Behind a chain's last item it is 0, as `tile` is; behind a single item's end
    `tile` goes on."""
    seq: jax.Array
    last: jax.Array
    """The position of the item's query."""

    @property
    def has_tile(self) -> jax.Array:
        """Whether there is a tile to copy."""
        return self.tile < self.end


def _either(condition: jax.Array, first: Callable[[], Cursor], second: Callable[[], Cursor]) -> Cursor:
    def branch(make: Callable[[], Cursor]) -> Callable[[], Cursor]:
        return lambda: Cursor(*map(scalar_of, make()))

    found: Cursor = lax.cond(condition, branch(first), branch(second))
    return found


class View(NamedTuple):
    """The positions first..last that an item's query sees."""

    first: Any
    last: jax.Array


@dataclasses.dataclass(frozen=True)
class Program:
    """One kv head of the items of a chain. Items without tiles come behind all others."""

    k: Ring
    v: Ring
    page_table_ref: Any
    items_ref: Any
    end_item: jax.Array | None
    """The item after the chain's last; None for a single item, which takes fewer registers."""
    options: AttentionOptions
    interpret: bool

    @property
    def num_stages(self) -> int:
        """Tiles of a ring."""
        return int(self.k.tiles.shape[0])

    @property
    def tile_tokens(self) -> int:
        """Tokens of a tile."""
        return int(self.k.tiles.shape[1])

    @property
    def head_dim(self) -> int:
        """H."""
        return int(self.k.tiles.shape[2])

    @property
    def is_chained(self) -> bool:
        """Whether other items may follow."""
        return self.end_item is not None

    @property
    def is_widened(self) -> bool:
        """Whether products read wide tiles, so that places in the rings are free before them."""
        return self.k.wide is not None

    def start_first_tiles(self, item: jax.Array) -> Cursor:
        """Fill the rings from a chain's first item on. Comes before the first `attend`, which takes the result."""
        cursor = self._first_tile(item)
        for stage in range(self.num_stages):
            cursor = self._next_tile(cursor) if stage else cursor

            def start(stage: int = stage, cursor: Cursor = cursor) -> None:
                pages = self._pages(cursor)
                self.k.start(stage, pages)
                self.v.start(stage, pages)

            pl.when(cursor.has_tile)(start)
        return cursor

    def _first_tile(self, item: jax.Array) -> Cursor:
        """The first tile of an item, if the chain has it."""

        def found() -> Cursor:
            begin, end, seq, last = (self.items_ref[item, column] for column in (BEGIN, END, SEQUENCE, POSITION))
            return Cursor(item, begin, end, seq, last)

        if self.end_item is None:
            return found()
        none = jnp.int32(0)
        return _either(item < self.end_item, found, lambda: Cursor(item, none, none, none, none))

    def _next_tile(self, cursor: Cursor) -> Cursor:
        next_tile = cursor._replace(tile=cursor.tile + 1)
        if self.end_item is None:
            return next_tile
        return _either(next_tile.has_tile, lambda: next_tile, lambda: self._first_tile(cursor.item + 1))

    def _after(self, stage: jax.Array) -> jax.Array:
        """The next place in the rings."""
        return lax.select(stage == self.num_stages - 1, jnp.int32(0), stage + 1)

    def _before(self, stage: jax.Array) -> jax.Array:
        return lax.select(stage == 0, jnp.int32(self.num_stages - 1), stage - 1)

    def attend(
        self, q_tile: Any, item: jax.Array, stage: jax.Array, cursor: Cursor, queries_read: Callable[[], None]
    ) -> tuple[jax.Array, jax.Array, jax.Array, Cursor]:
        """Float32 `[64, H]`, the softmax-weighted V of an item, and `[64]`, its base-2 log-sum-exp; and what is next.

        Without tiles the output is zeros and the log-sum-exp has no meaning. V's place of the item's last tile isn't
        refilled yet; `refill_last` does it.

        Args:
            q_tile: `[64, H]`, already in shared memory. Its rows are independent: the contents of rows without a query
                have no effect.
            item: its number.
            stage: the place of its first tile in the rings.
            cursor: what `start_first_tiles`, or the call for the item before, returned.
            queries_read: called as soon as q_tile may be overwritten; not without tiles.
        """
        begin, end, last = (self.items_ref[item, column] for column in (BEGIN, END, POSITION))
        view = self._view(last)

        def add_tile(tile: jax.Array, state: tuple[Any, ...]) -> tuple[Any, ...]:
            top, total, acc, stage, cursor = state
            cursor = self._next_tile(cursor)
            pages = self._pages(cursor)  # read early, so that they are there when the copies start
            is_last = tile + 1 == end

            def refill(ring: Ring, condition: jax.Array = cursor.has_tile) -> None:
                pl.when(condition)(lambda: ring.start(stage, pages))

            keys = self.k.wait(stage, interpret=self.interpret)
            if self.is_widened:
                values = self.v.wait(stage, interpret=self.interpret)
                refill(self.k)
                refill(self.v)
            products = matmul(q_tile, keys, transpose_b=True, interpret=self.interpret)
            if self.is_chained:
                pl.when(is_last)(queries_read)
            if not self.is_widened:
                refill(self.k)
            scores, factor = shape_scores(self.options, self.head_dim, products)
            scores = self._mask(scores, tile, view)
            new_top = lax.max(top, jnp.max(scores, axis=1) * factor)
            weights = jnp.exp2(scores * factor - to_matrix(new_top, self.tile_tokens))
            shrink = jnp.exp2(top - new_top)
            total = total * shrink + jnp.sum(weights, axis=1)
            acc = acc * to_matrix(shrink, self.head_dim)
            if not self.is_widened:
                values = self.v.wait(stage, interpret=self.interpret)
            self._clear_unseen(values, tile, view)
            acc = matmul(weights.astype(values.dtype), values, acc, interpret=self.interpret)
            if not self.is_widened:
                refill(self.v, cursor.has_tile & jnp.logical_not(is_last) if self.is_chained else cursor.has_tile)
            return new_top, total, acc, self._after(stage), cursor

        start = (self.column(LOWEST), self.column(0.0), self._zero_rows(), stage, cursor)
        top, total, acc, stage, cursor = lax.fori_loop(begin, end, add_tile, start)
        # A row that has seen anything has a total of at least 1, the weight of its top score; else acc is 0.
        out = acc / to_matrix(lax.max(total, self.column(1.0)), self.head_dim)
        return out, top + jnp.log2(total), stage, cursor

    def free_tile(self, stage: jax.Array) -> Any:
        """`[64, H]` of shared memory, of the queries' dtype, for the result of an item; stage is the one after it.

        That is the place of the values of its last tile, read by the last product. It is free until `refill_last`.
        """
        if self.is_widened:
            return self.v.wide.at[pl.ds(0, WGMMA_ROWS)]
        return self.v.tiles.at[self._before(stage), pl.ds(0, WGMMA_ROWS)]

    def refill_last(self, stage: jax.Array, cursor: Cursor) -> None:
        """Start the copy that waited for `free_tile`; stage and cursor are those after the item."""
        if self.is_chained and not self.is_widened:
            pl.when(cursor.has_tile)(lambda: self.v.start(self._before(stage), self._pages(cursor)))

    def _pages(self, cursor: Cursor) -> Pages:
        """What the copies of a tile read: a page each, or the part of a page that falls into the tile.

        A tile is always copied whole, so that its barrier always expects the same. For what lies outside of the view
        the nearest tokens inside are read once more (from the L2 cache); the table's unused entries never are.
        """
        page_size = self.k.pages_ref.shape[2]
        if page_size % self.tile_tokens == 0:  # a tile in view has its page in view
            tiles = page_size // self.tile_tokens
            tile = cursor.tile if self.is_chained else lax.min(cursor.tile, cursor.end - 1)
            page, place = (lax.div(tile, tiles), lax.rem(tile, tiles)) if tiles > 1 else (tile, 0)
            return ((self.page_table_ref[cursor.seq, page], place * self.tile_tokens),)
        num_tokens = math.gcd(page_size, self.tile_tokens)
        view = self._view(cursor.last)
        pages = []
        for copy in range(self.tile_tokens // num_tokens):
            position = lax.max(lax.min(cursor.tile * self.tile_tokens + copy * num_tokens, view.last), view.first)
            offset = lax.div(lax.rem(position, page_size), num_tokens) * num_tokens
            pages.append((self.page_table_ref[cursor.seq, lax.div(position, page_size)], offset))
        return tuple(pages)

    def _view(self, last: jax.Array) -> View:
        window = self.options.sliding_window
        return View(0 if window is None else lax.max(last - window + 1, 0), last)

    def _is_seen(self, tile: jax.Array, view: View, shape: tuple[int, int], axis: int) -> jax.Array:
        """Which places of a tile the query sees, the tile's tokens lying along an axis of the shape."""
        position = tile * self.tile_tokens + iota(shape, axis, plgpu.Layout.WGMMA, interpret=self.interpret)
        seen = position <= view.last
        return seen if self.options.sliding_window is None else seen & (position >= view.first)

    def _is_cut(self, tile: jax.Array, view: View) -> jax.Array:
        """Whether the query doesn't see all of a tile."""
        is_cut = (tile + 1) * self.tile_tokens > view.last + 1
        return is_cut if self.options.sliding_window is None else is_cut | (tile * self.tile_tokens < view.first)

    def _mask(self, scores: jax.Array, tile: jax.Array, view: View) -> jax.Array:
        def mask(scores: jax.Array) -> jax.Array:
            return jnp.where(self._is_seen(tile, view, (WGMMA_ROWS, self.tile_tokens), 1), scores, -jnp.inf)

        return lax.cond(self._is_cut(tile, view), mask, lambda scores: scores, scores)

    def _clear_unseen(self, values: Any, tile: jax.Array, view: View) -> None:
        """Zero the places that the query doesn't see: they may hold NaN, which a weight of zero would not silence."""

        def clear() -> None:
            seen = self._is_seen(tile, view, (self.tile_tokens, _SWIZZLED_COLUMNS), 0)
            for column in range(0, self.head_dim, _SWIZZLED_COLUMNS):  # few registers at a time
                part = values.at[:, pl.ds(column, _SWIZZLED_COLUMNS)]
                found = in_layout(part[...], plgpu.Layout.WGMMA, interpret=self.interpret)
                part[...] = jnp.where(seen, found, jnp.zeros_like(found))
            plgpu.commit_smem()

        pl.when(self._is_cut(tile, view))(clear)

    def column(self, value: float) -> jax.Array:
        """One float32 for each of the 64 rows."""
        layout = plgpu.Layout.WGMMA.reduce(1)
        return in_layout(jnp.full((WGMMA_ROWS,), value, jnp.float32), layout, interpret=self.interpret)

    def _zero_rows(self) -> jax.Array:
        zeros = jnp.zeros((WGMMA_ROWS, self.head_dim), jnp.float32)
        return in_layout(zeros, plgpu.Layout.WGMMA, interpret=self.interpret)
