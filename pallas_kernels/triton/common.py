"""Attention of a block of query rows of one kv head over the pages of one sequence, inside a Triton kernel.

Owns the running softmax. Never knows the grid, nor how a tile of KV is read: a kernel says which rows it holds, at
which position each stands, and which tiles they see. Every array here has power-of-two extents, as Triton demands.

The loop's loads are what the Triton compiler turns into asynchronous copies, some tiles ahead (`num_stages`).
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.gpu_compiler import xla_ptxas
from pallas_kernels.options import AttentionOptions, places_of_biases
from pallas_kernels.paged_kv import FLOAT8, PagedKv
from pallas_kernels.partition import EMPTY_LSE, LOG2_E
from pallas_kernels.target import target_device
from pallas_kernels.triton.float8 import PLANES, UNPACKED_SCALE
from pallas_kernels.triton.tiles import holds_words, load_parts, load_rows, store_rows, widths_of

# The smallest extent that Triton's dot takes on any axis.
MIN_DOT = 16

# The most rows of a tile that Triton multiplies by mma.sync on Hopper: from 64 on it takes `wgmma`.
MOST_ROWS_WITHOUT_WGMMA = 32

# A head size whose rows fill the registers.
WIDE_HEAD = 512

# The most query heads of a kv head.
MOST_GROUPS = 128

# Arrays `[R, ..]` that are rows together: parts of columns (see `widths_of`), mostly one, or the planes of a float8
# cache (see `float8`).
Parts: TypeAlias = tuple[jax.Array, ...]


def refuse_attention(q: jax.Array, kv: PagedKv) -> str | None:
    """Why the attention kernels can't take q `[T, N, H]` and the cache, or None when they can."""
    if kv.dtype == FLOAT8 and q.shape[2] != kv.head_dim:
        return f"heads of {q.shape[2]} are a part of float8 entries of {kv.head_dim}, whose words it can't cut"
    head_dim, num_groups = q.shape[2], q.shape[1] // kv.num_kv_heads
    smallest, most_parts, sums = (MIN_DOT * PLANES, 1, "") if kv.dtype == FLOAT8 else (MIN_DOT, 2, " and sums of two")
    widths = widths_of(head_dim)
    if widths[-1] < smallest or len(widths) > most_parts:
        return f"head size is {head_dim}; with a {kv.dtype} cache it takes powers of two from {smallest}{sums}"
    if num_groups > MOST_GROUPS:
        return f"{num_groups} query heads share a kv head; it takes at most {MOST_GROUPS}"
    return None


def tile_rows_for(num_rows: int) -> int:
    """`num_rows`, or fewer where `ptxas` may compile the `wgmma` of so many to wrong code: see `gpu_compiler`."""
    device = target_device()
    suspect = device.is_hopper and device.is_here and (ptxas := xla_ptxas()) is not None and ptxas.is_suspect
    return min(num_rows, MOST_ROWS_WITHOUT_WGMMA) if suspect else num_rows


def head_block(num_kv_heads: int, num_blocks: int) -> tuple[jax.Array, jax.Array | None]:
    """The kv head of a program, and which block of its query heads it has, by the first axis of the grid.

    There are so many blocks of each kv head; None: the only one. The only kv head is a constant, and takes no register.
    """
    place = pl.program_id(0)
    if num_kv_heads == 1:
        return jnp.int32(0), None if num_blocks == 1 else place
    return (place, None) if num_blocks == 1 else (lax.div(place, num_blocks), lax.rem(place, num_blocks))


class TiledKv(Protocol):
    """K and V that rows attend to, in tiles: a `SequenceKv`, or what a token has chosen."""

    @property
    def k_pages(self) -> Any:
        """The cache's refs, as of a `SequenceKv`."""
        ...

    @property
    def v_pages(self) -> Any:
        """The same of values."""
        ...

    @property
    def value_widths(self) -> tuple[int, ...]:
        """Numbers of each part, or plane, of a value."""
        ...

    def page(self, tile: jax.Array) -> Any:
        """What `position` and `load` need to know of a tile: looked up a tile ahead."""
        ...

    def position(self, tile: jax.Array, page: Any) -> jax.Array:
        """KV positions of a tile, `[tile_tokens]`."""
        ...

    def load(self, tile: jax.Array, page: Any, is_masked: bool, dtype: Any) -> tuple[Any, Any]:
        """K and V of a tile, for dot products with `dtype`: tuples of arrays `[tile_tokens, ...]`."""
        ...


@dataclasses.dataclass(frozen=True)
class Rows:
    """The queries of a program."""

    q: Parts
    """The queries in the form that the dot products take."""
    scale: jax.Array | float
    """A factor on the products q . k beside the softmax's own scale: `[R]` or one number."""
    position: jax.Array
    """`[R]`."""
    sinks: jax.Array | None = None
    """`[R]`, those of the rows' heads, where they count; None where something else adds them to the softmax."""
    seen: jax.Array | None = None
    """`[R]`, of how many tokens, from the sequence's first, a row sees none after; None: of those up to itself."""
    biases: Any = None
    """Ref `[N, 2 B + 1]` of what is added to scores by the distance of the key; None: nothing is."""
    head: jax.Array | None = None
    """`[R]` where biases are: whose they are."""

    @property
    def head_dim(self) -> int:
        """H."""
        return sum(int(part.shape[1]) for part in self.q)


def load_queries(
    q_ref: Any,
    index: tuple[jax.Array, ...],
    is_real: jax.Array,
    position: jax.Array,
    kv: TiledKv,
    sinks_ref: Any = None,
) -> Rows:
    """Row r is at `index` of q `[.., H]`, zeros unless is_real; in the order of planes for a cache of words.

    The last of the indices is the row's head, whose sink is read from sinks_ref `[N]`, if given.
    """
    sinks = None if sinks_ref is None else plgpu.load(sinks_ref.at[index[-1]], mask=is_real, other=0.0)
    if not holds_words(kv.k_pages):
        return Rows(load_parts(q_ref, index, is_real), 1.0, position, sinks)
    width = q_ref.shape[-1] // PLANES
    q = [load_rows(q_ref, index, is_real, (plane * width, width)) for plane in range(PLANES)]
    if q_ref.dtype == jnp.float32:
        return Rows(tuple(q), UNPACKED_SCALE, position, sinks)
    # K unpacks to float16. Queries become that too, each row brought to a largest element of 1 so that all of them fit.
    wide = [plane.astype(jnp.float32) for plane in q]
    largest = functools.reduce(jnp.maximum, [jnp.max(jnp.abs(plane), axis=1) for plane in wide])
    largest = jnp.where(largest > 0, largest, 1.0)
    narrow = tuple((plane / largest[:, None]).astype(jnp.float16) for plane in wide)
    return Rows(narrow, largest * UNPACKED_SCALE, position, sinks)


def store_output(ref: Any, index: tuple[jax.Array, ...], is_real: jax.Array, out: Parts) -> None:
    """The opposite of `load_queries` for a result of `attend_rows`; rows that aren't real are not written."""
    first = 0
    for part in out:
        store_rows(ref, index, is_real, part, (first, part.shape[1]))
        first += part.shape[1]


def attend_rows(
    rows: Rows,
    kv: TiledKv,
    tiles: tuple[jax.Array, jax.Array],
    options: AttentionOptions,
    all_seen_until: jax.Array | None = None,
) -> tuple[Parts, jax.Array]:
    """Attention of `rows` over the KV tiles from tiles[0] up to before tiles[1].

    All rows see all of the tiles before `all_seen_until`, if given; these are computed without masks. Returns the
    output, float32, and `[R]` its log-sum-exp as `merge_splits` takes it. A row that sees nothing yields zeros.
    """
    begin, end = tiles
    state: Any = (kv.page(begin), *_nothing_seen(rows, kv))
    if all_seen_until is not None:
        middle = jnp.clip(all_seen_until, begin, end)
        state = lax.fori_loop(begin, middle, functools.partial(_add_tile, rows, kv, options, False), state)
        begin = middle
    state = lax.fori_loop(begin, end, functools.partial(_add_tile, rows, kv, options, True), state)
    return _finished(rows, kv, state[1:])


class Side(NamedTuple):
    """A part of what rows attend to; see `attend_to_sides`.

    Attributes:
      rows: with positions as `kv` counts them.
      kv: whose values have as many numbers as those of other sides.
      tiles: the first one, and the one after the last.
      options: with the side's own window.
    """

    rows: Rows
    kv: TiledKv
    tiles: tuple[jax.Array, jax.Array]
    options: AttentionOptions


def attend_to_sides(sides: Sequence[Side]) -> tuple[Parts, jax.Array]:
    """Attention of the same rows to all sides, by one softmax; returns what `attend_rows` does."""
    first = sides[0]
    softmax = _nothing_seen(first.rows, first.kv)
    for rows, kv, tiles, options in sides:
        state = (kv.page(tiles[0]), *softmax)
        softmax = lax.fori_loop(*tiles, functools.partial(_add_tile, rows, kv, options, True), state)[1:]
    return _finished(first.rows, first.kv, softmax)


# A running softmax in powers of two: of each row the highest score, the sum of weights, and that of weighed values.
_Softmax: TypeAlias = tuple[jax.Array, jax.Array, Parts]


def _nothing_seen(rows: Rows, kv: TiledKv) -> _Softmax:
    num_rows = rows.position.shape[0]
    return (
        jnp.full((num_rows,), -jnp.inf, jnp.float32),
        jnp.zeros((num_rows,), jnp.float32),
        tuple(jnp.zeros((num_rows, width), jnp.float32) for width in kv.value_widths),
    )


def _finished(rows: Rows, kv: TiledKv, softmax: _Softmax) -> tuple[Parts, jax.Array]:
    top, total, acc = softmax
    seen = jnp.where(total > 0, total, 1.0)
    if rows.sinks is not None:
        seen = seen + jnp.where(total > 0, jnp.exp2(rows.sinks * LOG2_E - top), 0.0)
    factor = (UNPACKED_SCALE if holds_words(kv.v_pages) else 1.0) / seen
    lse = jnp.where(total > 0, top + jnp.log(total) * LOG2_E, EMPTY_LSE)
    return tuple(part * factor[:, None] for part in acc), lse


def _add_tile(
    rows: Rows, kv: TiledKv, options: AttentionOptions, is_masked: bool, tile: jax.Array, state: Any
) -> tuple[jax.Array, jax.Array, jax.Array, Parts]:
    """One step of the running softmax, in powers of two: what the state holds of a score is score * log2(e).

    The page of a tile is looked up one step before: a chain of two loads within a step would cost the compiler's
    pipeline a stage, and the copies their head start.
    """
    page, top, total, acc = state
    k, v = kv.load(tile, page, is_masked, rows.q[0].dtype)
    kv_position = kv.position(tile, page)
    products = functools.reduce(jnp.add, map(_dot_transposed, rows.q, k))
    scores, scale = _scaled(products, rows.scale, options.scale(rows.head_dim), options.logit_soft_cap)
    if rows.biases is not None:
        assert rows.head is not None
        place = places_of_biases(rows.biases, kv_position[None, :] - rows.position[:, None])
        added = plgpu.load(rows.biases.at[jnp.broadcast_to(rows.head[:, None], place.shape), place])
        scores, scale = scores * _column(scale) + LOG2_E * added, 1.0
    if is_masked:
        stop = rows.position + 1 if rows.seen is None else rows.seen
        seen = kv_position[None, :] < stop[:, None]
        if options.sliding_window is not None:
            seen &= kv_position[None, :] > rows.position[:, None] - options.sliding_window
        scores = jnp.where(seen, scores, -jnp.inf)
    new_top = jnp.maximum(top, jnp.max(scores, axis=1) * scale)
    # While a row has seen nothing its top is -inf; any finite number then keeps the differences from being NaN.
    base = jnp.where(new_top > -jnp.inf, new_top, 0.0) if is_masked else new_top
    weights = jnp.exp2(scores * _column(scale) - base[:, None])
    shrink = jnp.exp2(top - base)
    total = total * shrink + jnp.sum(weights, axis=1)
    weights = weights.astype(v[0].dtype)
    acc = tuple(a * shrink[:, None] + _dot(weights, part) for a, part in zip(acc, v, strict=True))
    return kv.page(tile + 1), new_top, total, acc


def _scaled(
    scores: jax.Array, scale: jax.Array | float, sm_scale: float, soft_cap: float | None
) -> tuple[jax.Array, jax.Array | float]:
    """Scores, and the positive factor that makes them the exponents of 2; it is left to the exponent's own product."""
    if soft_cap is not None:
        return jnp.tanh(scores * _column(scale * (sm_scale / soft_cap))), soft_cap * LOG2_E
    return scores, scale * (sm_scale * LOG2_E)


def _column(scale: jax.Array | float) -> jax.Array | float:
    return scale if isinstance(scale, float) else scale[:, None]


def _dot_transposed(a: jax.Array, b: jax.Array) -> jax.Array:
    return _dot(a, b.T)


def _dot(a: jax.Array, b: jax.Array) -> jax.Array:
    # float32 stays float32: the default would round it to TF32.
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return lax.dot(a, b, precision=precision, preferred_element_type=jnp.float32)
