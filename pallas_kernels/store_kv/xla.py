"""`store_kv` as plain XLA: the CPU's production path, and the fall-back anywhere. Called by `api` only."""

import jax


def store_kv(
    k_pages: jax.Array, v_pages: jax.Array, k: jax.Array, v: jax.Array, slots: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """See `pallas_kernels.store_kv`; a scatter of `[H]` rows, in place when the cache is donated."""
    return _store(k_pages, k, slots), _store(v_pages, v, slots)


def _store(pages: jax.Array, new: jax.Array, slots: jax.Array) -> jax.Array:
    page_size = pages.shape[2]
    return pages.at[slots // page_size, :, slots % page_size].set(new, mode="promise_in_bounds")
