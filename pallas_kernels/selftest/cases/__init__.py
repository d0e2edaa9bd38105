"""The calls by which each operation is tested, and how far its results may be from XLA's in float32.

Owns the batches: ragged lengths around pages and tiles, a last page that is cut, splits, extends whose sequences begin
at odd tokens and follow cached ones, NaN wherever no sequence has a token. Called by `__main__`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.api.attention import (
    decode_latents,
    paged_decode_attention,
    paged_extend_attention,
    store_and_decode,
)
from pallas_kernels.api.experts import (
    choose_experts,
    gated_product,
    group_by_expert,
    grouped_product,
    products_with_shared,
)
from pallas_kernels.api.norms import add_and_norm, add_and_norm_in_float8
from pallas_kernels.api.products import float8_product, float8_rows, ordered_product, quantized_product
from pallas_kernels.api.stores import absorb_and_store, rotate_and_store, store_kv
from pallas_kernels.choice import AUTO, XLA, KernelChoice
from pallas_kernels.delta import DeltaStates, Sequences, delta_decode, delta_extend
from pallas_kernels.delta_tokens import DeltaTokens, DeltaVectors
from pallas_kernels.experts import Groups, UnitWeights, sort_by_expert
from pallas_kernels.latent import LatentHeads, LatentQkv
from pallas_kernels.options import AttentionOptions
from pallas_kernels.paged_kv import FLOAT8, PagedKv, numbers_dtype, to_numbers
from pallas_kernels.qkv import FusedQkv
from pallas_kernels.scaled import ScaledMatrix, ScaledRows
from pallas_kernels.selftest.batches import Array, normal, pages_of, scattered_pages, slots_of, used_places
from pallas_kernels.selftest.second_opinion import second_opinion, second_opinion_of_decode
from pallas_kernels.selftest.shapes import ExpertShape, KernelShapes, LatentShape, MatrixShape
from pallas_kernels.triton.row_sums import sums_of_rows

RUNS = 3  # with the same inputs: a race shows in some of them
# Error of a token's row over its norm. Numbers of 16 bits have 0.2 to 0.5%, float8 that is stored up to 6%; a row
# that is wrong has some 100%.
TOLERANCE = {"float32": 1e-3, "float16": 2e-2, "bfloat16": 2e-2}
FLOAT8_TOLERANCE = 8e-2
ROW, EPS, NUM_PARTS = 1, 1e-6, 4  # of norms: the layer's row, what is added to squares, and parts of an update
MANY_ROWS, MOST_EXPERTS, EXPERT_TOKENS, LONGEST_WINDOW = 256, 16, 67, 8192
STATE_POSITIONS, STATES_KEPT = (0, 7, 130, 1, 0), (-1, 8, -1, 7, 9)  # of rows that decode, and where they go besides
LONG_ROW = 50_000  # as the scores of a vocabulary
MATRIX_ROWS, MOST_OUTPUTS = ((5, 300), (33, 100)), 2000  # rows of matrices by turns, for each of a kernel's tiles


@dataclasses.dataclass(frozen=True)
class Case:
    """A call and what it should return.

    Attributes:
        name: of its batch.
        tolerance: of `error`.
        call: its results on a backend, interpreted or not: arrays `[rows, ..]`.
        right: what they should be, in float32. Where that is NaN, so must the results be.
        others: what JAX's own kernel computes, which is asked after a wrong result; None where JAX has no such kernel.
    """

    name: str
    tolerance: float
    call: Callable[[str, bool], list[jax.Array]]
    right: Callable[[], list[jax.Array]]
    others: Callable[[], list[jax.Array]] | None = None

    def error(self, backend: str, interpret: bool = False) -> float:
        """The largest error of a row in any of `RUNS` runs, over the row's norm; infinite for NaN that shouldn't be."""
        return self._error([self.call(backend, interpret) for _ in range(RUNS)])

    def second_opinion(self) -> str:
        """Whether JAX's own kernel is right where ours is wrong, in words; empty where JAX has no such kernel."""
        if self.others is None:
            return ""
        try:
            error = self._error([self.others()])
        except Exception as problem:  # compilers and drivers raise errors of any class
            return f"; JAX's own kernel raised {type(problem).__name__}"
        if error <= self.tolerance:
            return "; JAX's own kernel is right"
        return f"; JAX's own kernel is wrong too, by {error:.1e}: suspect the device and its software"

    def _error(self, found: list[list[jax.Array]]) -> float:
        with jax.default_matmul_precision("highest"):
            right = self.right()
        return max(float(row_error(a, b)) for results in found for a, b in zip(results, right, strict=True))


@jax.jit
def row_error(out: jax.Array, right: jax.Array) -> jax.Array:
    """The largest error of a row of `out` over the norm of the row of `right`, which is not taken for almost zero."""
    out, right = (each.astype(jnp.float32).reshape(len(each), -1) for each in (out, right))
    difference = jnp.where(jnp.isnan(out) & jnp.isnan(right), 0, out - right)
    norms = jnp.linalg.norm(jnp.nan_to_num(right), axis=1)
    errors = jnp.linalg.norm(difference, axis=1) / jnp.maximum(norms, 1e-3 * jnp.max(norms) + 1e-30)
    return jnp.max(jnp.where(jnp.isfinite(errors), errors, jnp.inf))


def decode_cases(shapes: KernelShapes) -> Iterator[Case]:
    """A few sequences of all lengths, of which the long ones are split; and many rows."""
    page = shapes.page_size
    few = [0, 1, page - 1, page, page + 1, 2 * page + 1, 63, 64, 65, 193, 1000, 0, 3001]
    for options in shapes.attention:
        lengths = few if options.sliding_window is None else [*few, _past(options) + page + 3]
        yield _decode(shapes, "ragged", np.array(lengths), options)
    yield _decode(shapes, "many rows", 37 * np.arange(MANY_ROWS) % 300, shapes.attention[0])
    for latent in shapes.latents:
        for rows in (np.array([3001]), np.array(few), 37 * np.arange(MANY_ROWS) % 300):
            yield _decode_latents(shapes, latent, rows)


def _decode_latents(shapes: KernelShapes, latent: LatentShape, lengths: Array) -> Case:
    kv, exact = _caches(shapes, lengths)
    options = shapes.attention[0]

    def attend(q: jax.Array, kv: PagedKv, heads: LatentHeads, backend: str, interpret: bool) -> list[jax.Array]:
        return [_latents_jit(q, kv, heads, options, backend=backend, interpret=interpret)]

    call = _queries(shapes, len(lengths)), kv, _latent_heads(shapes, latent)
    wide = _wide(call[0]), exact, _wide(call[2])
    return Case(
        f"{len(lengths)} rows of latents, outputs of heads",
        _attention_tolerance(shapes),
        functools.partial(attend, *call),
        functools.partial(attend, *wide, "xla", False),
    )


def _latent_heads(shapes: KernelShapes, latent: LatentShape) -> LatentHeads:
    size = shapes.attention[0].value_dim
    assert size is not None
    shape = shapes.num_groups, latent.num_absorbing + latent.num_outputs, size
    weights = normal(jax.random.key(13), size**0.5, shape=shape, dtype=jnp.dtype(shapes.dtype))
    return LatentHeads(weights, latent.num_absorbing)


def _wide(tree: Any) -> Any:
    return jax.tree.map(lambda each: each.astype(jnp.float32), tree)


def _decode(shapes: KernelShapes, name: str, lengths: Array, options: AttentionOptions) -> Case:
    kv, exact = _caches(shapes, lengths)
    q = _queries(shapes, len(lengths))
    sinks = _sinks(shapes)

    def attend(q: jax.Array, kv: PagedKv, backend: str, interpret: bool) -> list[jax.Array]:
        return [_decode_jit(q, kv, options, sinks, backend=backend, interpret=interpret)]

    return Case(
        _named(name, options),
        _attention_tolerance(shapes),
        functools.partial(attend, q, kv),
        functools.partial(attend, q.astype(jnp.float32), exact, "xla", False),
        second_opinion_of_decode(q, kv, options, sinks),
    )


def extend_cases(shapes: KernelShapes) -> Iterator[Case]:
    """Sequences whose first tokens stand at odd places of the batch, with cached tokens before them or none."""
    page = shapes.page_size
    pairs = [(0, 3), (0, 1), (5, 37), (page - 1, 65), (0, 0), (2 * page + 1, 129), (1000, 21), (0, 200), (300, 7)]
    for options in shapes.attention:
        last = (0, 0) if options.sliding_window is None else (_past(options), 19)
        yield _extend(shapes, [*pairs, last], options)


def _extend(shapes: KernelShapes, pairs: list[tuple[int, int]], options: AttentionOptions) -> Case:
    cached, new = np.array(pairs).T
    kv, exact = _caches(shapes, cached + new)
    offsets = jnp.asarray(np.cumsum([0, *new]), jnp.int32)
    q = _queries(shapes, _padded(int(new.sum())))
    sinks = _sinks(shapes)

    def attend(q: jax.Array, kv: PagedKv, backend: str, interpret: bool) -> list[jax.Array]:
        return [_extend_jit(q, offsets, kv, options, sinks, backend=backend, interpret=interpret)]

    return Case(
        _named("ragged", options),
        _attention_tolerance(shapes),
        functools.partial(attend, q, kv),
        functools.partial(attend, q.astype(jnp.float32), exact, "xla", False),
        second_opinion(q, offsets, kv, options, sinks),
    )


def rotate_cases(shapes: KernelShapes) -> Iterator[Case]:
    """A few tokens and many, padding among them, into pages full of NaN, which must stay wherever no token goes."""
    if shapes.has_latents:
        yield from (_absorb(shapes, each, *batch) for each in shapes.latents for batch in ((5, 4), (300, 1)))
        return
    for num_tokens, parts in ((5, (NUM_PARTS,)), (300, ())):
        slots, kv, empty = _places(shapes, num_tokens)
        qkv = _qkv(shapes, len(slots), parts)
        exact = jax.tree.map(lambda each: each.astype(jnp.float32), qkv)
        yield Case(
            f"{num_tokens} tokens" + (" in parts" if parts else ""),
            _store_tolerance(shapes),
            functools.partial(_rotated, qkv, kv, slots, num_tokens),
            functools.partial(_rotated, exact, empty, slots, num_tokens, "xla", False),
        )


def _absorb(shapes: KernelShapes, latent: LatentShape, num_tokens: int, num_parts: int) -> Case:
    """Of tokens whose queries and entries are one product in parts, or two whole ones."""
    slots, kv, empty = _places(shapes, num_tokens)
    heads = _latent_heads(shapes, latent)
    num_rotated, keys = shapes.head_dim - heads.latent_size, jax.random.split(jax.random.key(14), 4)
    angles = jax.random.uniform(keys[0], (len(slots), 1, num_rotated // 2), jnp.float32, 0, 2 * np.pi)
    widths = [shapes.num_groups * (latent.num_absorbing + num_rotated), shapes.head_dim]
    dtype = jnp.dtype(shapes.dtype)
    products: list[Any] = [None, None]  # of both, or of each
    if num_parts > 1:
        shape, float32 = (num_parts, len(slots), sum(widths)), jnp.dtype(jnp.float32)
        products[0] = normal(keys[1], num_parts**0.5, shape=shape, dtype=float32)
    else:
        products = [normal(keys[1 + i], 1.0, shape=(len(slots), width), dtype=dtype) for i, width in enumerate(widths)]
    scales = normal(keys[3], 1.0, shape=(heads.latent_size,), dtype=dtype)
    qkv = LatentQkv(products[0], products[1], scales, heads, jnp.cos(angles), jnp.sin(angles), EPS, dtype)

    def call(qkv: LatentQkv, kv: PagedKv, backend: str, interpret: bool) -> list[jax.Array]:
        q, pages = _absorb_jit(qkv, kv.k, slots, backend=backend, interpret=interpret)
        return [q[:num_tokens], *_rows_of(dataclasses.replace(kv, k=pages))[:1]]

    exact = dataclasses.replace(_wide(qkv), dtype=jnp.dtype(jnp.float32))
    return Case(
        f"{num_tokens} tokens of latents",
        _store_tolerance(shapes),
        functools.partial(call, qkv, kv),
        functools.partial(call, exact, empty, "xla", False),
    )


def _rotated(
    qkv: FusedQkv, kv: PagedKv, slots: jax.Array, num_tokens: int, backend: str, interpret: bool
) -> list[jax.Array]:
    q, kv = _rotate_jit(qkv, kv, slots, backend=backend, interpret=interpret)
    return [q[:num_tokens], *_rows_of(kv)]


def store_cases(shapes: KernelShapes) -> Iterator[Case]:
    """The same stores, of keys and values that XLA has rotated."""
    for num_tokens in (5, 300):
        slots, kv, empty = _places(shapes, num_tokens)
        keys = jax.random.split(jax.random.key(6))
        shape = (len(slots), shapes.num_kv_heads, shapes.head_dim)
        k, v = (normal(key, 1.0, shape=shape, dtype=jnp.dtype(shapes.dtype)) for key in keys)

        wide = k.astype(jnp.float32), v.astype(jnp.float32)
        yield Case(
            f"{num_tokens} tokens",
            _store_tolerance(shapes),
            functools.partial(_stored, kv, slots, k, v),
            functools.partial(_stored, empty, slots, *wide, "xla", False),
        )


def _stored(
    kv: PagedKv, slots: jax.Array, k: jax.Array, v: jax.Array, backend: str, interpret: bool
) -> list[jax.Array]:
    return _rows_of(_store_jit(kv, k, v, slots, backend=backend, interpret=interpret))


def store_and_decode_cases(shapes: KernelShapes) -> Iterator[Case]:
    """The decodes, with NaN where the newest tokens go."""
    page = shapes.page_size
    few = [0, 1, page - 1, page, page + 1, 2 * page + 1, 63, 64, 65, 193, 1000, 0, 3001]
    for options in shapes.attention:
        lengths = few if options.sliding_window is None else [*few, _past(options) + page + 3]
        yield _store_and_decode(shapes, "ragged", np.array(lengths), options)
    yield _store_and_decode(shapes, "many rows", 37 * np.arange(MANY_ROWS) % 300, shapes.attention[0])


def _store_and_decode(shapes: KernelShapes, name: str, lengths: Array, options: AttentionOptions) -> Case:
    before, exact = _caches(shapes, np.maximum(lengths - 1, 0), room=1)
    before, exact = (dataclasses.replace(each, lengths=jnp.asarray(lengths, jnp.int32)) for each in (before, exact))
    table, last = np.asarray(before.page_table), np.maximum(lengths - 1, 0)
    slots = table[np.arange(len(lengths)), last // shapes.page_size] * shapes.page_size + last % shapes.page_size
    slots = jnp.asarray(np.where(lengths > 0, slots, 0), jnp.int32)
    qkv, sinks = _qkv(shapes, len(lengths)), _sinks(shapes)

    def call(qkv: FusedQkv, kv: PagedKv, backend: str, interpret: bool) -> list[jax.Array]:
        parts = KernelChoice.of_attention(XLA) if backend == XLA else KernelChoice()
        choice = {"backend": backend, "parts": parts, "interpret": interpret}
        out, kv = _store_and_decode_jit(qkv, kv, slots, options, sinks, **choice)
        return [out, *_rows_of(kv)]

    wide = jax.tree.map(lambda each: each.astype(jnp.float32), qkv)
    return Case(
        _named(name, options),
        max(_attention_tolerance(shapes), _store_tolerance(shapes)),
        functools.partial(call, qkv, before),
        functools.partial(call, wide, exact, XLA, False),
    )


def norm_cases(shapes: KernelShapes) -> Iterator[Case]:
    """A whole update, and one in parts, whose norm is rounded to float8 if products read that."""
    rounds = any(each.may_be_in_float8 and each.inputs == shapes.hidden_size for each in shapes.matrices)
    for num_tokens, parts in ((300, ()), (37, (NUM_PARTS,))):
        keys = jax.random.split(jax.random.key(3), 3)
        dtype = jnp.dtype(shapes.dtype)
        x = normal(keys[0], 1.0, shape=(num_tokens, shapes.hidden_size), dtype=dtype)
        update = normal(keys[1], 1.0, shape=(*parts, num_tokens, shapes.hidden_size), dtype=_in_parts(dtype, parts))
        scales = normal(keys[2], 1.0, shape=(ROW + 2, shapes.hidden_size), dtype=jnp.dtype(shapes.norm_dtype))
        wide = x.astype(jnp.float32), update.astype(jnp.float32), scales.astype(jnp.float32)

        yield Case(
            f"{num_tokens} tokens" + (" in parts" if parts else ""),
            TOLERANCE[shapes.dtype],
            functools.partial(_added, x, update, scales),
            functools.partial(_added, *wide, "xla", False),
        )
        if rounds:
            yield Case(
                f"{num_tokens} tokens in float8",
                FLOAT8_TOLERANCE,
                functools.partial(_added_in_float8, x, update, scales),
                functools.partial(_added_in_float8, *wide, "xla", False),
            )


def _added(x: jax.Array, update: jax.Array, scales: jax.Array, backend: str, interpret: bool) -> list[jax.Array]:
    return list(_norm_jit(x, update, scales, backend=backend, interpret=interpret))


def _added_in_float8(
    x: jax.Array, update: jax.Array, scales: jax.Array, backend: str, interpret: bool
) -> list[jax.Array]:
    total, normed = _rounded_norm_jit(x, update, scales, backend=backend, interpret=interpret)
    return [total, normed.values(jnp.float32)]


def product_cases(shapes: KernelShapes) -> Iterator[Case]:
    """Tokens that choose experts at random, and some that choose none; how they choose; gated units, shared experts."""
    for expert in shapes.experts:
        yield _product(shapes, expert)
        if expert.of_tokens and jnp.dtype(expert.dtype).itemsize > 1:
            yield _product(shapes, expert, gated=True)
            if expert.router.num_shared:
                yield _with_shared(shapes, expert)
    if shapes.experts:
        yield _routing(shapes.experts[0])


def _routing(expert: ExpertShape) -> Case:
    """Chosen experts, their shares and their groups, which are XLA's whatever the kernel."""
    router, num_routed = expert.router, expert.num_routed
    num_experts = num_routed + router.num_shared
    keys = jax.random.split(jax.random.key(5))
    logits = jax.random.normal(keys[0], (EXPERT_TOKENS, num_routed))
    bias = jax.random.normal(keys[1], (num_routed,)) if router.choice_bias else None

    def call(backend: str, interpret: bool) -> list[jax.Array]:
        options: dict[str, Any] = {"backend": _of_others(backend), "interpret": interpret}
        chosen, shares = choose_experts(router, logits, bias, **options)
        groups = group_by_expert(chosen, num_experts, jnp.arange(EXPERT_TOKENS) % 16 != 15, **options)
        return [chosen, shares, groups.place_of, groups.sizes[:, None]]

    return Case("routing", TOLERANCE["float32"], call, functools.partial(call, XLA, False))


def _of_others(backend: str) -> str:
    """Where experts are chosen, grouped and gated if their products run on `backend`; not all backends do that."""
    return backend if backend in (XLA, "triton") else AUTO


def _chosen(expert: ExpertShape, num_experts: int, key: jax.Array) -> Groups:
    _, chosen = jax.lax.top_k(
        jax.random.normal(key, (EXPERT_TOKENS, num_experts)), min(expert.router.top_k, num_experts)
    )
    return sort_by_expert(jnp.where(jnp.arange(EXPERT_TOKENS)[:, None] % 16 == 15, num_experts, chosen), num_experts)


def _product(shapes: KernelShapes, expert: ExpertShape, *, gated: bool = False) -> Case:
    num_experts = min(expert.num_experts, MOST_EXPERTS)
    keys = jax.random.split(jax.random.key(4), 3)
    groups = _chosen(expert, num_experts, keys[0])
    num_rows = groups.num_tokens if expert.of_tokens else groups.num_places
    x = normal(keys[1], 1.0, shape=(num_rows, expert.inputs), dtype=jnp.dtype(shapes.dtype))
    dtype = jnp.dtype(expert.dtype)
    scale = 1 / 40 if dtype == jnp.int8 else 1.0  # uses the range of the format
    drawn = normal(keys[2], scale, shape=(num_experts, expert.outputs, expert.inputs), dtype=jnp.dtype(jnp.float32))
    weights = (jnp.clip(jnp.round(drawn), -127, 127) if dtype == jnp.int8 else drawn).astype(dtype)

    def call(x: jax.Array, weights: jax.Array, backend: str, interpret: bool) -> list[jax.Array]:
        options: dict[str, Any] = {"of_tokens": expert.of_tokens, "backend": backend, "interpret": interpret}
        if gated:
            return [_gated_jit(x, groups, weights, "silu", **options | {"backend": _of_others(backend)})]
        return [_product_jit(x, groups, weights, **options)]

    return Case(
        f"{expert.outputs} x {expert.inputs}{', gated' if gated else ''}",
        TOLERANCE[shapes.dtype],
        functools.partial(call, x, weights),
        functools.partial(call, x.astype(jnp.float32), weights.astype(jnp.float32), "xla", False),
    )


def _with_shared(shapes: KernelShapes, expert: ExpertShape) -> Case:
    """Both products where each token takes the shared experts, too."""
    num_experts, num_shared, size = min(expert.num_experts, MOST_EXPERTS), expert.router.num_shared, expert.outputs // 2
    keys = jax.random.split(jax.random.key(12), 6)
    chosen = _chosen(expert, num_experts, keys[0])
    numbers = chosen.experts[chosen.place_of]
    shared = jnp.broadcast_to(num_experts + jnp.arange(num_shared, dtype=jnp.int32), (EXPERT_TOKENS, num_shared))
    numbers = jnp.concatenate([jnp.where(numbers < num_experts, numbers, -1), shared], axis=1)
    groups = sort_by_expert(numbers, num_experts + num_shared, jnp.arange(EXPERT_TOKENS) % 16 != 15)
    dims = (
        (groups.num_tokens, expert.inputs), (num_experts, 2 * size, expert.inputs), (num_experts, expert.inputs, size),
        (2, num_shared * size, expert.inputs), (expert.inputs, num_shared * size),
    )  # fmt: skip
    dtype = jnp.dtype(expert.dtype)
    x, *weights = (normal(key, 1.0, shape=shape, dtype=dtype) for key, shape in zip(keys[1:], dims, strict=True))

    def call(x: jax.Array, weights: list[jax.Array], backend: str, interpret: bool) -> list[jax.Array]:
        options: dict[str, Any] = {"backend": _of_others(backend), "interpret": interpret}
        return [_shared_jit(x, groups, UnitWeights(*weights[:2]), UnitWeights(*weights[2:]), "silu", **options)]

    wide = [each.astype(jnp.float32) for each in weights]
    return Case(
        f"{num_shared} shared experts of {size}",
        TOLERANCE[shapes.dtype],
        functools.partial(call, x, weights),
        functools.partial(call, x.astype(jnp.float32), wide, XLA, False),
    )


def quantized_cases(shapes: KernelShapes) -> Iterator[Case]:
    """Few rows and many times each matrix in groups, whole and as parts that are added up."""
    matrices = [each for each in shapes.matrices if each.is_in_groups]
    for number, matrix in enumerate(matrices):
        for num_rows in MATRIX_ROWS[number % len(MATRIX_ROWS)]:
            yield _quantized(shapes, matrix, num_rows, in_parts=number % 2 == 1)


def _quantized(shapes: KernelShapes, matrix: MatrixShape, num_rows: int, *, in_parts: bool) -> Case:
    weights = _weights(matrix)
    x = normal(jax.random.key(8), 1.0, shape=(num_rows, matrix.inputs), dtype=jnp.dtype(shapes.dtype))

    def call(x: jax.Array, backend: str, interpret: bool) -> list[jax.Array]:
        out = _quantized_jit(x, weights, in_parts=in_parts, backend=backend, interpret=interpret)
        return [out.sum(axis=0) if out.ndim == 3 else out]

    return Case(
        f"{num_rows} rows, {matrix.outputs} x {matrix.inputs} {matrix.numbers}",
        TOLERANCE[shapes.dtype],
        functools.partial(call, x),
        functools.partial(call, x.astype(jnp.float32), XLA, False),
    )


def float8_cases(shapes: KernelShapes) -> Iterator[Case]:
    """Rows that are rounded, by the kernel or by XLA, and multiplied; and gated units that are rounded."""
    matrices = [each for each in shapes.matrices if each.may_be_in_float8]
    for number, matrix in enumerate(matrices):
        num_rows = MATRIX_ROWS[0][1] if number % 2 == 0 else MATRIX_ROWS[1][1]
        yield _in_float8(shapes, matrix, num_rows, in_parts=number % 2 == 1)
        yield _gated_rows(shapes, matrix, num_rows)


def _in_float8(shapes: KernelShapes, matrix: MatrixShape, num_rows: int, *, in_parts: bool) -> Case:
    weights = _weights(matrix)
    x = normal(jax.random.key(8), 1.0, shape=(num_rows, matrix.inputs), dtype=jnp.dtype(shapes.dtype))

    def call(x: jax.Array, backend: str, interpret: bool) -> list[jax.Array]:
        out = _float8_jit(_rows_jit(x, backend=backend, interpret=interpret), weights, in_parts, backend, interpret)
        return [out.sum(axis=0) if out.ndim == 3 else out]

    return Case(
        f"{num_rows} rows in float8, {matrix.outputs} x {matrix.inputs}",
        TOLERANCE["bfloat16"],
        functools.partial(call, x),
        functools.partial(call, x, XLA, False),
    )


def _gated_rows(shapes: KernelShapes, matrix: MatrixShape, num_rows: int) -> Case:
    x = normal(jax.random.key(8), 1.0, shape=(num_rows, 2, matrix.inputs), dtype=jnp.dtype(shapes.dtype))

    def call(x: jax.Array, backend: str, interpret: bool) -> list[jax.Array]:
        return [_rows_jit(x, activation="silu", backend=backend, interpret=interpret).values(jnp.float32)]

    return Case(
        f"{num_rows} gated rows of {matrix.inputs} in float8",
        FLOAT8_TOLERANCE,  # a number that lies between two others may become either
        functools.partial(call, x),
        functools.partial(call, x.astype(jnp.float32), XLA, False),
    )


def ordered_cases(shapes: KernelShapes) -> Iterator[Case]:
    """Products of few rows and of many, whose sums have parts or not; and sums of rows, short ones and long ones."""
    size, dtype = shapes.hidden_size, jnp.dtype(shapes.dtype)
    for num_rows, num_outputs in ((5, size), (300, size), (300, MOST_OUTPUTS)):
        keys = jax.random.split(jax.random.key(10))
        x = normal(keys[0], 1.0, shape=(num_rows, size), dtype=dtype)
        weights = normal(keys[1], 1.0, shape=(num_outputs, size), dtype=dtype)
        wide = x.astype(jnp.float32), weights.astype(jnp.float32)
        yield Case(
            f"{num_rows} rows, {num_outputs} x {size}",
            TOLERANCE[shapes.dtype],
            functools.partial(_ordered, x, weights),
            functools.partial(_ordered, *wide, XLA, False),
        )
    for length in (64, size, LONG_ROW):
        rows = normal(jax.random.key(11), 1.0, shape=(37, length), dtype=jnp.dtype(jnp.float32))
        yield Case(
            f"sums of {length} numbers",
            TOLERANCE["float32"],
            functools.partial(_summed, jnp.abs(rows)),
            functools.partial(_summed, jnp.abs(rows), XLA, False),
        )


def state_cases(shapes: KernelShapes) -> Iterator[Case]:
    """Sequences with states and without, of which some are kept besides; other places must stay as they were."""
    for shape in shapes.states:
        keys = jax.random.split(jax.random.key(12), 6)
        heads, num_seqs = (shape.key_heads, shape.group), len(STATE_POSITIONS)
        channels = 2 * shape.key_size + shape.group * shape.value_size
        fused = num_seqs, shape.key_heads, channels + shape.group * (shape.value_size + 2)
        dtype = jnp.dtype(shapes.dtype)
        tokens = DeltaTokens(
            normal(keys[0], 1.0, shape=fused, dtype=dtype),
            DeltaVectors(
                normal(keys[1], 1.0, shape=(2, shape.key_heads, channels, shape.taps), dtype=jnp.dtype(jnp.float32)),
                jax.random.uniform(keys[2], (2, shape.key_heads, 2, shape.group), minval=-2.0),
                normal(keys[3], 1.0, shape=(2, shape.value_size), dtype=jnp.dtype(jnp.float32)),
                row=1,
                eps=1e-6,
            ),
            shape.key_size,
            dtype,
        )
        product = normal(keys[0], 1.0, shape=(NUM_PARTS, *fused), dtype=_in_parts(dtype, (NUM_PARTS,)))
        in_parts = dataclasses.replace(tokens, product=product)
        states = DeltaStates(*(
            normal(key, 1.0, shape=(2 * num_seqs, *dims), dtype=jnp.dtype(jnp.float32))
            for key, dims in zip(
                keys[4:],
                ((*heads, shape.key_size, shape.value_size), (shape.taps, shape.key_heads, channels)),
                strict=True,
            )
        ))  # fmt: skip
        where = jnp.array(STATE_POSITIONS), jnp.arange(num_seqs)[::-1] + 1, jnp.array(STATES_KEPT)
        name = f"{num_seqs} rows, {shape.key_heads} x {shape.group} states of {shape.key_size} x {shape.value_size}"
        for which, run, of_step in (
            ("", _decoded_states, tokens),
            (", of parts", _decoded_states, in_parts),
            (", next to chunks", _extended_states, tokens),
        ):
            yield Case(
                name + which,
                TOLERANCE[shapes.dtype],
                functools.partial(run, of_step, states, where),
                functools.partial(run, of_step, states, where, XLA, False),
            )


def _decoded_states(
    tokens: DeltaTokens, states: DeltaStates, where: tuple[jax.Array, ...], backend: str, interpret: bool
) -> list[jax.Array]:
    out, after = _delta_jit(tokens, states, *where, backend=backend, interpret=interpret)
    return [each.reshape(len(each), -1) for each in (out, *after)]


def _extended_states(
    tokens: DeltaTokens, states: DeltaStates, where: tuple[jax.Array, ...], backend: str, interpret: bool
) -> list[jax.Array]:
    """The same in a step that extends: so sequences of one token are decoded by a kernel of their own."""
    positions, place, kept_to = where
    is_kept = kept_to >= 0
    kept = jnp.where(is_kept, kept_to, 0)[None]  # place 0 is no sequence's
    seqs = Sequences(jnp.arange(len(place) + 1), positions, place, place, is_kept[None].astype(jnp.int32), kept)
    out, after = _delta_extend_jit(tokens, states, seqs, backend=backend, interpret=interpret)
    return [each.reshape(len(each), -1) for each in (out, *(array[1:] for array in after))]


def _ordered(x: jax.Array, weights: jax.Array, backend: str, interpret: bool) -> list[jax.Array]:
    return [_ordered_jit(x, weights, backend=backend, interpret=interpret)]


def _summed(rows: jax.Array, backend: str, interpret: bool) -> list[jax.Array]:
    if backend == XLA:
        return [jnp.stack([rows.sum(-1), (rows * rows).sum(-1)], axis=-1)]
    return [jnp.stack([sums_of_rows(rows, what, interpret) for what in ("sum", "squares")], axis=-1)]


def _weights(matrix: MatrixShape) -> ScaledMatrix:
    """Random numbers that use the range of their format, as many outputs as show a kernel's tiles."""
    keys = jax.random.split(jax.random.key(9), 3)
    shape = min(matrix.outputs, MOST_OUTPUTS), matrix.inputs
    groups = shape[0], -(-matrix.inputs // matrix.group)
    if jnp.issubdtype(jnp.dtype(matrix.numbers), jnp.integer):
        most = jnp.iinfo(jnp.dtype(matrix.numbers)).max
        numbers = jax.random.randint(keys[0], shape, -most, most + 1).astype(matrix.numbers)
    else:
        numbers = normal(keys[0], 1.0, shape=shape, dtype=jnp.dtype(matrix.numbers))
    scale = jax.random.uniform(keys[1], groups, jnp.float32, 0.5, 1.5)
    zero = jax.random.randint(keys[2], groups, -8, 8).astype(jnp.int8) if matrix.has_zeros else None
    return ScaledMatrix(numbers, scale, zero, matrix.group)


CASES_OF: Mapping[str, Callable[[KernelShapes], Iterator[Case]]] = {
    "rotate_and_store": rotate_cases,
    "store_kv": store_cases,  # after the one that may do without it
    "store_and_decode": store_and_decode_cases,
    "paged_decode_attention": decode_cases,
    "paged_extend_attention": extend_cases,
    "add_and_norm": norm_cases,
    "grouped_product": product_cases,
    "quantized_product": quantized_cases,
    "float8_product": float8_cases,
    "ordered_product": ordered_cases,
    "delta_decode": state_cases,
}

_decode_jit = jax.jit(paged_decode_attention, static_argnames=("options", "backend", "interpret"))
_latents_jit = jax.jit(decode_latents, static_argnames=("options", "backend", "interpret"))
_absorb_jit = jax.jit(absorb_and_store, static_argnames=("backend", "interpret"))
_extend_jit = jax.jit(paged_extend_attention, static_argnames=("options", "backend", "interpret"))
_rotate_jit = jax.jit(rotate_and_store, static_argnames=("backend", "interpret"))
_store_and_decode_jit = jax.jit(store_and_decode, static_argnames=("options", "backend", "parts", "interpret"))
_store_jit = jax.jit(store_kv, static_argnames=("backend", "interpret"))
_norm_jit = jax.jit(functools.partial(add_and_norm, row=ROW, eps=EPS), static_argnames=("backend", "interpret"))
_rounded_norm_jit = jax.jit(
    functools.partial(add_and_norm_in_float8, row=ROW, eps=EPS), static_argnames=("backend", "interpret")
)
_product_jit = jax.jit(grouped_product, static_argnames=("of_tokens", "backend", "interpret"))
_quantized_jit = jax.jit(
    functools.partial(quantized_product, dtype=jnp.float32), static_argnames=("in_parts", "backend", "interpret")
)
_ordered_jit = jax.jit(functools.partial(ordered_product, dtype=jnp.float32), static_argnames=("backend", "interpret"))
_delta_jit = jax.jit(delta_decode, static_argnames=("backend", "interpret"))
_delta_extend_jit = jax.jit(delta_extend, static_argnames=("backend", "interpret"))
_rows_jit = jax.jit(float8_rows, static_argnames=("activation", "backend", "interpret"))


@functools.partial(jax.jit, static_argnums=(2, 3, 4))
def _float8_jit(rows: ScaledRows, weights: ScaledMatrix, in_parts: bool, backend: str, interpret: bool) -> jax.Array:
    return float8_product(rows, weights, jnp.float32, in_parts=in_parts, backend=backend, interpret=interpret)


_gated_jit = jax.jit(gated_product, static_argnames=("activation", "of_tokens", "backend", "interpret"))
_shared_jit = jax.jit(products_with_shared, static_argnames=("activation", "backend", "interpret"))


def _past(options: AttentionOptions) -> int:
    """A length past the window, or one that is long enough."""
    return min(options.sliding_window or 0, LONGEST_WINDOW) + 5


def _named(name: str, options: AttentionOptions) -> str:
    return name if options.sliding_window is None else f"{name}, window {options.sliding_window}"


def _padded(num_tokens: int) -> int:
    """A multiple of 256 that leaves padding tokens."""
    return (num_tokens + 9 + 255) // 256 * 256


def _queries(shapes: KernelShapes, num_tokens: int) -> jax.Array:
    shape = (num_tokens, shapes.num_kv_heads * shapes.num_groups, shapes.head_dim)
    return normal(jax.random.key(1), 1.0, shape=shape, dtype=jnp.dtype(shapes.dtype))


def _sinks(shapes: KernelShapes) -> jax.Array | None:
    """From far below the scores of random queries to far above."""
    num_heads = shapes.num_kv_heads * shapes.num_groups
    return 12 * jnp.sin(jnp.arange(1, num_heads + 1, dtype=jnp.float32)) if shapes.has_sinks else None


def _scales(shapes: KernelShapes) -> dict[str, Any]:
    """Of a float8 cache: one for K, and one for each head of V."""
    if numbers_dtype(jnp.dtype(shapes.kv_dtype)) != FLOAT8:
        return {}
    return {"k_scale": 0.02, "v_scale": 0.02 * (1 + jnp.arange(shapes.num_kv_heads) % 4).astype(jnp.float32)}


def _caches(shapes: KernelShapes, lengths: Array, room: int = 0) -> tuple[PagedKv, PagedKv]:
    """A full cache for these sequences, and the same numbers in float32; pages have room for so many tokens more."""
    rng = np.random.default_rng(0)
    page, owned = shapes.page_size, lengths + room
    num_pages = 2 + int(np.sum(-(-owned // page)))
    table = rng.integers(0, num_pages, (len(lengths), max(1, -(-int(owned.max()) // page)))).astype(np.int32)
    scattered_pages(owned, page, table, num_pages, rng)
    used = used_places(lengths, page, table, num_pages)
    shape, dtype = (num_pages, shapes.num_kv_heads, page, shapes.head_dim), jnp.dtype(shapes.kv_dtype)
    scales = _scales(shapes)
    # float8 holds numbers that its scales bring to the size of others.
    of_heads = (jnp.broadcast_to(jnp.asarray(scales.get(name, 1.0)), shape[1]) for name in ("k_scale", "v_scale"))
    spread = [each[:, None, None] for each in of_heads]
    numbers = [
        normal(key, each, shape=shape, dtype=numbers_dtype(dtype))
        for key, each in zip(jax.random.split(jax.random.key(2)), spread, strict=True)
    ]
    k, v = (pages_of(each, used, dtype) for each in numbers)
    v = k if shapes.has_latents else v
    cache = PagedKv(k, v, jnp.asarray(table), jnp.asarray(lengths, jnp.int32), **scales)
    return cache, dataclasses.replace(cache, k=to_numbers(k).astype(jnp.float32), v=to_numbers(v).astype(jnp.float32))


def _places(shapes: KernelShapes, num_tokens: int) -> tuple[jax.Array, PagedKv, PagedKv]:
    """Slots of tokens of three sequences and of padding, and two caches full of NaN: the model's, and in float32."""
    rng = np.random.default_rng(5)
    page, ends = shapes.page_size, np.array([num_tokens // 2, num_tokens // 3, num_tokens])
    begins, lengths = np.array([0, 1, num_tokens // 2 + num_tokens // 3 - 1]), ends
    num_pages = 2 + int(np.sum(-(-lengths // page)))
    table = np.zeros((len(lengths), max(1, -(-num_tokens // page))), np.int32)
    scattered_pages(lengths, page, table, num_pages, rng)
    slots = [slots_of(row, begin, end, page) for row, begin, end in zip(table, begins, ends, strict=True)]
    padding = rng.integers(0, page, 3)
    dtype = jnp.dtype(shapes.kv_dtype)
    shape = (num_pages, shapes.num_kv_heads, page, shapes.head_dim)
    nothing = np.zeros((num_pages, page), bool)
    empty = pages_of(jnp.zeros(shape, numbers_dtype(dtype)), nothing, dtype)
    kv = PagedKv(empty, empty, jnp.asarray(table), jnp.asarray(lengths, jnp.int32), **_scales(shapes))
    wide = jnp.full(shape, jnp.nan, jnp.float32)
    exact = PagedKv(wide, wide, kv.page_table, kv.lengths)
    return jnp.asarray(np.concatenate([*slots, padding]), jnp.int32), kv, exact


def _rows_of(kv: PagedKv) -> list[jax.Array]:
    """Keys and values of all places but the dummy page's, `[places, K, H]` float32."""
    rows = []
    for pages, scale in ((kv.k, kv.k_scale), (kv.v, kv.v_scale)):
        factor = jnp.broadcast_to(jnp.asarray(1.0 if scale is None else scale, jnp.float32), kv.num_kv_heads)
        numbers = to_numbers(pages)[1:].astype(jnp.float32) * factor[:, None, None]
        rows.append(jnp.swapaxes(numbers, 1, 2).reshape(-1, kv.num_kv_heads, kv.head_dim))
    return rows


def _qkv(shapes: KernelShapes, num_tokens: int, parts: tuple[int, ...] = ()) -> FusedQkv:
    heads = (shapes.num_kv_heads, shapes.num_groups + 2, shapes.head_dim)
    keys = jax.random.split(jax.random.key(7), 5)
    dtype, norm = jnp.dtype(shapes.dtype), jnp.dtype(shapes.norm_dtype)
    angles = jax.random.uniform(keys[0], (num_tokens, 1, shapes.head_dim // 2), jnp.float32, 0, 2 * np.pi)
    norms = [normal(key, 1.0, shape=(ROW + 1, shapes.head_dim), dtype=norm) for key in keys[1:3]]
    return FusedQkv(
        product=normal(keys[3], 1.0, shape=(*parts, num_tokens, *heads), dtype=_in_parts(dtype, parts)),
        cos=jnp.cos(angles),
        sin=jnp.sin(angles),
        bias=normal(keys[4], 1.0, shape=(ROW + 1, *heads), dtype=dtype) if shapes.has_bias else None,
        q_norm=norms[0] if shapes.has_head_norms else None,
        k_norm=norms[1] if shapes.has_head_norms else None,
        layer=ROW,
        rotates_first=shapes.rotates_first,
        normalizes_values=shapes.normalizes_values,
        dtype_of_sum=dtype,
    )


def _in_parts(dtype: jnp.dtype, parts: tuple[int, ...]) -> jnp.dtype:
    """What a product in `dtype` is in, that comes in `(P,)` parts or in none."""
    return jnp.dtype(jnp.float32) if parts else dtype


def _attention_tolerance(shapes: KernelShapes) -> float:
    """Products may be made in the narrower of both formats."""
    kept = numbers_dtype(jnp.dtype(shapes.kv_dtype)).name
    return max(TOLERANCE[shapes.dtype], TOLERANCE.get(kept, 0.0))


def _store_tolerance(shapes: KernelShapes) -> float:
    is_float8 = numbers_dtype(jnp.dtype(shapes.kv_dtype)) == FLOAT8
    return FLOAT8_TOLERANCE if is_float8 else _attention_tolerance(shapes)
