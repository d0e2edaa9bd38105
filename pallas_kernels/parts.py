"""Products whose sums come in parts: `[P, ...]` float32 in place of `[...]`, for readers that add them up.

Few rows times a matrix keep a GPU's multiprocessors busy only if several of them share each sum. Who reads the result
next adds up the parts as it loads them, which saves a kernel and its way through memory. Owns what the whole of such a
product is; which products come so is the models' (`models.precision.product_in_parts`).
"""

from collections.abc import Iterable
from functools import reduce

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike


def total(parts: Iterable[jax.Array], dtype: DTypeLike) -> jax.Array:
    """The sum of float32 parts, first to last, rounded once to what the product would have been in."""
    return reduce(jnp.add, parts).astype(dtype)


def whole(product: jax.Array, num_axes: int, dtype: DTypeLike) -> jax.Array:
    """A product of so many axes, or of one more with its parts first, as one array: in `dtype` if it came in parts."""
    if product.ndim == num_axes:
        return product
    return total((product[part] for part in range(len(product))), dtype)
