"""What every attention op and backend is told besides its arrays, and the checks on it.

Owns `AttentionOptions` and the shape checks shared by the attention ops. Called by their `api` modules; backends
only read the options.
"""

import dataclasses
import math
from typing import TypeAlias

import jax
import jax.numpy as jnp

MAX_PAGE_SIZE = 256
FLOAT8 = jnp.float8_e4m3fn
_QUERY_DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)
_CACHE_DTYPES = (*_QUERY_DTYPES, FLOAT8, jnp.uint16)  # uint16: see `bfloat16_bits`

# One factor for the whole cache array, or `[K]` of them.
Scale: TypeAlias = float | jax.Array | None


@dataclasses.dataclass(frozen=True)
class AttentionOptions:
    """Static options of an attention op; hashable, so that it can be a static argument of `jax.jit`."""

    sm_scale: float
    """Factor on q . k before the softmax."""
    sliding_window: int | None = None
    """A query at position p sees positions p - sliding_window + 1 .. p."""
    logit_soft_cap: float | None = None
    """Scaled scores become cap * tanh(score / cap) before masking."""


def attention_options(
    head_dim: int, sm_scale: float | None, sliding_window: int | None, logit_soft_cap: float | None
) -> AttentionOptions:
    """Fill in the default scale, 1 / sqrt(H), and check the ranges.

    Raises:
        ValueError: a window below 1, or a scale or soft cap that isn't positive and finite.
    """
    if sm_scale is not None and not (0 < sm_scale < math.inf):
        raise ValueError(f"sm_scale is {sm_scale}; it must be positive, or None for 1 / sqrt(head size)")
    if sliding_window is not None and sliding_window < 1:
        raise ValueError(f"sliding_window is {sliding_window}; it must be at least 1, or None for no window")
    if logit_soft_cap is not None and not (0 < logit_soft_cap < math.inf):
        raise ValueError(f"logit_soft_cap is {logit_soft_cap}; it must be positive, or None for no cap")
    scale = head_dim**-0.5 if sm_scale is None else float(sm_scale)
    return AttentionOptions(scale, sliding_window, logit_soft_cap)


def check_pages(k_pages: jax.Array, v_pages: jax.Array) -> None:
    """Check a pair of cache arrays `[num_pages, K, page_size, H]`.

    Raises:
        ValueError: shapes differ or aren't 4-dimensional, page size out of 1..256, or a dtype the cache can't have.
    """
    if k_pages.ndim != 4 or k_pages.shape != v_pages.shape:
        raise ValueError(
            f"k_pages {k_pages.shape} and v_pages {v_pages.shape} must have one shape [num_pages, K, page_size, H]"
        )
    if not 1 <= k_pages.shape[2] <= MAX_PAGE_SIZE:
        raise ValueError(f"page_size is {k_pages.shape[2]} (axis 2 of k_pages); it must be 1..{MAX_PAGE_SIZE}")
    for name, pages in (("k_pages", k_pages), ("v_pages", v_pages)):
        if pages.dtype not in _CACHE_DTYPES:
            allowed = "float32, bfloat16 (or its bits, uint16), float16 or float8_e4m3fn"
            raise ValueError(f"{name} has dtype {pages.dtype}; it must be {allowed}")
    if k_pages.dtype != v_pages.dtype:
        raise ValueError(f"k_pages has dtype {k_pages.dtype} and v_pages {v_pages.dtype}; they must have one")


def check_queries(q: jax.Array, k_pages: jax.Array, page_table: jax.Array, lengths: jax.Array) -> None:
    """Check q `[T, N, H]`, page_table `[S, P]` and lengths `[S]` against the cache.

    Raises:
        ValueError: a rank, head count, head size, batch size or integer dtype doesn't fit.
    """
    if q.dtype not in _QUERY_DTYPES:
        raise ValueError(f"q has dtype {q.dtype}; it must be float32, bfloat16 or float16")
    if q.ndim != 3 or q.shape[2] != k_pages.shape[3]:
        raise ValueError(f"q {q.shape} must be [T, N, H] with the H of k_pages {k_pages.shape}")
    if q.shape[1] % k_pages.shape[1]:
        raise ValueError(f"q has {q.shape[1]} heads; it must be a multiple of the {k_pages.shape[1]} kv heads")
    if page_table.ndim != 2 or lengths.shape != page_table.shape[:1]:
        raise ValueError(f"page_table {page_table.shape} must be [S, P] and lengths {lengths.shape} [S]")
    for name, array in (("page_table", page_table), ("lengths", lengths)):
        if array.dtype != jnp.int32:
            raise ValueError(f"{name} has dtype {array.dtype}; it must be int32")


def refuse_mixed_dtypes(q: jax.Array, k_pages: jax.Array) -> str | None:
    """Why a kernel on matrix units can't multiply q with the cache, or None: one dtype, or a float8 cache, is fine."""
    if k_pages.dtype not in (q.dtype, FLOAT8):
        return f"q is {q.dtype} and the cache {k_pages.dtype}; it takes equal dtypes, or a float8_e4m3fn cache"
    return None


def per_head_scale(name: str, scale: Scale, num_kv_heads: int) -> jax.Array | None:
    """A cache's scale as float32 `[K]`; None stays None.

    Raises:
        ValueError: it is neither one number nor one for each kv head.
    """
    if scale is None:
        return None
    array = jnp.asarray(scale, jnp.float32)
    if array.shape not in ((), (num_kv_heads,)):
        raise ValueError(f"{name} has shape {array.shape}; it must be one number or [{num_kv_heads}], one per kv head")
    return jnp.broadcast_to(array, (num_kv_heads,))


def multiply_heads(x: jax.Array, scale: jax.Array | None) -> jax.Array:
    """x `[T, N, H]` times `[K]` scales, each for the query heads of one kv head, in x's dtype; None is 1."""
    if scale is None:
        return x
    per_query_head = jnp.repeat(scale, x.shape[1] // scale.shape[0])
    return (x.astype(jnp.float32) * per_query_head[:, None]).astype(x.dtype)
