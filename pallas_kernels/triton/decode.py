"""`paged_decode_attention` as a Pallas kernel for the Triton backend: a program per (kv head, sequence, KV split).

The query heads that share a kv head are the rows of one program, so that K and V are loaded once for all of them.
Called through `triton.BACKEND`.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels import tuning
from pallas_kernels.options import AttentionOptions
from pallas_kernels.paged_kv import FLOAT8, PagedKv
from pallas_kernels.partition import merge_splits, num_splits_of, split_tiles
from pallas_kernels.triton import float8
from pallas_kernels.triton.common import MIN_DOT, attend_rows, load_queries, store_output
from pallas_kernels.triton.tiles import SequenceKv


@functools.partial(jax.jit, static_argnames=("options", "interpret"))
def decode_attention(q: jax.Array, kv: PagedKv, options: AttentionOptions, interpret: bool) -> jax.Array:
    """See `backend.Decode`."""
    num_seqs, num_heads, _ = q.shape
    num_kv_heads, k_pages, v_pages = kv.num_kv_heads, kv.k, kv.v
    blocks = tuning.blocks("paged_decode_attention", "triton", tuning.shape_class(q, kv))
    num_splits = num_splits_of(kv, options, blocks)
    is_float8 = kv.dtype == FLOAT8
    if is_float8:
        q, k_pages, v_pages = float8.planes_first(q), *map(float8.as_words, (k_pages, v_pages))
    part = jax.ShapeDtypeStruct((num_splits, *q.shape), q.dtype if num_splits == 1 else jnp.float32)
    lse = jax.ShapeDtypeStruct((num_splits, num_seqs, num_heads), jnp.float32)
    parts = pl.pallas_call(
        functools.partial(_decode_kernel, tile_tokens=blocks["tile_tokens"], options=options),
        out_shape=(part,) if num_splits == 1 else (part, lse),
        # Heads first: programs that run side by side read tiles that lie side by side.
        grid=(num_kv_heads, num_seqs, num_splits),
        compiler_params=plgpu.CompilerParams(num_warps=blocks["num_warps"], num_stages=blocks["num_stages"]),
        interpret=interpret,
        name="paged_decode_attention",
    )(q, k_pages, v_pages, kv.page_table, kv.lengths)
    out: jax.Array = parts[0][0] if num_splits == 1 else merge_splits(*parts).astype(q.dtype)
    return float8.planes_last(out) if is_float8 else out


def _decode_kernel(
    q_ref: Any, k_pages_ref: Any, v_pages_ref: Any, page_table_ref: Any, lengths_ref: Any, out_ref: Any,
    lse_ref: Any = None, *, tile_tokens: int, options: AttentionOptions
) -> None:  # fmt: skip
    kv_head, seq, split = (pl.program_id(axis) for axis in range(3))
    num_groups = q_ref.shape[1] // k_pages_ref.shape[1]
    row = jnp.arange(max(MIN_DOT, pl.next_power_of_2(num_groups)), dtype=jnp.int32)
    head = kv_head * num_groups + row
    is_real = row < num_groups
    last = lengths_ref[seq] - 1
    kv = SequenceKv(
        k_pages_ref, v_pages_ref, page_table_ref, seq, kv_head, options.first_visible(last), last, tile_tokens
    )
    rows = load_queries(q_ref, (seq, head), is_real, jnp.broadcast_to(last, row.shape), kv)
    tiles = split_tiles((kv.first, kv.last), split, out_ref.shape[0], tile_tokens)
    out, lse = attend_rows(rows, kv, tiles, options)
    store_output(out_ref, (split, seq, head), is_real, out)
    if lse_ref is not None:
        plgpu.store(lse_ref.at[split, seq, head], lse, mask=is_real)
