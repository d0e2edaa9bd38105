"""`paged_extend_attention` as a Pallas kernel for Hopper (Mosaic GPU): a producer and two consumer warpgroups.

As many programs as the chip has multiprocessors walk over the items (query tile, kv head). The producer brings queries
and pages to shared memory by TMA; the consumers compute with `wgmma`, each 64 rows of the tile, in which the query
heads of a kv head are packed so that K and V are loaded once for all of them. The package's docstring
explains the waits. Called through `hopper.BACKEND`.

Source of the structure: FlashAttention-3 (Shah et al., 2024).
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import tuning
from pallas_kernels.hopper.common import COPY_ROWS, WGMMA_ROWS, gpu_kernel, operand, refuse_operands
from pallas_kernels.hopper.extend_consumer import consume
from pallas_kernels.hopper.extend_plan import NUM_CONSUMERS, TILE_ROWS, Plan, Refs, kv_steps, max_tile_queries
from pallas_kernels.hopper.extend_producer import produce
from pallas_kernels.options import AttentionOptions
from pallas_kernels.paged_kv import FLOAT8, PagedKv
from pallas_kernels.partition import BEGIN, END, POSITION, query_tiles
from pallas_kernels.target import target_device

# Registers of a thread. A kernel of three warpgroups starts with 168 for each; a warpgroup that asks for more waits
# until others have given up as many, so the three together must not ask for more than 3 * 168. Copying needs few;
# converting spills with 40, and consumers with a head size of 256 with 216.
_COPYING, _CONVERTING = (40, 232), (56, 224)  # of the producer and of a consumer


def refuse_extend(q: jax.Array, kv: PagedKv) -> str | None:
    """Why the kernel can't take q `[T, N, H]` and the cache, or None when it can."""
    if (reason := refuse_operands(q, kv)) is not None:
        return reason
    head_dim, num_groups = q.shape[2], q.shape[1] // kv.num_kv_heads
    if head_dim not in (64, 128, 256):
        return f"head size is {head_dim}; it takes 64, 128 and 256"
    if max_tile_queries(num_groups) == 0:
        return f"{num_groups} query heads share a kv head; it takes at most {TILE_ROWS // COPY_ROWS}"
    return None


@functools.partial(jax.jit, static_argnames=("options", "interpret"))
def extend_attention(
    q: jax.Array,
    query_offsets: jax.Array,
    kv: PagedKv,
    sinks: jax.Array | None,
    options: AttentionOptions,
    interpret: bool,
) -> jax.Array:
    """See `backend.Extend`."""
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads = kv.num_kv_heads
    sizes = tuning.blocks("paged_extend_attention", "mosaic_gpu", tuning.shape_class(q, kv))
    tile_queries = max_tile_queries(num_heads // num_kv_heads)
    tiles = _longest_first(
        query_tiles(kv.lengths, query_offsets, num_tokens, tile_queries, COPY_ROWS), options, sizes["tile_tokens"]
    )
    # A copy must not reach past the end of q, whose tokens it counts in eights.
    padding = max(tile_queries - num_tokens, -num_tokens % COPY_ROWS)
    padded = jnp.pad(q, ((0, padding), (0, 0), (0, 0)))
    plan = Plan(
        options=options,
        num_tokens=padded.shape[0],
        num_kv_heads=num_kv_heads,
        num_groups=num_heads // num_kv_heads,
        head_dim=head_dim,
        page_size=kv.page_size,
        num_tiles=tiles.shape[0],
        num_programs=min(target_device().num_cores, tiles.shape[0] * num_kv_heads),
        tile_tokens=sizes["tile_tokens"],
        num_stages=sizes["num_stages"],
        converts=kv.dtype == FLOAT8,
        interpret=interpret,
    )
    out = gpu_kernel(
        functools.partial(_extend_kernel, plan=plan),
        name="paged_extend_attention",
        out_type=jax.ShapeDtypeStruct(padded.shape, q.dtype),
        scratch_types=_scratch(plan, q.dtype),
        grid=(plan.num_programs,),
        grid_names=("program",),
        num_warpgroups=NUM_CONSUMERS + 1,
        warpgroup_name="warpgroup",
        interpret=interpret,
        approx_math=True,
        reduction_scratch_bytes=0,
    )(padded, kv.k, kv.v, kv.page_table, tiles, *([] if sinks is None else [sinks]))
    return out[:num_tokens]


def _longest_first(tiles: jax.Array, options: AttentionOptions, tile_tokens: int) -> jax.Array:
    num_steps = kv_steps(options, tile_tokens, tiles[:, POSITION], tiles[:, END] - tiles[:, BEGIN])[2]
    return tiles[jnp.argsort(-num_steps)]


def _scratch(plan: Plan, dtype: Any) -> dict[str, Any]:
    tiles = (plan.num_stages, plan.tile_tokens, plan.head_dim)
    scratch = {
        "q_tile": operand((NUM_CONSUMERS, WGMMA_ROWS, plan.head_dim), dtype),
        "k_tiles": operand(tiles, dtype),
        "v_tiles": operand(tiles, dtype),
        "out_tile": plgpu.SMEM((TILE_ROWS, plan.staging_columns), dtype),
        "q_arrived": plgpu.Barrier(num_arrivals=len(plan.query_pieces())),
        # The producer's arrivals on behalf of a converted tile, or those of its copies.
        "arrived": plgpu.Barrier(
            num_arrivals=1 if plan.converts else plan.copies_per_tile, num_barriers=2 * plan.num_stages
        ),
        "free": plgpu.Barrier(num_arrivals=NUM_CONSUMERS, num_barriers=2 * plan.num_stages + 1),
        "turn": plgpu.Barrier(num_arrivals=1, num_barriers=NUM_CONSUMERS),
        "raw_arrived": plgpu.Barrier(num_arrivals=plan.copies_per_tile, num_barriers=2),
    }
    if plan.converts:
        # Swizzled rows of 64 bytes, as wide as the blocks that are converted.
        scratch["raw_tiles"] = operand((2, *tiles[1:]), FLOAT8, row_bytes=64)
    return scratch


def _extend_kernel(
    q: Any, k_pages: Any, v_pages: Any, page_table: Any, tiles: Any, *sinks_and_out: Any, plan: Plan, **scratch: Any
) -> None:
    *sinks, out = sinks_and_out
    refs = Refs(q, k_pages, v_pages, page_table, tiles, out, sinks=sinks[0] if sinks else None, **scratch)
    warpgroup = lax.axis_index("warpgroup")
    # Small heads leave registers to a producer that also clears the first tile of a window.
    gives_more = plan.converts or (plan.head_dim == 64 and plan.options.sliding_window is not None)
    producers, consumers = _CONVERTING if gives_more else _COPYING

    def compute() -> None:
        plgpu.set_max_registers(consumers, action="increase")
        consume(plan, refs, warpgroup)

    def copy() -> None:
        plgpu.set_max_registers(producers, action="decrease")
        produce(plan, refs)

    pl.when(warpgroup < NUM_CONSUMERS)(compute)
    pl.when(warpgroup == NUM_CONSUMERS)(copy)
