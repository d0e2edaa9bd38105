"""Decode and extend attention in C++ (`attention.cc`) for processors with bfloat16 products. Called by the ops' `api`.

XLA has no loop that reads pages and multiplies them at once: its gathers and the packing of small products take most
of the time (docs/kernels/native.md).
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import bfloat16_bits
from pallas_kernels.native import library
from pallas_kernels.options import AttentionOptions
from pallas_kernels.target import target_device

_HEAD_STEP, _MAX_HEAD_DIM, _MAX_GROUP = 32, 256, 128


def refuse(q: jax.Array, k_pages: jax.Array) -> str | None:
    """Why these arrays or this machine are impossible, or None."""
    head_dim, group = q.shape[2], q.shape[1] // k_pages.shape[1]
    if target_device().platform != "cpu":
        return f"it needs a cpu, this is a {target_device().platform}"
    if k_pages.dtype != bfloat16_bits.DTYPE or q.dtype != jnp.float32:
        return f"it takes float32 queries and a cache of bfloat16's bits (uint16), not {q.dtype} and {k_pages.dtype}"
    if head_dim % _HEAD_STEP or head_dim > _MAX_HEAD_DIM:
        return f"the head size is {head_dim}; it takes multiples of {_HEAD_STEP} up to {_MAX_HEAD_DIM}"
    if group > _MAX_GROUP:
        return f"{group} query heads share a kv head; it takes {_MAX_GROUP} at most"
    return library.load()


@functools.partial(jax.jit, static_argnames="options")
def decode_attention(
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    page_table: jax.Array,
    lengths: jax.Array,
    options: AttentionOptions,
) -> jax.Array:
    """See `pallas_kernels.paged_decode_attention`: an extend of one query per sequence."""
    query_offsets = jnp.arange(q.shape[0] + 1, dtype=jnp.int32)
    return extend_attention(q, k_pages, v_pages, page_table, lengths, query_offsets, options)


@functools.partial(jax.jit, static_argnames="options")
def extend_attention(
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    page_table: jax.Array,
    lengths: jax.Array,
    query_offsets: jax.Array,
    options: AttentionOptions,
) -> jax.Array:
    """See `pallas_kernels.paged_extend_attention`. Pages that sequences share from their start are read once."""
    call = jax.ffi.ffi_call(library.PAGED_ATTENTION, jax.ShapeDtypeStruct(q.shape, q.dtype))
    out: jax.Array = call(
        q,
        k_pages,
        v_pages,
        page_table,
        lengths,
        query_offsets,
        sm_scale=np.float32(options.sm_scale),
        soft_cap=np.float32(options.logit_soft_cap or 0),
        window=np.int64(options.sliding_window or 0),
        widened=library.widens(),
    )
    return out
