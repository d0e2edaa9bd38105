"""The merge of a decode's splits as one Pallas kernel for the Triton backend: a program per sequence and query head.

Every split yields a softmax of its own (Flash-Decoding: Dao, Haziza, Massa, Sizov, 2023); the whole one weighs them by
their log-sum-exp. A program reads the splits that its sequence has and no others. XLA makes two kernels of it, which
read as many as there may be. Called by the decodes of the Triton and the Mosaic GPU backend.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.partition import EMPTY_LSE, LOG2_E

_SPLITS_AT_ONCE = 16


def merge_splits(
    parts: jax.Array, lse: jax.Array, counts: jax.Array, sinks: jax.Array | None, num_groups: int, dtype: Any,
    interpret: bool,
) -> jax.Array:  # fmt: skip
    """The attention over all items of each sequence, `[S, K * num_groups, H]` of `dtype`.

    Args:
        parts: `[R, max_splits, S, K, G, H]`, R arrays that add up to each item's own softmax-weighted sum of V. Of G
            query heads the first num_groups count. Not read from a sequence's count on.
        lse: float32 `[max_splits, S, K, G or more]`, the base-2 logarithm of each item's sum of 2 ** score, where the
            scores are those of the softmax times log2(e); not read there either.
        counts: int32 `[S]` items of each sequence; one without any (a padding row) yields zeros.
        sinks: `[K * num_groups]`, or None.
        num_groups: query heads of a kv head.
        dtype: of the result.
        interpret: runs the kernel in Pallas's interpreter.
    """
    _, _, num_seqs, num_kv_heads, _, head_dim = parts.shape
    num_heads = num_kv_heads * num_groups
    out: jax.Array = pl.pallas_call(
        functools.partial(_kernel, num_groups=num_groups),
        out_shape=jax.ShapeDtypeStruct((num_seqs, num_heads, head_dim), dtype),
        grid=(num_heads, num_seqs),
        compiler_params=plgpu.CompilerParams(num_warps=4),
        interpret=interpret,
        name="merge_splits",
    )(parts, lse, counts, *([] if sinks is None else [sinks]))
    return out


def _kernel(parts_ref: Any, lse_ref: Any, counts_ref: Any, *more: Any, num_groups: int) -> None:
    *sinks_ref, out_ref = more
    num_rounds, max_splits, head_dim = parts_ref.shape[0], parts_ref.shape[1], parts_ref.shape[5]
    head, seq = pl.program_id(0), pl.program_id(1)
    kv_head, group = lax.div(head, num_groups), lax.rem(head, num_groups)
    count = counts_ref[seq]

    def lses(split: jax.Array) -> jax.Array:
        return plgpu.load(lse_ref.at[split, seq, kv_head, group], mask=split < count, other=EMPTY_LSE)

    every = lses(jnp.arange(pl.next_power_of_2(max_splits), dtype=jnp.int32))
    top = jnp.max(every)
    total = jnp.sum(jnp.where(every > EMPTY_LSE, jnp.exp2(every - top), 0.0))
    at_once = min(_SPLITS_AT_ONCE, pl.next_power_of_2(max_splits))
    column = jnp.arange(pl.next_power_of_2(head_dim), dtype=jnp.int32)

    def add(chunk: jax.Array, merged: jax.Array) -> jax.Array:
        split = chunk * at_once + jnp.arange(at_once, dtype=jnp.int32)
        weight = jnp.where(split < count, jnp.exp2(lses(split) - top), 0.0)
        shape = (at_once, column.shape[0])
        is_there = jnp.broadcast_to((split < count)[:, None], shape) & (column < head_dim)[None, :]
        place = (jnp.broadcast_to(split[:, None], shape), seq, kv_head, group, jnp.broadcast_to(column[None, :], shape))
        rounds = [
            plgpu.load(parts_ref.at[(i, *place)], mask=is_there, other=0).astype(jnp.float32) for i in range(num_rounds)
        ]
        return merged + jnp.sum(weight[:, None] * functools.reduce(jnp.add, rounds), axis=0)

    merged = lax.fori_loop(0, pl.cdiv(count, at_once), add, jnp.zeros(column.shape, jnp.float32))
    if sinks_ref:
        total += jnp.exp2(sinks_ref[0][head].astype(jnp.float32) * LOG2_E - top)
    # Where anything is seen the total is at least 1, the weight of the top split.
    out = (merged / jnp.maximum(total, 1.0)).astype(out_ref.dtype)
    plgpu.store(out_ref.at[seq, head, column], out, mask=column < head_dim)
