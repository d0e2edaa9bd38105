"""What the ops mean, in the plainest way: scatter by slot; gather each token's whole sequence, mask, softmax.

Owns the definition of right, by which the other backends are judged. Never fast: memory `[T, K, P * page_size, H]`, so
for small shapes only. Chosen by its name alone.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.backend import Backend, Kernel
from pallas_kernels.experts import ACTIVATIONS, Groups, product_dtype, result_dtype
from pallas_kernels.kept_heads import widened
from pallas_kernels.latent import LatentQkv
from pallas_kernels.options import AttentionOptions, places_of_biases
from pallas_kernels.packed import PackedMatrix
from pallas_kernels.paged_kv import PagedKv, refuse_conversion, to_format, to_numbers
from pallas_kernels.qkv import FusedQkv
from pallas_kernels.scaled import ScaledMatrix, ScaledRows, rounded_rows
from pallas_kernels.scaled import widened as widened_matrix


def store_kv(kv: PagedKv, k: jax.Array, v: jax.Array, slots: jax.Array, interpret: bool) -> PagedKv:
    """Token t of k and v replaces the cache's entry at slots[t]; by way of a `[slots, K, H]` view of the cache."""
    return dataclasses.replace(kv, k=_store(kv.k, k, slots), v=_store(kv.v, v, slots))


def absorb_and_store(
    qkv: LatentQkv, pages: jax.Array, slots: jax.Array, interpret: bool
) -> tuple[jax.Array, jax.Array]:
    """The queries and entries that define it; these are stored as K is."""
    q = qkv.queries if qkv.num_chosen else widened(qkv.queries, pages.shape[3])
    return q, _store(pages, to_format(widened(qkv.entries, pages.shape[3]), pages.dtype), slots)


def _store(pages: jax.Array, new: jax.Array, slots: jax.Array) -> jax.Array:
    num_pages, num_kv_heads, page_size, head_dim = pages.shape
    by_slot = jnp.swapaxes(pages, 1, 2).reshape(num_pages * page_size, num_kv_heads, head_dim)
    by_slot = by_slot.at[slots].set(new)
    return jnp.swapaxes(by_slot.reshape(num_pages, page_size, num_kv_heads, head_dim), 1, 2)


def rotate_and_store(qkv: FusedQkv, kv: PagedKv, slots: jax.Array, interpret: bool) -> tuple[jax.Array, PagedKv]:
    """All in float32, one step after the other; rounded once, to the formats of the product and the cache."""
    rows = qkv.whole.astype(jnp.float32)
    if qkv.bias is not None:
        rows = rows + qkv.bias[qkv.layer].astype(jnp.float32)
    cos, sin = qkv.cos[:, :, None], qkv.sin[:, :, None]

    def of_unit_size(rows: jax.Array) -> jax.Array:
        squares = jnp.sum(rows**2, axis=-1, keepdims=True)
        return rows / jnp.sqrt(squares / qkv.head_dim + qkv.eps)

    def normalized(rows: jax.Array, scales: jax.Array | None) -> jax.Array:
        return rows if scales is None else of_unit_size(rows) * scales[qkv.layer].astype(jnp.float32)

    def rotated(rows: jax.Array) -> jax.Array:
        real, imaginary = rows[..., : qkv.head_dim // 2], rows[..., qkv.head_dim // 2 :]
        return jnp.concatenate([real * cos - imaginary * sin, real * sin + imaginary * cos], axis=-1)

    def attended(rows: jax.Array, scales: jax.Array | None) -> jax.Array:
        return normalized(rotated(rows), scales) if qkv.rotates_first else rotated(normalized(rows, scales))

    groups = qkv.num_groups
    q = attended(rows[:, :, :groups], qkv.q_norm).reshape(qkv.num_tokens, -1, qkv.head_dim)
    k, v = attended(rows[:, :, groups : groups + 1], qkv.k_norm)[:, :, 0], rows[:, :, groups + 1]
    v = of_unit_size(v) if qkv.normalizes_values else v
    heads = kv.kept(qkv.num_kv_heads)
    k, v = (heads.joined(widened(each, heads.share)) for each in (k, v))
    k, v = k.astype(kv.dtype), v.astype(kv.dtype)
    return heads.queries(q).astype(qkv.dtype), store_kv(kv, k, v, slots, interpret)


def decode_attention(
    q: jax.Array, kv: PagedKv, sinks: jax.Array | None, options: AttentionOptions, interpret: bool
) -> jax.Array:
    """An extend by one token for each sequence. A padding row, of length 0, sees nothing and yields zeros."""
    offsets = jnp.arange(q.shape[0] + 1, dtype=jnp.int32)
    return extend_attention(q, offsets, kv, sinks, options, interpret)


def store_and_decode(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    kv: PagedKv,
    slots: jax.Array,
    sinks: jax.Array | None,
    options: AttentionOptions,
    interpret: bool,
) -> tuple[jax.Array, PagedKv]:
    """One after the other."""
    stored = store_kv(kv, k, v, slots, interpret)
    return decode_attention(q, stored, sinks, options, interpret), stored


def extend_attention(
    q: jax.Array,
    query_offsets: jax.Array,
    kv: PagedKv,
    sinks: jax.Array | None,
    options: AttentionOptions,
    interpret: bool,
    seen: jax.Array | None = None,
    biases: jax.Array | None = None,
) -> jax.Array:
    """Each token attends to what it sees of its own sequence, in float32."""
    num_tokens, num_heads, head_dim = q.shape
    token = jnp.arange(num_tokens)
    # The sequence of a token: how many sequences end at or before it. Padding tokens come out as S.
    owner = jnp.sum(token[:, None] >= query_offsets[None, 1:], axis=1)
    is_real = owner < kv.num_seqs
    owner = jnp.where(is_real, owner, 0)
    position = kv.lengths[owner] - query_offsets[owner + 1] + token

    k = _gather(kv.k, kv.page_table[owner])  # [T, K, L, H]
    v = _gather(kv.v, kv.page_table[owner])
    kv_position = jnp.arange(k.shape[2])
    stop = position + 1 if seen is None else seen
    is_seen = is_real[:, None] & (kv_position < stop[:, None])
    if options.sliding_window is not None:
        is_seen &= kv_position > position[:, None] - options.sliding_window
    is_seen = is_seen[:, None, None, :]  # [T, 1, 1, L]

    # Unused places may hold NaN, and 0 * NaN is NaN: they are cleared, not only weighted by zero.
    v = jnp.where(is_seen.squeeze(2)[..., None], v, 0)
    grouped = q.astype(jnp.float32).reshape(num_tokens, kv.num_kv_heads, -1, head_dim)
    scores = jnp.einsum("tkgh,tklh->tkgl", grouped, k, precision="highest") * options.scale(head_dim)
    if options.logit_soft_cap is not None:
        scores = options.logit_soft_cap * jnp.tanh(scores / options.logit_soft_cap)
    if biases is not None:
        of_heads = biases.reshape(1, kv.num_kv_heads, -1, biases.shape[1])
        distance = places_of_biases(biases, kv_position - position[:, None])
        scores = scores + jnp.take_along_axis(of_heads, distance[:, None, None], axis=3)
    scores = jnp.where(is_seen, scores, -jnp.inf)
    top = jnp.max(scores, axis=-1, keepdims=True)
    if sinks is not None:
        top = jnp.maximum(top, sinks.reshape(kv.num_kv_heads, -1, 1))
    weights = jnp.where(is_seen, jnp.exp(scores - top), 0)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    if sinks is not None:
        total += jnp.exp(sinks.reshape(kv.num_kv_heads, -1, 1) - top)
    weights = weights / jnp.where(total > 0, total, 1)
    out = jnp.einsum("tkgl,tklh->tkgh", weights, v, precision="highest")
    return out.reshape(num_tokens, num_heads, head_dim).astype(q.dtype)


def _gather(pages: jax.Array, page_ids: jax.Array) -> jax.Array:
    """`[T, P]` page ids to float32 `[T, K, P * page_size, H]`."""
    pages = to_numbers(pages)
    _, num_kv_heads, page_size, head_dim = pages.shape
    num_tokens, num_pages_per_token = page_ids.shape
    gathered = jnp.swapaxes(pages[page_ids], 1, 2).astype(jnp.float32)  # [T, K, P, page_size, H]
    return gathered.reshape(num_tokens, num_kv_heads, num_pages_per_token * page_size, head_dim)


def grouped_product(x: jax.Array, groups: Groups, weights: jax.Array, of_tokens: bool, interpret: bool) -> jax.Array:
    """All rows times all experts in float32, of which each place keeps its own."""
    rows = (x[groups.tokens] if of_tokens else x).astype(product_dtype(x, weights)).astype(jnp.float32)
    products = jnp.einsum("mi,eoi->emo", rows, weights.astype(jnp.float32), precision="highest")
    is_mine = groups.experts == jnp.arange(groups.num_experts)[:, None]
    return jnp.sum(jnp.where(is_mine[:, :, None], products, 0), axis=0).astype(result_dtype(x, weights))


def grouped_scaled_product(
    x: jax.Array, groups: Groups, weights: ScaledMatrix, of_tokens: bool, interpret: bool
) -> jax.Array:
    """All in float32; rounded once, to x's format."""
    values = widened_matrix(weights.numbers, weights.scale, weights.zero, weights.group, jnp.float32)
    return grouped_product(x.astype(jnp.float32), groups, values, of_tokens, interpret).astype(x.dtype)


def quantized_product(
    x: jax.Array, weights: ScaledMatrix | PackedMatrix, dtype: DTypeLike, in_parts: bool, interpret: bool
) -> jax.Array:
    """All in float32; rounded once, to `dtype`."""
    weights = weights.as_scaled() if isinstance(weights, PackedMatrix) else weights
    values = widened_matrix(weights.numbers, weights.scale, weights.zero, weights.group, jnp.float32)
    return jnp.einsum("td,nd->tn", x.astype(jnp.float32), values, precision="highest").astype(dtype)


def float8_rows(x: jax.Array, activation: str | None, interpret: bool) -> ScaledRows:
    """The gated unit in float32, rounded once before it is rounded to float8."""
    if activation is not None:
        wide = x.astype(jnp.float32)
        x = (ACTIVATIONS[activation](wide[:, 0]) * wide[:, 1]).astype(x.dtype)
    return rounded_rows(x)


def float8_product(
    rows: ScaledRows, weights: ScaledMatrix, dtype: DTypeLike, in_parts: bool, interpret: bool
) -> jax.Array:
    """All in float32; rounded once, to `dtype`."""
    return quantized_product(rows.values(jnp.float32), weights, dtype, in_parts, interpret)


def grouped_float8_product(
    rows: ScaledRows, groups: Groups, weights: ScaledMatrix, of_tokens: bool, interpret: bool
) -> jax.Array:
    """All in float32; rounded once, to the dtype that the rows had."""
    values = widened_matrix(weights.numbers, weights.scale, None, weights.group, jnp.float32)
    wide = grouped_product(rows.values(jnp.float32), groups, values, of_tokens, interpret)
    return wide.astype(rows.dtype)


def ordered_product(x: jax.Array, weights: jax.Array, dtype: DTypeLike, in_parts: bool, interpret: bool) -> jax.Array:
    """All in float32; rounded once, to `dtype`."""
    rows = x.astype(weights.dtype).astype(jnp.float32)
    return jnp.einsum("td,nd->tn", rows, weights.astype(jnp.float32), precision="highest").astype(dtype)


BACKEND = Backend(
    "reference",
    Kernel(decode_attention),
    Kernel(extend_attention),
    Kernel(store_kv),
    Kernel(rotate_and_store, lambda qkv, kv: refuse_conversion(kv)),
    extend_ahead=Kernel(extend_attention),
    extend_biased=Kernel(extend_attention),
    grouped_product=Kernel(grouped_product),
    grouped_scaled_product=Kernel(grouped_scaled_product),
    quantized_product=Kernel(quantized_product),
    float8_rows=Kernel(float8_rows),
    float8_product=Kernel(float8_product),
    grouped_float8_product=Kernel(grouped_float8_product),
    store_and_decode=Kernel(store_and_decode),
    ordered_product=Kernel(ordered_product),
    absorb_and_store=Kernel(absorb_and_store),
)
