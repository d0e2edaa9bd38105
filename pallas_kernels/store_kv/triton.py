"""`store_kv` as a Pallas kernel for the Triton backend. Called by `api` only.

A program copies a tile of tokens of one kv head; the cache is aliased from input to output, so that nothing else moves.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.triton_rows import load_rows, store_rows

_TILE_TOKENS = 32


def refuse_shapes(k_pages: jax.Array) -> str | None:
    """Why this backend can't store into k_pages, or None when it can."""
    head_dim = k_pages.shape[3]
    if head_dim & (head_dim - 1):
        return f"head size is {head_dim}; it takes powers of two"
    return None


@functools.partial(jax.jit, static_argnames="interpret")
def store_kv(
    k_pages: jax.Array, v_pages: jax.Array, k: jax.Array, v: jax.Array, slots: jax.Array, interpret: bool
) -> tuple[jax.Array, jax.Array]:
    """See `pallas_kernels.store_kv`."""
    num_tokens, num_kv_heads, _ = k.shape
    stored: tuple[jax.Array, jax.Array] = pl.pallas_call(
        _store_kernel,
        out_shape=(
            jax.ShapeDtypeStruct(k_pages.shape, k_pages.dtype),
            jax.ShapeDtypeStruct(v_pages.shape, v_pages.dtype),
        ),
        grid=(pl.cdiv(num_tokens, _TILE_TOKENS), num_kv_heads),
        input_output_aliases={3: 0, 4: 1},
        compiler_params=plgpu.CompilerParams(num_warps=4),
        interpret=interpret,
        name="store_kv",
    )(k, v, slots, k_pages, v_pages)
    return stored


def _store_kernel(k_ref: Any, v_ref: Any, slots_ref: Any, _k_in: Any, _v_in: Any, k_out: Any, v_out: Any) -> None:
    num_tokens = k_ref.shape[0]
    page_size = k_out.shape[2]
    head = pl.program_id(1)
    token = pl.program_id(0) * _TILE_TOKENS + jnp.arange(_TILE_TOKENS, dtype=jnp.int32)
    is_real = token < num_tokens
    slot = plgpu.load(slots_ref.at[token], mask=is_real, other=0)
    for new_ref, pages_ref in ((k_ref, k_out), (v_ref, v_out)):
        new = load_rows(new_ref, (token, head), is_real)
        store_rows(pages_ref, (slot // page_size, head, slot % page_size), is_real, new)
