"""What decode and extend do alike with the scores of a tile, for softmaxes in powers of 2."""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.hopper.common import WGMMA_ROWS
from pallas_kernels.options import AttentionOptions
from pallas_kernels.partition import LOG2_E

# Where a row's top score starts: below any real score, finite, so that hidden scores of -inf weigh 0 and not NaN.
LOWEST = -1e30


def shape_scores(options: AttentionOptions, head_dim: int, products: jax.Array) -> tuple[jax.Array, float]:
    """Turn products q . k into values, and the factor by which they become softmax scores times log2(e).

    The factor is left to the exponential, where it costs nothing.
    """
    scale, cap = options.scale(head_dim), options.logit_soft_cap
    if cap is None:
        return products, scale * LOG2_E
    # tanh(x) = 1 - 2 / (1 + exp(2 x)); the chip's own approximation of tanh is too coarse under a large cap.
    growth = jnp.exp2(products * (2 * LOG2_E * scale / cap))
    return 1.0 - 2.0 / (1.0 + growth), cap * LOG2_E


def to_matrix(column: jax.Array, width: int) -> jax.Array:
    """`[64]` to `[64, width]`."""
    return lax.broadcast_in_dim(column, (WGMMA_ROWS, width), (0,))
