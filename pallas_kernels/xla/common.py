"""What the ops as plain XLA share: reading pages, moving formats that XLA's CPU back end can't move, the soft cap.

Owns how pages leave the cache in the order of a dot product. Never knows which tokens an op wants.

Measured on a CPU (docs/kernels/xla.md): dynamic slices of a few pages run at memory speed, and so does a gather whose
contiguous runs are of 128 numbers or more; one of runs of 64 takes three times as long. Every op in a loop's body costs
a microsecond or two per iteration and some 15 milliseconds of compilation.
"""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.options import AttentionOptions
from pallas_kernels.paged_kv import BITS, FLOAT8, FLOAT8_BITS, numbers_dtype
from pallas_kernels.target import target_device

# Below any real score; finite, so that subtracting it from itself gives 0 and not NaN.
UNSEEN = -1e30


def take(array: jax.Array, index: jax.Array | tuple[jax.Array, ...]) -> jax.Array:
    """`array[index]`, the indices known to be in range and not negative."""
    return array.at[index].get(mode="promise_in_bounds", wrap_negative_indices=False)


def as_bits(array: jax.Array) -> jax.Array:
    """On a CPU, an array of a type that XLA can't move there as unsigned integers; any other array as it is.

    XLA would widen the whole cache instead, and then move that. On a TPU, taking the bits would copy the cache.
    """
    if target_device().platform != "cpu":
        return array
    bits = {jnp.dtype(jnp.bfloat16): BITS, jnp.dtype(FLOAT8): FLOAT8_BITS}.get(array.dtype)
    return array if bits is None else lax.bitcast_convert_type(array, bits)


def from_bits(array: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """The opposite of `as_bits`; the numbers, too, of pages that are kept as `BITS` or `FLOAT8_BITS`."""
    dtype = numbers_dtype(dtype)
    return array if array.dtype == dtype else lax.bitcast_convert_type(array, dtype)


def soft_cap(scores: jax.Array, options: AttentionOptions) -> jax.Array:
    """Scaled scores with the soft cap of the options, if there is one."""
    if options.logit_soft_cap is None:
        return scores
    return options.logit_soft_cap * jnp.tanh(scores / options.logit_soft_cap)


def gather_tiles(pages: jax.Array, page_ids: jax.Array) -> jax.Array:
    """The pages `page_ids [..., n]` of `[num_pages, K, page_size, H]` as `[..., K, n * page_size, H]`."""
    _, num_kv_heads, page_size, head_dim = pages.shape
    # Rows of one page and head, so that the gather puts them in order and nothing is transposed afterwards. An axis of
    # length 1 would tempt XLA into another layout, and into copying the cache to get it.
    rows = pages.reshape((-1, head_dim) if page_size == 1 else (-1, page_size, head_dim))
    index = page_ids[..., None, :] * num_kv_heads + jnp.arange(num_kv_heads)[:, None]
    return take(rows, index).reshape(*index.shape[:-1], -1, head_dim)
