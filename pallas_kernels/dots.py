"""The precision of XLA's products: float32 stays float32, which accelerators would round by default.

A GPU's default is TF32, 10 bits of mantissa, and a TPU's bfloat16.
"""

import jax
import jax.numpy as jnp
from jax import lax


def dot_precision(x: jax.Array) -> lax.Precision | None:
    """What a product of rows in x's dtype asks for.

    Routers' weights are float32 where rows have 16 bits, too: such products take the default, which is exact for rows
    and faster.
    """
    return lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
