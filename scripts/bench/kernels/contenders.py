"""The contenders for a case: the backends of `pallas_kernels`, and baselines that do the same work through JAX.

A contender takes the inputs of a case and returns a `Prepared`, or raises `Unsupported` with the reason, which the
table then prints. Backends are called through the public functions of `pallas_kernels` only. Each baseline prepares its
own layout before the clock starts. Unpaged ones get K and V as dense `[S, L, K, H]`; they are credited with the useful
work of the paged call, without page ids.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench.kernels.cases import DECODE, EXTEND, FUNCTIONS, STORE
from bench.kernels.inputs import Inputs, Layer
from bench.kernels.runners import Prepared
from pallas_kernels import PagedKv
from pallas_kernels.dispatch import BACKEND_OF_NAME


class Unsupported(Exception):
    """A contender can't run a case; the message says why."""


def backends_for(platform: str) -> list[str]:
    """The backends that a platform ("cpu", "gpu", "tpu") can run, without the slow "reference"."""
    real = [each for name, each in BACKEND_OF_NAME.items() if name != "reference"]
    return [each.name for each in real if each.platform in (None, platform)]


def prepare_backend(backend: str, inputs: Inputs, *, interpret: bool = False) -> Prepared:
    """Prepares the op of the case on one backend.

    Raises:
        Unsupported: the backend refuses the shapes.
    """
    case, scales = inputs.case, inputs.case.spec.scales
    table, lengths, offsets, slots = map(
        jnp.asarray, (inputs.page_table, inputs.lengths, inputs.query_offsets, inputs.slots)
    )
    op = functools.partial(FUNCTIONS[case.op], backend=backend, interpret=interpret, **case.options)
    if case.op == STORE:
        states: list[Any] = [(layer.k_pages, layer.v_pages) for layer in inputs.layers]
        own: list[tuple[jax.Array, ...]] = [(layer.k, layer.v) for layer in inputs.layers]

        def store(cache: tuple[jax.Array, jax.Array], k: jax.Array, v: jax.Array, slots: jax.Array) -> tuple[Any, None]:
            stored = op(PagedKv(*cache, table, lengths, **scales), k, v, slots)
            return (stored.k, stored.v), None

        prepared = Prepared(store, states, own, (slots,))
    else:

        def attend(_: None, q: jax.Array, k: jax.Array, v: jax.Array, *tables: jax.Array) -> tuple[None, jax.Array]:
            table, lengths, offsets = tables
            kv = PagedKv(k, v, table, lengths, **scales)
            return None, op(q, kv) if case.op == DECODE else op(q, offsets, kv)

        own = [(layer.q, layer.k_pages, layer.v_pages) for layer in inputs.layers]
        prepared = Prepared(attend, [None] * len(own), own, (table, lengths, offsets))
    try:
        jax.eval_shape(prepared.call, prepared.states[0], *prepared.own[0], *prepared.shared)
    except ValueError as error:
        raise Unsupported(str(error)) from None
    return prepared


Prepare = Callable[[Inputs], Prepared]


def gather_and_einsum(inputs: Inputs) -> Prepared:
    """The simplest way: sequences are padded to the longest one, and the scores of all pairs are in memory."""
    _only_plain_attention(inputs)
    case = inputs.case
    longest = 1 if case.op == DECODE else max(case.new)
    groups, dim = case.num_groups, case.head_dim

    def attend(
        _: None, q: jax.Array, k_pages: jax.Array, v_pages: jax.Array, table: jax.Array, lengths: jax.Array,
        offsets: jax.Array,
    ) -> tuple[None, jax.Array]:  # fmt: skip
        k, v = (dense(pages, table) for pages in (k_pages, v_pages))
        index = jnp.minimum(offsets[:-1, None] + jnp.arange(longest), q.shape[0] - 1)
        queries = q[index].reshape(len(case.new), longest, case.num_kv_heads, groups, dim)
        scores = jnp.einsum("sqkgh,slkh->skgql", queries, k, preferred_element_type=jnp.float32) * dim**-0.5
        position = (lengths - offsets[1:] + offsets[:-1])[:, None] + jnp.arange(longest)
        seen = jnp.arange(k.shape[1]) <= position[:, :, None]
        weights = jax.nn.softmax(jnp.where(seen[:, None, None], scores, -jnp.inf)).astype(v.dtype)
        out = jnp.einsum("skgql,slkh->sqkgh", weights, v).reshape(len(case.new), longest, *q.shape[1:])
        owner = jnp.sum(jnp.arange(q.shape[0])[:, None] >= offsets[1:], axis=1)
        return None, out[owner, jnp.arange(q.shape[0]) - offsets[owner]]

    own = [(layer.q, *layer.cache_numbers()) for layer in inputs.layers]
    shared = tuple(map(jnp.asarray, (inputs.page_table, inputs.lengths, inputs.query_offsets)))
    return Prepared(attend, [None] * len(own), own, shared)


def jax_paged_attention(inputs: Inputs, k_splits: int, tile_tokens: int, *, interpret: bool = False) -> Prepared:
    """JAX's own Pallas op for decode on GPU. Its cache is `[K, num_pages, page_size, H]`; queries are scaled before."""
    _only_plain_attention(inputs)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        from jax.experimental.pallas.ops.gpu.paged_attention import paged_attention
    pages = max(1, tile_tokens // inputs.case.page_size)
    table = np.pad(inputs.page_table, ((0, 0), (0, -inputs.page_table.shape[1] % (k_splits * pages))))

    def attend(_: None, q: jax.Array, k: jax.Array, v: jax.Array, *rest: jax.Array) -> tuple[None, jax.Array]:
        options = {"k_splits": k_splits, "pages_per_compute_block": pages, "interpret": interpret}
        return None, paged_attention(q, k, v, *rest, **options)

    own = [
        (
            layer.q * layer.q.dtype.type(inputs.case.head_dim**-0.5),
            *(jnp.swapaxes(a, 0, 1) for a in layer.cache_numbers()),
        )
        for layer in inputs.layers
    ]
    return Prepared(attend, [None] * len(own), own, (jnp.asarray(table), jnp.asarray(inputs.lengths)))


def ragged_paged_attention(inputs: Inputs) -> Prepared:
    """JAX's own Pallas op for decode and extend on TPU, with sizes of its own table for the chip.

    Its cache is `[num_pages, page_size, K and V in turns, H]`.
    """
    case = inputs.case
    if case.float8_cache or case.has_sinks or case.padding_tokens or 0 in case.new:
        raise Unsupported("no float8 cache, sinks or padding")
    from jax.experimental.pallas.ops.tpu import ragged_paged_attention as jax_op

    options = {
        "sm_scale": case.head_dim**-0.5 if case.sm_scale is None else case.sm_scale,
        "sliding_window": case.sliding_window,
        "soft_cap": case.logit_soft_cap,
    }

    def attend(_: None, q: jax.Array, pages: jax.Array, *rest: jax.Array) -> tuple[None, jax.Array]:
        return None, jax_op.ragged_paged_attention(q, pages, *rest, **options)

    def in_turns(layer: Layer) -> jax.Array:
        k, v = (jnp.swapaxes(a, 1, 2) for a in layer.cache_numbers())
        return jnp.stack([k, v], axis=3).reshape(*k.shape[:2], -1, k.shape[3])

    own = [(layer.q, in_turns(layer)) for layer in inputs.layers]
    arrays = inputs.lengths, inputs.page_table, inputs.query_offsets, np.array([len(case.new)], np.int32)
    return Prepared(attend, [None] * len(own), own, tuple(map(jnp.asarray, arrays)))


def cudnn(inputs: Inputs) -> Prepared:
    """cuDNN through `jax.nn.dot_product_attention` on dense K and V, for equal numbers of new tokens only."""
    _only_plain_attention(inputs)
    case = inputs.case
    num_new, length = equal_shape(inputs, ragged_lengths=case.op == DECODE)
    lengths = jnp.asarray(inputs.lengths)
    causal = num_new > 1 and num_new == length
    # cuDNN's causal mask starts at the upper left corner; new tokens behind cached ones need another mask.
    mask = None
    if num_new > 1 and not causal:
        mask = jnp.tril(jnp.ones((num_new, length), bool), length - num_new)[None, None]

    def attend(_: None, q: jax.Array, k: jax.Array, v: jax.Array, lengths: jax.Array) -> tuple[None, jax.Array]:
        out = jax.nn.dot_product_attention(
            q.reshape(len(case.new), num_new, *q.shape[1:]), k, v, mask=mask, is_causal=causal,
            key_value_seq_lengths=lengths if num_new == 1 else None, implementation="cudnn",
        )  # fmt: skip
        return None, out.reshape(q.shape)

    own = [(layer.q, *dense_cache(inputs, layer)) for layer in inputs.layers]
    return Prepared(attend, [None] * len(own), own, (lengths,))


def cudnn_paged(inputs: Inputs) -> Prepared:
    """cuDNN over pages, a private function of JAX: for decode, with every page of the cache in the table once."""
    _only_plain_attention(inputs)
    case = inputs.case
    equal_shape(inputs)
    from jax._src.cudnn import fused_attention_stablehlo as fused

    paged_attention: Any = fused.paged_attention

    def attend(_: None, q: jax.Array, k: jax.Array, v: jax.Array, table: jax.Array, *lengths: jax.Array) -> Any:
        out = paged_attention(
            q[:, :, None], k, v, *lengths, table, table, scale=case.head_dim**-0.5,
            mask_type=fused.MaskType.PADDING, qkv_layout="BNTH",
        )  # fmt: skip
        return None, (out[0] if isinstance(out, (tuple, list)) else out)[:, :, 0]

    own = [(layer.q, *(pages[1:] for pages in layer.cache_numbers())) for layer in inputs.layers]
    table = jnp.asarray(inputs.page_table - 1)[:, None, :, None]
    shared = (table, jnp.ones(len(case.new), jnp.int32), jnp.asarray(inputs.lengths))
    return Prepared(attend, [None] * len(own), own, shared)


def slot_major_scatter(inputs: Inputs) -> Prepared:
    """XLA's scatter into `[slots, K, H]`, the best layout for a scatter."""
    case = inputs.case
    if case.float8_cache or case.bits_cache:
        raise Unsupported("no float8 cache, no bits")

    def scatter(cache: Any, k: jax.Array, v: jax.Array, slots: jax.Array) -> tuple[Any, None]:
        return tuple(a.at[slots].set(new, mode="promise_in_bounds") for a, new in zip(cache, (k, v), strict=True)), None

    states = [tuple(map(slot_major, layer.cache_numbers())) for layer in inputs.layers]
    own = [(layer.k, layer.v) for layer in inputs.layers]
    shape = (-1, case.page_size, case.num_kv_heads, case.head_dim)
    return Prepared(
        scatter, states, own, (jnp.asarray(inputs.slots),),
        finish=lambda cache: tuple(jnp.swapaxes(a.reshape(shape), 1, 2) for a in cache),
    )  # fmt: skip


def slot_major(pages: jax.Array) -> jax.Array:
    """Pages as `[slots, K, H]`."""
    _, num_kv_heads, _, head_dim = pages.shape
    return jnp.swapaxes(pages, 1, 2).reshape(-1, num_kv_heads, head_dim)


def dense(pages: jax.Array, table: jax.Array) -> jax.Array:
    """Pages through a table `[S, P]` as `[S, P * page_size, K, H]`."""
    _, num_kv_heads, _, head_dim = pages.shape
    return jnp.swapaxes(pages[table], 2, 3).reshape(table.shape[0], -1, num_kv_heads, head_dim)


def dense_cache(inputs: Inputs, layer: Layer) -> tuple[jax.Array, jax.Array]:
    """K and V of a layer as `[S, L, K, H]`, where L is the longest length."""
    longest = int(inputs.lengths.max())
    k, v = (dense(pages, jnp.asarray(inputs.page_table))[:, :longest] for pages in layer.cache_numbers())
    return k, v


def equal_shape(inputs: Inputs, *, ragged_lengths: bool = False) -> tuple[int, int]:
    """The new tokens and the length that all sequences have.

    Raises:
        Unsupported: sequences differ in them.
    """
    case = inputs.case
    if len(set(case.new)) > 1 or case.padding_tokens or (len(set(case.lengths)) > 1 and not ragged_lengths):
        raise Unsupported("sequences of equal shape only")
    return case.new[0], int(case.lengths.max())


def _only_plain_attention(inputs: Inputs) -> None:
    case = inputs.case
    if case.float8_cache or case.sliding_window or case.logit_soft_cap or case.sm_scale or case.has_sinks:
        raise Unsupported("no float8 cache, window, soft cap, scale or sinks")
    if case.padding_tokens or 0 in case.new:
        raise Unsupported("no padding")


_PAGED_ATTENTION: dict[str, Prepare] = {
    "JAX paged_attention, 16 splits": lambda inputs: jax_paged_attention(inputs, k_splits=16, tile_tokens=128),
    "JAX paged_attention, 4 splits": lambda inputs: jax_paged_attention(inputs, k_splits=4, tile_tokens=64),
}
_ANYWHERE: dict[str, dict[str, Prepare]] = {
    STORE: {"XLA slot-major scatter": slot_major_scatter},
    DECODE: {"XLA gather + einsum": gather_and_einsum},
    EXTEND: {"XLA gather + einsum": gather_and_einsum},
}
_ON_GPU: dict[str, dict[str, Prepare]] = {
    STORE: {},
    DECODE: {**_PAGED_ATTENTION, "cuDNN (unpaged)": cudnn, "cuDNN paged (private in JAX)": cudnn_paged},
    EXTEND: {"cuDNN (unpaged)": cudnn},
}
_RAGGED: dict[str, Prepare] = {"JAX ragged_paged_attention": ragged_paged_attention}
_ON: dict[str, dict[str, dict[str, Prepare]]] = {
    "cpu": {},
    "gpu": _ON_GPU,
    "tpu": {DECODE: _RAGGED, EXTEND: _RAGGED},
}


def baselines_for(op: str, platform: str) -> dict[str, Prepare]:
    """The baselines of this module that do the work of the op and can run on "cpu", "gpu" or "tpu"."""
    return _ANYWHERE[op] | _ON[platform].get(op, {})
