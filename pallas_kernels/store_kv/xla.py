"""`store_kv` as plain XLA: the CPU's production path, and the fall-back anywhere. Called by `api` only."""

import jax

from pallas_kernels.xla_rows import as_bits, from_bits


def store_kv(
    k_pages: jax.Array, v_pages: jax.Array, k: jax.Array, v: jax.Array, slots: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """See `pallas_kernels.store_kv`; a scatter of `[H]` rows, in place when the cache is donated.

    Not so on a CPU for bfloat16 and float8_e4m3fn, whose bits XLA copies there before and after the scatter.
    """
    return _store(k_pages, k, slots), _store(v_pages, v, slots)


def _store(pages: jax.Array, new: jax.Array, slots: jax.Array) -> jax.Array:
    page_size = pages.shape[2]
    where = (slots // page_size, slice(None), slots % page_size)
    stored = as_bits(pages).at[where].set(as_bits(new), mode="promise_in_bounds")
    return stored if stored.dtype == pages.dtype else from_bits(stored, pages.dtype)
