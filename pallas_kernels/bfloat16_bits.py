"""A cache of bfloat16 that a CPU can move: kept as uint16, the numbers' bits. Read here; called by the XLA decode.

XLA has no moves of bfloat16 on a CPU: it would widen the whole cache to write a row or read a page. It also gathers
four times slower where it knows that pages end up as four axes, since then it counts them for each number. Hence
the branches: XLA doesn't look into them, and these are always taken, which it can't know.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.xla_rows import take

DTYPE = jnp.dtype(jnp.uint16)
NUMBERS = jnp.dtype(jnp.bfloat16)


def to_bits(numbers: jax.Array) -> jax.Array:
    """Rounded to bfloat16, as they are stored."""
    return lax.bitcast_convert_type(numbers.astype(NUMBERS), DTYPE)


def to_numbers(bits: jax.Array) -> jax.Array:
    """The opposite of `to_bits`."""
    return lax.bitcast_convert_type(bits, NUMBERS)


def read_keys(pages: jax.Array, page_ids: jax.Array) -> jax.Array:
    """The pages `page_ids [B, n]` as bfloat16 `[B, K, n * page_size, H]`."""
    return _read(pages, page_ids, to_numbers, NUMBERS)


def read_values(pages: jax.Array, page_ids: jax.Array, seen: jax.Array | None) -> jax.Array:
    """As float32, and 0 in places that `seen [B, n * page_size]`, if given, excludes, whatever is there."""
    _, num_kv_heads, page_size, head_dim = pages.shape
    batch, num_pages = page_ids.shape

    def widened(bits: jax.Array) -> jax.Array:
        numbers = lax.bitcast_convert_type(bits.astype(jnp.uint32) << 16, jnp.float32)
        if seen is None:
            return numbers
        places = seen.reshape(batch, 1, num_pages, page_size, 1)
        places = jnp.broadcast_to(places, (batch, num_kv_heads, num_pages, page_size, head_dim)).reshape(bits.shape)
        return jnp.where(places, numbers, 0)

    return _read(pages, page_ids, widened, jnp.dtype(jnp.float32))


def _read(
    pages: jax.Array, page_ids: jax.Array, convert: Callable[[jax.Array], jax.Array], dtype: jnp.dtype
) -> jax.Array:
    num_pages, num_kv_heads, page_size, head_dim = pages.shape
    batch = page_ids.shape[0]
    rows = (page_ids[:, None, :] * num_kv_heads + jnp.arange(num_kv_heads)[:, None]).reshape(-1)

    def gathered() -> jax.Array:
        return convert(take(pages.reshape(num_pages * num_kv_heads, page_size * head_dim), rows))

    nothing = jnp.zeros((len(rows), page_size * head_dim), dtype)
    tiles = lax.cond(page_ids[0, 0] >= 0, gathered, lambda: nothing)
    return tiles.reshape(batch, num_kv_heads, -1, head_dim)
