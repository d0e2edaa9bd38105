"""`store_kv`: write new K and V into the paged cache, in place. Checks arguments and dispatches; computes nothing."""

import jax
import jax.numpy as jnp

from pallas_kernels.dispatch import choose_backend, no_refusal
from pallas_kernels.options import check_pages
from pallas_kernels.store_kv import pallas_gpu, reference, xla


def store_kv(
    k_pages: jax.Array,
    v_pages: jax.Array,
    k: jax.Array,
    v: jax.Array,
    slots: jax.Array,
    *,
    backend: str = "auto",
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Scatter the K and V of T tokens into the cache; returns the two updated cache arrays.

    Args:
        k_pages, v_pages: the cache `[num_pages, K, page_size, H]`. Donate them to the surrounding jit and they are
            updated in place.
        k, v: `[T, K, H]`, cast to the cache's dtype.
        slots: `[T]` int32, page * page_size + offset, each within the cache. Padding tokens use slots of page 0; only
            there may a slot occur twice.
        backend: one of `BACKENDS`.
        interpret: run a Pallas backend in its interpreter, on any platform.

    Raises:
        ValueError: shapes that don't fit each other, or a backend that can't run here.
    """
    check_pages(k_pages, v_pages)
    _, num_kv_heads, _, head_dim = k_pages.shape
    expected = (slots.shape[0] if slots.ndim == 1 else -1, num_kv_heads, head_dim)
    if k.shape != expected or v.shape != expected or slots.dtype != jnp.int32:
        raise ValueError(
            f"k {k.shape} and v {v.shape} must be [T, K, H] and slots {slots.shape} {slots.dtype} [T] int32, "
            f"with the K and H of k_pages {k_pages.shape}"
        )
    implemented = {
        "reference": no_refusal,
        "xla": no_refusal,
        "pallas_gpu": lambda: pallas_gpu.refuse_shapes(k_pages),
    }
    chosen = choose_backend("store_kv", backend, implemented, interpret=interpret)
    k, v = k.astype(k_pages.dtype), v.astype(v_pages.dtype)
    if chosen == "pallas_gpu":
        stored: tuple[jax.Array, jax.Array] = pallas_gpu.store_kv(k_pages, v_pages, k, v, slots, interpret=interpret)
        return stored
    if chosen == "reference":
        return reference.store_kv(k_pages, v_pages, k, v, slots)
    return xla.store_kv(k_pages, v_pages, k, v, slots)
