"""`paged_decode_attention` as a Pallas kernel for the Triton backend: one program per (sequence, kv head).

The query heads that share a kv head are the rows of one program, so that K and V are loaded once for all of them.
Called by `api` only.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.options import AttentionOptions
from pallas_kernels.triton_rows import MIN_DOT, attend_rows, load_rows, store_rows
from pallas_kernels.xla_rows import first_visible


@functools.partial(jax.jit, static_argnames=("options", "interpret"))
def decode_attention(
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    page_table: jax.Array,
    lengths: jax.Array,
    options: AttentionOptions,
    interpret: bool,
) -> jax.Array:
    """See `pallas_kernels.paged_decode_attention`."""
    kernel = functools.partial(_decode_kernel, options=options)
    out: jax.Array = pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        grid=(q.shape[0], k_pages.shape[1]),
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=2),
        interpret=interpret,
        name="paged_decode_attention",
    )(q, k_pages, v_pages, page_table, lengths)
    return out


def _decode_kernel(
    q_ref: Any, k_pages_ref: Any, v_pages_ref: Any, page_table_ref: Any, lengths_ref: Any, out_ref: Any,
    *, options: AttentionOptions
) -> None:  # fmt: skip
    seq, kv_head = pl.program_id(0), pl.program_id(1)
    num_groups = q_ref.shape[1] // k_pages_ref.shape[1]
    row = jnp.arange(max(MIN_DOT, pl.next_power_of_2(num_groups)), dtype=jnp.int32)
    head = kv_head * num_groups + row
    is_real = row < num_groups
    last = lengths_ref[seq] - 1
    result = attend_rows(
        load_rows(q_ref, (seq, head), is_real),
        jnp.broadcast_to(last, row.shape),
        (first_visible(last, options), last),
        seq,
        kv_head,
        k_pages_ref,
        v_pages_ref,
        page_table_ref,
        options,
    )
    store_rows(out_ref, (seq, head), is_real, result)
