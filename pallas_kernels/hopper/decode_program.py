"""One program of the Hopper decode: the queries of a kv head over a range of KV tiles of one sequence.

Owns the copies from pages to shared memory, their waits, and the running softmax. Never knows the grid, or where the
result goes. Called by `decode`; docs/kernels/hopper.md says why every wait is enough.

One warpgroup does everything. K and V each have a ring of tiles in shared memory, and a barrier per tile of a ring:
a copy into the tile announces its bytes there, one wait per round of the ring consumes them. The copy of a later tile
into the same place starts when the product that read it is done, so that no second barrier is needed.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper.common import SWIZZLE_BYTES, WGMMA_ROWS, in_layout, iota, matmul
from pallas_kernels.options import AttentionOptions

_LOG2_E = math.log2(math.e)
# Where a row's top score starts: below any real score, finite, so that hidden scores of -inf weigh 0 and not NaN.
_LOWEST = -1e30
# Columns of a swizzled tile of 2-byte numbers.
_SWIZZLED_COLUMNS = SWIZZLE_BYTES // 2

# For each copy that makes up a tile: page, and first token in it.
Pages = tuple[tuple[jax.Array, jax.Array], ...]


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


@dataclasses.dataclass(frozen=True)
class Program:
    """One sequence, one kv head, and the positions first..last that its query sees."""

    k: Ring
    v: Ring
    page_table_ref: Any
    seq: jax.Array
    first: Any
    last: jax.Array
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

    def start_first_tiles(self, begin: jax.Array, end: jax.Array) -> None:
        """Fill the rings from the tiles begin..end - 1, as far as both reach. Comes before `attend`."""
        for tile in range(self.num_stages):

            def start(tile: Any = begin + tile) -> None:
                pages, stage = self._pages(tile), self._stage(tile)
                self.k.start(stage, pages)
                self.v.start(stage, pages)

            pl.when(begin + tile < end)(start)

    def _stage(self, tile: jax.Array) -> jax.Array:
        """The place of a tile in the rings; not counted from the first tile, which then needs no register."""
        return lax.rem(tile, self.num_stages)

    def attend(self, q_tile: Any, begin: jax.Array, end: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Float32 `[64, H]`, the softmax-weighted V of the tiles, and `[64]`, its base-2 log-sum-exp.

        q_tile: `[64, H]`, already in shared memory. Its rows are independent: the contents of rows without a query have
        no effect. Without tiles the output is zeros and the log-sum-exp has no meaning.
        """
        is_widened = self.k.wide is not None

        def add_tile(tile: jax.Array, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            top, total, acc = state
            stage = self._stage(tile)
            later = tile + self.num_stages
            later_pages = self._pages(later)  # read early, so that they are there when the copies start

            def refill(ring: Ring) -> None:
                pl.when(later < end)(lambda: ring.start(stage, later_pages))

            keys = self.k.wait(stage, interpret=self.interpret)
            if is_widened:
                values = self.v.wait(stage, interpret=self.interpret)
                refill(self.k)
                refill(self.v)
            products = matmul(q_tile, keys, transpose_b=True, interpret=self.interpret)
            if not is_widened:
                refill(self.k)
            scores, factor = self._scores(products)
            scores = self._mask(scores, tile)
            new_top = lax.max(top, jnp.max(scores, axis=1) * factor)
            weights = jnp.exp2(scores * factor - to_matrix(new_top, self.tile_tokens))
            shrink = jnp.exp2(top - new_top)
            total = total * shrink + jnp.sum(weights, axis=1)
            acc = acc * to_matrix(shrink, self.head_dim)
            if not is_widened:
                values = self.v.wait(stage, interpret=self.interpret)
            self._clear_unseen(values, tile)
            acc = matmul(weights.astype(values.dtype), values, acc, interpret=self.interpret)
            if not is_widened:
                refill(self.v)
            return new_top, total, acc

        start = (self.column(_LOWEST), self.column(0.0), self._zero_rows())
        top, total, acc = lax.fori_loop(begin, end, add_tile, start)
        # A row that has seen anything has a total of at least 1, the weight of its top score; else acc is 0.
        out = acc / to_matrix(lax.max(total, self.column(1.0)), self.head_dim)
        return out, top + jnp.log2(total)

    def _pages(self, tile: jax.Array) -> Pages:
        """What the copies of a tile read: a page each, or the part of a page that falls into the tile.

        A tile is always copied whole, so that its barrier always expects the same. For what lies outside of
        first..last the nearest tokens inside are read once more (from the L2 cache); the table's unused entries never
        are.
        """
        page_size = self.k.pages_ref.shape[2]
        num_tokens = math.gcd(page_size, self.tile_tokens)
        pages = []
        for copy in range(self.tile_tokens // num_tokens):
            position = lax.max(lax.min(tile * self.tile_tokens + copy * num_tokens, self.last), self.first)
            offset = lax.div(lax.rem(position, page_size), num_tokens) * num_tokens
            pages.append((self.page_table_ref[self.seq, lax.div(position, page_size)], offset))
        return tuple(pages)

    def _scores(self, products: jax.Array) -> tuple[jax.Array, float]:
        """Turn products q . k into values, and the factor by which they become softmax scores times log2(e).

        The factor is left to the exponential, where it costs nothing.
        """
        scale, cap = self.options.scale(self.head_dim), self.options.logit_soft_cap
        if cap is None:
            return products, scale * _LOG2_E
        # tanh(x) = 1 - 2 / (1 + exp(2 x)); the chip's own approximation of tanh is too coarse under a large cap.
        growth = jnp.exp2(products * (2 * _LOG2_E * scale / cap))
        return 1.0 - 2.0 / (1.0 + growth), cap * _LOG2_E

    def _is_seen(self, tile: jax.Array, shape: tuple[int, int], axis: int) -> jax.Array:
        """Which places of a tile the query sees, the tile's tokens lying along an axis of the shape."""
        position = tile * self.tile_tokens + iota(shape, axis, plgpu.Layout.WGMMA, interpret=self.interpret)
        seen = position <= self.last
        return seen if self.options.sliding_window is None else seen & (position >= self.first)

    def _is_cut(self, tile: jax.Array) -> jax.Array:
        """Whether the query doesn't see all of a tile."""
        is_cut = (tile + 1) * self.tile_tokens > self.last + 1
        return is_cut if self.options.sliding_window is None else is_cut | (tile * self.tile_tokens < self.first)

    def _mask(self, scores: jax.Array, tile: jax.Array) -> jax.Array:
        def mask(scores: jax.Array) -> jax.Array:
            return jnp.where(self._is_seen(tile, (WGMMA_ROWS, self.tile_tokens), 1), scores, -jnp.inf)

        return lax.cond(self._is_cut(tile), mask, lambda scores: scores, scores)

    def _clear_unseen(self, values: Any, tile: jax.Array) -> None:
        """Zero the places that the query doesn't see: they may hold NaN, which a weight of zero would not silence."""

        def clear() -> None:
            seen = self._is_seen(tile, (self.tile_tokens, _SWIZZLED_COLUMNS), 0)
            for column in range(0, self.head_dim, _SWIZZLED_COLUMNS):  # few registers at a time
                part = values.at[:, pl.ds(column, _SWIZZLED_COLUMNS)]
                found = in_layout(part[...], plgpu.Layout.WGMMA, interpret=self.interpret)
                part[...] = jnp.where(seen, found, jnp.zeros_like(found))
            plgpu.commit_smem()

        pl.when(self._is_cut(tile))(clear)

    def column(self, value: float) -> jax.Array:
        """One float32 for each of the 64 rows."""
        layout = plgpu.Layout.WGMMA.reduce(1)
        return in_layout(jnp.full((WGMMA_ROWS,), value, jnp.float32), layout, interpret=self.interpret)

    def _zero_rows(self) -> jax.Array:
        zeros = jnp.zeros((WGMMA_ROWS, self.head_dim), jnp.float32)
        return in_layout(zeros, plgpu.Layout.WGMMA, interpret=self.interpret)


def to_matrix(column: jax.Array, width: int) -> jax.Array:
    """`[64]` to `[64, width]`."""
    return lax.broadcast_in_dim(column, (WGMMA_ROWS, width), (0,))
