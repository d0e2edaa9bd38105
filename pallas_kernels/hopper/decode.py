"""`paged_decode_attention` as a Pallas kernel for Hopper (Mosaic GPU): a program per (item, kv head).

Owns sizes, the call, and how results leave a program; `decode_program` computes them. An item is a range of KV tiles of
one sequence (`partition`). K and V are read once for all query heads of a kv head, which are the first of 64 rows.
Called through `hopper.BACKEND`.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import tuning
from pallas_kernels.hopper.common import COPY_ROWS, SWIZZLE_BYTES, WGMMA_ROWS, gpu_kernel, operand, refuse_operands
from pallas_kernels.hopper.decode_program import Program, Ring, float8_columns
from pallas_kernels.options import AttentionOptions
from pallas_kernels.paged_kv import FLOAT8, PagedKv
from pallas_kernels.partition import (
    BEGIN,
    END,
    POSITION,
    SEQUENCE,
    SPLIT,
    merge_splits,
    plan_splits,
    split_sequences,
)


def refuse_decode(q: jax.Array, kv: PagedKv) -> str | None:
    """Why the kernel can't take q `[S, N, H]` and the cache, or None when it can."""
    if (reason := refuse_operands(q, kv)) is not None:
        return reason
    head_dim, num_groups = q.shape[2], q.shape[1] // kv.num_kv_heads
    if head_dim % 64 or head_dim > 256:
        return f"head size is {head_dim}; it takes multiples of 64 up to 256"
    if num_groups > WGMMA_ROWS:
        return f"{num_groups} query heads share a kv head; it takes at most {WGMMA_ROWS}"
    return None


def pad_queries(q: jax.Array, num_kv_heads: int) -> jax.Array:
    """q `[S, N, H]` as `attend_padded` takes it: `[S, K, G', H]`, G' the multiple of 8 from G = N / K on, zeros behind.

    A copy to shared memory moves 8 rows, and the last heads would read past the array.
    """
    num_seqs, num_heads, head_dim = q.shape
    grouped = q.reshape(num_seqs, num_kv_heads, -1, head_dim)
    return jnp.pad(grouped, ((0, 0), (0, 0), (0, -(num_heads // num_kv_heads) % COPY_ROWS), (0, 0)))


@functools.partial(jax.jit, static_argnames=("options", "interpret"))
def decode_attention(q: jax.Array, kv: PagedKv, options: AttentionOptions, interpret: bool) -> jax.Array:
    """See `backend.Decode`."""
    num_groups = q.shape[1] // kv.num_kv_heads
    padded = pad_queries(q, kv.num_kv_heads)
    return attend_padded(padded, kv, num_groups, options, interpret).reshape(q.shape)


def attend_padded(
    padded: jax.Array, kv: PagedKv, num_groups: int, options: AttentionOptions, interpret: bool
) -> jax.Array:
    """The decode of queries that are padded already: `[S, N * H]` in their dtype.

    padded: `[S, K, G', H]` as `pad_queries` makes it, from a kernel that writes queries anyway, for example. What is
    behind the first num_groups (G) of its rows has no effect.
    """
    num_seqs, num_kv_heads, _, head_dim = padded.shape
    q_like: Any = jax.ShapeDtypeStruct((num_seqs, num_kv_heads * num_groups, head_dim), padded.dtype)
    blocks = tuning.blocks("paged_decode_attention", "mosaic_gpu", tuning.shape_class(q_like, kv))
    plan = plan_splits(kv, options, blocks)
    splits = split_sequences(plan, kv.lengths, options)
    out_type: Any = jax.ShapeDtypeStruct(padded.shape, padded.dtype)
    if plan.max_splits > 1:
        out_type = (
            jax.ShapeDtypeStruct((2, plan.max_splits, *padded.shape), padded.dtype),
            jax.ShapeDtypeStruct((plan.max_splits, num_seqs, num_kv_heads, WGMMA_ROWS), jnp.float32),
        )
    out = gpu_kernel(
        functools.partial(_decode_kernel, options=options, interpret=interpret),
        name="paged_decode_attention",
        out_type=out_type,
        scratch_types=_scratch(padded.dtype, kv, blocks),
        grid=(plan.num_items, num_kv_heads),  # the last is the fastest: the heads of a page lie side by side
        grid_names=("item", "kv_head"),
        interpret=interpret,
        approx_math=True,
        reduction_scratch_bytes=0,  # rows are reduced within a warp
    )(padded, kv.k, kv.v, kv.page_table, splits.items)
    if plan.max_splits == 1:
        return out[:, :, :num_groups].reshape(num_seqs, -1)
    rounded, rest = out[0][..., :num_groups, :].astype(jnp.float32)
    parts = (rounded + rest).reshape(plan.max_splits, *q_like.shape)
    lse = out[1][..., :num_groups].reshape(parts.shape[:3])
    return merge_splits(parts, lse, splits.count).astype(padded.dtype).reshape(num_seqs, -1)


def _scratch(dtype: Any, kv: PagedKv, blocks: dict[str, int]) -> dict[str, Any]:
    """The shared memory of a program for queries of a dtype."""
    num_stages, tile_tokens = blocks["num_stages"], blocks["tile_tokens"]
    is_float8 = kv.dtype == FLOAT8
    row_bytes = float8_columns(kv.head_dim) if is_float8 else SWIZZLE_BYTES
    tiles = operand((num_stages, tile_tokens, kv.head_dim), kv.dtype, row_bytes)
    copies = tile_tokens // math.gcd(kv.page_size, tile_tokens)
    arrived = plgpu.Barrier(num_arrivals=copies, num_barriers=num_stages)
    scratch = {
        "q_tile": operand((WGMMA_ROWS, kv.head_dim), dtype),
        "q_arrived": plgpu.Barrier(num_arrivals=1),
        "k_tiles": tiles,
        "k_arrived": arrived,
        "v_tiles": tiles,
        "v_arrived": arrived,
    }
    if is_float8:
        scratch["wide_k"] = scratch["wide_v"] = operand((tile_tokens, kv.head_dim), dtype)
    return scratch


def _decode_kernel(
    q_ref: Any, k_pages_ref: Any, v_pages_ref: Any, page_table_ref: Any, items_ref: Any, out_ref: Any,
    lse_ref: Any = None, *, q_tile: Any, q_arrived: Any, k_tiles: Any, k_arrived: Any, v_tiles: Any, v_arrived: Any,
    wide_k: Any = None, wide_v: Any = None, options: AttentionOptions, interpret: bool,
) -> None:  # fmt: skip
    item, kv_head = (lax.axis_index(name) for name in ("item", "kv_head"))
    columns = (SEQUENCE, BEGIN, END, POSITION, SPLIT)
    seq, begin, end, last, split = (items_ref[item, column] for column in columns)
    first: Any = 0 if options.sliding_window is None else lax.max(last - options.sliding_window + 1, 0)
    program = Program(
        Ring(k_pages_ref, k_tiles, k_arrived, wide_k, kv_head), Ring(v_pages_ref, v_tiles, v_arrived, wide_v, kv_head),
        page_table_ref, seq, first, last, options, interpret,
    )  # fmt: skip

    def attend() -> tuple[jax.Array, jax.Array]:
        plgpu.copy_gmem_to_smem(q_ref.at[seq, kv_head], q_tile.at[pl.ds(0, q_ref.shape[2])], q_arrived)
        program.start_first_tiles(begin, end)
        plgpu.barrier_wait(q_arrived)
        return program.attend(q_tile, begin, end)

    def write_part() -> None:
        out, lse = attend()
        lse_ref[split, seq, kv_head] = lse
        # A float32 leaves in two rounds through the queries' shared memory: its value in q's dtype, then the remainder.
        rounded = out.astype(q_tile.dtype)
        _write(rounded, q_tile, out_ref.at[0, split, seq, kv_head])
        _write(out - rounded.astype(jnp.float32), q_tile, out_ref.at[1, split, seq, kv_head])

    if lse_ref is None:
        _write(attend()[0], q_tile, out_ref.at[seq, kv_head])
    else:
        pl.when(begin < end)(write_part)  # an item that doesn't exist holds nothing


def _write(rows: jax.Array, staging: Any, out_ref: Any) -> None:
    """Write the first rows of `[64, H]` to global memory, through shared memory that is free again on return."""
    staging[...] = rows.astype(staging.dtype)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(staging.at[pl.ds(0, out_ref.shape[0])], out_ref)
    plgpu.wait_smem_to_gmem(0)
