"""Attention of a block of queries over a range of KV tiles, and the reading of tiles, for the XLA backends.

Owns the running softmax of one block and how a tile leaves the pages. Never knows which queries make up a block, nor
block sizes: extend lays out its queries as rows, says at which position each row stands, and reads back rows; decode
takes the parts. Called by `*/xla.py` only.

What shaped it, measured on CPU (docs/kernels/xla.md): dynamic slices of a few pages run at memory speed, and so does a
gather whose contiguous runs are of 128 numbers or more; one of runs of 64 takes three times as long. Every op in a
loop's body costs a microsecond or two per iteration and some 15 milliseconds of compilation.
"""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.options import FLOAT8, AttentionOptions
from pallas_kernels.target import target_device

# Below any real score; finite, so that subtracting it from itself gives 0 and not NaN.
UNSEEN = -1e30

# As slices, more pages than this take longer to compile than they save.
_MOST_SLICES = 8


def take(array: jax.Array, index: jax.Array | tuple[jax.Array, ...]) -> jax.Array:
    """`array[index]`, the indices known to be in range and not negative."""
    return array.at[index].get(mode="promise_in_bounds", wrap_negative_indices=False)


def as_bits(array: jax.Array) -> jax.Array:
    """On a CPU, types that XLA can't move there come as unsigned integers; everything else as it is.

    It would widen the whole cache instead, and then move that. On a TPU it's the bits that would be copied.
    """
    if target_device().platform != "cpu":
        return array
    bits = {jnp.dtype(jnp.bfloat16): jnp.uint16, jnp.dtype(FLOAT8): jnp.uint8}.get(array.dtype)
    return array if bits is None else lax.bitcast_convert_type(array, bits)


def from_bits(array: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """The opposite of `as_bits`; numbers of pages that are kept as bits (`bfloat16_bits`), too."""
    dtype = jnp.dtype(jnp.bfloat16) if dtype == jnp.uint16 else dtype
    return array if array.dtype == dtype else lax.bitcast_convert_type(array, dtype)


def first_visible(position: jax.Array, options: AttentionOptions) -> jax.Array:
    """The lowest KV position that a query at `position` may see."""
    if options.sliding_window is None:
        return jnp.zeros_like(position)
    return jnp.maximum(position - options.sliding_window + 1, 0)


def soft_cap(scores: jax.Array, options: AttentionOptions) -> jax.Array:
    """Scaled scores as the options cap them."""
    if options.logit_soft_cap is None:
        return scores
    return options.logit_soft_cap * jnp.tanh(scores / options.logit_soft_cap)


def dot_precision(q: jax.Array) -> lax.Precision | None:
    """Of dot products for queries of q's dtype: float32 stays float32 also where the default would round it."""
    return lax.Precision.HIGHEST if q.dtype == jnp.float32 else None


def gather_tiles(pages: jax.Array, page_ids: jax.Array) -> jax.Array:
    """The pages `page_ids [..., n]` of `[num_pages, K, page_size, H]` as `[..., K, n * page_size, H]`."""
    _, num_kv_heads, page_size, head_dim = pages.shape
    # Rows of one page and head, so that the gather puts them in order and nothing is transposed afterwards. An axis of
    # length 1 would tempt XLA into another layout, and into copying the cache to get it.
    rows = pages.reshape((-1, head_dim) if page_size == 1 else (-1, page_size, head_dim))
    index = page_ids[..., None, :] * num_kv_heads + jnp.arange(num_kv_heads)[:, None]
    return take(rows, index).reshape(*index.shape[:-1], -1, head_dim)


def attend_rows(
    q: jax.Array,
    position: jax.Array,
    kv_range: tuple[jax.Array, jax.Array],
    page_ids: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    tile_pages: int,
    options: AttentionOptions,
    precision: lax.Precision | None,
) -> jax.Array:
    """Scaled float32 rows q `[K, R, H]` at `position [R]` over the pages `page_ids [P]` of one sequence.

    `kv_range` is the first and the last KV position that any row sees; only tiles that touch it are read, `tile_pages`
    pages each. A row at position -1 sees nothing and yields zeros. Returns float32 `[K, R, H]`.
    """
    page_size = k_pages.shape[2]
    first, last = kv_range
    # Of bits the numbers are multiplied as they are, by numbers of their format.
    dtype = jnp.dtype(jnp.bfloat16 if k_pages.dtype == jnp.uint16 else jnp.float32)
    rows = q.astype(dtype)
    tile_tokens = tile_pages * page_size

    def add_tile(tile: jax.Array, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        top, total, acc = state
        # Past the range the last page is read again: the table may end there.
        ids = take(page_ids, jnp.minimum(tile * tile_pages + jnp.arange(tile_pages), last // page_size))
        kv_position = tile * tile_tokens + jnp.arange(tile_tokens)
        k = _read_tile(k_pages, ids)
        # Places that no row sees may hold NaN, which a weight of zero would not silence.
        v = jnp.where(((kv_position >= first) & (kv_position <= last))[:, None], _read_tile(v_pages, ids), 0)
        k, v = (from_bits(tile, k_pages.dtype).astype(dtype) for tile in (k, v))
        scores = jnp.einsum("krh,kth->krt", rows, k, precision=precision, preferred_element_type=jnp.float32)
        scores = soft_cap(scores, options)
        seen = kv_position <= position[:, None]
        if options.sliding_window is not None:
            seen &= kv_position > position[:, None] - options.sliding_window
        scores = jnp.where(seen, scores, UNSEEN)
        new_top = jnp.maximum(top, jnp.max(scores, axis=2))
        # A row that has seen nothing yet collects weights of 1 here; its first real score shrinks them to 0.
        weights = jnp.exp(scores - new_top[..., None])
        shrink = jnp.exp(top - new_top)
        total = total * shrink + jnp.sum(weights, axis=2)
        added = jnp.einsum(
            "krt,kth->krh", weights.astype(dtype), v, precision=precision, preferred_element_type=jnp.float32
        )
        acc = acc * shrink[..., None] + added
        return new_top, total, acc

    start = (
        jnp.full(q.shape[:2], UNSEEN, jnp.float32),
        jnp.zeros(q.shape[:2], jnp.float32),
        jnp.zeros(q.shape, jnp.float32),
    )
    end = (last + tile_tokens) // tile_tokens
    _, total, acc = lax.fori_loop(first // tile_tokens, end, add_tile, start)
    # A row that sees something has a total of at least 1, the weight of its top score.
    return jnp.where((position >= 0)[:, None], acc / jnp.maximum(total, 1)[..., None], 0)


def _read_tile(pages: jax.Array, ids: jax.Array) -> jax.Array:
    """The pages `ids [n]` as `[K, n * page_size, H]`, moved `as_bits`."""
    _, num_kv_heads, page_size, head_dim = pages.shape
    if ids.shape[0] > _MOST_SLICES:
        tile = gather_tiles(as_bits(pages), ids)
    else:
        sizes = (1, num_kv_heads, page_size, head_dim)
        tile = jnp.concatenate(
            [
                lax.dynamic_slice(as_bits(pages), (page, 0, 0, 0), sizes, allow_negative_indices=False)[0]
                for page in ids
            ],
            axis=1,
        )
    return tile
