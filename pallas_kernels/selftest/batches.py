"""Ragged batches for checks: pages in any order, and the places that sequences own; arrays of random numbers.

Owns where tokens lie. Never knows ops. Used by `cases`, and by the checks and benchmarks of `scripts/`.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.paged_kv import numbers_dtype, to_bits, to_format

Array = np.ndarray[Any, Any]
FEW = 1 << 20  # numbers that a host draws faster than a device compiles that


def scattered_pages(lengths: Array, page_size: int, table: Array, num_pages: int, rng: np.random.Generator) -> None:
    """Gives each sequence pages of its own, in any order, as entries of its row of `table [S, P]`; page 0 is nobody's.

    Entries past a sequence's pages stay as they are.
    """
    counts = -(-lengths // page_size)
    free = 1 + rng.permutation(num_pages - 1)
    for row, end, count in zip(table, np.cumsum(counts), counts, strict=True):
        row[:count] = free[end - count : end]


def used_places(lengths: Array, page_size: int, table: Array, num_pages: int) -> Array:
    """`[num_pages, page_size]`: true where a place holds a token of some sequence."""
    used = np.zeros((num_pages, page_size), bool)
    for row, length in zip(table, lengths, strict=True):
        position = np.arange(length)
        used[row[position // page_size], position % page_size] = True
    return used


def slots_of(row: Array, begin: int, end: int, page_size: int) -> Array:
    """Slots of the tokens `begin` to `end` of the sequence whose pages are `row`."""
    position = np.arange(begin, end)
    slots: Array = row[position // page_size] * page_size + position % page_size
    return slots


def normal(key: jax.Array, scale: jax.Array | float, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """Normal numbers over `scale`, rounded to `dtype`: few are drawn by the host, for many a program is compiled."""
    if math.prod(shape) > FEW or isinstance(key, jax.core.Tracer):
        return _many(key, scale, shape, dtype)
    numbers = np.random.default_rng(np.asarray(jax.random.key_data(key))).standard_normal(shape, np.float32)
    return to_format(jnp.asarray(numbers / np.asarray(scale, np.float32)), dtype)


@functools.partial(jax.jit, static_argnames=("shape", "dtype"))
def _many(key: jax.Array, scale: jax.Array | float, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    return to_format(jax.random.normal(key, shape, jnp.float32) / scale, dtype)


def pages_of(numbers: jax.Array, used: Array, dtype: Any) -> jax.Array:
    """Pages `[num_pages, K, page_size, H]` of numbers as a cache of `dtype` keeps them; NaN where none is used."""
    pages = jnp.where(used[:, None, :, None], numbers, jnp.asarray(jnp.nan, numbers.dtype))
    return pages if numbers_dtype(dtype) == jnp.dtype(dtype) else to_bits(pages, jnp.dtype(dtype))
