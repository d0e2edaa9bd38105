"""`paged_extend_attention`: ragged new tokens of several sequences against their pages. Checks and dispatches only."""

import jax
import jax.numpy as jnp

from pallas_kernels import dispatch, mosaic_tpu_attention
from pallas_kernels.dispatch import Implementation
from pallas_kernels.extend_attention import mosaic_gpu, mosaic_tpu, reference, triton, xla
from pallas_kernels.native import attention as native
from pallas_kernels.options import (
    Scale,
    attention_options,
    check_pages,
    check_queries,
    multiply_heads,
    per_head_scale,
)
from pallas_kernels.triton_rows import refuse_shapes

_IMPLEMENTATIONS = {
    "reference": Implementation(reference.extend_attention),
    "xla": Implementation(xla.extend_attention),
    "native": Implementation(native.extend_attention, native.refuse),
    "triton": Implementation(triton.extend_attention, refuse_shapes),
    "mosaic_gpu": Implementation(mosaic_gpu.extend_attention, mosaic_gpu.refuse_shapes),
    "mosaic_tpu": Implementation(mosaic_tpu.extend_attention, mosaic_tpu_attention.refuse_shapes),
}


def paged_extend_attention(
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    page_table: jax.Array,
    lengths: jax.Array,
    query_offsets: jax.Array,
    *,
    sm_scale: float | None = None,
    sliding_window: int | None = None,
    logit_soft_cap: float | None = None,
    k_scale: Scale = None,
    v_scale: Scale = None,
    backend: str = "auto",
    interpret: bool = False,
) -> jax.Array:
    """Causal attention of each sequence's last tokens over its cached and new KV; `[T, N, H]` in q's dtype.

    Args:
        q: `[T, N, H]`; sequence s owns q[query_offsets[s]:query_offsets[s + 1]], its last tokens, so that its i-th
            query stands at position lengths[s] - num_queries + i. Query head n reads kv head n // (N // K).
        k_pages, v_pages: the cache `[num_pages, K, page_size, H]`, the new tokens already stored; unused places may
            hold anything, NaN included. uint16: the bits of bfloat16, for CPUs (`bfloat16_bits`).
        page_table: `[S, P]` int32; entries past a sequence's pages may be any page that exists.
        lengths: `[S]` int32, KV tokens of each sequence, the new ones included, at most P * page_size.
        query_offsets: `[S + 1]` int32, ascending from 0. Padding sequences own no query and have length 0; tokens from
            query_offsets[S] on are padding, and their output is zeros.
        sm_scale, sliding_window, logit_soft_cap, k_scale, v_scale, backend, interpret: as in `paged_decode_attention`.

    Raises:
        ValueError: shapes or options that don't fit, or a backend that can't run here.
    """
    check_pages(k_pages, v_pages)
    check_queries(q, k_pages, page_table, lengths)
    if query_offsets.shape != (lengths.shape[0] + 1,) or query_offsets.dtype != jnp.int32:
        raise ValueError(
            f"query_offsets is {query_offsets.shape} {query_offsets.dtype}; it must be [S + 1] int32, "
            f"and lengths has S = {lengths.shape[0]}"
        )
    options = attention_options(q.shape[2], sm_scale, sliding_window, logit_soft_cap)
    # The scales commute with both products: K's goes to the queries, V's to the output.
    scaled_q = multiply_heads(q, per_head_scale("k_scale", k_scale, k_pages.shape[1]))
    args = (scaled_q, k_pages, v_pages, page_table, lengths, query_offsets, options)
    out = dispatch.run("paged_extend_attention", backend, _IMPLEMENTATIONS, (q, k_pages), args, interpret=interpret)
    return multiply_heads(out, per_head_scale("v_scale", v_scale, k_pages.shape[1]))
