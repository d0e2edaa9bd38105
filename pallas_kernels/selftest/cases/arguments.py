"""What operations on the paged cache are called with at a model's shapes: caches, products, heads of latents.

Owns the places of tokens, what vectors and parts the calls have, and how far what went through a cache may be off.
Never knows operations. Used by the cases of attention, stores, norms and states.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.latent import LatentHeads
from pallas_kernels.paged_kv import FLOAT8, PagedKv, numbers_dtype, to_numbers
from pallas_kernels.qkv import FusedQkv
from pallas_kernels.selftest.batches import Array, normal, pages_of, scattered_pages, slots_of, used_places
from pallas_kernels.selftest.case import FLOAT8_TOLERANCE, TOLERANCE
from pallas_kernels.selftest.shapes import KernelShapes, LatentShape

ROW, EPS, NUM_PARTS = 1, 1e-6, 4  # of norms: the layer's row, what is added to squares, and parts of an update


def full_caches(shapes: KernelShapes, lengths: Array, room: int = 0) -> tuple[PagedKv, PagedKv]:
    """A full cache for these sequences, and the same numbers in float32; pages have room for so many tokens more."""
    rng = np.random.default_rng(0)
    page, owned = shapes.page_size, lengths + room
    num_pages = 2 + int(np.sum(-(-owned // page)))
    table = rng.integers(0, num_pages, (len(lengths), max(1, -(-int(owned.max()) // page)))).astype(np.int32)
    scattered_pages(owned, page, table, num_pages, rng)
    used = used_places(lengths, page, table, num_pages)
    shape, dtype = (num_pages, shapes.num_kv_heads, page, shapes.head_dim), jnp.dtype(shapes.kv_dtype)
    scales = _scales(shapes)
    # float8 holds numbers that its scales bring to the size of others.
    of_heads = (jnp.broadcast_to(jnp.asarray(scales.get(name, 1.0)), shape[1]) for name in ("k_scale", "v_scale"))
    spread = [each[:, None, None] for each in of_heads]
    numbers = [
        normal(key, each, shape=shape, dtype=numbers_dtype(dtype))
        for key, each in zip(jax.random.split(jax.random.key(2)), spread, strict=True)
    ]
    k, v = (pages_of(each, used, dtype) for each in numbers)
    v = k if shapes.has_latents else v
    cache = PagedKv(k, v, jnp.asarray(table), jnp.asarray(lengths, jnp.int32), **scales)
    return cache, dataclasses.replace(cache, k=to_numbers(k).astype(jnp.float32), v=to_numbers(v).astype(jnp.float32))


def empty_caches(shapes: KernelShapes, num_tokens: int) -> tuple[jax.Array, PagedKv, PagedKv]:
    """Slots of tokens of three sequences and of padding, and two caches full of NaN: the model's, and in float32."""
    rng = np.random.default_rng(5)
    page, ends = shapes.page_size, np.array([num_tokens // 2, num_tokens // 3, num_tokens])
    begins, lengths = np.array([0, 1, num_tokens // 2 + num_tokens // 3 - 1]), ends
    num_pages = 2 + int(np.sum(-(-lengths // page)))
    table = np.zeros((len(lengths), max(1, -(-num_tokens // page))), np.int32)
    scattered_pages(lengths, page, table, num_pages, rng)
    slots = [slots_of(row, begin, end, page) for row, begin, end in zip(table, begins, ends, strict=True)]
    padding = rng.integers(0, page, 3)
    dtype = jnp.dtype(shapes.kv_dtype)
    shape = (num_pages, shapes.num_kv_heads, page, shapes.head_dim)
    nothing = np.zeros((num_pages, page), bool)
    empty = pages_of(jnp.zeros(shape, numbers_dtype(dtype)), nothing, dtype)
    kv = PagedKv(empty, empty, jnp.asarray(table), jnp.asarray(lengths, jnp.int32), **_scales(shapes))
    wide = jnp.full(shape, jnp.nan, jnp.float32)
    exact = PagedKv(wide, wide, kv.page_table, kv.lengths)
    return jnp.asarray(np.concatenate([*slots, padding]), jnp.int32), kv, exact


def _scales(shapes: KernelShapes) -> dict[str, Any]:
    """Of a float8 cache: one for K, and one for each head of V."""
    if numbers_dtype(jnp.dtype(shapes.kv_dtype)) != FLOAT8:
        return {}
    return {"k_scale": 0.02, "v_scale": 0.02 * (1 + jnp.arange(shapes.num_kv_heads) % 4).astype(jnp.float32)}


def fused_qkv(shapes: KernelShapes, num_tokens: int, parts: tuple[int, ...] = ()) -> FusedQkv:
    """The product of a layer, whole or in `(P,)` parts, with the vectors that the model has."""
    heads = (shapes.num_kv_heads, shapes.num_groups + 2, shapes.head_dim)
    keys = jax.random.split(jax.random.key(7), 5)
    dtype, norm = jnp.dtype(shapes.dtype), jnp.dtype(shapes.norm_dtype)
    angles = jax.random.uniform(keys[0], (num_tokens, 1, shapes.head_dim // 2), jnp.float32, 0, 2 * np.pi)
    norms = [normal(key, 1.0, shape=(ROW + 1, shapes.head_dim), dtype=norm) for key in keys[1:3]]
    return FusedQkv(
        product=normal(keys[3], 1.0, shape=(*parts, num_tokens, *heads), dtype=in_parts_of(dtype, parts)),
        cos=jnp.cos(angles),
        sin=jnp.sin(angles),
        bias=normal(keys[4], 1.0, shape=(ROW + 1, *heads), dtype=dtype) if shapes.has_bias else None,
        q_norm=norms[0] if shapes.has_head_norms else None,
        k_norm=norms[1] if shapes.has_head_norms else None,
        layer=ROW,
        rotates_first=shapes.rotates_first,
        normalizes_values=shapes.normalizes_values,
        dtype_of_sum=dtype,
    )


def latent_heads(shapes: KernelShapes, latent: LatentShape) -> LatentHeads:
    """The matrices of a layer with a latent."""
    size = shapes.attention[0].value_dim
    assert size is not None
    shape = shapes.num_groups, latent.num_absorbing + latent.num_outputs, size
    weights = normal(jax.random.key(13), size**0.5, shape=shape, dtype=jnp.dtype(shapes.dtype))
    return LatentHeads(weights, latent.num_absorbing)


def rows_of(kv: PagedKv) -> list[jax.Array]:
    """Keys and values of all places but the dummy page's, `[places, K, H]` float32."""
    rows = []
    for pages, scale in ((kv.k, kv.k_scale), (kv.v, kv.v_scale)):
        factor = jnp.broadcast_to(jnp.asarray(1.0 if scale is None else scale, jnp.float32), kv.num_kv_heads)
        numbers = to_numbers(pages)[1:].astype(jnp.float32) * factor[:, None, None]
        rows.append(jnp.swapaxes(numbers, 1, 2).reshape(-1, kv.num_kv_heads, kv.head_dim))
    return rows


def in_float32(tree: Any) -> Any:
    """The same arrays in float32."""
    return jax.tree.map(lambda each: each.astype(jnp.float32), tree)


def in_parts_of(dtype: jnp.dtype, parts: tuple[int, ...]) -> jnp.dtype:
    """What a product in `dtype` is in, that comes in `(P,)` parts or in none."""
    return jnp.dtype(jnp.float32) if parts else dtype


def attention_tolerance(shapes: KernelShapes) -> float:
    """Products may be made in the narrower of both formats."""
    kept = numbers_dtype(jnp.dtype(shapes.kv_dtype)).name
    return max(TOLERANCE[shapes.dtype], TOLERANCE.get(kept, 0.0))


def store_tolerance(shapes: KernelShapes) -> float:
    """What is stored is rounded to the cache's format."""
    is_float8 = numbers_dtype(jnp.dtype(shapes.kv_dtype)) == FLOAT8
    return FLOAT8_TOLERANCE if is_float8 else attention_tolerance(shapes)
