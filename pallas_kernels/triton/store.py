"""`store_kv` as a Pallas kernel for the Triton backend. Called through `triton.BACKEND`.

A program copies a tile of tokens of one kv head; the cache is aliased from input to output, so that nothing else moves.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels import tuning
from pallas_kernels.paged_kv import FLOAT8, PagedKv
from pallas_kernels.triton import float8
from pallas_kernels.triton.tiles import load_rows, store_rows


def refuse_store(kv: PagedKv) -> str | None:
    """Why this backend can't store into the cache, or None when it can."""
    head_dim = kv.head_dim
    smallest = float8.PLANES if kv.dtype == FLOAT8 else 1
    if head_dim < smallest or head_dim & (head_dim - 1):
        return f"head size is {head_dim}; with a {kv.dtype} cache it takes powers of two from {smallest}"
    return None


@functools.partial(jax.jit, static_argnames="interpret")
def store_kv(kv: PagedKv, k: jax.Array, v: jax.Array, slots: jax.Array, interpret: bool) -> PagedKv:
    """See `backend.Store`."""
    num_tokens, num_kv_heads, _ = k.shape
    blocks = tuning.blocks("store_kv", "triton", tuning.shape_class(k, kv, num_tokens))
    is_float8 = kv.dtype == FLOAT8
    k_pages, v_pages = kv.k, kv.v
    if is_float8:
        k_pages, v_pages, k, v = map(float8.as_words, (k_pages, v_pages, k, v))
    stored_k, stored_v = pl.pallas_call(
        functools.partial(_store_kernel, tile_tokens=blocks["tile_tokens"]),
        out_shape=(
            jax.ShapeDtypeStruct(k_pages.shape, k_pages.dtype),
            jax.ShapeDtypeStruct(v_pages.shape, v_pages.dtype),
        ),
        grid=(num_kv_heads, pl.cdiv(num_tokens, blocks["tile_tokens"])),
        input_output_aliases={3: 0, 4: 1},
        compiler_params=plgpu.CompilerParams(num_warps=blocks["num_warps"]),
        interpret=interpret,
        name="store_kv",
    )(k, v, slots, k_pages, v_pages)
    if is_float8:
        stored_k, stored_v = map(float8.from_words, (stored_k, stored_v))
    return dataclasses.replace(kv, k=stored_k, v=stored_v)


def _store_kernel(
    k_ref: Any, v_ref: Any, slots_ref: Any, _k_in: Any, _v_in: Any, k_out: Any, v_out: Any, *, tile_tokens: int
) -> None:
    num_tokens = k_ref.shape[0]
    page_size = k_out.shape[2]
    head = pl.program_id(0)
    token = pl.program_id(1) * tile_tokens + jnp.arange(tile_tokens, dtype=jnp.int32)
    is_real = token < num_tokens
    slot = plgpu.load(slots_ref.at[token], mask=is_real, other=0)
    # Both loads before both stores: more bytes in flight.
    k, v = load_rows(k_ref, (token, head), is_real), load_rows(v_ref, (token, head), is_real)
    where = (lax.div(slot, jnp.int32(page_size)), head, lax.rem(slot, jnp.int32(page_size)))
    store_rows(k_out, where, is_real, k)
    store_rows(v_out, where, is_real, v)
