"""Products whose sums come in parts: `[P, ...]` float32 in place of `[...]`, for readers that add them up.

Few rows times a matrix keep a GPU's multiprocessors busy only if several of them share each sum. Who reads the result
next adds up the parts as it loads them, which saves a kernel and its way through memory. Owns how many parts kernels
make, and what the whole of such a product is; which products come so is the models'
(`models.precision.product_in_parts`).
"""

from collections.abc import Iterable
from functools import reduce

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.target import target_device

_MOST_PARTS, _PROGRAMS_PER_CORE = 8, 1.5


def total(parts: Iterable[jax.Array], dtype: DTypeLike) -> jax.Array:
    """The sum of float32 parts, first to last, rounded once to what the product would have been in."""
    return reduce(jnp.add, parts).astype(dtype)


def whole(product: jax.Array, num_axes: int, dtype: DTypeLike) -> jax.Array:
    """A product of so many axes, or of one more with its parts first, as one array: in `dtype` if it came in parts."""
    if product.ndim == num_axes:
        return product
    return total((product[part] for part in range(len(product))), dtype)


def num_parts_of(num_tiles: int, num_steps: int, programs_per_core: float = _PROGRAMS_PER_CORE) -> int:
    """Parts of each sum: a power of two that divides the steps, for that many programs a multiprocessor."""
    parts = 1
    while (
        2 * parts <= _MOST_PARTS
        and parts * num_tiles < programs_per_core * target_device().num_cores
        and num_steps % (2 * parts) == 0
    ):
        parts *= 2
    return parts
