"""`store_kv` as plain XLA: a scatter of `[H]` rows. Called through `xla.BACKEND`."""

import dataclasses

import jax

from pallas_kernels.paged_kv import PagedKv
from pallas_kernels.xla.common import as_bits, from_bits


def store_kv(kv: PagedKv, k: jax.Array, v: jax.Array, slots: jax.Array, interpret: bool) -> PagedKv:
    """See `backend.Store`; in place when the cache is donated.

    On a CPU that isn't so for bfloat16 and float8_e4m3fn, whose bits XLA copies before and after the scatter.
    """
    return dataclasses.replace(kv, k=store_pages(kv.k, k, slots), v=store_pages(kv.v, v, slots))


def store_pages(pages: jax.Array, new: jax.Array, slots: jax.Array) -> jax.Array:
    """Pages with `new [T, K, H]`, of their format, at `slots [T]`."""
    page_size = pages.shape[2]
    where = (slots // page_size, slice(None), slots % page_size)
    stored = as_bits(pages).at[where].set(as_bits(new), mode="promise_in_bounds")
    return stored if stored.dtype == pages.dtype else from_bits(stored, pages.dtype)
