"""`paged_decode_attention`: one query token per sequence against its pages. Checks and dispatches only."""

import jax

from pallas_kernels import dispatch, mosaic_tpu_attention
from pallas_kernels.decode_attention import mosaic_gpu, mosaic_tpu, reference, triton, xla
from pallas_kernels.dispatch import Implementation
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
    "reference": Implementation(reference.decode_attention),
    "xla": Implementation(xla.decode_attention),
    "native": Implementation(native.decode_attention, native.refuse),
    "triton": Implementation(triton.decode_attention, refuse_shapes),
    "mosaic_gpu": Implementation(mosaic_gpu.decode_attention, mosaic_gpu.refuse_shapes),
    "mosaic_tpu": Implementation(mosaic_tpu.decode_attention, mosaic_tpu_attention.refuse_shapes),
}


def paged_decode_attention(
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    page_table: jax.Array,
    lengths: jax.Array,
    *,
    sm_scale: float | None = None,
    sliding_window: int | None = None,
    logit_soft_cap: float | None = None,
    k_scale: Scale = None,
    v_scale: Scale = None,
    backend: str = "auto",
    interpret: bool = False,
) -> jax.Array:
    """Attention of the newest token of each sequence over all its KV; returns `[S, N, H]` in q's dtype.

    Args:
        q: `[S, N, H]`, the query at position lengths[s] - 1. Query head n reads kv head n // (N // K).
        k_pages, v_pages: the cache `[num_pages, K, page_size, H]`; unused places may hold anything, NaN included.
            uint16: the bits of bfloat16, for CPUs (`bfloat16_bits`).
        page_table: `[S, P]` int32; entries past a sequence's pages may be any page that exists.
        lengths: `[S]` int32, KV tokens of each sequence, the new one included (already stored), at most
            P * page_size. 0 marks a padding row, whose output is zeros.
        sm_scale: factor on q . k; default 1 / sqrt(H).
        sliding_window: see only the last so many tokens, the query's own included.
        logit_soft_cap: scores become cap * tanh(score / cap).
        k_scale, v_scale: what the cache's numbers stand for is each times its scale: one number or `[K]`, default 1.
        backend: one of `BACKENDS`.
        interpret: run a Pallas backend in its interpreter, on any platform.

    Raises:
        ValueError: shapes or options that don't fit, or a backend that can't run here.
    """
    check_pages(k_pages, v_pages)
    check_queries(q, k_pages, page_table, lengths)
    if q.shape[0] != lengths.shape[0]:
        raise ValueError(f"q {q.shape} must hold one token for each of the {lengths.shape[0]} sequences in lengths")
    options = attention_options(q.shape[2], sm_scale, sliding_window, logit_soft_cap)
    # The scales commute with both products: K's goes to the queries, V's to the output.
    scaled_q = multiply_heads(q, per_head_scale("k_scale", k_scale, k_pages.shape[1]))
    args = (scaled_q, k_pages, v_pages, page_table, lengths, options)
    out = dispatch.run("paged_decode_attention", backend, _IMPLEMENTATIONS, (q, k_pages), args, interpret=interpret)
    return multiply_heads(out, per_head_scale("v_scale", v_scale, k_pages.shape[1]))
