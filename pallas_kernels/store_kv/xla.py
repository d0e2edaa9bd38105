"""`store_kv` as plain XLA: the CPU's production path, and the fall-back anywhere. Called by `api` only."""

import jax
import jax.numpy as jnp
from jax import lax


def store_kv(
    k_pages: jax.Array, v_pages: jax.Array, k: jax.Array, v: jax.Array, slots: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """See `pallas_kernels.store_kv`; a scatter of `[H]` rows, in place when the cache is donated."""
    return _store(k_pages, k, slots), _store(v_pages, v, slots)


def _store(pages: jax.Array, new: jax.Array, slots: jax.Array) -> jax.Array:
    page_size = pages.shape[2]
    if pages.dtype != jnp.bfloat16:
        return pages.at[slots // page_size, :, slots % page_size].set(new, mode="promise_in_bounds")
    # XLA's CPU back end has no bfloat16 scatter and would widen the whole cache to float32; moving bits is a quarter of
    # that time, though still a copy. The CPU's cache should be float32 or float16, which are stored in place.
    bits, new_bits = (lax.bitcast_convert_type(array, jnp.uint16) for array in (pages, new))
    bits = bits.at[slots // page_size, :, slots % page_size].set(new_bits, mode="promise_in_bounds")
    return lax.bitcast_convert_type(bits, jnp.bfloat16)
