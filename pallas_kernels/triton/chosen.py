"""`attend_to_chosen` as a Pallas kernel for the Triton backend: a program per (block of heads, split, token).

A program gathers the entries that its token has chosen, a tile at a time: it looks up the pages of the chosen positions
and multiplies all of its heads by the entries, which are keys and values. Where tokens are few, what each has chosen is
cut into splits of one length, which `merge` puts together again. Called through `triton.BACKEND`.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels import tuning
from pallas_kernels.options import AttentionOptions
from pallas_kernels.paged_kv import QUERY_DTYPES, PagedKv
from pallas_kernels.target import target_device
from pallas_kernels.triton.common import (
    MIN_DOT,
    attend_rows,
    head_block,
    load_queries,
    refuse_attention,
    store_output,
    tile_rows_for,
)
from pallas_kernels.triton.merge import merge_splits
from pallas_kernels.triton.tiles import load_parts, value_widths

# Where what isn't chosen stands: after every query.
_NOWHERE = 1 << 30

# Columns of the table of tokens: a token's sequence, and how many of its places may hold a position.
_SEQUENCE, _END = range(2)


def refuse_attend_to_chosen(q: jax.Array, kv: PagedKv) -> str | None:
    """Why this backend can't take q `[T, N, H]` and the cache, or None when it can."""
    if kv.dtype not in QUERY_DTYPES:
        return f"the cache holds {kv.dtype}, of which it can't gather entries"
    return refuse_attention(q, kv)


@functools.partial(jax.jit, static_argnames=("options", "interpret"))
def attend_to_chosen(
    q: jax.Array, chosen: jax.Array, query_offsets: jax.Array, kv: PagedKv, options: AttentionOptions, interpret: bool
) -> jax.Array:
    """See `backend.AttendToChosen`."""
    (num_tokens, num_heads, head_dim), count = q.shape, chosen.shape[1]
    blocks = tuning.blocks("attend_to_chosen", "triton", tuning.shape_class(q, kv, num_tokens))
    tile_tokens = blocks["tile_tokens"]
    num_rows = min(tile_rows_for(blocks["head_rows"]), max(MIN_DOT, pl.next_power_of_2(num_heads)))
    head_blocks = pl.cdiv(num_heads, num_rows)
    programs_at_once = target_device().num_cores * blocks["programs_per_core"]
    most_splits = max(1, programs_at_once // (head_blocks * num_tokens))
    split_tokens = max(-(-count // most_splits), blocks["min_split_tokens"])
    split_tiles = pl.cdiv(split_tokens, tile_tokens)
    num_splits = pl.cdiv(count, split_tiles * tile_tokens)
    tokens = _tokens(chosen, query_offsets)
    shape = (num_tokens, num_heads, sum(value_widths(head_dim, options.value_dim)))
    out_shape: Any = (jax.ShapeDtypeStruct(shape, q.dtype),)
    if num_splits > 1:
        out_shape = tuple(jax.ShapeDtypeStruct((num_splits, *dims), jnp.float32) for dims in (shape, shape[:2]))
    out, *lse = pl.pallas_call(
        functools.partial(
            _kernel,
            page_size=kv.page_size,
            tile_tokens=tile_tokens,
            num_rows=num_rows,
            head_blocks=head_blocks,
            split_tiles=split_tiles,
            options=options,
        ),
        out_shape=out_shape,
        # Heads first: programs that run side by side gather the same entries.
        grid=(head_blocks, num_splits, num_tokens),
        compiler_params=plgpu.CompilerParams(num_warps=blocks["num_warps"], num_stages=blocks["num_stages"]),
        interpret=interpret,
        name="attend_to_chosen",
    )(q, kv.k.reshape(-1, kv.head_dim), kv.page_table, chosen, tokens)
    if not lse:
        return out
    counts = -(-tokens[:, _END] // (split_tiles * tile_tokens))
    parts, lses = out.reshape(1, num_splits, num_tokens, 1, *shape[1:]), lse[0][:, :, None]
    return merge_splits(parts, lses, counts, None, num_heads, q.dtype, interpret)


def _tokens(chosen: jax.Array, query_offsets: jax.Array) -> jax.Array:
    """The table of tokens, `[T, 2]` int32; see above."""
    num_tokens, count = chosen.shape
    seq = jnp.sum(query_offsets[1:] <= jnp.arange(num_tokens)[:, None], axis=1)
    end = jnp.max(jnp.where(chosen >= 0, jnp.arange(1, count + 1), 0), axis=1)
    return jnp.stack([jnp.minimum(seq, len(query_offsets) - 2), end], axis=1).astype(jnp.int32)


@dataclasses.dataclass(frozen=True)
class ChosenKv:
    """The entries that one token has chosen, in tiles of `tile_tokens`; `attend_rows` takes it as a `SequenceKv`."""

    k_pages: Any
    """Ref `[slots, H or more]` of the cache's entries."""
    page_size: int
    page_table: Any
    """Ref `[S, P]`."""
    chosen: Any
    """Ref `[T, k]`, positions or -1."""
    token: jax.Array
    seq: jax.Array
    tile_tokens: int
    head_dim: int
    value_dim: int | None

    @property
    def v_pages(self) -> Any:
        """The same: values are part of keys."""
        return self.k_pages

    @property
    def value_widths(self) -> tuple[int, ...]:
        """Numbers of each part of a value."""
        return value_widths(self.head_dim, self.value_dim)

    def page(self, tile: jax.Array) -> jax.Array:
        """The slots `[tile_tokens]` of a tile's entries, negative where nothing is chosen."""
        place = tile * self.tile_tokens + jnp.arange(self.tile_tokens, dtype=jnp.int32)
        # Behind a token's positions stands -1: that bound would take a register through the loop, this one takes none.
        position = plgpu.load(self.chosen.at[self.token, place], mask=place < self.chosen.shape[1], other=-1)
        # Positions aren't negative where they count, so lax's division suffices; page -1 makes all slots negative.
        page_size = jnp.int32(self.page_size)
        index = self.seq, lax.div(position, page_size)
        page = plgpu.load(self.page_table.at[index], mask=position >= 0, other=-1)
        return page * page_size + lax.rem(position, page_size)

    def position(self, _tile: jax.Array, page: jax.Array) -> jax.Array:
        """Where a tile's entries stand, `[tile_tokens]`: with the query if they are chosen, else after it."""
        return jnp.where(page >= 0, 0, _NOWHERE)

    def load(self, _tile: jax.Array, page: jax.Array, _is_masked: bool, dtype: Any) -> tuple[Any, Any]:
        """K and V of a tile for dot products with `dtype`, the parts of rows; zeros where nothing is chosen."""
        k = tuple(part.astype(dtype) for part in load_parts(self.k_pages, (page,), page >= 0, self.head_dim))
        return k, k[: len(self.value_widths)]


def _kernel(
    q_ref: Any, entries_ref: Any, page_table_ref: Any, chosen_ref: Any, tokens_ref: Any, out_ref: Any,
    lse_ref: Any = None, *, page_size: int, tile_tokens: int, num_rows: int, head_blocks: int, split_tiles: int,
    options: AttentionOptions,
) -> None:  # fmt: skip
    _, block = head_block(1, head_blocks)
    split, token = pl.program_id(1), pl.program_id(2)
    seq, end = tokens_ref[token, _SEQUENCE], tokens_ref[token, _END]
    row = jnp.arange(num_rows, dtype=jnp.int32)
    head = row if block is None else block * num_rows + row
    begin, stop = jnp.int32(0), lax.div(end + tile_tokens - 1, jnp.int32(tile_tokens))
    if lse_ref is not None:
        begin = split * split_tiles
        stop = jnp.minimum(begin + split_tiles, stop)
    # A split without any is not read; a token without any, where none is split, gets zeros.
    is_real = (head < q_ref.shape[1]) & ((begin < stop) | (lse_ref is None))
    kv = ChosenKv(
        entries_ref, page_size, page_table_ref, chosen_ref, token, seq, tile_tokens, q_ref.shape[2], options.value_dim
    )
    rows = load_queries(q_ref, (token, head), is_real, jnp.zeros_like(row), kv)
    out, lse = attend_rows(rows, kv, (begin, stop), options)
    place = (token, head) if lse_ref is None else (split, token, head)
    store_output(out_ref, place, is_real, out)
    if lse_ref is not None:
        plgpu.store(lse_ref.at[place], lse, mask=is_real)
