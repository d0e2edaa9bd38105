"""`paged_extend_attention` as a Pallas kernel for the Triton backend: one program per (kv head, block of heads,
query tile).

A query tile holds queries of one sequence; a small table, computed on the device before the kernel, has the sequence of
each tile and where it starts. The query heads that share a kv head are packed into the rows beside the queries, so that
K and V are loaded once for all of them; many of them are several blocks. Called through `triton.BACKEND`.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels import tuning
from pallas_kernels.options import AttentionOptions
from pallas_kernels.paged_kv import FLOAT8, PagedKv
from pallas_kernels.partition import BEGIN, END, POSITION, SEQUENCE, query_tiles
from pallas_kernels.target import target_device
from pallas_kernels.triton import float8
from pallas_kernels.triton.common import WIDE_HEAD, attend_rows, head_block, load_queries, store_output, tile_rows_for
from pallas_kernels.triton.tiles import SequenceKv, value_widths


@functools.partial(jax.jit, static_argnames=("options", "interpret"))
def extend_attention(
    q: jax.Array,
    query_offsets: jax.Array,
    kv: PagedKv,
    sinks: jax.Array | None,
    options: AttentionOptions,
    interpret: bool,
    seen: jax.Array | None = None,
    biases: jax.Array | None = None,
) -> jax.Array:
    """See `backend.Extend` and `ExtendBiased`."""
    num_kv_heads, k_pages, v_pages = kv.num_kv_heads, kv.k, kv.v
    blocks = tuning.blocks("paged_extend_attention", "triton", tuning.shape_class(q, kv))
    num_groups, tile_rows = q.shape[1] // num_kv_heads, tile_rows_for(blocks["tile_rows"])
    tile_heads = min(tile_rows, pl.next_power_of_2(num_groups))
    tile_queries = tile_rows // tile_heads
    head_blocks = pl.cdiv(num_groups, tile_heads)
    tiles = query_tiles(kv.lengths, query_offsets, q.shape[0], tile_queries)
    # ptxas serializes wgmma (advisory C7515) where a loop without masks precedes the one with them and the pages of a
    # tile's tokens are looked up one by one. One loop, with masks, is compiled as meant. Over heads of 512 and latents,
    # whose rows fill the registers, two loops spill.
    fills_registers = options.value_dim is not None or q.shape[2] >= WIDE_HEAD
    is_one_loop = bool(kv.page_size % blocks["tile_tokens"]) or fills_registers
    is_float8 = kv.dtype == FLOAT8
    if is_float8:
        q, k_pages, v_pages = float8.planes_first(q), *map(float8.as_words, (k_pages, v_pages))
    out: jax.Array = pl.pallas_call(
        functools.partial(
            _extend_kernel,
            tile_queries=tile_queries,
            tile_heads=tile_heads,
            head_blocks=head_blocks,
            tile_tokens=blocks["tile_tokens"],
            one_loop=is_one_loop and target_device().is_hopper,
            options=options,
        ),
        out_shape=jax.ShapeDtypeStruct((*q.shape[:2], sum(value_widths(q.shape[2], options.value_dim))), q.dtype),
        grid=(num_kv_heads * head_blocks, tiles.shape[0]),
        compiler_params=plgpu.CompilerParams(num_warps=blocks["num_warps"], num_stages=blocks["num_stages"]),
        interpret=interpret,
        name="paged_extend_attention",
    )(q, k_pages, v_pages, kv.page_table, tiles, sinks, seen, biases)
    return float8.planes_last(out) if is_float8 else out


def _extend_kernel(
    q_ref: Any, k_pages_ref: Any, v_pages_ref: Any, page_table_ref: Any, tiles_ref: Any, sinks_ref: Any, seen_ref: Any,
    biases_ref: Any, out_ref: Any, tile_queries: int, tile_heads: int, head_blocks: int, tile_tokens: int,
    one_loop: bool, options: AttentionOptions,
) -> None:  # fmt: skip
    kv_head, block = head_block(k_pages_ref.shape[1], head_blocks)
    # Begins with the last tile: later tiles of a sequence see more KV, and long tiles should not begin last.
    tile = tiles_ref.shape[0] - 1 - pl.program_id(1)
    num_groups = q_ref.shape[1] // k_pages_ref.shape[1]
    seq, begin, end, first = (tiles_ref[tile, column] for column in (SEQUENCE, BEGIN, END, POSITION))

    row = jnp.arange(tile_queries * tile_heads, dtype=jnp.int32)
    # Of one query there is one position, which no row needs to keep.
    query, group = (row // tile_heads, row % tile_heads) if tile_queries > 1 else (jnp.zeros_like(row), row)
    group = group if block is None else block * tile_heads + group
    token, head = begin + query, kv_head * num_groups + group
    is_real = (token < end) & (group < num_groups)
    kv = SequenceKv(
        k_pages_ref,
        v_pages_ref,
        page_table_ref,
        seq,
        kv_head,
        options.first_visible(first),
        first + end - begin - 1 if seen_ref is None else seen_ref[end - 1] - 1,
        tile_tokens,
        q_ref.shape[2],
        options.value_dim,
    )
    rows = load_queries(q_ref, (token, head), is_real, first + query, kv, sinks_ref)
    if seen_ref is not None:
        rows = dataclasses.replace(rows, seen=plgpu.load(seen_ref.at[token], mask=is_real, other=0))
    if biases_ref is not None:
        rows = dataclasses.replace(rows, biases=biases_ref, head=jnp.where(is_real, head, 0))
    # Without a window, all rows see what lies before the first query: most tiles of a long prompt.
    has_plain_tiles = options.sliding_window is None and not one_loop
    all_seen_until = (first + 1) // tile_tokens if has_plain_tiles else None
    out, _ = attend_rows(rows, kv, kv.tile_range, options, all_seen_until)
    store_output(out_ref, (token, head), is_real, out)
