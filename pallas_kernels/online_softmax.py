"""Attention of a block of queries over a range of KV tiles, for the XLA backends.

Owns the running softmax and the gathering of a tile of pages. Never knows which queries make up the block: decode
and extend lay out their queries as rows, say at which position each row stands, and read back rows.
"""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.options import AttentionOptions

# KV tokens per loop iteration: enough to pay for the loop's overhead, small enough to stay in the L2 cache.
TILE_TOKENS = 128

# Below any real score; finite, so that subtracting it from itself gives 0 and not NaN.
_UNSEEN = -1e30


def pages_per_tile(page_size: int) -> int:
    """Pages in one KV tile."""
    return max(1, TILE_TOKENS // page_size)


def pad_page_table(page_table: jax.Array, page_size: int) -> jax.Array:
    """`[S, P]` to `[S, P']` with P' a multiple of `pages_per_tile`, padded with the dummy page."""
    return jnp.pad(page_table, ((0, 0), (0, -page_table.shape[1] % pages_per_tile(page_size))))


def first_visible(position: jax.Array, options: AttentionOptions) -> jax.Array:
    """The lowest KV position that a query at `position` may see."""
    if options.sliding_window is None:
        return jnp.zeros_like(position)
    return jnp.maximum(position - options.sliding_window + 1, 0)


def attend_rows(
    q: jax.Array,
    position: jax.Array,
    page_ids: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    options: AttentionOptions,
) -> jax.Array:
    """Rows q `[K, R, H]` at `position [R]` (-1: sees nothing) over the pages `page_ids [P']` of one sequence.

    Only the tiles that some row sees are touched. Returns float32 `[K, R, H]`; zeros for rows that see nothing.
    """
    num_kv_heads, num_rows, head_dim = q.shape
    page_size = k_pages.shape[2]
    tile_tokens = pages_per_tile(page_size) * page_size
    last = jnp.max(position)
    first = jnp.min(jnp.where(position < 0, jnp.maximum(last, 0), first_visible(position, options)))
    q = q.astype(jnp.float32) * options.sm_scale

    def add_tile(tile: jax.Array, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        top, total, acc = state
        ids = lax.dynamic_slice_in_dim(page_ids, tile * pages_per_tile(page_size), pages_per_tile(page_size))
        k, v = _gather_tile(k_pages, ids), _gather_tile(v_pages, ids)
        kv_position = tile * tile_tokens + jnp.arange(tile_tokens)
        seen = kv_position <= position[:, None]
        if options.sliding_window is not None:
            seen &= kv_position > position[:, None] - options.sliding_window
        scores = jnp.einsum("krh,kth->krt", q, k, preferred_element_type=jnp.float32)
        if options.logit_soft_cap is not None:
            scores = options.logit_soft_cap * jnp.tanh(scores / options.logit_soft_cap)
        scores = jnp.where(seen, scores, _UNSEEN)
        new_top = jnp.maximum(top, jnp.max(scores, axis=2))
        weights = jnp.where(seen, jnp.exp(scores - new_top[..., None]), 0)
        # Places that no row sees may hold NaN, which a weight of zero would not silence.
        v = jnp.where(((kv_position >= first) & (kv_position <= last))[:, None], v, 0)
        shrink = jnp.exp(top - new_top)
        total = total * shrink + jnp.sum(weights, axis=2)
        acc = acc * shrink[..., None] + jnp.einsum("krt,kth->krh", weights, v, preferred_element_type=jnp.float32)
        return new_top, total, acc

    start = (
        jnp.full((num_kv_heads, num_rows), _UNSEEN, jnp.float32),
        jnp.zeros((num_kv_heads, num_rows), jnp.float32),
        jnp.zeros((num_kv_heads, num_rows, head_dim), jnp.float32),
    )
    _, total, acc = lax.fori_loop(first // tile_tokens, last // tile_tokens + 1, add_tile, start)
    return acc / jnp.where(total > 0, total, 1)[..., None]


def _gather_tile(pages: jax.Array, ids: jax.Array) -> jax.Array:
    """The pages `ids [n]` as float32 `[K, n * page_size, H]`."""
    _, num_kv_heads, page_size, head_dim = pages.shape
    tile = pages.at[ids].get(mode="promise_in_bounds")
    return jnp.swapaxes(tile, 0, 1).reshape(num_kv_heads, -1, head_dim).astype(jnp.float32)
