"""Cases of what mixtures of experts need: choice and groups, products by group, gated units, shared experts.

Owns who chooses which experts.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.api.experts import (
    choose_experts,
    gated_packed_product,
    gated_product,
    group_by_expert,
    grouped_float8_product,
    grouped_packed_product,
    grouped_product,
    grouped_scaled_product,
    products_with_shared,
)
from pallas_kernels.api.products import float8_rows
from pallas_kernels.choice import AUTO, XLA
from pallas_kernels.experts import GatedUnit, Groups, UnitWeights, sort_by_expert, unit_rows
from pallas_kernels.paged_kv import FLOAT8
from pallas_kernels.selftest.batches import normal
from pallas_kernels.selftest.case import TOLERANCE, Case
from pallas_kernels.selftest.shapes import ExpertShape, KernelShapes
from pallas_kernels.selftest.weights import packed_weights, scaled_weights

MOST_EXPERTS, EXPERT_TOKENS = 16, 67
MANY_PLACES = 160  # of an expert, for Hopper's own kernel


def product_cases(shapes: KernelShapes) -> Iterator[Case]:
    """Tokens that choose experts at random, and some that choose none; how they choose; gated units, shared experts."""
    for expert in shapes.experts:
        if expert.packing:
            yield from _packed(shapes, expert)
            continue
        if expert.numbers:
            yield _scaled(shapes, expert)
            continue
        num_experts = min(expert.num_experts, MOST_EXPERTS)
        yield _product(shapes, expert, num_experts)
        if jnp.dtype(expert.dtype).itemsize > 1:
            yield _product(shapes, expert, num_experts, _many_tokens(expert), gated=expert.of_tokens)
        if expert.of_tokens and jnp.dtype(expert.dtype).itemsize > 1:
            yield _product(shapes, expert, num_experts, gated=True)
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
    drawn = jax.random.normal(keys[1], (num_routed,))
    choice_bias, logit_bias = drawn if router.choice_bias else None, drawn if router.bias else None

    def call(backend: str, interpret: bool) -> list[jax.Array]:
        options: dict[str, Any] = {"backend": _of_others(backend), "interpret": interpret}
        chosen, shares = choose_experts(router, logits, choice_bias, None, logit_bias, **options)
        groups = group_by_expert(chosen, num_experts, jnp.arange(EXPERT_TOKENS) % 16 != 15, **options)
        return [chosen, shares, groups.place_of, groups.sizes[:, None]]

    return Case("routing", TOLERANCE["float32"], call, functools.partial(call, XLA, False))


def _of_others(backend: str) -> str:
    """Where experts are chosen, grouped and gated if their products run on `backend`; not all backends do that."""
    return backend if backend in (XLA, "triton") else AUTO


def _chosen(expert: ExpertShape, num_experts: int, key: jax.Array, num_tokens: int = EXPERT_TOKENS) -> Groups:
    top_k = min(expert.router.top_k, num_experts)
    _, chosen = jax.lax.top_k(jax.random.normal(key, (num_tokens, num_experts)), top_k)
    return sort_by_expert(jnp.where(jnp.arange(num_tokens)[:, None] % 16 == 15, num_experts, chosen), num_experts)


def _many_tokens(expert: ExpertShape) -> int:
    """Of which each expert gets `MANY_PLACES`."""
    num_experts = min(expert.num_experts, MOST_EXPERTS)
    return -(-MANY_PLACES * num_experts // min(expert.router.top_k, num_experts) // 8) * 8


def _product(
    shapes: KernelShapes, expert: ExpertShape, num_experts: int, num_tokens: int = EXPERT_TOKENS, *, gated: bool = False
) -> Case:
    keys = jax.random.split(jax.random.key(4), 3)
    groups = _chosen(expert, num_experts, keys[0], num_tokens)
    num_rows = groups.num_tokens if expert.of_tokens else groups.num_places
    x = normal(keys[1], 1.0, shape=(num_rows, expert.inputs), dtype=jnp.dtype(shapes.dtype))
    dtype = jnp.dtype(expert.dtype)
    scale = 1 / 40 if dtype == jnp.int8 else 1.0  # uses the range of the format
    drawn = normal(keys[2], scale, shape=(num_experts, expert.outputs, expert.inputs), dtype=jnp.dtype(jnp.float32))
    weights = (jnp.clip(jnp.round(drawn), -127, 127) if dtype == jnp.int8 else drawn).astype(dtype)

    def call(x: jax.Array, weights: jax.Array, backend: str, interpret: bool) -> list[jax.Array]:
        options: dict[str, Any] = {"of_tokens": expert.of_tokens, "backend": backend, "interpret": interpret}
        if gated:
            return [_gated_jit(x, groups, weights, expert.activation, **options | {"backend": _of_others(backend)})]
        return [_product_jit(x, groups, weights, **options)]

    return Case(
        f"{num_tokens} tokens, {expert.outputs} x {expert.inputs}{', gated' if gated else ''}",
        TOLERANCE[shapes.dtype],
        functools.partial(call, x, weights),
        functools.partial(call, x.astype(jnp.float32), weights.astype(jnp.float32), "xla", False),
    )


def float8_cases(shapes: KernelShapes) -> Iterator[Case]:
    """Products with experts of rows that are rounded, by the kernel or by XLA."""
    for expert in shapes.experts:
        if expert.may_be_in_float8:
            yield from (_in_float8(shapes, expert, each) for each in (EXPERT_TOKENS, _many_tokens(expert)))


def _in_float8(shapes: KernelShapes, expert: ExpertShape, num_tokens: int) -> Case:
    num_experts, group = min(expert.num_experts, MOST_EXPERTS), expert.float8_group
    assert group is not None
    keys = jax.random.split(jax.random.key(13))
    groups = _chosen(expert, num_experts, keys[0], num_tokens)
    num_rows = groups.num_tokens if expert.of_tokens else groups.num_places
    x = normal(keys[1], 1.0, shape=(num_rows, expert.inputs), dtype=jnp.dtype(shapes.dtype))
    shape = num_experts, expert.outputs, expert.inputs
    weights = scaled_weights(shape, FLOAT8.dtype.name, group, has_zeros=False, block_outputs=expert.block_outputs)

    def call(backend: str, interpret: bool) -> list[jax.Array]:
        rows = _rows_jit(x, backend=backend, interpret=interpret)
        options: dict[str, Any] = {"of_tokens": expert.of_tokens, "backend": backend, "interpret": interpret}
        return [_float8_jit(rows, groups, weights, **options)]

    return Case(
        f"{num_tokens} tokens, experts in float8, {expert.outputs} x {expert.inputs}",
        TOLERANCE["bfloat16"],
        call,
        functools.partial(call, XLA, False),
    )


def _scaled(shapes: KernelShapes, expert: ExpertShape) -> Case:
    """The product with numbers whose inputs share scales in groups."""
    num_experts = min(expert.num_experts, MOST_EXPERTS)
    keys = jax.random.split(jax.random.key(4))
    groups = _chosen(expert, num_experts, keys[0])
    num_rows = groups.num_tokens if expert.of_tokens else groups.num_places
    x = normal(keys[1], 1.0, shape=(num_rows, expert.inputs), dtype=jnp.dtype(shapes.dtype))
    shape = num_experts, expert.outputs, expert.inputs
    weights = scaled_weights(shape, expert.numbers, expert.group, expert.has_zeros)

    def call(x: jax.Array, backend: str, interpret: bool) -> list[jax.Array]:
        options: dict[str, Any] = {"of_tokens": expert.of_tokens, "backend": backend, "interpret": interpret}
        return [_scaled_jit(x, groups, weights, **options)]

    return Case(
        f"{expert.outputs} x {expert.inputs} {expert.numbers}",
        TOLERANCE[shapes.dtype],
        functools.partial(call, x),
        functools.partial(call, x.astype(jnp.float32), XLA, False),
    )


def _packed(shapes: KernelShapes, expert: ExpertShape) -> Iterator[Case]:
    """The product with weights of 4 bits, of tokens gated too: as most models do, and as gpt-oss does."""
    num_experts = min(expert.num_experts, MOST_EXPERTS)
    keys = jax.random.split(jax.random.key(4), 3)
    groups = _chosen(expert, num_experts, keys[0])
    num_rows = groups.num_tokens if expert.of_tokens else groups.num_places
    x = normal(keys[1], 1.0, shape=(num_rows, expert.inputs), dtype=jnp.dtype(shapes.dtype))
    shape = num_experts, expert.outputs, expert.inputs
    weights = packed_weights(expert.packing, shape, expert.group, expert.has_zeros)
    bias = normal(keys[2], 1.0, shape=(num_experts, expert.outputs), dtype=jnp.dtype(shapes.dtype))
    units: dict[str, GatedUnit | None] = {"": None}
    if expert.of_tokens and unit_rows(expert.activation) == 2:
        units |= {", gated": GatedUnit("silu"), ", gated with biases and limits": GatedUnit(limit=7.0, alpha=1.7)}
    for name, unit in units.items():

        def call(x: jax.Array, unit: GatedUnit | None, backend: str, interpret: bool) -> list[jax.Array]:
            options: dict[str, Any] = {"of_tokens": expert.of_tokens, "dtype": x.dtype.name, "backend": backend}
            options["interpret"] = interpret
            if unit is None:
                return [_packed_jit(x, groups, weights, bias if expert.router.bias else None, **options)]
            return [_gated_packed_jit(x, groups, weights, unit, None if unit.limit is None else bias, **options)]

        yield Case(
            f"{expert.outputs} x {expert.inputs} {expert.packing}{name}",
            TOLERANCE[shapes.dtype],
            functools.partial(call, x, unit),
            functools.partial(call, x.astype(jnp.float32), unit, XLA, False),
        )


def _with_shared(shapes: KernelShapes, expert: ExpertShape) -> Case:
    """Both products where each token takes the shared experts, too."""
    num_experts, num_shared = min(expert.num_experts, MOST_EXPERTS), expert.router.num_shared
    sides = unit_rows(expert.activation)
    size = expert.outputs // sides
    keys = jax.random.split(jax.random.key(12), 6)
    chosen = _chosen(expert, num_experts, keys[0])
    numbers = chosen.experts[chosen.place_of]
    shared = jnp.broadcast_to(num_experts + jnp.arange(num_shared, dtype=jnp.int32), (EXPERT_TOKENS, num_shared))
    numbers = jnp.concatenate([jnp.where(numbers < num_experts, numbers, -1), shared], axis=1)
    groups = sort_by_expert(numbers, num_experts + num_shared, jnp.arange(EXPERT_TOKENS) % 16 != 15)
    dims = (
        (groups.num_tokens, expert.inputs), (num_experts, expert.outputs, expert.inputs),
        (num_experts, expert.inputs, size), (sides, num_shared * size, expert.inputs),
        (expert.inputs, num_shared * size),
    )  # fmt: skip
    dtype = jnp.dtype(expert.dtype)
    x, *weights = (normal(key, 1.0, shape=shape, dtype=dtype) for key, shape in zip(keys[1:], dims, strict=True))

    def call(x: jax.Array, weights: list[jax.Array], backend: str, interpret: bool) -> list[jax.Array]:
        options: dict[str, Any] = {"backend": _of_others(backend), "interpret": interpret}
        units = UnitWeights(*weights[:2]), UnitWeights(*weights[2:])
        return [_shared_jit(x, groups, *units, expert.activation, **options)]

    wide = [each.astype(jnp.float32) for each in weights]
    return Case(
        f"{num_shared} shared experts of {size}",
        TOLERANCE[shapes.dtype],
        functools.partial(call, x, weights),
        functools.partial(call, x.astype(jnp.float32), wide, XLA, False),
    )


_rows_jit = jax.jit(float8_rows, static_argnames=("backend", "interpret"))
_float8_jit = jax.jit(grouped_float8_product, static_argnames=("of_tokens", "backend", "interpret"))
_product_jit = jax.jit(grouped_product, static_argnames=("of_tokens", "backend", "interpret"))

_scaled_jit = jax.jit(grouped_scaled_product, static_argnames=("of_tokens", "backend", "interpret"))
_packed_jit = jax.jit(grouped_packed_product, static_argnames=("of_tokens", "dtype", "backend", "interpret"))
_gated_packed_jit = jax.jit(
    gated_packed_product, static_argnames=("unit", "of_tokens", "dtype", "backend", "interpret")
)
_gated_jit = jax.jit(gated_product, static_argnames=("activation", "of_tokens", "backend", "interpret"))
_shared_jit = jax.jit(products_with_shared, static_argnames=("activation", "backend", "interpret"))
