"""The paged KV cache as one argument: `PagedKv`, the formats its pages come in, and the checks on it.

Owns the cache's layout and its scales. Never knows queries' options or how a backend reads pages. Used by every kernel
and by the callers of the public functions.
"""

import dataclasses
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.kept_heads import KeptHeads

MAX_PAGE_SIZE = 256
FLOAT8 = jnp.float8_e4m3fn
# Caches of bfloat16 and of float8 that a CPU can move: their numbers are kept as their bits. XLA has no moves of these
# formats on a CPU and would widen the whole cache to write a row of it or to read a page.
BITS = jnp.dtype(jnp.uint16)
FLOAT8_BITS = jnp.dtype(jnp.uint8)
QUERY_DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)
_NUMBERS_OF_BITS = {BITS: jnp.dtype(jnp.bfloat16), FLOAT8_BITS: jnp.dtype(FLOAT8)}
_CACHE_DTYPES = (*QUERY_DTYPES, FLOAT8, *_NUMBERS_OF_BITS)

# One factor for a whole cache array, `[K]` factors for its kv heads, or None for 1.
Scale: TypeAlias = float | np.ndarray[Any, Any] | jax.Array | None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PagedKv:
    """The keys and values of S sequences in pages; a JAX pytree, so that it passes through `jit` as it is.

    Slot `s` is offset `s % page_size` of page `s // page_size`. Page 0 is the dummy page: padding tokens are written
    there, and its contents never matter. Where several arrays of pages share one page table (the layers of a model),
    each gets a PagedKv of its own.
    """

    k: jax.Array
    """`[num_pages, K, page_size, H]`, so that the tile of one page and one kv head is contiguous; float32, bfloat16,
    float16, float8_e4m3fn, or uint16 and uint8 for the bits of bfloat16 and of float8_e4m3fn (`BITS`, `FLOAT8_BITS`).
    Unused places may hold anything, even NaN. For kernels that take only some sizes, H may be more than a model's heads
    have, and K a fraction of theirs: `kept_heads` says how they lie then."""
    v: jax.Array
    """Like k."""
    page_table: jax.Array
    """`[S, P]` int32; entries past a sequence's pages may name any page that exists. A store doesn't read it."""
    lengths: jax.Array
    """`[S]` int32: KV tokens of each sequence, the new ones included, at most P * page_size. A padding sequence has
    length 0. A store doesn't read it."""
    k_scale: Scale = None
    """A number of the cache stands for itself times its scale: one scale for all, or one for each of the model's kv
    heads."""
    v_scale: Scale = None

    @property
    def num_kv_heads(self) -> int:
        """K."""
        return int(self.k.shape[1])

    @property
    def page_size(self) -> int:
        """Tokens of a page."""
        return int(self.k.shape[2])

    @property
    def head_dim(self) -> int:
        """H."""
        return int(self.k.shape[3])

    @property
    def dtype(self) -> Any:
        """The format of the pages."""
        return self.k.dtype

    @property
    def num_seqs(self) -> int:
        """S."""
        return int(self.lengths.shape[0])

    @property
    def max_len(self) -> int:
        """The most tokens that a sequence can have: P * page_size."""
        return int(self.page_table.shape[1]) * self.page_size

    def kept(self, num_kv_heads: int) -> KeptHeads:
        """How the cache keeps so many kv heads of a model."""
        return KeptHeads(num_kv_heads, self.num_kv_heads, self.head_dim)

    def unscaled(self) -> "PagedKv":
        """The same cache without its scales."""
        return dataclasses.replace(self, k_scale=None, v_scale=None)


def to_bits(numbers: jax.Array, bits: jnp.dtype = BITS) -> jax.Array:
    """Numbers rounded to bfloat16, as a cache of `BITS` holds them; or to float8, as one of `FLOAT8_BITS` does."""
    if jnp.dtype(bits) == FLOAT8_BITS:
        return _float8_bits(numbers.astype(jnp.float32))
    return lax.bitcast_convert_type(to_format(numbers, _NUMBERS_OF_BITS[bits]), bits)


def _float8_bits(numbers: jax.Array) -> jax.Array:
    """`to_format`'s float8 of float32 numbers, as uint8: XLA's conversion takes twice as long on a CPU."""
    largest = float(jnp.finfo(FLOAT8).max)
    bits = lax.bitcast_convert_type(jnp.clip(numbers, -largest, largest), jnp.uint32)
    size = bits & 0x7FFFFFFF
    # To 3 bits of mantissa, ties to even; then 120 less in the exponent, whose bias is 7, not 127.
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - (120 << 3)
    # Below 2^-6 they are whole 512ths: what a float32 next to 2^14 has in its last bits.
    rounder = np.float32(2**14)
    small = lax.bitcast_convert_type(lax.bitcast_convert_type(size, jnp.float32) + rounder, jnp.uint32)
    small -= rounder.view(np.uint32)
    rounded = jnp.where(size < np.float32(2**-6).view(np.uint32), small, normal)
    rounded = jnp.where(size > np.float32(np.inf).view(np.uint32), 0x7F, rounded)
    return (rounded | (bits >> 24 & 0x80)).astype(jnp.uint8)


def to_numbers(pages: jax.Array) -> jax.Array:
    """The numbers of pages of `BITS` or `FLOAT8_BITS`; any other pages as they are."""
    dtype = numbers_dtype(pages.dtype)
    return pages if dtype == pages.dtype else lax.bitcast_convert_type(pages, dtype)


def numbers_dtype(dtype: jnp.dtype) -> jnp.dtype:
    """The format of the numbers in a cache of `dtype`: what `BITS` and `FLOAT8_BITS` stand for, else `dtype`."""
    return _NUMBERS_OF_BITS.get(jnp.dtype(dtype), jnp.dtype(dtype))


def to_format(numbers: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Numbers as a cache of `dtype` holds them: rounded to the nearest, ties to even.

    float8 has no infinity, and would make NaN of what it can't hold: that becomes its largest number. NaN stays NaN.
    """
    if dtype in _NUMBERS_OF_BITS:
        return to_bits(numbers, jnp.dtype(dtype))
    if dtype == FLOAT8:
        largest = float(jnp.finfo(FLOAT8).max)
        numbers = jnp.clip(numbers, -largest, largest)
    return numbers.astype(dtype)


def check_pages(kv: PagedKv) -> None:
    """Check the two arrays of pages.

    Raises:
        ValueError: shapes differ or aren't 4-dimensional, page size out of 1..256, or a dtype the cache can't have.
    """
    if kv.k.ndim != 4 or kv.k.shape != kv.v.shape:
        raise ValueError(f"kv.k {kv.k.shape} and kv.v {kv.v.shape} must have one shape [num_pages, K, page_size, H]")
    if not 1 <= kv.page_size <= MAX_PAGE_SIZE:
        raise ValueError(f"page_size is {kv.page_size} (axis 2 of kv.k); it must be 1..{MAX_PAGE_SIZE}")
    for name, pages in (("kv.k", kv.k), ("kv.v", kv.v)):
        if pages.dtype not in _CACHE_DTYPES:
            allowed = "float32, bfloat16 (or its bits, uint16), float16 or float8_e4m3fn (or its bits, uint8)"
            raise ValueError(f"{name} has dtype {pages.dtype}; it must be {allowed}")
    if kv.k.dtype != kv.v.dtype:
        raise ValueError(f"kv.k has dtype {kv.k.dtype} and kv.v {kv.v.dtype}; they must have one")


def refuse_mixed_dtypes(q: jax.Array, kv: PagedKv) -> str | None:
    """Why a kernel on matrix units can't multiply q with the cache, or None: one dtype, or a float8 cache, is fine."""
    if kv.dtype not in (q.dtype, FLOAT8):
        return f"q is {q.dtype} and the cache {kv.dtype}; it takes equal dtypes, or a float8_e4m3fn cache"
    return None


def refuse_conversion(kv: PagedKv) -> str | None:
    """Why a kernel that stores numbers as they are can't store into the cache, or None when it can."""
    if kv.dtype not in QUERY_DTYPES:
        return f"the cache holds {kv.dtype}; it stores float32, bfloat16 and float16"
    if kv.k_scale is not None or kv.v_scale is not None:
        return "the cache has scales; it stores numbers as they are"
    return None


def per_head_scale(name: str, scale: Scale, num_kv_heads: int) -> jax.Array | None:
    """A scale of the cache as float32 `[K]`; None stays None.

    Raises:
        ValueError: it is neither one number nor one for each kv head.
    """
    if scale is None:
        return None
    array = jnp.asarray(scale, jnp.float32)
    if array.shape not in ((), (num_kv_heads,)):
        raise ValueError(f"{name} has shape {array.shape}; it must be one number or [{num_kv_heads}], one per kv head")
    return jnp.broadcast_to(array, (num_kv_heads,))
