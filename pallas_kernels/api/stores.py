"""Stores into the paged cache: of keys and values, of a latent's entries, and of what a product in between becomes.

Owns how new tokens come into the cache: the checks of their slots, the cache's heads, scales and format. Never knows
attention, nor how a backend stores: it asks `dispatch` for one and calls it.
"""

import dataclasses

import jax
import jax.numpy as jnp

from pallas_kernels.choice import AUTO
from pallas_kernels.dispatch import choose_kernel, choose_kernel_or_xla
from pallas_kernels.kept_heads import widened
from pallas_kernels.latent import LatentQkv, check_latent_qkv
from pallas_kernels.paged_kv import PagedKv, check_pages, per_head_scale, to_format
from pallas_kernels.qkv import FusedQkv, check_qkv
from pallas_kernels.xla.store import store_pages


def store_kv(
    kv: PagedKv, k: jax.Array, v: jax.Array, slots: jax.Array, *, backend: str = "auto", interpret: bool = False
) -> PagedKv:
    """Write the K and V of T tokens into the cache; returns the cache with the updated pages.

    Args:
        kv: the cache. Donate its pages to the surrounding jit and they are updated in place. Page table and lengths are
            passed through unread.
        k, v: `[T, K, H]`, divided by the cache's scales and cast to its dtype; what float8 can't hold becomes its
            largest number. K and H may be those of a model whose heads the cache keeps otherwise (`kept_heads`).
        slots: `[T]` int32, page * page_size + offset, each within the cache. Padding tokens use slots of page 0; only
            there may a slot occur twice.
        backend: one of `STORE_BACKENDS`, or "auto".
        interpret: run a Pallas backend in its interpreter, on any platform.

    Raises:
        ValueError: shapes that don't fit each other, or a backend that can't run here.
    """
    check_pages(kv)
    is_rows = k.shape == v.shape and k.ndim == 3 and k.shape[:1] == slots.shape
    if not is_rows or not kv.kept(k.shape[1]).takes(k.shape[2]) or slots.dtype != jnp.int32:
        raise ValueError(
            f"k {k.shape} and v {v.shape} must be [T, K, H] and slots {slots.shape} {slots.dtype} [T] int32, "
            f"with the K of kv.k {kv.k.shape} and at most its H, or with heads that lie side by side in that"
        )
    k, v = as_kept(k, v, kv)
    store = choose_kernel("store_kv", lambda each: each.store, backend, kv, interpret=interpret)
    stored = store(kv.unscaled(), k, v, slots, interpret)
    return dataclasses.replace(kv, k=stored.k, v=stored.v)


def store_entries(pages: jax.Array, entries: jax.Array, slots: jax.Array) -> jax.Array:
    """Write what T tokens keep into pages without a partner; returns the pages, updated. XLA does it.

    Attention over such pages is that of `PagedKv(pages, pages, ..)` with `AttentionOptions.value_dim`.

    Args:
        pages: `[num_pages, K, page_size, H]`, as of `PagedKv`; donate them to the surrounding jit.
        entries: `[T, K, H]`, cast to the pages' format; of smaller ones the rest is written as zeros.
        slots: `[T]` int32, as for `store_kv`.

    Raises:
        ValueError: shapes that don't fit each other.
    """
    kv = PagedKv(pages, pages, slots[None], slots)
    check_pages(kv)
    fits = entries.ndim == 3 and entries.shape[:2] == (len(slots), kv.num_kv_heads) and entries.shape[2] <= kv.head_dim
    if not fits or slots.ndim != 1 or slots.dtype != jnp.int32:
        raise ValueError(
            f"entries {entries.shape} must be [T, K, H] and slots {slots.shape} {slots.dtype} [T] int32, with the K of "
            f"pages {pages.shape} and at most their H"
        )
    return store_pages(pages, to_format(widened(entries, kv.head_dim), pages.dtype), slots)


def absorb_and_store(
    qkv: LatentQkv, pages: jax.Array, slots: jax.Array, *, backend: str = AUTO, interpret: bool = False
) -> tuple[jax.Array, jax.Array]:
    """`rotate_and_store` of a layer with a latent: norm, rotation, queries times their heads' matrices, and a store.

    Returns the queries `[T, N, H]`, with the H of the pages and zeros after the model's, and the pages, updated. Where
    tokens are chosen, H is the model's: queries don't meet the key of the index, which the pages hold after it.

    Args:
        qkv: the products and what makes queries and entries of them.
        pages, slots: as for `store_entries`.
        backend: a backend that has the op, "xla" or "auto": where no kernel takes the call, XLA does it all.
        interpret: run a Pallas backend in its interpreter, on any platform.

    Raises:
        ValueError: shapes that don't fit each other, or a backend that can't run here.
    """
    check_latent_qkv(qkv)
    check_pages(PagedKv(pages, pages, slots[None], slots))
    kernel = choose_kernel_or_xla(
        "rotate_and_store", lambda each: each.absorb_and_store, backend, qkv, pages, interpret=interpret
    )
    if kernel is not None:
        return kernel(qkv, pages, slots, interpret)
    queries = qkv.queries if qkv.num_chosen else widened(qkv.queries, pages.shape[3])
    return queries, store_entries(pages, qkv.entries, slots)


def rotate_and_store(
    qkv: FusedQkv,
    kv: PagedKv,
    slots: jax.Array,
    *,
    backend: str = "auto",
    store_backend: str | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, PagedKv]:
    """Take the product of a layer's fused weights apart: bias, norm per head, rotation, and a store of keys and values.

    Returns the queries `[T, N, H]` in the product's dtype, and the cache with the updated pages. H is the cache's:
    where it isn't the model's (`kept_heads`), attention needs `options.for_heads`, and its output `own_numbers`.

    Args:
        qkv: the product and what turns it into queries, keys and values.
        kv: the cache, as for `store_kv`.
        slots: `[T]` int32, as for `store_kv`.
        backend: a backend that has the op, or "auto". "auto" takes the device's best one; a device without any gets
            XLA's queries, keys and values, and `store_kv`.
        store_backend: of that `store_kv`; None: `backend`.
        interpret: run a Pallas backend in its interpreter, on any platform.

    Raises:
        ValueError: shapes that don't fit each other, or a backend that can't run here.
    """
    check_new_tokens(qkv, kv, slots)
    kernel = choose_kernel_or_xla(
        "rotate_and_store", lambda each: each.rotate_and_store, backend, qkv, kv, interpret=interpret
    )
    if kernel is not None:
        return kernel(qkv, kv, slots, interpret)
    q, k, v = qkv.split()
    stored = store_kv(kv, k, v, slots, backend=backend if store_backend is None else store_backend)
    return kv.kept(qkv.num_kv_heads).queries(q), stored


def check_new_tokens(qkv: FusedQkv, kv: PagedKv, slots: jax.Array) -> None:
    """Check a product and the slots of its tokens against the cache."""
    check_pages(kv)
    check_qkv(qkv)
    if not kv.kept(qkv.num_kv_heads).takes(qkv.head_dim) or slots.shape != (qkv.num_tokens,):
        raise ValueError(
            f"qkv.product {qkv.product.shape} must be [T, K, G + 2, H] and slots {slots.shape} [T], "
            f"with the K of kv.k {kv.k.shape} and at most its H, or with heads that lie side by side in that"
        )
    if slots.dtype != jnp.int32:
        raise ValueError(f"slots has dtype {slots.dtype}; it must be int32")


def as_kept(k: jax.Array, v: jax.Array, kv: PagedKv) -> tuple[jax.Array, jax.Array]:
    """A model's k and v `[T, K, H]` as the cache holds them: in its heads, over its scales, in its format."""
    heads = kv.kept(k.shape[1])
    k, v = widened(k, heads.share), widened(v, heads.share)
    k = _to_cache_dtype(k, per_head_scale("k_scale", kv.k_scale, heads.num_kv_heads), kv.dtype)
    v = _to_cache_dtype(v, per_head_scale("v_scale", kv.v_scale, heads.num_kv_heads), kv.dtype)
    return heads.joined(k), heads.joined(v)


def _to_cache_dtype(new: jax.Array, scale: jax.Array | None, dtype: jnp.dtype) -> jax.Array:
    if scale is not None:
        new = new.astype(jnp.float32) / scale[:, None]
    return to_format(new, dtype)
