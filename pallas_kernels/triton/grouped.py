"""`attend_to_groups` as a Pallas kernel for the Triton backend: a program per (block of heads, split, token).

What a token sees lies on a line of tiles: those of its window, then those of entries of groups, all that have ended or
the ones that an index chose. A program goes along a part of the line with one running softmax. Where tokens are few,
each one's line is cut into splits, which `merge` puts together again. Called through `triton.BACKEND`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels import tuning
from pallas_kernels.grouped_tokens import GroupedCache, places_of
from pallas_kernels.options import AttentionOptions
from pallas_kernels.paged_kv import QUERY_DTYPES
from pallas_kernels.target import target_device
from pallas_kernels.triton.chosen import ChosenKv
from pallas_kernels.triton.common import (
    MIN_DOT,
    Side,
    TiledKv,
    attend_to_sides,
    head_block,
    load_queries,
    refuse_attention,
    store_output,
    tile_rows_for,
)
from pallas_kernels.triton.merge import merge_splits
from pallas_kernels.triton.tiles import SequenceKv

# Columns of the table of places: a token's sequence and position (-1 for padding), and how many entries of groups it
# sees, or can have chosen.
_SEQUENCE, _POSITION, _END = range(3)


def refuse_attend_to_groups(q: jax.Array, cache: GroupedCache) -> str | None:
    """Why this backend can't take q `[T, N, H]` and the cache, or None when it can."""
    if cache.tokens.dtype not in QUERY_DTYPES:
        return f"the cache holds {cache.tokens.dtype}, of which it can't gather entries"
    return refuse_attention(q, cache.of_tokens())


@functools.partial(jax.jit, static_argnames=("size", "options", "interpret"))
def attend_to_groups(
    q: jax.Array, chosen: jax.Array | None, query_offsets: jax.Array, cache: GroupedCache, size: int,
    sinks: jax.Array | None, options: AttentionOptions, interpret: bool,
) -> jax.Array:  # fmt: skip
    """See `backend.AttendToGroups`."""
    num_tokens, num_heads, head_dim = q.shape
    blocks = tuning.blocks("attend_to_groups", "triton", tuning.shape_class(q, cache.of_tokens(), num_tokens))
    num_rows = min(tile_rows_for(blocks["head_rows"]), max(MIN_DOT, pl.next_power_of_2(num_heads)))
    head_blocks = pl.cdiv(num_heads, num_rows)
    most_entries = cache.most_groups if chosen is None else chosen.shape[1]
    window = options.longest_view(cache.of_tokens().max_len)
    cut = _Cut.of(blocks, head_blocks * num_tokens, window, most_entries)
    places, groups = _places(query_offsets, cache.lengths, num_tokens, size, most_entries), cache.groups
    if groups is not None and chosen is not None:
        groups = groups.reshape(-1, groups.shape[3])
    is_split = cut.num_splits > 1
    out_shape: Any = (jax.ShapeDtypeStruct(q.shape, q.dtype),)
    if is_split:
        out_shape = tuple(jax.ShapeDtypeStruct((cut.num_splits, *dims), jnp.float32) for dims in (q.shape, q.shape[:2]))
    out, *lse = pl.pallas_call(
        functools.partial(
            _kernel,
            in_page=0 if cache.groups is None else cache.groups.shape[2],
            num_rows=num_rows,
            head_blocks=head_blocks,
            cut=cut,
            options=dataclasses.replace(options, value_dim=head_dim),
        ),
        out_shape=out_shape,
        # Heads first: programs that run side by side read the same tiles.
        grid=(head_blocks, cut.num_splits, num_tokens),
        compiler_params=plgpu.CompilerParams(num_warps=blocks["num_warps"], num_stages=blocks["num_stages"]),
        interpret=interpret,
        name="attend_to_groups",
    )(q, cache.tokens, groups, cache.page_table, chosen, places, None if is_split else sinks)
    if not is_split:
        return out
    line = cut.line(options, places[:, _POSITION], places[:, _END])
    counts = -(-line.num_tiles // line.split_tiles)
    parts = out.reshape(1, cut.num_splits, num_tokens, 1, num_heads, head_dim)
    return merge_splits(parts, lse[0][:, :, None], counts, sinks, num_heads, q.dtype, interpret)


def _places(query_offsets: jax.Array, lengths: jax.Array, num_tokens: int, size: int, most_entries: int) -> jax.Array:
    """The table of places, `[T, 3]` int32; see above. XLA computes it once for all layers that are alike."""
    seqs, positions = places_of(query_offsets, lengths, num_tokens)
    end = jnp.minimum((positions + 1) // size, most_entries) if size else jnp.zeros_like(positions)
    return jnp.stack([seqs, positions, end], axis=1).astype(jnp.int32)


class _Line(NamedTuple):
    """The tiles that a token sees, or each of `[T]`: of its window, then of entries of groups.

    Attributes:
      first: the first tile of the window, of its sequence's.
      in_window: tiles of the window.
      num_tiles: those and the ones of entries.
      split_tiles: tiles of a split, but for the last one.
    """

    first: jax.Array
    in_window: jax.Array
    num_tiles: jax.Array
    split_tiles: jax.Array


class _Cut(NamedTuple):
    """How lines are cut.

    Attributes:
      tile_tokens: tokens, or entries, of a tile.
      num_splits: the most splits of a line.
      min_tiles: the fewest tiles of a split, but for the last one.
    """

    tile_tokens: int
    num_splits: int
    min_tiles: int

    @classmethod
    def of(cls, blocks: Mapping[str, int], programs_per_split: int, window: int, most_entries: int) -> _Cut:
        """One that fills the target device, where so many programs have a split each."""
        tile_tokens = blocks["tile_tokens"]
        min_tiles = max(1, blocks["min_split_tokens"] // tile_tokens)
        most_tiles = pl.cdiv(window, tile_tokens) + 1 + pl.cdiv(most_entries, tile_tokens)
        at_once = target_device().num_cores * blocks["programs_per_core"] // programs_per_split
        return cls(tile_tokens, max(1, min(at_once, most_tiles // min_tiles)), min_tiles)

    def line(self, options: AttentionOptions, position: jax.Array, end: jax.Array) -> _Line:
        """Of tokens at these positions that see entries up to `end`; of padding it has no tiles."""
        size = jnp.int32(self.tile_tokens)
        first = lax.div(options.first_visible(position), size)
        in_window = lax.div(position + size, size) - first  # none of position -1
        num_tiles = in_window + lax.div(end + size - 1, size)
        even = lax.div(num_tiles + (self.num_splits - 1), jnp.int32(self.num_splits))
        return _Line(first, in_window, num_tiles, jnp.maximum(even, self.min_tiles))


def _kernel(
    q_ref: Any, tokens_ref: Any, groups_ref: Any, page_table_ref: Any, chosen_ref: Any, places_ref: Any, sinks_ref: Any,
    out_ref: Any, lse_ref: Any = None, *, in_page: int, num_rows: int, head_blocks: int, cut: _Cut,
    options: AttentionOptions,
) -> None:  # fmt: skip
    _, block = head_block(1, head_blocks)
    split, token = pl.program_id(1), pl.program_id(2)
    seq, position, end = (places_ref[token, column] for column in (_SEQUENCE, _POSITION, _END))
    row = jnp.arange(num_rows, dtype=jnp.int32)
    head = row if block is None else block * num_rows + row
    line = cut.line(options, position, end)
    begin, stop = jnp.int32(0), line.num_tiles
    if lse_ref is not None:
        begin = split * line.split_tiles
        stop = jnp.minimum(begin + line.split_tiles, stop)
    # A split without tiles is not read; a token without any, where none is split, gets zeros.
    is_real = (head < q_ref.shape[1]) & ((begin < stop) | (lse_ref is None))
    common = cut.tile_tokens, q_ref.shape[2], options.value_dim
    window = SequenceKv(
        tokens_ref, tokens_ref, page_table_ref, seq, jnp.int32(0), options.first_visible(position), position, *common
    )
    rows = load_queries(q_ref, (token, head), is_real, jnp.broadcast_to(position, row.shape), window, sinks_ref)
    tiles = line.first + jnp.minimum(begin, line.in_window), line.first + jnp.minimum(stop, line.in_window)
    sides = [Side(rows, window, tiles, options)]
    if groups_ref is not None:
        tiles = jnp.maximum(begin - line.in_window, 0), jnp.maximum(stop - line.in_window, 0)
        if chosen_ref is None:
            last = end - 1
            entries: TiledKv = SequenceKv(
                groups_ref, groups_ref, page_table_ref, seq, jnp.int32(0), jnp.int32(0), last, *common
            )
        else:
            last = jnp.int32(0)  # where chosen ones stand
            entries = ChosenKv(groups_ref, in_page, page_table_ref, chosen_ref, token, seq, *common)
        of_groups = dataclasses.replace(rows, position=jnp.broadcast_to(last, row.shape))
        sides.append(Side(of_groups, entries, tiles, dataclasses.replace(options, sliding_window=None)))
    out, lse = attend_to_sides(sides)
    place = (token, head) if lse_ref is None else (split, token, head)
    store_output(out_ref, place, is_real, out)
    if lse_ref is not None:
        plgpu.store(lse_ref.at[place], lse, mask=is_real)
