"""Moves rows of arrays and tiles of KV pages between memory and a Triton kernel.

Owns addresses and masks. Never knows queries or softmax. Called by the kernels of this package and by `common`.

Offsets are 32-bit unless an array exceeds 2**32 bytes, as Pallas chooses them: enough for elements of 16 bits and more,
and for the 32-bit words that a float8 cache is read as here. A cache of single bytes would overflow at half of that.
"""

import dataclasses
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.triton.float8 import PLANES, unpack

# First column (a number, or one that the kernel computes) and number of columns, a power of two; the step from one to
# the next where it is not 1; and how many there are, where that is fewer: the rest is read as zeros and not written.
Columns: TypeAlias = tuple[Any, int] | tuple[Any, int, int] | tuple[Any, int, int, int]


def widths_of(row: int) -> tuple[int, ...]:
    """Numbers of each part that a row of so many is computed in: powers of two, the largest first."""
    return tuple(1 << bit for bit in reversed(range(row.bit_length())) if row >> bit & 1)


def value_widths(head_dim: int, value_dim: int | None) -> tuple[int, ...]:
    """The same of a value: all parts of a row, or those that hold its first value_dim numbers."""
    widths = widths_of(head_dim)
    if value_dim is None:
        return widths
    return tuple(width for place, width in enumerate(widths) if sum(widths[:place]) < value_dim)


def index_of(layer: int) -> jax.Array:
    """A layer's number as an array `[1]`: kernels of all layers are then one, lowered and compiled once."""
    return jnp.full((1,), layer, jnp.int32)


def holds_words(pages_ref: Any) -> bool:
    """Whether these are pages of a float8 cache."""
    return bool(pages_ref.dtype == jnp.uint32)


def load_rows(ref: Any, index: tuple[Any, ...], is_real: jax.Array | None, columns: Columns | None = None) -> jax.Array:
    """`[R, columns]` of a ref whose last axis is that of the columns, all of them by default.

    Row r is at `index` (each `[R]` or a scalar, at least one `[R]`), and zeros unless is_real (None: all are).
    """
    where = _address(ref, index, columns)
    mask = _mask(where, is_real, columns)
    return plgpu.load(ref.at[where]) if mask is None else plgpu.load(ref.at[where], mask=mask, other=0)


def store_rows(
    ref: Any, index: tuple[Any, ...], is_real: jax.Array, rows: jax.Array, columns: Columns | None = None
) -> None:
    """The opposite of `load_rows`; rows that aren't real are not written."""
    where = _address(ref, index, columns)
    plgpu.store(ref.at[where], rows.astype(ref.dtype), mask=_mask(where, is_real, columns))


def load_parts(
    ref: Any, index: tuple[Any, ...], is_real: jax.Array | None, size: int | None = None
) -> tuple[jax.Array, ...]:
    """The parts of the rows that `load_rows` loads, or of their first `size` numbers; see `widths_of`."""
    widths = widths_of(ref.shape[-1] if size is None else size)
    return tuple(load_rows(ref, index, is_real, (sum(widths[:place]), width)) for place, width in enumerate(widths))


def _mask(where: tuple[jax.Array, ...], is_real: jax.Array | None, columns: Columns | None) -> jax.Array | None:
    """Which places `[R, columns]` there are; None: all."""
    shape = where[0].shape
    mask = None if is_real is None else jnp.broadcast_to(is_real[:, None], shape)
    if columns is None or len(columns) < 4 or columns[3] == columns[1]:
        return mask
    is_there = jnp.broadcast_to(jnp.arange(columns[1], dtype=jnp.int32)[None, :] < columns[3], shape)
    return is_there if mask is None else mask & is_there


def _address(ref: Any, index: tuple[Any, ...], columns: Columns | None) -> tuple[jax.Array, ...]:
    # The last axis is indexed too, and not sliced: JAX's interpreter takes no mixture of index arrays and slices.
    first, width, step = (*(columns or (0, ref.shape[-1])), 1)[:3]
    (num_rows,) = {i.shape[0] for i in index if jnp.ndim(i)}
    column = jnp.arange(width, dtype=jnp.int32)
    column = first + (column if step == 1 else step * column)
    rows = (jnp.broadcast_to(i[:, None] if jnp.ndim(i) else i, (num_rows, width)) for i in index)
    return (*rows, jnp.broadcast_to(column[None, :], (num_rows, width)))


@dataclasses.dataclass(frozen=True)
class SequenceKv:
    """K and V of one kv head of one sequence, in tiles of `tile_tokens`."""

    k_pages: Any
    """The cache's refs `[num_pages, K, page_size, H]`, of words `[.., H / 4]` where it is float8."""
    v_pages: Any
    page_table: Any
    """Ref `[S, P]`."""
    seq: jax.Array
    head: jax.Array
    first: jax.Array
    """KV positions in view, first and last: outside of them V may hold NaN and is read as zeros."""
    last: jax.Array
    tile_tokens: int
    head_dim: int
    """H of the queries: where values are part of keys, entries may be longer."""
    value_dim: int | None = None
    """How many of the first numbers of a key are its value; None: values are of v_pages."""

    @property
    def tile_range(self) -> tuple[jax.Array, jax.Array]:
        """The first tile in view, and the tile after the last."""
        return self.first // self.tile_tokens, (self.last + self.tile_tokens) // self.tile_tokens

    @property
    def value_widths(self) -> tuple[int, ...]:
        """Numbers of each part, or plane, of a value."""
        if holds_words(self.v_pages):
            return (self.v_pages.shape[3],) * PLANES
        return value_widths(self.head_dim, self.value_dim)

    def position(self, tile: jax.Array, _page: jax.Array | None = None) -> jax.Array:
        """KV positions of a tile, `[tile_tokens]`, whatever its page."""
        return tile * self.tile_tokens + jnp.arange(self.tile_tokens, dtype=jnp.int32)

    def page(self, tile: jax.Array) -> jax.Array:
        """The page of a tile that lies in one page, else those of its tokens `[tile_tokens]`; any page past the end."""
        page_size = self.k_pages.shape[2]
        position = tile * self.tile_tokens if page_size % self.tile_tokens == 0 else self.position(tile)
        # A padding row has no last position, but looks up a page all the same. Positions aren't negative, so lax's
        # division suffices; it is shorter than one that rounds down.
        page_index = lax.div(jnp.minimum(position, jnp.maximum(self.last, 0)), jnp.int32(page_size))
        return self.page_table[self.seq, page_index]

    def load(self, tile: jax.Array, page: jax.Array, is_masked: bool, dtype: Any) -> tuple[Any, Any]:
        """K and V of a tile whose page is known, for dot products with `dtype`.

        They are tuples of arrays `[tile_tokens, ...]`: the parts of rows, or the planes of a float8 cache. Unless
        is_masked, all of the tile has to be in view. K may hold anything where it isn't: its scores are masked.
        """
        position = self.position(tile)
        in_view = (position >= self.first) & (position <= self.last) if is_masked else None
        index = (page, self.head, lax.rem(position, jnp.int32(self.k_pages.shape[2])))
        if self.value_dim is None:
            k, v = load_parts(self.k_pages, index, None), load_parts(self.v_pages, index, in_view)
        else:
            k = load_parts(self.k_pages, index, in_view, self.head_dim)
            v = k[: len(self.value_widths)]
        is_words = holds_words(self.k_pages)
        k, v = (tuple(part.astype(dtype) for part in (unpack(*each) if is_words else each)) for each in (k, v))
        return k, v
