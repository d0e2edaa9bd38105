"""Cases of stores: of products that are rotated or absorbed, and of keys and values as they are.

Owns how many tokens they have, and checks that all other places of the cache stay as they were.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.api.stores import absorb_and_store, rotate_and_store, store_kv
from pallas_kernels.latent import LatentQkv
from pallas_kernels.paged_kv import PagedKv
from pallas_kernels.qkv import FusedQkv
from pallas_kernels.selftest.batches import normal
from pallas_kernels.selftest.case import Case
from pallas_kernels.selftest.cases.arguments import (
    EPS,
    NUM_PARTS,
    empty_caches,
    fused_qkv,
    in_float32,
    latent_heads,
    rows_of,
    store_tolerance,
)
from pallas_kernels.selftest.shapes import KernelShapes, LatentShape
from pallas_kernels.token_index import TokenIndex


def rotate_cases(shapes: KernelShapes) -> Iterator[Case]:
    """A few tokens and many, padding among them, into pages full of NaN, which must stay wherever no token goes."""
    if shapes.has_latents:
        yield from (_absorb(shapes, each, *batch) for each in shapes.latents for batch in ((5, 4), (300, 1)))
        return
    for num_tokens, parts in ((5, (NUM_PARTS,)), (300, ())):
        slots, kv, empty = empty_caches(shapes, num_tokens)
        qkv = fused_qkv(shapes, len(slots), parts)
        exact = in_float32(qkv)
        yield Case(
            f"{num_tokens} tokens" + (" in parts" if parts else ""),
            store_tolerance(shapes),
            functools.partial(_rotated, qkv, kv, slots, num_tokens),
            functools.partial(_rotated, exact, empty, slots, num_tokens, "xla", False),
        )


def _absorb(shapes: KernelShapes, latent: LatentShape, num_tokens: int, num_parts: int) -> Case:
    """Of tokens whose queries and entries are one product in parts, or two whole ones; with keys of an index."""
    slots, kv, empty = empty_caches(shapes, num_tokens)
    heads = latent_heads(shapes, latent)
    key_size, keys = latent.key_size or shapes.head_dim, jax.random.split(jax.random.key(14), 5)
    num_rotated = key_size - heads.latent_size
    angles = jax.random.uniform(keys[0], (len(slots), 1, num_rotated // 2), jnp.float32, 0, 2 * np.pi)
    widths = [shapes.num_groups * (latent.num_absorbing + num_rotated), key_size]
    dtype = jnp.dtype(shapes.dtype)
    products: list[Any] = [None, None]  # of both, or of each
    if num_parts > 1:
        shape, float32 = (num_parts, len(slots), sum(widths)), jnp.dtype(jnp.float32)
        products[0] = normal(keys[1], num_parts**0.5, shape=shape, dtype=float32)
    else:
        products = [normal(keys[1 + i], 1.0, shape=(len(slots), width), dtype=dtype) for i, width in enumerate(widths)]
    scales = normal(keys[3], 1.0, shape=(heads.latent_size,), dtype=dtype)
    turns = jnp.cos(angles), jnp.sin(angles)
    index = None
    if latent.index_size:
        own = normal(keys[4], 1.0, shape=(len(slots), latent.index_size), dtype=dtype)
        index = TokenIndex(own[:, None], jnp.ones((len(slots), 1)), own)
    qkv = LatentQkv(products[0], products[1], scales, heads, *turns, EPS, dtype, index, latent.num_chosen)

    def call(qkv: LatentQkv, kv: PagedKv, backend: str, interpret: bool) -> list[jax.Array]:
        q, pages = _absorb_jit(qkv, kv.k, slots, backend=backend, interpret=interpret)
        return [q[:num_tokens], *rows_of(dataclasses.replace(kv, k=pages))[:1]]

    exact = dataclasses.replace(in_float32(qkv), dtype=jnp.dtype(jnp.float32))
    return Case(
        f"{num_tokens} tokens of latents",
        store_tolerance(shapes),
        functools.partial(call, qkv, kv),
        functools.partial(call, exact, empty, "xla", False),
    )


def _rotated(
    qkv: FusedQkv, kv: PagedKv, slots: jax.Array, num_tokens: int, backend: str, interpret: bool
) -> list[jax.Array]:
    q, kv = _rotate_jit(qkv, kv, slots, backend=backend, interpret=interpret)
    return [q[:num_tokens], *rows_of(kv)]


def store_cases(shapes: KernelShapes) -> Iterator[Case]:
    """The same stores, of keys and values that XLA has rotated."""
    for num_tokens in (5, 300):
        slots, kv, empty = empty_caches(shapes, num_tokens)
        keys = jax.random.split(jax.random.key(6))
        shape = (len(slots), shapes.num_kv_heads, shapes.head_dim)
        k, v = (normal(key, 1.0, shape=shape, dtype=jnp.dtype(shapes.dtype)) for key in keys)

        wide = k.astype(jnp.float32), v.astype(jnp.float32)
        yield Case(
            f"{num_tokens} tokens",
            store_tolerance(shapes),
            functools.partial(_stored, kv, slots, k, v),
            functools.partial(_stored, empty, slots, *wide, "xla", False),
        )


def _stored(
    kv: PagedKv, slots: jax.Array, k: jax.Array, v: jax.Array, backend: str, interpret: bool
) -> list[jax.Array]:
    return rows_of(_store_jit(kv, k, v, slots, backend=backend, interpret=interpret))


_rotate_jit = jax.jit(rotate_and_store, static_argnames=("backend", "interpret"))
_absorb_jit = jax.jit(absorb_and_store, static_argnames=("backend", "interpret"))
_store_jit = jax.jit(store_kv, static_argnames=("backend", "interpret"))
