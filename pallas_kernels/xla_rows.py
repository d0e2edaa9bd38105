"""Attention of a block of queries over a range of KV tiles, for the XLA backends.

Owns the running softmax and the reading of a tile of pages. Never knows which queries make up the block: decode
and extend lay out their queries as rows, say at which position each row stands, and read back rows.

What shaped it, measured on CPU (docs/kernels.md): a dynamic slice of one page runs at memory speed, a gather of
several at less than half of it; every op in the loop's body costs about a microsecond per tile and some
milliseconds of compilation.
"""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.options import AttentionOptions

_MANY_ROWS = 128
_MANY_ROWS_TOKENS = 128
_FEW_ROWS_TOKENS = 64
_SINGLE_PAGE_SIZE = 16

# Below any real score; finite, so that subtracting it from itself gives 0 and not NaN.
_UNSEEN = -1e30


def pages_per_tile(page_size: int, num_rows: int) -> int:
    """Pages in one KV tile, for blocks of `num_rows` query rows.

    Few rows do little with a tile, so that reading it decides: one page at a time, unless pages are tiny. Many rows
    want a longer tile for their dot products, which pays for the gather.
    """
    if num_rows < _MANY_ROWS:
        return 1 if page_size >= _SINGLE_PAGE_SIZE else _FEW_ROWS_TOKENS // page_size
    return max(1, _MANY_ROWS_TOKENS // page_size)


def pad_page_table(page_table: jax.Array, num_pages_per_tile: int) -> jax.Array:
    """`[S, P]` to `[S, P']`, P' a multiple of the pages in a tile, padded with the dummy page."""
    return jnp.pad(page_table, ((0, 0), (0, -page_table.shape[1] % num_pages_per_tile)))


def first_visible(position: jax.Array, options: AttentionOptions) -> jax.Array:
    """The lowest KV position that a query at `position` may see."""
    if options.sliding_window is None:
        return jnp.zeros_like(position)
    return jnp.maximum(position - options.sliding_window + 1, 0)


def attend_rows(
    q: jax.Array,
    position: jax.Array,
    kv_range: tuple[jax.Array, jax.Array],
    page_ids: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    num_pages_per_tile: int,
    options: AttentionOptions,
) -> jax.Array:
    """Rows q `[K, R, H]` at `position [R]` over the pages `page_ids [P']` of one sequence.

    `kv_range` is the first and the last KV position that any row sees; only tiles that touch it are read. A row at
    position -1 sees nothing and yields zeros. Returns float32 `[K, R, H]`.
    """
    num_kv_heads, num_rows, head_dim = q.shape
    first, last = kv_range
    tile_tokens = num_pages_per_tile * k_pages.shape[2]
    q = q.astype(jnp.float32) * options.sm_scale

    def add_tile(tile: jax.Array, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        top, total, acc = state
        ids = lax.dynamic_slice_in_dim(
            page_ids, tile * num_pages_per_tile, num_pages_per_tile, allow_negative_indices=False
        )
        k, v = _read_tile(k_pages, ids), _read_tile(v_pages, ids)
        kv_position = tile * tile_tokens + jnp.arange(tile_tokens)
        # Places that no row sees may hold NaN, which a weight of zero would not silence.
        v = jnp.where(((kv_position >= first) & (kv_position <= last))[:, None], v, 0)
        scores = jnp.einsum("krh,kth->krt", q, k, preferred_element_type=jnp.float32)
        if options.logit_soft_cap is not None:
            scores = options.logit_soft_cap * jnp.tanh(scores / options.logit_soft_cap)
        seen = kv_position <= position[:, None]
        if options.sliding_window is not None:
            seen &= kv_position > position[:, None] - options.sliding_window
        scores = jnp.where(seen, scores, _UNSEEN)
        new_top = jnp.maximum(top, jnp.max(scores, axis=2))
        # A row that has seen nothing yet collects weights of 1 here; its first real score shrinks them to 0.
        weights = jnp.exp(scores - new_top[..., None])
        shrink = jnp.exp(top - new_top)
        total = total * shrink + jnp.sum(weights, axis=2)
        acc = acc * shrink[..., None] + jnp.einsum("krt,kth->krh", weights, v, preferred_element_type=jnp.float32)
        return new_top, total, acc

    start = (
        jnp.full((num_kv_heads, num_rows), _UNSEEN, jnp.float32),
        jnp.zeros((num_kv_heads, num_rows), jnp.float32),
        jnp.zeros((num_kv_heads, num_rows, head_dim), jnp.float32),
    )
    end = (last + tile_tokens) // tile_tokens
    _, total, acc = lax.fori_loop(first // tile_tokens, end, add_tile, start)
    # A row that sees something has a total of at least 1, the weight of its top score.
    return jnp.where((position >= 0)[:, None], acc / jnp.maximum(total, 1)[..., None], 0)


def _read_tile(pages: jax.Array, ids: jax.Array) -> jax.Array:
    """The pages `ids [n]` as float32 `[K, n * page_size, H]`."""
    _, num_kv_heads, page_size, head_dim = pages.shape
    if ids.shape[0] == 1:
        start = (ids[0], 0, 0, 0)
        sizes = (1, num_kv_heads, page_size, head_dim)
        return lax.dynamic_slice(pages, start, sizes, allow_negative_indices=False)[0].astype(jnp.float32)
    tile = pages.at[ids].get(mode="promise_in_bounds")
    return jnp.swapaxes(tile, 0, 1).reshape(num_kv_heads, -1, head_dim).astype(jnp.float32)
