"""Decode and extend attention in C++ (`attention.cc`) for x86 processors. Called through `native.backend`.

XLA has no loop that reads pages and multiplies them at once: its gathers and the packing of small products take most
of the time (docs/kernels/native.md).
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.native import library
from pallas_kernels.options import AttentionOptions
from pallas_kernels.paged_kv import BITS, FLOAT8_BITS, PagedKv

_HEAD_STEP, _MAX_HEAD_DIM, _MAX_GROUP = 32, 512, 128


def refuse_attention(q: jax.Array, kv: PagedKv) -> str | None:
    """Why this backend can't take q `[T, N, H]` and the cache, because of the arrays or of this machine; or None."""
    if kv.dtype not in (BITS, FLOAT8_BITS) or q.dtype != jnp.float32:
        return (
            "it takes float32 queries and a cache of bfloat16's or float8's bits (uint16, uint8), "
            f"not {q.dtype} and {kv.dtype}"
        )
    return refuse_heads(q.shape[2], q.shape[1] // kv.num_kv_heads) or library.load()


def refuse_heads(head_dim: int, group: int) -> str | None:
    """Why this backend can't take heads of that size, `group` query heads for each kv head, on any machine; or None."""
    if head_dim % _HEAD_STEP or head_dim > _MAX_HEAD_DIM:
        return f"the head size is {head_dim}; it takes multiples of {_HEAD_STEP} up to {_MAX_HEAD_DIM}"
    if group > _MAX_GROUP:
        return f"{group} query heads share a kv head; it takes {_MAX_GROUP} at most"
    return None


@functools.partial(jax.jit, static_argnames=("options", "interpret"))
def decode_attention(
    q: jax.Array, kv: PagedKv, sinks: jax.Array | None, options: AttentionOptions, interpret: bool
) -> jax.Array:
    """See `backend.Decode`: an extend of one query per sequence."""
    query_offsets = jnp.arange(q.shape[0] + 1, dtype=jnp.int32)
    return extend_attention(q, query_offsets, kv, sinks, options, interpret)


@functools.partial(jax.jit, static_argnames=("options", "interpret"))
def extend_attention(
    q: jax.Array,
    query_offsets: jax.Array,
    kv: PagedKv,
    sinks: jax.Array | None,
    options: AttentionOptions,
    interpret: bool,
    seen: jax.Array | None = None,
    biases: jax.Array | None = None,
) -> jax.Array:
    """See `backend.Extend` and `ExtendBiased`. Pages that sequences share from their start are read once."""
    call = jax.ffi.ffi_call(library.PAGED_ATTENTION, jax.ShapeDtypeStruct(q.shape, q.dtype))
    out: jax.Array = call(
        q,
        kv.k,
        kv.v,
        kv.page_table,
        kv.lengths,
        query_offsets,
        *(each for each in (sinks, seen, biases) if each is not None),
        sm_scale=np.float32(options.scale(q.shape[2])),
        soft_cap=np.float32(options.logit_soft_cap or 0),
        way=library.product_way(),
        window=np.int64(options.sliding_window or 0),
    )
    return out
