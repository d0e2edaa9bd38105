"""How the XLA decode reads tiles: pages in the order and format that its dot products take. Called by `xla*` only."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels import bfloat16_bits
from pallas_kernels.xla_rows import as_bits, from_bits, gather_tiles


def read_tiles(
    k_pages: jax.Array, v_pages: jax.Array, page_ids: jax.Array, seen: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """Keys, and values in float32, of the pages `page_ids [B, n]`; each `[B, K, n * page_size, H]`.

    Values are 0 in places that `seen [B, n * page_size]` excludes: they may hold NaN, which no weight would silence.
    """
    if k_pages.dtype == bfloat16_bits.DTYPE:
        return bfloat16_bits.read_keys(k_pages, page_ids), bfloat16_bits.read_values(v_pages, page_ids, seen)
    k, v = (from_bits(gather_tiles(as_bits(x), page_ids), x.dtype).astype(jnp.float32) for x in (k_pages, v_pages))
    return k, v if seen is None else jnp.where(seen[:, None, :, None], v, 0)
