"""The tiled form that the cache has in a TPU's memory, and a view of it in which one page is whole tiles.

Owns the knowledge of XLA's default layouts on TPUs and the refusals that follow from them. Never knows attention or
stores. Called by the kernels of this package.

TPU memory is tiled: the last axis of an array in 128 lanes, the one before in 8 (or 32) sublanes. XLA permutes the axes
of `[num_pages, K, page_size, H]` so that little is padded, and a kernel wants row-major operands. The views here are
those that cost nothing: their row-major tiles are the bytes that lie there already. Any other view would copy the
cache.
"""

import enum
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.paged_kv import FLOAT8

LANES = 128
SUBLANES = 8
# Room for what the compiler keeps beside the buffers that a kernel asks for: values that don't fit registers.
_SPILL_BYTES = 8 << 20


class PageForm(enum.Enum):
    """The axes of a page in the view, row-major."""

    ROWS = "[K, page_size, H]"
    """H fills the lanes."""
    HEADS = "[K, H]"
    """Pages of one token: the heads lie in the sublanes."""
    COLUMNS = "[K, H, page_size]"
    """H is narrower than the lanes, and whole multiples of 128 tokens lie there instead."""


def page_form(pages: jax.Array) -> PageForm:
    """The form of a cache array that `refuse_pages` accepts."""
    _, _, page_size, head_dim = pages.shape
    if page_size == 1:
        return PageForm.HEADS
    return PageForm.ROWS if head_dim % LANES == 0 else PageForm.COLUMNS


def refuse_float16(array: jax.Array) -> str | None:
    """Why queries or a cache in this dtype can't be read at all, or None."""
    if array.dtype == jnp.float16:
        return "Mosaic has no float16 on TPUs; it takes bfloat16 and float32, and a cache of float8_e4m3fn too"
    return None


def refuse_pages(pages: jax.Array) -> str | None:
    """Why no view of cache array `[num_pages, K, page_size, H]` is free of copies, or None when one is."""
    _, num_kv_heads, page_size, head_dim = pages.shape
    if (reason := refuse_float16(pages)) is not None:
        return reason
    if head_dim % LANES and (page_size % LANES or head_dim % SUBLANES):
        return (
            f"head size {head_dim} would be padded to {-(-head_dim // LANES) * LANES} lanes, and page_size is "
            f"{page_size}; it takes head sizes that are multiples of {LANES}, or page_size {LANES}"
        )
    if page_size == 1:
        return _refuse_single_tokens(num_kv_heads, head_dim, pages.dtype)
    if page_size % SUBLANES:
        return f"page_size is {page_size}; it takes 1 and multiples of {SUBLANES}"
    return None


def _refuse_single_tokens(num_kv_heads: int, head_dim: int, dtype: jnp.dtype) -> str | None:
    packed = 4 // dtype.itemsize  # elements in one 32-bit word of a lane
    fills_tiles = num_kv_heads % SUBLANES == 0 or num_kv_heads in {n for n in (1, 2, 4) if n >= packed}
    if not fills_tiles:
        return f"page_size is 1 and {num_kv_heads} kv heads of {dtype} don't fill whole tiles; use page_size 16"
    if dtype == jnp.float32 and head_dim != LANES:
        return f"page_size is 1 and a float32 head of {head_dim} isn't one tile wide; use page_size 16"
    return None


def tile_rows(pages: jax.Array) -> int:
    """Tokens of a page that lie in one tile of the memory: the unit in which rows can be written."""
    page_size = pages.shape[2]
    form = page_form(pages)
    if form is not PageForm.ROWS:
        return 1 if form is PageForm.HEADS else page_size
    # Four float8 share a word, and XLA makes the tile higher where the page allows it.
    return 32 if pages.dtype == FLOAT8 and page_size % 32 == 0 else SUBLANES


def view_pages(pages: jax.Array) -> jax.Array:
    """The cache array with pages in their form."""
    num_pages, num_kv_heads, _, head_dim = pages.shape
    form = page_form(pages)
    if form is PageForm.HEADS:
        return jnp.swapaxes(pages, 1, 2).reshape(num_pages, num_kv_heads, head_dim)
    return jnp.swapaxes(pages, 2, 3) if form is PageForm.COLUMNS else pages


def keep_in_hbm(view: jax.Array, interpret: bool) -> jax.Array:
    """Keep XLA from moving a cache that happens to fit VMEM there and back around a kernel."""
    return view if interpret else pltpu.with_memory_space_constraint(view, pltpu.HBM)


def unview_pages(view: jax.Array, form: PageForm) -> jax.Array:
    """The inverse of `view_pages`."""
    if form is PageForm.HEADS:
        return view[:, :, None, :]
    return jnp.swapaxes(view, 2, 3) if form is PageForm.COLUMNS else view


def vmem_limit_bytes(scratch: list[Any]) -> int:
    """VMEM that a kernel with these scratch buffers may use, their last two axes padded to tiles."""
    total = _SPILL_BYTES
    for buffer in scratch:
        if getattr(buffer, "memory_space", None) == pltpu.VMEM:
            *major, rows, lanes = buffer.shape
            tiles = math.prod(major) * -(-rows // SUBLANES) * -(-lanes // LANES)
            total += tiles * SUBLANES * LANES * jnp.dtype(buffer.dtype).itemsize
    return total
