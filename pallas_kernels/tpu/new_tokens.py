"""The store inside a decode on TPUs: a sequence's newest token joins its last page while that is in VMEM.

Owns the copies of new keys and values, and of the tiles of the memory that they change. Never knows scores or query
tiles' order. Called by `attention`.

TPU memory is written by whole tiles, several tokens each. The tile of the new token has been read with its page: the
token is put there, attention sees it, and the tile goes back to HBM from a buffer of its own, so that the ring doesn't
wait. No two sequences write a tile, and none reads what another one writes: the page of a sequence's newest token is
its own, since only full pages are shared.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.partition import POSITION, SEQUENCE
from pallas_kernels.tpu.attention_copies import QueryTiles
from pallas_kernels.tpu.common import PageForm


class TokensOfTiles(Protocol):
    """The new tokens of a kernel's query tiles."""

    def start_load(self, tile: jax.Array) -> None:
        """Start copying a tile's token in; nothing if the tile doesn't exist."""

    def wait_load(self, tile: jax.Array) -> None:
        """Wait for a tile's token."""

    def put(self, tile: jax.Array, kv_tile: jax.Array, number: jax.Array) -> None:
        """Store the tile's token if it belongs into this KV tile, which is in buffer `number` of the ring."""

    def wait_store(self, tile: jax.Array) -> None:
        """Wait until a tile's token is in HBM; nothing for a negative tile."""


class NoTokens:
    """A kernel whose tokens are stored already."""

    def start_load(self, tile: jax.Array) -> None:
        """Nothing."""

    def wait_load(self, tile: jax.Array) -> None:
        """Nothing."""

    def put(self, tile: jax.Array, kv_tile: jax.Array, number: jax.Array) -> None:
        """Nothing."""

    def wait_store(self, tile: jax.Array) -> None:
        """Nothing."""


@dataclasses.dataclass(frozen=True)
class NewTokens:
    """One token for each sequence, of which each query tile is one."""

    tiles: QueryTiles
    slots: Any
    """`[S]` in SMEM. Slots in page 0 belong to padding rows, whose tokens aren't written."""
    new: tuple[Any, Any]
    """K and V `[S, K, H]` in HBM."""
    pages: tuple[Any, Any]
    """Views of K and V, `[num_pages, ...]` in HBM."""
    ring: tuple[Any, Any]
    """`[num_buffers, pages, ...]` in VMEM."""
    new_buf: Any
    """`[2, 2, K, H]`: for two query tiles in turn, K and V."""
    tile_buf: Any
    """`[2, 2, K, rows, H]`, or `[2, 2, K, H]` where pages are of one token."""
    load_sem: Any
    store_sem: Any
    page_size: int
    form: PageForm

    @property
    def _rows(self) -> int:
        """Tokens of a tile of the memory."""
        return 1 if self.form is PageForm.HEADS else int(self.tile_buf.shape[3])

    def start_load(self, tile: jax.Array) -> None:
        """See `TokensOfTiles`."""
        pl.when(tile < self.tiles.count)(lambda: self._load(tile, lambda copy: copy.start()))

    def wait_load(self, tile: jax.Array) -> None:
        """See `TokensOfTiles`."""
        self._load(tile, lambda copy: copy.wait())

    def _load(self, tile: jax.Array, act: Callable[[Any], None]) -> None:
        seq, number = self.tiles.column(tile, SEQUENCE), tile % 2
        for i, new in enumerate(self.new):
            act(pltpu.make_async_copy(new.at[seq], self.new_buf.at[number, i], self.load_sem.at[number]))

    def put(self, tile: jax.Array, kv_tile: jax.Array, number: jax.Array) -> None:
        """See `TokensOfTiles`."""
        position = self.tiles.column(tile, POSITION)

        def put() -> None:
            page = (position - kv_tile * self.tiles.tile_tokens) // self.page_size
            row = position % self.page_size
            for i, ring in enumerate(self.ring):
                self._merge(ring.at[number, page], row, tile % 2, i)
            pl.when(self._is_stored(tile))(lambda: self._store(tile, lambda copy: copy.start()))

        pl.when(kv_tile == position // self.tiles.tile_tokens)(put)

    def _merge(self, page: Any, row: jax.Array, number: jax.Array, i: int) -> None:
        """Put the token in its row of the page in VMEM, and the tile of that row in its buffer."""
        new = self.new_buf[number, i]
        if self.form is PageForm.HEADS:
            page[...] = new
            self.tile_buf[number, i] = new
            return
        rows = pl.ds(self._first(row), self._rows)
        old = page[:, rows]
        spread = jnp.transpose(jnp.broadcast_to(new[None], (self._rows, *new.shape)), (1, 0, 2))
        is_new = lax.broadcasted_iota(jnp.int32, old.shape, 1) == row % self._rows
        merged = jnp.where(is_new, spread, old)
        page[:, rows] = merged
        self.tile_buf[number, i] = merged

    def _first(self, row: jax.Array) -> jax.Array:
        first: jax.Array = pl.multiple_of(row // self._rows * self._rows, self._rows)
        return first

    def wait_store(self, tile: jax.Array) -> None:
        """See `TokensOfTiles`."""
        known = jnp.maximum(tile, 0)
        is_stored = (tile >= 0) & self._is_stored(known)
        pl.when(is_stored)(lambda: self._store(known, lambda copy: copy.wait()))

    def _is_stored(self, tile: jax.Array) -> jax.Array:
        is_real: jax.Array = self.tiles.column(tile, POSITION) >= 0
        return is_real & (self.slots[self.tiles.column(tile, SEQUENCE)] >= self.page_size)

    def _store(self, tile: jax.Array, act: Callable[[Any], None]) -> None:
        slot, number = self.slots[self.tiles.column(tile, SEQUENCE)], tile % 2
        for i, pages in enumerate(self.pages):
            place = pages.at[slot // self.page_size]
            if self.form is not PageForm.HEADS:
                place = place.at[:, pl.ds(self._first(slot % self.page_size), self._rows)]
            act(pltpu.make_async_copy(self.tile_buf.at[number, i], place, self.store_sem.at[number]))
