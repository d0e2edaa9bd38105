"""`paged_decode_attention` as a Pallas kernel for Hopper (Mosaic GPU): a program per (chain of items, kv head).

Owns sizes, the call, and how results leave a program; `decode_program` computes them. An item is a range of KV tiles of
one sequence, a chain the items that a program computes one after the other (`partition`). K and V are read once for all
query heads of a kv head, which are the first of 64 rows. Called through `hopper.BACKEND`.
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
from pallas_kernels.hopper.decode_program import Cursor, Program, Ring, float8_columns
from pallas_kernels.options import AttentionOptions
from pallas_kernels.paged_kv import FLOAT8, PagedKv
from pallas_kernels.partition import (
    BEGIN,
    END,
    SEQUENCE,
    SPLIT,
    chain_items,
    plan_splits,
    split_sequences,
)
from pallas_kernels.triton.merge import merge_splits

# CUDA's limit on the y axis of a grid, on which the items lie.
_MOST_BLOCKS = 65_535


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


@functools.partial(jax.jit, static_argnames=("options", "interpret"))
def decode_attention(
    q: jax.Array, kv: PagedKv, sinks: jax.Array | None, options: AttentionOptions, interpret: bool
) -> jax.Array:
    """See `backend.Decode`."""
    num_seqs, num_heads, head_dim = q.shape
    num_kv_heads = kv.num_kv_heads
    num_groups = num_heads // num_kv_heads
    blocks = tuning.blocks("paged_decode_attention", "mosaic_gpu", tuning.shape_class(q, kv))
    plan = plan_splits(kv, options, blocks)
    splits = split_sequences(plan, kv.lengths, options)
    # Sinks join where splits are merged; without splits, a merge of one.
    is_merged = plan.max_splits > 1 or sinks is not None
    # Splits, or a float8 cache, leave no registers for running ahead with heads of 256: 72 to 448 bytes were spilled.
    spills = head_dim == 256 and (is_merged or kv.dtype == FLOAT8)
    is_chained = plan.is_chained and (not spills or plan.num_items > _MOST_BLOCKS)
    chains = [chain_items(plan, splits)] if is_chained else []
    grouped = q.reshape(num_seqs, num_kv_heads, num_groups, head_dim)
    if num_groups % COPY_ROWS and (interpret or num_groups > COPY_ROWS):  # else see _whole_tiles
        grouped = jnp.pad(grouped, ((0, 0), (0, 0), (0, -num_groups % COPY_ROWS), (0, 0)))
    out_type: Any = jax.ShapeDtypeStruct(grouped.shape, q.dtype)
    if is_merged:
        out_type = (
            jax.ShapeDtypeStruct((2, plan.max_splits, *grouped.shape), q.dtype),
            jax.ShapeDtypeStruct((plan.max_splits, num_seqs, num_kv_heads, WGMMA_ROWS), jnp.float32),
        )
    out = gpu_kernel(
        functools.partial(_decode_kernel, is_chained=is_chained, options=options, interpret=interpret),
        name="paged_decode_attention",
        out_type=out_type,
        scratch_types=_scratch(q.dtype, kv, blocks),
        # The last axis is the fastest: the heads of a page lie side by side.
        grid=(plan.num_chains if is_chained else plan.num_items, num_kv_heads),
        grid_names=("chain", "kv_head"),
        interpret=interpret,
        approx_math=True,
        reduction_scratch_bytes=0,  # rows are reduced within a warp
    )(grouped, kv.k, kv.v, kv.page_table, splits.items, *chains)
    if not is_merged:
        return out[:, :, :num_groups].reshape(q.shape)
    # The kernel writes no part of a padding row, which counts as one where no sequence is split.
    counts = splits.counts if plan.max_splits > 1 else lax.min(kv.lengths, 1)
    parts, lse = out
    return merge_splits(parts, lse, counts, sinks, num_groups, q.dtype, interpret)


def _scratch(dtype: Any, kv: PagedKv, blocks: dict[str, int]) -> dict[str, Any]:
    """The shared memory of a program for queries of a dtype."""
    num_stages, tile_tokens = blocks["num_stages"], blocks["tile_tokens"]
    if tile_tokens % WGMMA_ROWS:
        raise ValueError(
            f"tile_tokens is {tile_tokens}; results of {WGMMA_ROWS} rows leave through the place of a tile, so the "
            "block-size table has to give a multiple of that"
        )
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
    q_ref: Any, k_pages_ref: Any, v_pages_ref: Any, page_table_ref: Any, items_ref: Any, *refs: Any,
    q_tile: Any, q_arrived: Any, k_tiles: Any, k_arrived: Any, v_tiles: Any, v_arrived: Any,
    wide_k: Any = None, wide_v: Any = None, is_chained: bool, options: AttentionOptions, interpret: bool,
) -> None:  # fmt: skip
    chains_ref, out_ref, lse_ref = (*([] if is_chained else [None]), *refs, None)[:3]
    first_item, kv_head = (lax.axis_index(name) for name in ("chain", "kv_head"))
    end_item = None
    if chains_ref is not None:
        first_item, end_item = chains_ref[first_item], chains_ref[first_item + 1]

    def has_tiles(item: jax.Array) -> jax.Array:
        return items_ref[item, BEGIN] < items_ref[item, END]

    program = Program(
        Ring(k_pages_ref, k_tiles, k_arrived, wide_k, kv_head), Ring(v_pages_ref, v_tiles, v_arrived, wide_v, kv_head),
        page_table_ref, items_ref, end_item, options, interpret,
    )  # fmt: skip

    def start_queries(item: jax.Array) -> None:
        def start() -> None:
            seq = items_ref[item, SEQUENCE]
            queries = _whole_tiles(q_ref.at[seq, kv_head], seq)
            plgpu.copy_gmem_to_smem(queries, q_tile.at[pl.ds(0, queries.shape[0])], q_arrived)

        pl.when(has_tiles(item))(start)

    def start_next_queries(item: jax.Array) -> None:
        assert end_item is not None  # a single item has no next one
        pl.when(item < end_item)(lambda: start_queries(item))

    def compute(item: jax.Array, state: tuple[jax.Array, Cursor]) -> tuple[jax.Array, Cursor]:
        pl.when(has_tiles(item))(lambda: plgpu.barrier_wait(q_arrived))
        out, lse, stage, cursor = program.attend(q_tile, item, *state, lambda: start_next_queries(item + 1))
        seq, staging = items_ref[item, SEQUENCE], program.free_tile(stage)
        if lse_ref is None:
            _write(out.astype(q_tile.dtype), staging, out_ref.at[seq, kv_head])
        else:
            split = items_ref[item, SPLIT]
            lse_ref[split, seq, kv_head] = lse
            # A float32 leaves in two rounds through shared memory: its value in q's dtype, then the remainder, which
            # the barrier keeps from being computed, and held in registers, before the first round.
            _write(out.astype(q_tile.dtype), staging, out_ref.at[0, split, seq, kv_head])
            out = lax.optimization_barrier(out)
            rest = out - out.astype(q_tile.dtype).astype(jnp.float32)
            _write(rest.astype(q_tile.dtype), staging, out_ref.at[1, split, seq, kv_head])
        program.refill_last(stage, cursor)
        return stage, cursor

    def compute_all() -> None:
        start_queries(first_item)
        state = (jnp.int32(0), program.start_first_tiles(first_item))
        if end_item is None:
            compute(first_item, state)
        else:
            lax.fori_loop(first_item, end_item, compute, state)
        plgpu.wait_smem_to_gmem(0)

    if end_item is not None:
        pl.when(first_item < end_item)(compute_all)
    elif lse_ref is not None:
        pl.when(has_tiles(first_item))(compute_all)  # an item that doesn't exist writes nothing
    else:
        compute_all()


def _num_rows(ref: Any) -> int:
    """The rows of whole tiles that hold those of `[G, H]`."""
    return -(-int(ref.shape[0]) // COPY_ROWS) * COPY_ROWS


def _whole_tiles(ref: Any, scalar: jax.Array) -> Any:
    """`[G, H]` in global memory as copies take it, which move whole tiles of 8 rows.

    Where G is less, the slice reaches behind the array's last row. TMA knows its shape: it reads zeros there and writes
    nothing. Pallas takes such a slice only if its start, which is 0, isn't known when it is traced. Interpreters would
    read the neighbour's rows, so there the arrays are padded, as they are for other G, whose last tile TMA can't split.
    """
    if ref.shape[0] % COPY_ROWS == 0:
        return ref
    return ref.at[pl.ds(lax.min(scalar, 0), _num_rows(ref))]


def _write(rows: jax.Array, staging: Any, out_ref: Any) -> None:
    """Write the first rows of `[64, H]` to global memory, through shared memory that is free again on return.

    The rows need not have arrived by then.
    """
    staging[...] = rows
    plgpu.commit_smem()
    target = _whole_tiles(out_ref, lax.axis_index("kv_head"))
    plgpu.copy_smem_to_gmem(staging.at[pl.ds(0, _num_rows(out_ref))], target)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
