"""The public functions: attention on a paged cache, the stores into it, `add_and_norm`, products, what experts need.

Owns the checks of their arguments and the cache's scales. Never knows how a backend computes: it asks `dispatch` for
one and calls it.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.backend import refuse_nothing
from pallas_kernels.choice import AUTO, AUTO_CHOICE, KernelChoice
from pallas_kernels.dispatch import choose_backend, choose_kernel, choose_kernel_or_xla, has_kernel, refusals_of
from pallas_kernels.experts import ACTIVATIONS, Choices, Groups, UnitWeights, sort_by_expert
from pallas_kernels.kept_heads import widened
from pallas_kernels.latent import LatentHeads, LatentQkv, check_latent_qkv
from pallas_kernels.norm import Update, add_then_norm
from pallas_kernels.options import AttentionOptions
from pallas_kernels.order import is_order_fixed
from pallas_kernels.packed import PackedMatrix
from pallas_kernels.paged_kv import QUERY_DTYPES, PagedKv, Scale, check_pages, per_head_scale, to_format
from pallas_kernels.qkv import FusedQkv, check_qkv
from pallas_kernels.routing import Router, choose_by_xla
from pallas_kernels.scaled import ROW_GROUP, ScaledMatrix, ScaledRows, rounded_rows
from pallas_kernels.xla.store import store_pages

_DEFAULTS = AttentionOptions()


def store_kv(
    kv: PagedKv, k: jax.Array, v: jax.Array, slots: jax.Array, *, backend: str = "auto", interpret: bool = False
) -> PagedKv:
    """Write the K and V of T tokens into the cache; returns the cache with the updated pages.

    Args:
        kv: the cache. Donate its pages to the surrounding jit and they are updated in place. Page table and lengths are
            passed through unread.
        k, v: `[T, K, H]`, divided by the cache's scales and cast to its dtype; what float8 can't hold becomes its
            largest number. K and H may be those of a model whose heads the cache keeps otherwise (`kept_heads`).
        slots: `[T]` int32, page * page_size + offset, each within the cache. Padding tokens use slots of page 0; only
            there may a slot occur twice.
        backend: one of `STORE_BACKENDS`, or "auto".
        interpret: run a Pallas backend in its interpreter, on any platform.

    Raises:
        ValueError: shapes that don't fit each other, or a backend that can't run here.
    """
    check_pages(kv)
    is_rows = k.shape == v.shape and k.ndim == 3 and k.shape[:1] == slots.shape
    if not is_rows or not kv.kept(k.shape[1]).takes(k.shape[2]) or slots.dtype != jnp.int32:
        raise ValueError(
            f"k {k.shape} and v {v.shape} must be [T, K, H] and slots {slots.shape} {slots.dtype} [T] int32, "
            f"with the K of kv.k {kv.k.shape} and at most its H, or with heads that lie side by side in that"
        )
    k, v = _as_kept(k, v, kv)
    store = choose_kernel("store_kv", lambda each: each.store, backend, kv, interpret=interpret)
    stored = store(kv.unscaled(), k, v, slots, interpret)
    return dataclasses.replace(kv, k=stored.k, v=stored.v)


def store_entries(pages: jax.Array, entries: jax.Array, slots: jax.Array) -> jax.Array:
    """Write what T tokens keep into pages without a partner; returns the pages, updated. XLA does it.

    Attention over such pages is that of `PagedKv(pages, pages, ..)` with `AttentionOptions.value_dim`.

    Args:
        pages: `[num_pages, K, page_size, H]`, as of `PagedKv`; donate them to the surrounding jit.
        entries: `[T, K, H]`, cast to the pages' format; of smaller ones the rest is written as zeros.
        slots: `[T]` int32, as for `store_kv`.

    Raises:
        ValueError: shapes that don't fit each other.
    """
    kv = PagedKv(pages, pages, slots[None], slots)
    check_pages(kv)
    fits = entries.ndim == 3 and entries.shape[:2] == (len(slots), kv.num_kv_heads) and entries.shape[2] <= kv.head_dim
    if not fits or slots.ndim != 1 or slots.dtype != jnp.int32:
        raise ValueError(
            f"entries {entries.shape} must be [T, K, H] and slots {slots.shape} {slots.dtype} [T] int32, with the K of "
            f"pages {pages.shape} and at most their H"
        )
    return store_pages(pages, to_format(widened(entries, kv.head_dim), pages.dtype), slots)


def absorb_and_store(
    qkv: LatentQkv, pages: jax.Array, slots: jax.Array, *, backend: str = AUTO, interpret: bool = False
) -> tuple[jax.Array, jax.Array]:
    """`rotate_and_store` of a layer with a latent: norm, rotation, queries times their heads' matrices, and a store.

    Returns the queries `[T, N, H]`, with the H of the pages and zeros after the model's, and the pages, updated.

    Args:
        qkv: the products and what makes queries and entries of them.
        pages, slots: as for `store_entries`.
        backend: a backend that has the op, "xla" or "auto": where no kernel takes the call, XLA does it all.
        interpret: run a Pallas backend in its interpreter, on any platform.

    Raises:
        ValueError: shapes that don't fit each other, or a backend that can't run here.
    """
    check_latent_qkv(qkv)
    check_pages(PagedKv(pages, pages, slots[None], slots))
    kernel = choose_kernel_or_xla(
        "rotate_and_store", lambda each: each.absorb_and_store, backend, qkv, pages, interpret=interpret
    )
    if kernel is not None:
        return kernel(qkv, pages, slots, interpret)
    return widened(qkv.queries, pages.shape[3]), store_entries(pages, qkv.entries, slots)


def rotate_and_store(
    qkv: FusedQkv,
    kv: PagedKv,
    slots: jax.Array,
    *,
    backend: str = "auto",
    store_backend: str | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, PagedKv]:
    """Take the product of a layer's fused weights apart: bias, norm per head, rotation, and a store of keys and values.

    Returns the queries `[T, N, H]` in the product's dtype, and the cache with the updated pages. H is the cache's:
    where it isn't the model's (`kept_heads`), attention needs `options.for_heads`, and its output `own_numbers`.

    Args:
        qkv: the product and what turns it into queries, keys and values.
        kv: the cache, as for `store_kv`.
        slots: `[T]` int32, as for `store_kv`.
        backend: a backend that has the op, or "auto". "auto" takes the device's best one, and where there is none XLA's
            queries, keys and values with `store_kv`.
        store_backend: of that `store_kv`; None: `backend`.
        interpret: run a Pallas backend in its interpreter, on any platform.

    Raises:
        ValueError: shapes that don't fit each other, or a backend that can't run here.
    """
    _check_qkv(qkv, kv, slots)
    kernel = choose_kernel_or_xla(
        "rotate_and_store", lambda each: each.rotate_and_store, backend, qkv, kv, interpret=interpret
    )
    if kernel is not None:
        return kernel(qkv, kv, slots, interpret)
    q, k, v = qkv.split()
    stored = store_kv(kv, k, v, slots, backend=backend if store_backend is None else store_backend)
    return kv.kept(qkv.num_kv_heads).queries(q), stored


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
    _check_qkv(qkv, kv, slots)
    refusals = {**refusals_of(lambda each: each.store_and_decode, qkv, kv), "xla": refuse_nothing}
    chosen = choose_backend("store_and_decode", backend, refusals, interpret=interpret)
    named = {parts.store_kv, parts.paged_decode_attention} - {AUTO, chosen.name}
    if chosen.store_and_decode is None or (backend == AUTO and named):
        q, kv = rotate_and_store(qkv, kv, slots, backend=parts.rotate_and_store, store_backend=parts.store_kv)
        return paged_decode_attention(q, kv, options, sinks, backend=parts.paged_decode_attention), kv
    q, k, v = qkv.split()
    q = kv.kept(qkv.num_kv_heads).queries(q)
    _check_decode(q, kv, options, sinks)
    new = _as_kept(k, v, kv)
    run = chosen.store_and_decode.run
    out, stored = run(_scale_queries(q, kv), *new, kv.unscaled(), slots, sinks, options, interpret)
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
            n // (N // K).
        kv: the cache; a sequence of length 0 is a padding row, whose output is zeros.
        options: softmax scale, sliding window, soft cap, and what is a value.
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
    decode = choose_kernel("paged_decode_attention", lambda each: each.decode, backend, q, kv, interpret=interpret)
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
    refusals = refusals_of(lambda each: each.decode, q, kv)
    chosen = choose_backend("paged_decode_attention", backend, refusals, interpret=interpret)
    kernel = chosen.decode_latents
    if kernel is None or is_order_fixed() or kernel.refuse(q, kv, heads) is not None:
        return heads.outputs(paged_decode_attention(q, kv, options, backend=chosen.name, interpret=interpret))
    return kernel.run(q, kv, heads, options, interpret)


def paged_extend_attention(
    q: jax.Array,
    query_offsets: jax.Array,
    kv: PagedKv,
    options: AttentionOptions = _DEFAULTS,
    sinks: jax.Array | None = None,
    *,
    backend: str = "auto",
    interpret: bool = False,
) -> jax.Array:
    """Causal attention of each sequence's last tokens over its cached and new KV; `[T, N, H]` in q's dtype.

    Args:
        q: `[T, N, H]`; sequence s owns q[query_offsets[s]:query_offsets[s + 1]], its last tokens, so that its i-th
            query stands at position lengths[s] - num_queries + i. Query head n reads kv head n // (N // K).
        query_offsets: `[S + 1]` int32, ascending from 0. Padding sequences own no query and have length 0; tokens from
            query_offsets[S] on are padding, and their output is zeros.
        kv: the cache, the new tokens already stored.
        options, sinks, backend, interpret: as in `paged_decode_attention`.

    Raises:
        ValueError: shapes that don't fit each other, or a backend that can't run here.
    """
    _check_attention(q, kv, options, sinks)
    if query_offsets.shape != (kv.num_seqs + 1,) or query_offsets.dtype != jnp.int32:
        raise ValueError(
            f"query_offsets is {query_offsets.shape} {query_offsets.dtype}; it must be [S + 1] int32, "
            f"and lengths has S = {kv.num_seqs}"
        )
    extend = choose_kernel("paged_extend_attention", lambda each: each.extend, backend, q, kv, interpret=interpret)
    out = extend(_scale_queries(q, kv), query_offsets, kv.unscaled(), sinks, options, interpret)
    return _scale_output(out, kv)[..., : options.value_dim]


def add_and_norm(
    x: jax.Array,
    update: Update,
    scales: jax.Array,
    row: int,
    eps: float,
    *,
    backend: str = "auto",
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Add to the residual stream and normalize the sum; returns the sum and its RMSNorm, `[T, D]` in x's dtype.

    Args:
        x: `[T, D]`.
        update: `[T, D]` in x's dtype; or `[P, T, D]` float32, parts whose sum is the update; or `Choices` of T tokens,
            whose rows are in x's dtype.
        scales: `[L, D]`, of which this norm takes `row`.
        row: index of the norm's scale.
        eps: added to the mean square.
        backend: a backend that has the op, or "auto"; "xla" always has it.
        interpret: run a Pallas backend in its interpreter, on any platform.

    Raises:
        ValueError: shapes that don't fit each other, or a backend that can't run here.
    """
    total, normed = _add_and_norm(x, update, scales, row, eps, False, backend, interpret)
    assert isinstance(normed, jax.Array)
    return total, normed


def add_and_norm_in_float8(
    x: jax.Array,
    update: Update,
    scales: jax.Array,
    row: int,
    eps: float,
    *,
    backend: str = "auto",
    interpret: bool = False,
) -> tuple[jax.Array, ScaledRows]:
    """`add_and_norm` for a `float8_product`: the norm is rounded as `float8_rows` would, in the same kernel.

    Raises:
        ValueError: as `add_and_norm`, or D is no multiple of `ROW_GROUP`.
    """
    if x.shape[-1] % ROW_GROUP:
        raise ValueError(f"x is {x.shape}; it must be [T, D] with a D that is a multiple of {ROW_GROUP}")
    total, normed = _add_and_norm(x, update, scales, row, eps, True, backend, interpret)
    return total, normed if isinstance(normed, ScaledRows) else rounded_rows(normed)


def _add_and_norm(
    x: jax.Array,
    update: Update,
    scales: jax.Array,
    row: int,
    eps: float,
    in_float8: bool,
    backend: str,
    interpret: bool,
) -> tuple[jax.Array, jax.Array | ScaledRows]:
    """With `in_float8` the norm is rounded by a kernel, or as it is."""
    _check_update(update, x)
    if x.ndim != 2 or scales.ndim != 2 or scales.shape[1] != x.shape[1] or not 0 <= row < scales.shape[0]:
        raise ValueError(f"x {x.shape} must be [T, D] and scales {scales.shape} [L, D] with a row {row}")
    kernel = choose_kernel_or_xla(
        "add_and_norm", lambda each: each.add_and_norm, backend, x, update, interpret=interpret
    )
    if kernel is None:
        return add_then_norm(x, update, scales, row, eps)
    return kernel(x, update, scales, row, eps, in_float8, interpret)


def choose_experts(
    router: Router,
    logits: jax.Array,
    choice_bias: jax.Array | None = None,
    shared_logits: jax.Array | None = None,
    *,
    backend: str = "auto",
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """The experts `[T, k]` int32 of each token, best first, and their shares `[T, k]` float32.

    Of experts that score alike the first ones are chosen. Shared ones, if the router counts some, follow: `[T, k + n]`.

    Args:
        router: the rule.
        logits: `[T, E]` float32, or `[P, T, E]`, parts whose sum they are.
        choice_bias: `[E]` float32, or None.
        shared_logits: `[T]` float32, whose sigmoids are the shares of shared experts; None: these are 1.
        backend: a backend that has the op, or "auto"; "xla" always has it.
        interpret: run a Pallas backend in its interpreter, on any platform.

    Raises:
        ValueError: shapes that don't fit each other, or a backend that can't run here.
    """
    if logits.ndim not in (2, 3) or logits.dtype != jnp.float32 or router.top_k > logits.shape[-1]:
        raise ValueError(
            f"logits are {logits.shape} {logits.dtype}; they must be [T, E] float32, or parts of that, with E >= "
            f"{router.top_k}, of which that many are chosen"
        )
    if choice_bias is not None and choice_bias.shape != logits.shape[-1:]:
        raise ValueError(f"choice_bias is {choice_bias.shape}; it must be [{logits.shape[-1]}], one for each expert")
    if shared_logits is not None and shared_logits.shape != logits.shape[-2:-1]:
        raise ValueError(f"shared_logits is {shared_logits.shape}; it must be [{logits.shape[-2]}], one for each token")
    kernel = choose_kernel_or_xla(
        "choose_experts", lambda each: each.choose_experts, backend, router, logits, interpret=interpret
    )
    if kernel is None:
        return choose_by_xla(router, logits, choice_bias, shared_logits)
    return kernel(router, logits, choice_bias, shared_logits, interpret)


def group_by_expert(
    experts: jax.Array,
    num_experts: int,
    is_token: jax.Array | None = None,
    *,
    backend: str = "auto",
    interpret: bool = False,
) -> Groups:
    """The choices of all tokens by expert, those of one expert in the order of tokens.

    Args:
        experts: `[T, k]` int32, the experts of each token; others than 0 .. E - 1 are no expert.
        num_experts: E.
        is_token: `[T]`, whether a token's choices count; those of others are no expert. None: all count.
        backend: a backend that has the op, or "auto"; "xla" always has it.
        interpret: run a Pallas backend in its interpreter, on any platform.

    Raises:
        ValueError: shapes that don't fit each other, or a backend that can't run here.
    """
    if experts.ndim != 2 or (is_token is not None and is_token.shape != experts.shape[:1]):
        raise ValueError(f"experts are {experts.shape}; they must be [T, k], and is_token [T]")
    kernel = choose_kernel_or_xla("group_by_expert", lambda each: each.group_by_expert, backend, interpret=interpret)
    if kernel is None:
        return sort_by_expert(experts, num_experts, is_token)
    return kernel(experts, num_experts, is_token, interpret)


def grouped_product(
    x: jax.Array,
    groups: Groups,
    weights: jax.Array,
    *,
    of_tokens: bool = False,
    backend: str = "auto",
    interpret: bool = False,
) -> jax.Array:
    """Each row times the weights of its expert; returns `[M, out]` in x's dtype, added up in float32.

    Weights of a byte, int8 or float8, are multiplied in x's format and return float32: the caller scales the results.

    Only the weights of experts that have rows are read, where they lie. A row's result depends on no other row.

    Args:
        x: `[M, in]`, a row for each place; with `of_tokens` `[T, in]`, a row for each token, which stands at the places
            of all its choices. Rounded to the weights' dtype, unless that is of a byte.
        groups: which places are whose, from `group_by_expert`. Places without an expert yield zeros.
        weights: `[E, out, in]`, as checkpoints store each expert's.
        of_tokens: whether x's rows are tokens' or places'.
        backend: a backend that has the op, or "auto".
        interpret: run a Pallas backend in its interpreter, on any platform.

    Raises:
        ValueError: shapes that don't fit each other, or a backend that can't run here.
    """
    num_rows = groups.num_tokens if of_tokens else groups.num_places
    if weights.ndim != 3 or weights.shape[0] != groups.num_experts or x.shape != (num_rows, weights.shape[-1]):
        raise ValueError(
            f"x is {x.shape} and weights are {weights.shape}; they must be [{num_rows}, in] and "
            f"[{groups.num_experts}, out, in]"
        )
    multiply = choose_kernel(
        "grouped_product", lambda each: each.grouped_product, backend, x, groups, weights, interpret=interpret
    )
    return multiply(x, groups, weights, of_tokens, interpret)


def grouped_packed_product(
    x: jax.Array,
    groups: Groups,
    weights: PackedMatrix,
    *,
    of_tokens: bool = False,
    dtype: str = "bfloat16",
    row_bits: int = 16,
    backend: str = "auto",
) -> jax.Array:
    """`grouped_product` with weights that are kept as small as they are published; `[M, out]` in x's dtype.

    Args:
        x, groups, of_tokens: as for `grouped_product`.
        weights: `[E, out, in]`.
        dtype: what floats become in products.
        row_bits: of the integers that rows become where C++ multiplies int4.
        backend: "native", "xla" or "auto".

    Raises:
        ValueError: another backend, or one that can't run here.
    """
    multiply = choose_kernel(
        "grouped_product", lambda each: each.grouped_packed_product, backend, x, weights, interpret=False
    )
    return multiply(x, groups, weights, of_tokens, dtype, row_bits)


def gated_product(
    x: jax.Array,
    groups: Groups,
    weights: jax.Array,
    activation: str,
    *,
    of_tokens: bool = False,
    backend: str = "auto",
    interpret: bool = False,
) -> jax.Array:
    """`grouped_product` with the weights of gates and of what they multiply: activation(gate) * up, `[M, F]`.

    Args:
        x, groups, of_tokens: as for `grouped_product`.
        weights: `[E, 2 F, in]`, the gate's rows first; not of a byte.
        activation: one of `ACTIVATIONS`.
        backend: a backend that has the op, "xla", or "auto": where no kernel takes the call, XLA computes the unit
            after the device's best `grouped_product`.
        interpret: run a Pallas backend in its interpreter, on any platform.

    Raises:
        ValueError: shapes that don't fit each other, or a backend that can't run here.
    """
    num_rows = groups.num_tokens if of_tokens else groups.num_places
    if weights.ndim != 3 or weights.shape[0] != groups.num_experts or x.shape != (num_rows, weights.shape[-1]):
        raise ValueError(
            f"x is {x.shape} and weights are {weights.shape}; they must be [{num_rows}, in] and "
            f"[{groups.num_experts}, 2 F, in]"
        )
    if activation not in ACTIVATIONS or weights.shape[1] % 2 or weights.dtype.itemsize == 1:
        raise ValueError(
            f"activation is {activation!r} and weights are {weights.shape} {weights.dtype}; they must be one of "
            f"{', '.join(ACTIVATIONS)} and [E, 2 F, in] in a format of more than a byte"
        )
    kernel = choose_kernel_or_xla(
        "gated_product", lambda each: each.gated_product, backend, x, groups, weights, interpret=interpret
    )
    if kernel is not None:
        return kernel(x, groups, weights, activation, of_tokens, interpret)
    both = grouped_product(x, groups, weights, of_tokens=of_tokens, backend="xla" if backend == "xla" else "auto")
    gate, up = jnp.split(both, 2, axis=1)
    return ACTIVATIONS[activation](gate) * up


def joins_shared(experts: UnitWeights, shared: UnitWeights, *, backend: str = "auto") -> bool:
    """Whether a kernel reads the weights of shared experts with those of others on the target device.

    Args:
        experts, shared: as for `products_with_shared`.
        backend: as for `gated_product`.

    Raises:
        ValueError: a named backend that can't run here.
    """
    return has_kernel("gated_product", backend, refusals_of(lambda each: each.products_with_shared, experts, shared))


def products_with_shared(
    x: jax.Array,
    groups: Groups,
    experts: UnitWeights,
    shared: UnitWeights,
    activation: str,
    *,
    backend: str = "auto",
    interpret: bool = False,
) -> jax.Array:
    """A `gated_product` of tokens and the `grouped_product` after it, `[M, out]`, with shared experts among the others.

    Args:
        x: `[T, in]`.
        groups: of E + n experts, of which the last n are the shared ones.
        experts: `[E, 2 F, in]` and `[E, out, F]`.
        shared: `[2, n F, in]` and `[out, n F]`: those of n experts as one MLP.
        activation: one of `ACTIVATIONS`.
        backend: a backend that has the op, "xla", or "auto": XLA copies all weights (see `joins_shared`).
        interpret: run a Pallas backend in its interpreter, on any platform.

    Raises:
        ValueError: shapes that don't fit each other, or a backend that can't run here.
    """
    num_experts, out, size = experts.down.shape
    all_units = (groups.num_experts - num_experts) * size
    shapes = [each.shape for each in (x, *experts, *shared)]
    wanted = [
        (groups.num_tokens, x.shape[-1]), (num_experts, 2 * size, x.shape[-1]), (num_experts, out, size),
        (2, all_units, x.shape[-1]), (out, all_units),
    ]  # fmt: skip
    if shapes != wanted or activation not in ACTIVATIONS:
        raise ValueError(
            f"x, weights of experts and shared ones are {shapes} and the activation {activation!r}; for groups of "
            f"{groups.num_experts} experts they must be {wanted} and one of {', '.join(ACTIVATIONS)}"
        )
    kernel = choose_kernel_or_xla(
        "gated_product", lambda each: each.products_with_shared, backend, experts, shared, interpret=interpret
    )
    if kernel is not None:
        return kernel(x, groups, experts, shared, activation, interpret)
    both = experts.and_shared(shared)
    gated = gated_product(x, groups, both.gate_up, activation, of_tokens=True, backend=backend)
    return grouped_product(gated, groups, both.down, backend=backend)


def quantized_product(
    x: jax.Array,
    weights: ScaledMatrix,
    dtype: DTypeLike | None = None,
    *,
    in_parts: bool = False,
    backend: str = "auto",
    interpret: bool = False,
) -> jax.Array:
    """Rows times a matrix whose inputs share scales in groups; returns `[T, O]` in `dtype` (default: x's).

    Numbers are converted to x's format and added up in float32. "xla" rounds the scaled weights to x's format, others
    scale the sums of groups.

    Args:
        x: `[T, I]`.
        weights: of O outputs and I inputs.
        dtype: of the result.
        in_parts: the caller adds up parts itself: where that is faster, the result is `[P, T, O]` float32, parts whose
            sum is the product.
        backend: a backend that has the op, or "auto".
        interpret: run a Pallas backend in its interpreter, on any platform.

    Raises:
        ValueError: shapes that don't fit each other, or a backend that can't run here.
    """
    groups = -(-weights.num_inputs // weights.group)
    of_groups = [each.shape for each in (weights.scale, weights.zero) if each is not None]
    if x.shape[1:] != (weights.num_inputs,) or any(shape != (weights.num_outputs, groups) for shape in of_groups):
        raise ValueError(
            f"x is {x.shape}, numbers are {weights.numbers.shape}, scales and zeros {of_groups}; they must be [T, I], "
            f"[O, I] and [O, G], with G = {groups} groups of {weights.group}"
        )
    multiply = choose_kernel(
        "quantized_product", lambda each: each.quantized_product, backend, x, weights, interpret=interpret
    )
    return multiply(x, weights, jnp.dtype(x.dtype if dtype is None else dtype), in_parts, interpret)


def multiplies_float8(dtype: DTypeLike, weights: ScaledMatrix, *, backend: str = "auto") -> bool:
    """Whether a kernel multiplies rows in float8 with the weights on the target device; with "xla" none does.

    Args:
        dtype: of the rows before they are rounded.
        weights: of O outputs and I inputs.
        backend: as for `float8_product`.

    Raises:
        ValueError: a named backend that can't run here.
    """
    return has_kernel("float8_product", backend, refusals_of(lambda each: each.float8_product, dtype, weights))


def float8_rows(
    x: jax.Array, activation: str | None = None, *, backend: str = "auto", interpret: bool = False
) -> ScaledRows:
    """Rows rounded to float8, each group of `ROW_GROUP` numbers with a scale that brings the largest to 448.

    Args:
        x: `[T, I]` of whole groups; with an activation `[T, 2, I]`, gates and what they multiply, of which
            activation(gate) * up is rounded.
        activation: one of `ACTIVATIONS`, or None.
        backend: a backend that has `float8_product`, "xla", or "auto".
        interpret: run a Pallas backend in its interpreter, on any platform.

    Raises:
        ValueError: shapes that don't fit, or a backend that can't run here.
    """
    shape = (len(x), x.shape[-1]) if activation is None else (len(x), 2, x.shape[-1])
    if x.shape != shape or x.shape[-1] % ROW_GROUP or activation not in (None, *ACTIVATIONS):
        raise ValueError(
            f"x is {x.shape} and the activation {activation}; they must be [T, I] and None, or [T, 2, I] and one of "
            f"{', '.join(ACTIVATIONS)}, with an I that is a multiple of {ROW_GROUP}"
        )
    round_rows = choose_kernel("float8_product", lambda each: each.float8_rows, backend, interpret=interpret)
    return round_rows(x, activation, interpret)


def float8_product(
    rows: ScaledRows,
    weights: ScaledMatrix,
    dtype: DTypeLike | None = None,
    *,
    in_parts: bool = False,
    backend: str = "auto",
    interpret: bool = False,
) -> jax.Array:
    """Rows in float8 times a matrix of float8, both with scales; `[T, O]` in `dtype` (default: which the rows had).

    Args:
        rows: of `float8_rows`.
        weights: float8_e4m3fn without zero points, of O outputs and I inputs.
        dtype: of the result.
        in_parts: as for `quantized_product`.
        backend: a backend that has the op, "xla", or "auto".
        interpret: run a Pallas backend in its interpreter, on any platform.

    Raises:
        ValueError: shapes that don't fit each other, or a backend that can't run here.
    """
    if rows.numbers.shape[1:] != (weights.num_inputs,):
        shapes = f"rows are {rows.numbers.shape} and numbers are {weights.numbers.shape}"
        raise ValueError(f"{shapes}; they must be [T, I] and [O, I]")
    multiply = choose_kernel(
        "float8_product", lambda each: each.float8_product, backend, rows.dtype, weights, interpret=interpret
    )
    return multiply(rows, weights, jnp.dtype(dtype or rows.dtype), in_parts, interpret)


def ordered_product(
    x: jax.Array,
    weights: jax.Array,
    dtype: DTypeLike | None = None,
    *,
    in_parts: bool = False,
    backend: str = "auto",
    interpret: bool = False,
) -> jax.Array:
    """Rows times a matrix, `[T, O]` in `dtype` (default: x's), added up in float32 in one order for any number of rows.

    Args:
        x: `[T, I]`, rounded to the weights' dtype.
        weights: `[O, I]`.
        dtype: of the result.
        in_parts: it may be `[P, T, O]` float32 instead, for a reader that adds the parts in their order.
        backend: a backend that has the op, or "auto"; "xla" adds in any order.
        interpret: run a Pallas backend in its interpreter, on any platform.

    Raises:
        ValueError: shapes that don't fit each other, or a backend that can't run here.
    """
    if x.ndim != 2 or weights.ndim != 2 or x.shape[1] != weights.shape[1]:
        raise ValueError(f"x is {x.shape} and weights are {weights.shape}; they must be [T, I] and [O, I]")
    result = jnp.dtype(dtype or x.dtype)
    kernel = choose_kernel_or_xla(
        "ordered_product", lambda each: each.ordered_product, backend, x, weights, interpret=interpret
    )
    if kernel is not None:
        return kernel(x, weights, result, in_parts, interpret)
    rows = x.astype(weights.dtype)
    return jnp.einsum("td,nd->tn", rows, weights, preferred_element_type=jnp.float32).astype(result)


def _check_update(update: Update, x: jax.Array) -> None:
    if isinstance(update, Choices):
        rows, tokens = update.rows, update.place_of.shape[:1]
        if (
            (*tokens, *rows.shape[1:]) != x.shape
            or rows.dtype != x.dtype
            or update.shares.shape != update.place_of.shape
        ):
            raise ValueError(
                f"update has rows {rows.shape} {rows.dtype}, places {update.place_of.shape} and shares "
                f"{update.shares.shape}; they must be [M, D], [T, k] and [T, k] for x {x.shape} {x.dtype}"
            )
        return
    is_whole = update.shape == x.shape and update.dtype == x.dtype
    if not is_whole and (update.shape[1:] != x.shape or update.dtype != jnp.float32):
        raise ValueError(
            f"update is {update.shape} {update.dtype}; it must be {x.shape} {x.dtype} as x, or float32 parts of that"
        )


def _check_qkv(qkv: FusedQkv, kv: PagedKv, slots: jax.Array) -> None:
    """Check a product and the slots of its tokens against the cache."""
    check_pages(kv)
    check_qkv(qkv)
    if not kv.kept(qkv.num_kv_heads).takes(qkv.head_dim) or slots.shape != (qkv.num_tokens,):
        raise ValueError(
            f"qkv.product {qkv.product.shape} must be [T, K, G + 2, H] and slots {slots.shape} [T], "
            f"with the K of kv.k {kv.k.shape} and at most its H, or with heads that lie side by side in that"
        )
    if slots.dtype != jnp.int32:
        raise ValueError(f"slots has dtype {slots.dtype}; it must be int32")


def _check_decode(q: jax.Array, kv: PagedKv, options: AttentionOptions, sinks: jax.Array | None) -> None:
    _check_attention(q, kv, options, sinks)
    if q.shape[0] != kv.num_seqs:
        raise ValueError(f"q {q.shape} must hold one token for each of the {kv.num_seqs} sequences in lengths")


def _check_attention(q: jax.Array, kv: PagedKv, options: AttentionOptions, sinks: jax.Array | None) -> None:
    """Check q `[T, N, H]`, page table `[S, P]`, lengths `[S]` and sinks `[N]` against the cache."""
    check_pages(kv)
    if q.dtype not in QUERY_DTYPES:
        raise ValueError(f"q has dtype {q.dtype}; it must be float32, bfloat16 or float16")
    if q.ndim != 3 or q.shape[2] != kv.head_dim:
        raise ValueError(f"q {q.shape} must be [T, N, H] with the H of kv.k {kv.k.shape}")
    if (options.value_dim or 0) > kv.head_dim:
        raise ValueError(f"value_dim is {options.value_dim}; it must be at most the H of kv.k {kv.k.shape}")
    if q.shape[1] % kv.num_kv_heads:
        raise ValueError(f"q has {q.shape[1]} heads; it must be a multiple of the {kv.num_kv_heads} kv heads")
    if kv.page_table.ndim != 2 or kv.lengths.shape != kv.page_table.shape[:1]:
        raise ValueError(f"page_table {kv.page_table.shape} must be [S, P] and lengths {kv.lengths.shape} [S]")
    for name, array in (("page_table", kv.page_table), ("lengths", kv.lengths)):
        if array.dtype != jnp.int32:
            raise ValueError(f"{name} has dtype {array.dtype}; it must be int32")
    if sinks is not None and (sinks.shape != (q.shape[1],) or sinks.dtype != jnp.float32):
        raise ValueError(f"sinks is {sinks.shape} {sinks.dtype}; it must be [N] float32, and q has N = {q.shape[1]}")


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


def _as_kept(k: jax.Array, v: jax.Array, kv: PagedKv) -> tuple[jax.Array, jax.Array]:
    """A model's k and v `[T, K, H]` as the cache holds them: in its heads, over its scales, in its format."""
    heads = kv.kept(k.shape[1])
    k, v = widened(k, heads.share), widened(v, heads.share)
    k = _to_cache_dtype(k, per_head_scale("k_scale", kv.k_scale, heads.num_kv_heads), kv.dtype)
    v = _to_cache_dtype(v, per_head_scale("v_scale", kv.v_scale, heads.num_kv_heads), kv.dtype)
    return heads.joined(k), heads.joined(v)


def _to_cache_dtype(new: jax.Array, scale: jax.Array | None, dtype: jnp.dtype) -> jax.Array:
    if scale is not None:
        new = new.astype(jnp.float32) / scale[:, None]
    return to_format(new, dtype)
