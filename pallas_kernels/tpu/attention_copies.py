"""The copies of the TPU attention kernel: pages into a ring of KV tiles, queries in, results out.

Owns when each copy is started and awaited, and the reading of the list of query tiles. Never knows arithmetic. Called
by `attention`.

A wait names as many bytes as the copies it waits for, so that many pages are awaited by one instruction.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.options import AttentionOptions
from pallas_kernels.partition import BEGIN, END, POSITION, SEQUENCE


@dataclasses.dataclass(frozen=True)
class QueryTiles:
    """The list in SMEM: four columns per tile (see `partition`), flat, and then the number of tiles that exist."""

    ref: Any
    tile_tokens: int
    """Tokens of a KV tile."""
    options: AttentionOptions

    @property
    def count(self) -> jax.Array:
        """Tiles that exist; at least 1."""
        number: jax.Array = self.ref[self.ref.shape[0] - 1]
        return number

    def column(self, tile: jax.Array, column: int) -> jax.Array:
        """One of the columns above."""
        value: jax.Array = self.ref[tile * 4 + column]
        return value

    def num_tokens(self, tile: jax.Array) -> jax.Array:
        """Tokens in the tile, at least 1."""
        return self.column(tile, END) - self.column(tile, BEGIN)

    def kv_range(self, tile: jax.Array) -> tuple[jax.Array, jax.Array]:
        """First and last KV position that any query of the tile sees; the last is negative when none."""
        first = self.column(tile, POSITION)
        return self.options.first_visible(first), first + self.num_tokens(tile) - 1

    def kv_tiles(self, tile: jax.Array) -> tuple[jax.Array, jax.Array]:
        """First KV tile, and the one after the last."""
        low, high = self.kv_range(tile)
        sees = high >= 0
        return jnp.where(sees, low // self.tile_tokens, 0), jnp.where(sees, high // self.tile_tokens + 1, 0)

    def next_that_reads(self, tile: jax.Array) -> jax.Array:
        """The first tile from `tile` on that sees any KV, else the count."""
        last = self.count - 1

        def reads_nothing(i: jax.Array) -> jax.Array:
            return (i <= last) & (self.column(jnp.minimum(i, last), POSITION) < 0)

        found: jax.Array = lax.while_loop(reads_nothing, lambda i: i + 1, tile)
        return found


class Ring(NamedTuple):
    """Where the copies of pages stand."""

    tile: jax.Array
    """Query tile whose pages are copied next; the count when none is left."""
    kv_tile: jax.Array
    """The KV tile in it that is copied next."""
    following: jax.Array
    """The query tile after it that sees any KV."""
    row: jax.Array
    """Which row buffer holds the page ids of `tile`; those of `following` are on their way to the other."""
    taken: jax.Array
    """KV tiles taken so far."""


@dataclasses.dataclass(frozen=True)
class PageRing:
    """Pages of K and V in `num_buffers` KV tiles, copied in the order in which the walk takes them.

    The page table stays in HBM, since a large one exceeds SMEM; the rows of two query tiles are in SMEM.
    """

    tiles: QueryTiles
    table: Any
    """`[S, 1, P]` in HBM."""
    row_buf: Any
    """`[2, 1, P]` in SMEM."""
    row_sem: Any
    hbm: tuple[Any, Any]
    """Views of K and V, `[num_pages, ...]`."""
    bufs: tuple[Any, Any]
    """`[num_buffers, pages, ...]`."""
    sem: Any
    page_size: int

    @property
    def num_buffers(self) -> int:
        """KV tiles in the ring."""
        return int(self.bufs[0].shape[0])

    def fill(self) -> Ring:
        """Start the first copies."""
        zero = jnp.int32(0)
        self._row_copy(self.tiles.next_that_reads(zero), zero, lambda copy: copy.start())
        # As if a query tile before the first had just been done, whose ids were in buffer 1.
        ring = self._advance(Ring(zero, zero, self.tiles.next_that_reads(zero), jnp.int32(1), zero))
        for number in range(self.num_buffers - 1):
            ring = self._start(ring, jnp.int32(number))
        return ring

    def take(self, tile: jax.Array, kv_tile: jax.Array, ring: Ring) -> tuple[Ring, jax.Array]:
        """Wait for the next KV tile, which must be this one, and refill the buffer of the tile before it."""
        number = ring.taken % self.num_buffers
        begin, end = self._pages_of(tile, kv_tile)
        for buf in self.bufs:
            _wait_for_rows(buf.at[number], end - begin, self.sem.at[number])
        ring = self._start(ring, (ring.taken + self.num_buffers - 1) % self.num_buffers)
        return ring._replace(taken=ring.taken + 1), number

    def _start(self, ring: Ring, number: jax.Array) -> Ring:
        """Start the copies of the next KV tile, if there is one, and step on."""

        def start() -> Ring:
            begin, end = self._pages_of(ring.tile, ring.kv_tile)
            tile_begin = ring.kv_tile * self.bufs[0].shape[1]

            def copy_page(i: jax.Array, _: None) -> None:
                page = self.row_buf[ring.row, 0, i]
                for hbm, buf in zip(self.hbm, self.bufs, strict=True):
                    pltpu.make_async_copy(hbm.at[page], buf.at[number, i - tile_begin], self.sem.at[number]).start()

            lax.fori_loop(begin, end, copy_page, None)
            is_last = ring.kv_tile + 1 >= self.tiles.kv_tiles(ring.tile)[1]
            stay = ring._replace(kv_tile=ring.kv_tile + 1)
            stepped: Ring = lax.cond(is_last, lambda: self._advance(ring), lambda: stay)
            return stepped

        started: Ring = lax.cond(ring.tile < self.tiles.count, start, lambda: ring)
        return started

    def _advance(self, ring: Ring) -> Ring:
        """Step to the first KV tile of the next query tile; its page ids have arrived, those after it are fetched."""
        tile, row = ring.following, 1 - ring.row
        following = self.tiles.next_that_reads(jnp.minimum(tile + 1, self.tiles.count))
        self._row_copy(tile, row, lambda copy: copy.wait())
        self._row_copy(following, ring.row, lambda copy: copy.start())
        kv_tile = self.tiles.kv_tiles(jnp.minimum(tile, self.tiles.count - 1))[0]
        return Ring(tile, kv_tile, following, row, ring.taken)

    def _row_copy(self, tile: jax.Array, row: jax.Array, act: Callable[[Any], None]) -> None:
        def copy() -> None:
            seq = self.tiles.column(tile, SEQUENCE)
            act(pltpu.make_async_copy(self.table.at[seq], self.row_buf.at[row], self.row_sem.at[row]))

        pl.when(tile < self.tiles.count)(copy)

    def _pages_of(self, tile: jax.Array, kv_tile: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Indices into the sequence's table, of those pages in the KV tile that are seen."""
        low, high = self.tiles.kv_range(tile)
        tile_pages = self.bufs[0].shape[1]
        begin = jnp.maximum(low // self.page_size, kv_tile * tile_pages)
        return begin, jnp.minimum(high // self.page_size + 1, (kv_tile + 1) * tile_pages)


@dataclasses.dataclass(frozen=True)
class TokenCopies:
    """Queries in or results out, `[T, N, H]` in HBM and two buffers `[Q, N, H]` used in turn.

    A tile of one token, a decoding sequence in a mixed batch, moves one token; all others move through whole buffers.
    """

    tiles: QueryTiles
    hbm: Any
    buf: Any
    """`[2, tile_queries, N, H]`."""
    sem: Any

    @property
    def _tile_queries(self) -> int:
        return int(self.buf.shape[1])

    def by_size(self, tile: jax.Array, work: Callable[[int, jax.Array, Ring], Ring], ring: Ring) -> Ring:
        """Run `work` for as many queries as the tile's buffer holds."""
        whole = functools.partial(work, self._tile_queries)
        if self._tile_queries == 1:
            return whole(tile, ring)
        is_single = self.tiles.num_tokens(tile) == 1
        done: Ring = lax.cond(is_single, functools.partial(work, 1), whole, tile, ring)
        return done

    def skipped(self, tile: jax.Array, num_queries: int) -> jax.Array:
        """Tokens in the buffer before the tile's first: near the end of q a buffer begins earlier, to stay inside."""
        begin = self.tiles.column(tile, BEGIN)
        return begin - jnp.minimum(begin, self.hbm.shape[0] - num_queries)

    def start_load(self, tile: jax.Array) -> None:
        """Start copying a tile's queries; nothing if it doesn't exist."""
        self._load(tile, lambda copy: copy.start())

    def wait_load(self, tile: jax.Array) -> None:
        """Wait for a tile's queries."""
        self._load(tile, lambda copy: copy.wait())

    def _load(self, tile: jax.Array, act: Callable[[Any], None]) -> None:
        known = jnp.minimum(tile, self.tiles.count - 1)
        exists = tile < self.tiles.count
        is_single = self.tiles.num_tokens(known) == 1

        def copy(size: int) -> None:
            first = self.tiles.column(known, BEGIN) - self.skipped(known, size)
            number = known % 2
            dst = self.buf.at[number, pl.ds(0, size)]
            act(pltpu.make_async_copy(self.hbm.at[pl.ds(first, size)], dst, self.sem.at[number]))

        if self._tile_queries == 1:
            pl.when(exists)(lambda: copy(1))
        else:
            pl.when(exists & is_single)(lambda: copy(1))
            pl.when(exists & ~is_single)(lambda: copy(self._tile_queries))

    def start_store(self, tile: jax.Array) -> None:
        """Start copying a tile's results out: its own tokens only."""
        number = tile % 2
        begin, count = self.tiles.column(tile, BEGIN), self.tiles.num_tokens(tile)
        skipped = jnp.where(count == 1, 0, self.skipped(tile, self._tile_queries))

        def copy(size: int) -> None:
            done = count & -(2 * size)  # by the larger powers of two
            src = self.buf.at[number, pl.ds(skipped + done, size)]
            pltpu.make_async_copy(src, self.hbm.at[pl.ds(begin + done, size)], self.sem.at[number]).start()

        _for_powers_of_two(count, self._tile_queries, copy)

    def wait_store(self, tile: jax.Array) -> None:
        """Wait until a tile's results have left; nothing for a negative tile."""
        known = jnp.maximum(tile, 0)
        number = known % 2
        count = jnp.where(tile < 0, 0, self.tiles.num_tokens(known))
        _wait_for_rows(self.buf.at[number], count, self.sem.at[number])


def _wait_for_rows(buf: Any, count: jax.Array, sem: Any) -> None:
    """Wait for copies into or out of `count` entries of buf's first axis."""

    def wait(size: int) -> None:
        part = buf.at[pl.ds(0, size)]
        pltpu.make_async_copy(part, part, sem).wait()

    _for_powers_of_two(count, buf.shape[0], wait)


def _for_powers_of_two(count: jax.Array, largest: int, act: Callable[[int], None]) -> None:
    """Call `act` on the powers of two that add up to `count`, which is at most `largest`."""
    size = largest
    while size:
        pl.when((count & size) != 0)(functools.partial(act, size))
        size //= 2
