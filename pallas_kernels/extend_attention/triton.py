"""`paged_extend_attention` as a Pallas kernel for the Triton backend: one program per (query tile, kv head).

A query tile holds queries of one sequence; which one and where it starts is a small table computed on the device
before the kernel. The query heads that share a kv head are packed into the rows beside the queries, so that K and V
are loaded once for all of them. Called by `api` only.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.extend_attention.query_tiles import query_tiles
from pallas_kernels.options import AttentionOptions
from pallas_kernels.triton_rows import attend_rows, load_rows, store_rows
from pallas_kernels.xla_rows import first_visible

# Rows of a tile, queries times query heads per kv head: what one program's registers hold well at head size 128.
_TILE_ROWS = 64


@functools.partial(jax.jit, static_argnames=("options", "interpret"))
def extend_attention(
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    page_table: jax.Array,
    lengths: jax.Array,
    query_offsets: jax.Array,
    options: AttentionOptions,
    interpret: bool,
) -> jax.Array:
    """See `pallas_kernels.paged_extend_attention`."""
    num_groups_padded = pl.next_power_of_2(q.shape[1] // k_pages.shape[1])
    tile_queries = _TILE_ROWS // num_groups_padded
    tiles = query_tiles(lengths, query_offsets, q.shape[0], tile_queries)
    kernel = functools.partial(_extend_kernel, tile_queries=tile_queries, options=options)
    out: jax.Array = pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        grid=(tiles.shape[0], k_pages.shape[1]),
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=2),
        interpret=interpret,
        name="paged_extend_attention",
    )(q, k_pages, v_pages, page_table, tiles)
    return out


def _extend_kernel(
    q_ref: Any, k_pages_ref: Any, v_pages_ref: Any, page_table_ref: Any, tiles_ref: Any, out_ref: Any,
    *, tile_queries: int, options: AttentionOptions
) -> None:  # fmt: skip
    tile, kv_head = pl.program_id(0), pl.program_id(1)
    num_groups = q_ref.shape[1] // k_pages_ref.shape[1]
    num_groups_padded = pl.next_power_of_2(num_groups)
    seq, begin, end, first = (tiles_ref[tile, i] for i in range(4))

    row = jnp.arange(tile_queries * num_groups_padded, dtype=jnp.int32)
    query, group = row // num_groups_padded, row % num_groups_padded
    token, head = begin + query, kv_head * num_groups + group
    is_real = (token < end) & (group < num_groups)
    result = attend_rows(
        load_rows(q_ref, (token, head), is_real),
        jnp.where(is_real, first + query, -1),
        (first_visible(first, options), first + end - begin - 1),
        seq,
        kv_head,
        k_pages_ref,
        v_pages_ref,
        page_table_ref,
        options,
    )
    store_rows(out_ref, (token, head), is_real, result)
