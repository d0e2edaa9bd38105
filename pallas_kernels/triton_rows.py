"""The inner loop of the Triton-backend attention kernels: rows of one kv head over the pages of one sequence.

Owns the loads from pages and the running softmax inside a kernel. Never knows the grid: a kernel says which rows it
holds, at which position each stands, and which KV positions they see. Runs on NVIDIA GPUs since Ampere, and in the
interpreter anywhere; every array here has power-of-two extents, as Triton demands.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.options import AttentionOptions

# The smallest extent that Triton's dot takes on any axis.
MIN_DOT = 16
# KV tokens per iteration.
TILE_TOKENS = 64

# Below any real score; finite, so that subtracting it from itself gives 0 and not NaN.
_UNSEEN = -1e30


def refuse_shapes(q: jax.Array, k_pages: jax.Array) -> str | None:
    """Why the Triton-backend attention kernels can't take q `[T, N, H]` and k_pages, or None when they can."""
    head_dim = q.shape[2]
    if head_dim < MIN_DOT or head_dim & (head_dim - 1):
        return f"head size is {head_dim}; it takes powers of two from {MIN_DOT}"
    if q.shape[1] // k_pages.shape[1] > 16:
        return f"{q.shape[1] // k_pages.shape[1]} query heads share a kv head; it takes at most 16"
    return None


def load_rows(ref: Any, index: tuple[jax.Array, ...], is_real: jax.Array) -> jax.Array:
    """`[R, H]` from a ref whose last axis is H: row r is at `index` (each `[R]` or a scalar), zeros unless is_real."""
    where, mask = _address(ref, index, is_real)
    return plgpu.load(ref.at[where], mask=mask, other=0)


def store_rows(ref: Any, index: tuple[jax.Array, ...], is_real: jax.Array, rows: jax.Array) -> None:
    """The opposite of `load_rows`; rows that aren't real are not written."""
    where, mask = _address(ref, index, is_real)
    plgpu.store(ref.at[where], rows.astype(ref.dtype), mask=mask)


def _address(ref: Any, index: tuple[jax.Array, ...], is_real: jax.Array) -> tuple[tuple[jax.Array, ...], jax.Array]:
    # The last axis is indexed too, and not sliced: JAX's interpreter takes no mixture of index arrays and slices.
    shape = (is_real.shape[0], ref.shape[-1])
    column = jnp.arange(shape[1], dtype=jnp.int32)
    rows = tuple(jnp.broadcast_to(i[:, None] if jnp.ndim(i) else i, shape) for i in index)
    return (*rows, jnp.broadcast_to(column[None, :], shape)), jnp.broadcast_to(is_real[:, None], shape)


def attend_rows(
    q: jax.Array,
    position: jax.Array,
    kv_range: tuple[jax.Array, jax.Array],
    seq: jax.Array,
    kv_head: jax.Array,
    k_pages_ref: Any,
    v_pages_ref: Any,
    page_table_ref: Any,
    options: AttentionOptions,
) -> jax.Array:
    """Rows q `[R, H]` at `position [R]` (-1: sees nothing, yields zeros); `kv_range` as in `xla_rows`.

    Tokens are addressed one by one through the page table, so that any page size works. Returns float32 `[R, H]`.
    """
    num_rows, head_dim = q.shape
    page_size = k_pages_ref.shape[2]
    first, last = kv_range

    def add_tile(tile: jax.Array, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        top, total, acc = state
        kv_position = tile * TILE_TOKENS + jnp.arange(TILE_TOKENS, dtype=jnp.int32)
        in_range = (kv_position >= first) & (kv_position <= last)
        page = plgpu.load(page_table_ref.at[seq, kv_position // page_size], mask=in_range, other=0)
        offset = kv_position % page_size
        # Masked loads leave unused places unread: they may hold NaN.
        k = load_rows(k_pages_ref, (page, kv_head, offset), in_range).astype(q.dtype)
        v = load_rows(v_pages_ref, (page, kv_head, offset), in_range).astype(q.dtype)
        scores = _dot(q, k.T) * options.sm_scale
        if options.logit_soft_cap is not None:
            scores = options.logit_soft_cap * jnp.tanh(scores / options.logit_soft_cap)
        seen = kv_position[None, :] <= position[:, None]
        if options.sliding_window is not None:
            seen &= kv_position[None, :] > position[:, None] - options.sliding_window
        scores = jnp.where(seen, scores, _UNSEEN)
        new_top = jnp.maximum(top, jnp.max(scores, axis=1))
        # A row that has seen nothing yet collects weights of 1 here; its first real score shrinks them to 0.
        weights = jnp.exp(scores - new_top[:, None])
        shrink = jnp.exp(top - new_top)
        total = total * shrink + jnp.sum(weights, axis=1)
        acc = acc * shrink[:, None] + _dot(weights.astype(v.dtype), v)
        return new_top, total, acc

    start = (
        jnp.full((num_rows,), _UNSEEN, jnp.float32),
        jnp.zeros((num_rows,), jnp.float32),
        jnp.zeros((num_rows, head_dim), jnp.float32),
    )
    end = (last + TILE_TOKENS) // TILE_TOKENS
    _, total, acc = lax.fori_loop(first // TILE_TOKENS, end, add_tile, start)
    # A row that sees something has a total of at least 1, the weight of its top score.
    return jnp.where((position >= 0)[:, None], acc / jnp.maximum(total, 1.0)[:, None], 0.0)


def _dot(a: jax.Array, b: jax.Array) -> jax.Array:
    # float32 stays float32: the default would round it to TF32.
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return lax.dot(a, b, precision=precision, preferred_element_type=jnp.float32)
