"""`paged_decode_attention` as a Pallas kernel for the Triton backend: a program per (kv head, block of heads, item).

An item is a range of KV tiles of one sequence; a small table, computed on the device before the kernel, has them. The
query heads that share a kv head are the rows of one program, so that K and V are loaded once for all of them; many of
them are several blocks. Called through `triton.BACKEND`.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels import tuning
from pallas_kernels.latent import LatentHeads
from pallas_kernels.options import AttentionOptions
from pallas_kernels.paged_kv import FLOAT8, PagedKv
from pallas_kernels.partition import (
    BEGIN,
    END,
    POSITION,
    SEQUENCE,
    SPLIT,
    plan_splits,
    split_sequences,
)
from pallas_kernels.triton import float8
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
from pallas_kernels.triton.merge_latents import merge_latents, refuse_merge
from pallas_kernels.triton.tiles import SequenceKv, value_widths


@functools.partial(jax.jit, static_argnames=("options", "interpret"))
def decode_attention(
    q: jax.Array, kv: PagedKv, sinks: jax.Array | None, options: AttentionOptions, interpret: bool
) -> jax.Array:
    """See `backend.Decode`."""
    is_float8 = kv.dtype == FLOAT8
    out, lse, counts = _attend(q, kv, sinks, options, interpret)
    if lse is not None:
        num_groups = q.shape[1] // kv.num_kv_heads
        parts = out.reshape(1, *out.shape[:2], kv.num_kv_heads, num_groups, out.shape[3])
        out = merge_splits(parts, lse.reshape(parts.shape[1:5]), counts, sinks, num_groups, q.dtype, interpret)
    return float8.planes_last(out) if is_float8 else out


def refuse_decode_latents(q: jax.Array, kv: PagedKv, heads: LatentHeads) -> str | None:
    """Why this backend can't decode and make outputs by `heads`, or None when it can."""
    return refuse_attention(q, kv) or refuse_merge(heads)


@functools.partial(jax.jit, static_argnames=("options", "interpret"))
def decode_latents(
    q: jax.Array, kv: PagedKv, heads: LatentHeads, options: AttentionOptions, interpret: bool
) -> jax.Array:
    """See `backend.DecodeLatents`."""
    out, lse, counts = _attend(q, kv, None, options, interpret)
    if lse is None:
        return heads.outputs(out[..., : heads.latent_size])
    return merge_latents(out, lse, counts, heads, tuning.shape_class(q, kv), q.dtype, interpret)


def _attend(
    q: jax.Array, kv: PagedKv, sinks: jax.Array | None, options: AttentionOptions, interpret: bool
) -> tuple[jax.Array, jax.Array | None, jax.Array]:
    """The output `[S, N, H]`; or its splits `[max_splits, S, N, H]`, their log-sum-exp, and each sequence's items."""
    num_kv_heads, k_pages, v_pages = kv.num_kv_heads, kv.k, kv.v
    blocks = tuning.blocks("paged_decode_attention", "triton", tuning.shape_class(q, kv))
    num_groups = q.shape[1] // num_kv_heads
    num_rows = min(tile_rows_for(blocks["head_rows"]), max(MIN_DOT, pl.next_power_of_2(num_groups)))
    head_blocks = pl.cdiv(num_groups, num_rows)
    plan = plan_splits(kv, options, blocks, head_blocks)
    splits = split_sequences(plan, kv.lengths, options)
    if kv.dtype == FLOAT8:
        q, k_pages, v_pages = float8.planes_first(q), *map(float8.as_words, (k_pages, v_pages))
    shape = (*q.shape[:2], sum(value_widths(q.shape[2], options.value_dim)))
    out_shape: Any = (jax.ShapeDtypeStruct(shape, q.dtype),)
    is_split = plan.max_splits > 1
    if is_split:
        out_shape = (
            jax.ShapeDtypeStruct((plan.max_splits, *shape), jnp.float32),
            jax.ShapeDtypeStruct((plan.max_splits, *q.shape[:2]), jnp.float32),
        )
    out, *lse = pl.pallas_call(
        functools.partial(
            _decode_kernel,
            tile_tokens=blocks["tile_tokens"],
            num_rows=num_rows,
            head_blocks=head_blocks,
            options=options,
            is_split=is_split,
        ),
        out_shape=out_shape,
        # Heads first: programs that run side by side read tiles that lie side by side.
        grid=(num_kv_heads * head_blocks, plan.num_items),
        compiler_params=plgpu.CompilerParams(num_warps=blocks["num_warps"], num_stages=blocks["num_stages"]),
        interpret=interpret,
        name="paged_decode_attention",
    )(q, k_pages, v_pages, kv.page_table, splits.items, *([] if sinks is None or is_split else [sinks]))
    return out, lse[0] if lse else None, splits.counts


def _decode_kernel(
    q_ref: Any, k_pages_ref: Any, v_pages_ref: Any, page_table_ref: Any, items_ref: Any, *more: Any,
    tile_tokens: int, num_rows: int, head_blocks: int, options: AttentionOptions, is_split: bool
) -> None:  # fmt: skip
    # Sinks, if there are any, join where a sequence is whole: here, or where its splits are merged.
    *sinks_ref, out_ref, lse_ref = more if is_split else (*more, None)
    kv_head, block = head_block(k_pages_ref.shape[1], head_blocks)
    item = pl.program_id(1)
    num_groups = q_ref.shape[1] // k_pages_ref.shape[1]
    seq, begin, end, last = (items_ref[item, column] for column in (SEQUENCE, BEGIN, END, POSITION))
    row = jnp.arange(num_rows, dtype=jnp.int32)
    group = row if block is None else block * num_rows + row
    head = kv_head * num_groups + group
    # Items that don't exist hold no tiles. Where no sequence is split, those of padding rows hold none, to write zeros.
    is_real = (group < num_groups) & ((begin < end) | (lse_ref is None))
    kv = SequenceKv(
        k_pages_ref,
        v_pages_ref,
        page_table_ref,
        seq,
        kv_head,
        options.first_visible(last),
        last,
        tile_tokens,
        q_ref.shape[2],
        options.value_dim,
    )
    rows = load_queries(q_ref, (seq, head), is_real, jnp.broadcast_to(last, row.shape), kv, *sinks_ref)
    out, lse = attend_rows(rows, kv, (begin, end), options)
    place = (seq, head) if lse_ref is None else (items_ref[item, SPLIT], seq, head)
    store_output(out_ref, place, is_real, out)
    if lse_ref is not None:
        plgpu.store(lse_ref.at[place], lse, mask=is_real)
