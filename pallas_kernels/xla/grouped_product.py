"""`grouped_product` in XLA: a loop over tiles of one expert's rows. Called through `xla.BACKEND`.

The fall-back anywhere. `lax.ragged_dot` is none: on CPUs and GPUs XLA makes a product with all experts of it.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.experts import Groups, product_dtype, result_dtype, row_tiles

_TILE_ROWS = 16  # the same for all numbers of rows, so that a row's sums are made in the same way


def grouped_product(x: jax.Array, groups: Groups, weights: jax.Array, of_tokens: bool, interpret: bool) -> jax.Array:
    """See `backend.GroupedProduct`. Reads the weights once per tile, those of experts without rows never."""
    tiles, num_tiles = row_tiles(groups, _TILE_ROWS)
    num_places = groups.num_places
    rows, dtype = x.astype(product_dtype(x, weights)), result_dtype(x, weights)

    def multiply(index: jax.Array, y: jax.Array) -> jax.Array:
        places = tiles.begins[index] + jnp.arange(_TILE_ROWS, dtype=jnp.int32)
        is_mine = places < tiles.ends[index]
        of_place = groups.tokens.at[places].get(mode="clip") if of_tokens else places
        tile = rows.at[of_place].get(mode="clip")
        matrix = lax.dynamic_index_in_dim(weights, tiles.experts[index], keepdims=False).astype(rows.dtype)
        out = jnp.einsum("ri,oi->ro", tile, matrix, preferred_element_type=jnp.float32).astype(dtype)
        return y.at[jnp.where(is_mine, places, num_places)].set(out, mode="drop")

    return lax.fori_loop(0, num_tiles, multiply, jnp.zeros((num_places, weights.shape[1]), dtype))
