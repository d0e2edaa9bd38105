"""Attention over the paged cache: of each sequence's newest token, which the same call may store, or of more tokens.

Owns the checks of queries, sequences and options, and the cache's scales around a backend that knows none. Never knows
how a backend attends: it asks `dispatch` for one and calls it.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.api.stores import as_kept, check_new_tokens, rotate_and_store
from pallas_kernels.backend import Backend, Kernel, refuse_nothing
from pallas_kernels.choice import AUTO, AUTO_CHOICE, KernelChoice
from pallas_kernels.chunks import in_newest_chunk, split_at_chunks
from pallas_kernels.dispatch import choose_backend, choose_kernel, refusals_of
from pallas_kernels.kept_heads import widened
from pallas_kernels.latent import LatentHeads
from pallas_kernels.options import AttentionOptions
from pallas_kernels.order import is_order_fixed
from pallas_kernels.paged_kv import QUERY_DTYPES, PagedKv, Scale, check_pages, per_head_scale
from pallas_kernels.qkv import FusedQkv

_DEFAULTS = AttentionOptions()


def store_and_decode(
    qkv: FusedQkv,
    kv: PagedKv,
    slots: jax.Array,
    options: AttentionOptions = _DEFAULTS,
    sinks: jax.Array | None = None,
    *,
    backend: str = AUTO,
    parts: KernelChoice = AUTO_CHOICE,
    interpret: bool = False,
) -> tuple[jax.Array, PagedKv]:
    """`rotate_and_store` of the newest token of each sequence, then `paged_decode_attention`: output and cache.

    A kernel that reads a sequence's pages anyway puts the token into the last one. So no other sequence may have that
    page: sequences share only pages that are full.

    Args:
        qkv: the product for S tokens, as for `rotate_and_store`.
        kv: the cache; lengths count the new tokens.
        slots: `[S]` int32, of position lengths[s] - 1 of each sequence; those of padding rows are in page 0.
        options, sinks: as for `paged_decode_attention`.
        backend: a backend that has the op in one kernel; "xla" for none; or "auto": the device's best one, unless
            `parts` names another backend for the store or for the attention.
        parts: backends of `rotate_and_store`, `store_kv` and `paged_decode_attention` where no kernel does all.
        interpret: run a Pallas backend in its interpreter, on any platform.

    Raises:
        ValueError: shapes that don't fit each other, or a backend that can't run here.
    """
    check_new_tokens(qkv, kv, slots)
    refusals = {**refusals_of(lambda each: each.store_and_decode, qkv, kv), "xla": refuse_nothing}
    chosen = choose_backend("store_and_decode", backend, refusals, interpret=interpret)
    named = {parts.store_kv, parts.paged_decode_attention} - {AUTO, chosen.name}
    if chosen.store_and_decode is None or (backend == AUTO and named):
        q, kv = rotate_and_store(qkv, kv, slots, backend=parts.rotate_and_store, store_backend=parts.store_kv)
        return paged_decode_attention(q, kv, options, sinks, backend=parts.paged_decode_attention), kv
    q, k, v = qkv.split()
    q = kv.kept(qkv.num_kv_heads).queries(q)
    _check_decode(q, kv, options, sinks)
    new = as_kept(k, v, kv)
    run, (seen, options) = chosen.store_and_decode.run, in_newest_chunk(kv.unscaled(), options)
    out, stored = run(_scale_queries(q, kv), *new, seen, slots, sinks, options, interpret)
    return _scale_output(out, kv), dataclasses.replace(kv, k=stored.k, v=stored.v)


def paged_decode_attention(
    q: jax.Array,
    kv: PagedKv,
    options: AttentionOptions = _DEFAULTS,
    sinks: jax.Array | None = None,
    *,
    backend: str = "auto",
    interpret: bool = False,
) -> jax.Array:
    """Attention of the newest token of each sequence over all its KV; returns `[S, N, H]` in q's dtype.

    Args:
        q: `[S, N, H]`, the query at position lengths[s] - 1, whose KV is stored already. Query head n reads kv head
            n // (N // K). Where values are part of keys (`options.value_dim`), H may be less than the cache's: the
            first H numbers of an entry are then the key.
        kv: the cache; a sequence of length 0 is a padding row, whose output is zeros.
        options: softmax scale, sliding window, chunks, soft cap, and what is a value.
        sinks: `[N]` float32, a score per query head that joins the denominator of its softmax and has no value; None
            is a plain softmax. It is compared with scaled and capped scores, and seen by every query.
        backend: one of `BACKENDS`. A named one runs or raises; "auto" takes the best that can run.
        interpret: run a Pallas backend in its interpreter, on any platform.

    Raises:
        ValueError: shapes that don't fit each other, or a backend that can't run here.
    """
    _check_decode(q, kv, options, sinks)
    if is_order_fixed():
        options = dataclasses.replace(options, in_fixed_order=True)
    kv, options = in_newest_chunk(kv, options.for_heads(q.shape[2]))
    decode = choose_kernel(
        "paged_decode_attention", lambda each: _fitting(each, each.decode, kv), backend, q, kv, interpret=interpret
    )
    out = decode(_scale_queries(q, kv), kv.unscaled(), sinks, options, interpret)
    return _scale_output(out, kv)[..., : options.value_dim]


def decode_latents(
    q: jax.Array,
    kv: PagedKv,
    heads: LatentHeads,
    options: AttentionOptions = _DEFAULTS,
    *,
    backend: str = AUTO,
    interpret: bool = False,
) -> jax.Array:
    """`paged_decode_attention` over latents, and what each head makes of it: `[S, N, V]` in q's dtype.

    Args:
        q, kv, options, backend, interpret: as for `paged_decode_attention`; the cache's v is its k and has no scales,
            and `options.value_dim` is C.
        heads: N of them. Where the backend has no kernel that multiplies by their matrices, XLA does.

    Raises:
        ValueError: as `paged_decode_attention`, or matrices of other heads.
    """
    _check_decode(q, kv, options, None)
    if heads.num_heads != q.shape[1] or heads.latent_size != options.value_dim:
        raise ValueError(
            f"heads.weights is {heads.weights.shape}; it must be [N, D + V, C] with the N of q {q.shape} and C = "
            f"{options.value_dim}, options.value_dim"
        )
    refusals = refusals_of(lambda each: _fitting(each, each.decode, kv), q, kv)
    chosen = choose_backend("paged_decode_attention", backend, refusals, interpret=interpret)
    kernel = _fitting(chosen, chosen.decode_latents, kv)
    if kernel is None or is_order_fixed() or kernel.refuse(q, kv, heads) is not None:
        return heads.outputs(paged_decode_attention(q, kv, options, backend=chosen.name, interpret=interpret))
    return kernel.run(q, kv, heads, options.for_heads(q.shape[2]), interpret)


def paged_extend_attention(
    q: jax.Array,
    query_offsets: jax.Array,
    kv: PagedKv,
    options: AttentionOptions = _DEFAULTS,
    sinks: jax.Array | None = None,
    seen: jax.Array | None = None,
    *,
    biases: jax.Array | None = None,
    backend: str = "auto",
    interpret: bool = False,
) -> jax.Array:
    """Attention of each sequence's last tokens over its cached and new KV; `[T, N, H]` in q's dtype.

    It is causal, unless `seen` says how far each token sees.

    Args:
        q: `[T, N, H]`; sequence s owns q[query_offsets[s]:query_offsets[s + 1]], its last tokens, so that its i-th
            query stands at position lengths[s] - num_queries + i. Heads and H as in `paged_decode_attention`.
        query_offsets: `[S + 1]` int32, ascending from 0. Padding sequences own no query and have length 0; tokens from
            query_offsets[S] on are padding, and their output is zeros.
        kv: the cache, the new tokens already stored.
        options, sinks, backend, interpret: as in `paged_decode_attention`. A window reaches back from a token's own
            position.
        seen: `[T]` int32, the tokens of its sequence, from the first, after which each token sees none; at least those
            up to itself, at most `lengths`, and never less than the token before it. None: those up to itself.
        biases: `[N, 2 B + 1]` float32, added to scaled and capped scores: entry B + d where the key comes d after the
            query, the outermost ones where it is further away. None: nothing is added.

    Raises:
        ValueError: shapes that don't fit each other, or a backend that can't run here.
    """
    _check_attention(q, kv, options, sinks)
    if query_offsets.shape != (kv.num_seqs + 1,) or query_offsets.dtype != jnp.int32:
        raise ValueError(
            f"query_offsets is {query_offsets.shape} {query_offsets.dtype}; it must be [S + 1] int32, "
            f"and lengths has S = {kv.num_seqs}"
        )
    if biases is not None:
        _check_biases(biases, q, options)
    if seen is not None and options.chunk is not None:
        raise ValueError(f"options.chunk is {options.chunk}; it must be None where queries see ahead")
    query_offsets, kv, options = split_at_chunks(query_offsets, len(q), kv, options.for_heads(q.shape[2]))
    scaled, call = _scale_queries(q, kv), (query_offsets, kv.unscaled(), sinks, options, interpret)
    if seen is not None and (seen.shape != q.shape[:1] or seen.dtype != jnp.int32):
        raise ValueError(f"seen is {seen.shape} {seen.dtype}; it must be [T] int32, and q has T = {q.shape[0]}")
    if biases is not None:
        biased = choose_kernel(
            "paged_extend_attention", lambda each: _fitting(each, each.extend_biased, kv), backend, q, kv,
            interpret=interpret,
        )  # fmt: skip
        out = biased(scaled, *call, seen, biases)
    elif seen is None:
        extend = choose_kernel(
            "paged_extend_attention", lambda each: _fitting(each, each.extend, kv), backend, q, kv, interpret=interpret
        )
        out = extend(scaled, *call)
    else:
        ahead = choose_kernel(
            "paged_extend_attention", lambda each: _fitting(each, each.extend_ahead, kv), backend, q, kv,
            interpret=interpret,
        )  # fmt: skip
        out = ahead(scaled, *call, seen)
    return _scale_output(out, kv)[..., : options.value_dim]


def _check_decode(q: jax.Array, kv: PagedKv, options: AttentionOptions, sinks: jax.Array | None) -> None:
    _check_attention(q, kv, options, sinks)
    if q.shape[0] != kv.num_seqs:
        raise ValueError(f"q {q.shape} must hold one token for each of the {kv.num_seqs} sequences in lengths")


def _check_attention(q: jax.Array, kv: PagedKv, options: AttentionOptions, sinks: jax.Array | None) -> None:
    """Check q `[T, N, H]`, page table `[S, P]`, lengths `[S]` and sinks `[N]` against the cache."""
    check_pages(kv)
    if q.dtype not in QUERY_DTYPES:
        raise ValueError(f"q has dtype {q.dtype}; it must be float32, bfloat16 or float16")
    if q.ndim != 3 or not (q.shape[2] == kv.head_dim or (options.value_dim and q.shape[2] < kv.head_dim)):
        raise ValueError(
            f"q {q.shape} must be [T, N, H] with the H of kv.k {kv.k.shape}, or less where values are part of keys"
        )
    if (options.value_dim or 0) > q.shape[2]:
        raise ValueError(f"value_dim is {options.value_dim}; it must be at most the H of q {q.shape}")
    if q.shape[1] % kv.num_kv_heads:
        raise ValueError(f"q has {q.shape[1]} heads; it must be a multiple of the {kv.num_kv_heads} kv heads")
    if kv.page_table.ndim != 2 or kv.lengths.shape != kv.page_table.shape[:1]:
        raise ValueError(f"page_table {kv.page_table.shape} must be [S, P] and lengths {kv.lengths.shape} [S]")
    for name, array in (("page_table", kv.page_table), ("lengths", kv.lengths)):
        if array.dtype != jnp.int32:
            raise ValueError(f"{name} has dtype {array.dtype}; it must be int32")
    if sinks is not None and (sinks.shape != (q.shape[1],) or sinks.dtype != jnp.float32):
        raise ValueError(f"sinks is {sinks.shape} {sinks.dtype}; it must be [N] float32, and q has N = {q.shape[1]}")


def _fitting(backend: Backend, kernel: Kernel[Any] | None, kv: PagedKv) -> Kernel[Any] | None:
    """The kernel as it takes queries of fewer numbers than an entry of the cache has: if it can't, with zeros."""
    if kernel is None or backend.cuts_entries:
        return kernel
    run, refuse, width = kernel.run, kernel.refuse, kv.head_dim
    return Kernel(lambda q, *rest: run(widened(q, width), *rest), lambda q, *rest: refuse(widened(q, width), *rest))


def _check_biases(biases: jax.Array, q: jax.Array, options: AttentionOptions) -> None:
    """Kernels look biases up by distance, without a look at the array's end."""
    is_right = biases.ndim == 2 and biases.shape[0] == q.shape[1] and biases.shape[1] % 2 == 1
    if not is_right or biases.dtype != jnp.float32 or options.chunk is not None:
        raise ValueError(
            f"biases is {biases.shape} {biases.dtype}; it must be [N, 2 B + 1] float32 with the N of q {q.shape}, "
            "without chunks"
        )


def _scale_queries(q: jax.Array, kv: PagedKv) -> jax.Array:
    return _multiply_heads(q, _scale_of_heads("k_scale", kv.k_scale, kv))


def _scale_output(out: jax.Array, kv: PagedKv) -> jax.Array:
    return _multiply_heads(out, _scale_of_heads("v_scale", kv.v_scale, kv))


def _scale_of_heads(name: str, scale: Scale, kv: PagedKv) -> jax.Array | None:
    """One for each kv head of the cache, or of the model's of which several lie in one of the cache's."""
    num_scales = 0 if scale is None or jnp.ndim(scale) == 0 else jnp.shape(scale)[0]
    is_of_more = num_scales > kv.num_kv_heads and num_scales % kv.num_kv_heads == 0
    return per_head_scale(name, scale, num_scales if is_of_more else kv.num_kv_heads)


def _multiply_heads(x: jax.Array, scale: jax.Array | None) -> jax.Array:
    """x `[T, N, H]` times `[K]` scales, each for the query heads of one kv head, in x's dtype; None is 1."""
    if scale is None:
        return x
    per_query_head = jnp.repeat(scale, x.shape[1] // scale.shape[0])
    return (x.astype(jnp.float32) * per_query_head[:, None]).astype(x.dtype)
