"""`rotate_and_store` as a Pallas kernel for the Triton backend. Called through `triton.BACKEND`.

A program takes a tile of tokens of one kv head: its query heads, its key and its value, which lie side by side in the
product. It adds the bias, normalizes, rotates, and writes queries to an array of their own and K and V to their pages;
the cache is aliased from input to output. Rows come in halves, the partners of the rotation, since Triton can't cut an
array in two. Everything between load and store is float32.
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
from pallas_kernels.paged_kv import PagedKv, refuse_conversion
from pallas_kernels.qkv import FusedQkv
from pallas_kernels.triton.tiles import Columns, load_rows, store_rows

# The least head size: its half is the row of an array, and Triton wants vectors of some width.
_MIN_HEAD_DIM = 16


def refuse_rotate_and_store(qkv: FusedQkv, kv: PagedKv) -> str | None:
    """Why this backend can't take the call, or None when it can."""
    head_dim = qkv.head_dim
    if head_dim < _MIN_HEAD_DIM or head_dim & (head_dim - 1):
        return f"head size is {head_dim}; it takes powers of two from {_MIN_HEAD_DIM}"
    return refuse_conversion(kv)


@functools.partial(jax.jit, static_argnames="interpret")
def rotate_and_store(qkv: FusedQkv, kv: PagedKv, slots: jax.Array, interpret: bool) -> tuple[jax.Array, PagedKv]:
    """See `backend.RotateAndStore`."""
    num_tokens, num_kv_heads, head_dim = qkv.num_tokens, qkv.num_kv_heads, qkv.head_dim
    num_heads = num_kv_heads * qkv.num_groups
    q = jax.ShapeDtypeStruct((num_tokens, num_heads, head_dim), qkv.product.dtype)
    blocks = tuning.blocks("rotate_and_store", "triton", tuning.shape_class(q, kv, num_tokens))
    vectors = {name: getattr(qkv, name) for name in ("bias", "q_norm", "k_norm")}
    vectors = {name: array for name, array in vectors.items() if array is not None}
    first_page_input = 4 + len(vectors)
    q_out, stored_k, stored_v = pl.pallas_call(
        functools.partial(
            _kernel, names=tuple(vectors), layer=qkv.layer, eps=qkv.eps, tile_tokens=blocks["tile_tokens"]
        ),
        out_shape=(q, jax.ShapeDtypeStruct(kv.k.shape, kv.dtype), jax.ShapeDtypeStruct(kv.v.shape, kv.dtype)),
        grid=(num_kv_heads, pl.cdiv(num_tokens, blocks["tile_tokens"])),
        input_output_aliases={first_page_input: 1, first_page_input + 1: 2},
        compiler_params=plgpu.CompilerParams(num_warps=blocks["num_warps"]),
        interpret=interpret,
        name="rotate_and_store",
    )(qkv.product, qkv.cos, qkv.sin, slots, *vectors.values(), kv.k, kv.v)
    return q_out, dataclasses.replace(kv, k=stored_k, v=stored_v)


def _kernel(
    product_ref: Any, cos_ref: Any, sin_ref: Any, slots_ref: Any, *refs: Any,
    names: tuple[str, ...], layer: int, eps: float, tile_tokens: int,
) -> None:  # fmt: skip
    vectors = dict(zip(names, refs, strict=False))
    _k_in, _v_in, q_out, k_out, v_out = refs[len(names) :]
    num_tokens, _, num_rows, head_dim = product_ref.shape
    num_groups, page_size = num_rows - 2, k_out.shape[2]
    head = pl.program_id(0)
    token = pl.program_id(1) * tile_tokens + jnp.arange(tile_tokens, dtype=jnp.int32)
    is_real = token < num_tokens
    halves = ((0, head_dim // 2), (head_dim // 2, head_dim // 2))

    def vector(name: str, index: tuple[Any, ...], columns: Columns) -> jax.Array:
        row = jnp.full((1,), layer, jnp.int32)
        return load_rows(vectors[name], (row, *index), None, columns).astype(jnp.float32)

    def load(which: int) -> list[jax.Array]:
        rows = [load_rows(product_ref, (token, head, which), is_real, half).astype(jnp.float32) for half in halves]
        if "bias" not in vectors:
            return rows
        return [part + vector("bias", (head, which), half) for part, half in zip(rows, halves, strict=True)]

    def normalized(rows: list[jax.Array], name: str) -> list[jax.Array]:
        if name not in vectors:
            return rows
        squares = jnp.sum(rows[0] * rows[0] + rows[1] * rows[1], axis=1)
        inverse_rms = lax.rsqrt(squares / head_dim + eps)[:, None]
        return [part * inverse_rms * vector(name, (), half) for part, half in zip(rows, halves, strict=True)]

    # All loads before the first store: more bytes in flight.
    *queries, key, value = (load(which) for which in range(num_rows))
    table = (0, head_dim // 2)
    cos, sin = (load_rows(ref, (token, 0), is_real, table) for ref in (cos_ref, sin_ref))
    slot = plgpu.load(slots_ref.at[token], mask=is_real, other=0)

    def rotated(rows: list[jax.Array]) -> list[jax.Array]:
        first, second = rows
        return [first * cos - second * sin, second * cos + first * sin]

    def store(ref: Any, index: tuple[Any, ...], rows: list[jax.Array]) -> None:
        for part, half in zip(rows, halves, strict=True):
            store_rows(ref, index, is_real, part, half)

    where = (lax.div(slot, jnp.int32(page_size)), head, lax.rem(slot, jnp.int32(page_size)))
    store(k_out, where, rotated(normalized(key, "k_norm")))
    store(v_out, where, value)
    for group, query in enumerate(queries):
        store(q_out, (token, head * num_groups + group), rotated(normalized(query, "q_norm")))
