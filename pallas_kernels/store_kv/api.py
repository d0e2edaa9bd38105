"""`store_kv`: write new K and V into the paged cache, in place. Checks arguments and dispatches; computes nothing."""

import jax
import jax.numpy as jnp

from pallas_kernels import bfloat16_bits, dispatch
from pallas_kernels.dispatch import Implementation
from pallas_kernels.options import FLOAT8, Scale, check_pages, per_head_scale
from pallas_kernels.store_kv import mosaic_tpu, reference, triton, xla

_IMPLEMENTATIONS = {
    "reference": Implementation(reference.store_kv),
    "xla": Implementation(xla.store_kv),
    "triton": Implementation(triton.store_kv, triton.refuse_shapes),
    "mosaic_tpu": Implementation(mosaic_tpu.store_kv, mosaic_tpu.refuse_shapes),
}
STORE_BACKENDS = tuple(_IMPLEMENTATIONS)  # the others are for attention alone


def store_kv(
    k_pages: jax.Array,
    v_pages: jax.Array,
    k: jax.Array,
    v: jax.Array,
    slots: jax.Array,
    *,
    k_scale: Scale = None,
    v_scale: Scale = None,
    backend: str = "auto",
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Scatter the K and V of T tokens into the cache; returns the two updated cache arrays.

    Args:
        k_pages, v_pages: the cache `[num_pages, K, page_size, H]`; uint16: the bits of bfloat16
            (`bfloat16_bits`). Donate them to the surrounding jit and they are updated in place.
        k, v: `[T, K, H]`, cast to the cache's dtype; beyond what float8 can hold they become its largest number.
        slots: `[T]` int32, page * page_size + offset, each within the cache. Padding tokens use slots of page 0; only
            there may a slot occur twice.
        k_scale, v_scale: k and v are divided by them first: one number or `[K]`, default 1. Attention over this cache
            takes the same scales.
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
    k = _to_cache_dtype(k, per_head_scale("k_scale", k_scale, num_kv_heads), k_pages.dtype)
    v = _to_cache_dtype(v, per_head_scale("v_scale", v_scale, num_kv_heads), v_pages.dtype)
    args = (k_pages, v_pages, k, v, slots)
    stored: tuple[jax.Array, jax.Array] = dispatch.run(
        "store_kv", backend, _IMPLEMENTATIONS, (k_pages,), args, interpret=interpret
    )
    return stored


def _to_cache_dtype(new: jax.Array, scale: jax.Array | None, dtype: jnp.dtype) -> jax.Array:
    if scale is not None:
        new = new.astype(jnp.float32) / scale[:, None]
    if dtype == FLOAT8:
        largest = float(jnp.finfo(FLOAT8).max)
        new = jnp.clip(new, -largest, largest)
    return bfloat16_bits.to_bits(new) if dtype == bfloat16_bits.DTYPE else new.astype(dtype)
