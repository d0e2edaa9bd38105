"""Cases of attention: of the newest tokens, stored before or by the same call, of latents, and of more tokens.

Owns their lengths: around pages and tiles, past windows, cut into splits, with cached tokens before them or none.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.api.attention import (
    decode_latents,
    paged_decode_attention,
    paged_extend_attention,
    store_and_decode,
)
from pallas_kernels.choice import AUTO, XLA, KernelChoice
from pallas_kernels.dispatch import sees_ahead
from pallas_kernels.latent import LatentHeads
from pallas_kernels.options import AttentionOptions
from pallas_kernels.paged_kv import PagedKv
from pallas_kernels.qkv import FusedQkv
from pallas_kernels.selftest.batches import Array, normal
from pallas_kernels.selftest.case import Case
from pallas_kernels.selftest.cases.arguments import (
    attention_tolerance,
    full_caches,
    fused_qkv,
    in_float32,
    latent_heads,
    rows_of,
    store_tolerance,
)
from pallas_kernels.selftest.second_opinion import second_opinion, second_opinion_of_decode
from pallas_kernels.selftest.shapes import KernelShapes, LatentShape

MANY_ROWS, LONGEST_WINDOW = 256, 8192


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
    kv, exact = full_caches(shapes, lengths)
    options = shapes.attention[0]

    def attend(q: jax.Array, kv: PagedKv, heads: LatentHeads, backend: str, interpret: bool) -> list[jax.Array]:
        return [_latents_jit(q, kv, heads, options, backend=backend, interpret=interpret)]

    call = _queries(shapes, len(lengths)), kv, latent_heads(shapes, latent)
    wide = in_float32(call[0]), exact, in_float32(call[2])
    return Case(
        f"{len(lengths)} rows of latents, outputs of heads",
        attention_tolerance(shapes),
        functools.partial(attend, *call),
        functools.partial(attend, *wide, "xla", False),
    )


def _decode(shapes: KernelShapes, name: str, lengths: Array, options: AttentionOptions) -> Case:
    kv, exact = full_caches(shapes, lengths)
    q = _queries(shapes, len(lengths))
    sinks = _sinks(shapes)

    def attend(q: jax.Array, kv: PagedKv, backend: str, interpret: bool) -> list[jax.Array]:
        return [_decode_jit(q, kv, options, sinks, backend=backend, interpret=interpret)]

    return Case(
        _named(name, options),
        attention_tolerance(shapes),
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
        if options.sees_ahead:
            yield _extend(shapes, [*pairs, last], options, run=23)


def _extend(shapes: KernelShapes, pairs: list[tuple[int, int]], options: AttentionOptions, run: int = 0) -> Case:
    """`run`: so many new tokens of a sequence after the other see up to the last of them; 0: each up to itself."""
    cached, new = np.array(pairs).T
    kv, exact = full_caches(shapes, cached + new)
    offsets = jnp.asarray(np.cumsum([0, *new]), jnp.int32)
    q = _queries(shapes, _padded(int(new.sum())))
    sinks, seen = _sinks(shapes), None
    if run:
        runs = [begin + np.minimum(np.arange(count) // run * run + run, count) for begin, count in pairs]
        seen = jnp.asarray(np.pad(np.concatenate(runs), (0, len(q) - int(new.sum()))), jnp.int32)

    def attend(q: jax.Array, kv: PagedKv, backend: str, interpret: bool) -> list[jax.Array]:
        chosen = backend if seen is None or sees_ahead(backend) else AUTO  # as in the engine
        return [_extend_jit(q, offsets, kv, options, sinks, seen, backend=chosen, interpret=interpret)]

    return Case(
        _named(f"ragged, {run} together" if run else "ragged", options),
        attention_tolerance(shapes),
        functools.partial(attend, q, kv),
        functools.partial(attend, q.astype(jnp.float32), exact, "xla", False),
        None if run else second_opinion(q, offsets, kv, options, sinks),
    )


def store_and_decode_cases(shapes: KernelShapes) -> Iterator[Case]:
    """The decodes, with NaN where the newest tokens go."""
    page = shapes.page_size
    few = [0, 1, page - 1, page, page + 1, 2 * page + 1, 63, 64, 65, 193, 1000, 0, 3001]
    for options in shapes.attention:
        lengths = few if options.sliding_window is None else [*few, _past(options) + page + 3]
        yield _store_and_decode(shapes, "ragged", np.array(lengths), options)
    yield _store_and_decode(shapes, "many rows", 37 * np.arange(MANY_ROWS) % 300, shapes.attention[0])


def _store_and_decode(shapes: KernelShapes, name: str, lengths: Array, options: AttentionOptions) -> Case:
    before, exact = full_caches(shapes, np.maximum(lengths - 1, 0), room=1)
    before, exact = (dataclasses.replace(each, lengths=jnp.asarray(lengths, jnp.int32)) for each in (before, exact))
    table, last = np.asarray(before.page_table), np.maximum(lengths - 1, 0)
    slots = table[np.arange(len(lengths)), last // shapes.page_size] * shapes.page_size + last % shapes.page_size
    slots = jnp.asarray(np.where(lengths > 0, slots, 0), jnp.int32)
    qkv, sinks = fused_qkv(shapes, len(lengths)), _sinks(shapes)

    def call(qkv: FusedQkv, kv: PagedKv, backend: str, interpret: bool) -> list[jax.Array]:
        parts = KernelChoice.of_attention(XLA) if backend == XLA else KernelChoice()
        choice = {"backend": backend, "parts": parts, "interpret": interpret}
        out, kv = _store_and_decode_jit(qkv, kv, slots, options, sinks, **choice)
        return [out, *rows_of(kv)]

    wide = in_float32(qkv)
    return Case(
        _named(name, options),
        max(attention_tolerance(shapes), store_tolerance(shapes)),
        functools.partial(call, qkv, before),
        functools.partial(call, wide, exact, XLA, False),
    )


_decode_jit = jax.jit(paged_decode_attention, static_argnames=("options", "backend", "interpret"))
_latents_jit = jax.jit(decode_latents, static_argnames=("options", "backend", "interpret"))
_extend_jit = jax.jit(paged_extend_attention, static_argnames=("options", "backend", "interpret"))
_store_and_decode_jit = jax.jit(store_and_decode, static_argnames=("options", "backend", "parts", "interpret"))


def _past(options: AttentionOptions) -> int:
    """A length past the window, or one that is long enough."""
    return min(options.sliding_window or 0, LONGEST_WINDOW) + 5


def _named(name: str, options: AttentionOptions) -> str:
    return name if options.sliding_window is None else f"{name}, window {options.sliding_window}"


def _padded(num_tokens: int) -> int:
    """A multiple of 256 that leaves padding tokens."""
    return (num_tokens + 9 + 255) // 256 * 256


def _queries(shapes: KernelShapes, num_tokens: int) -> jax.Array:
    shape = (num_tokens, shapes.num_kv_heads * shapes.num_groups, shapes.query_dim)
    return normal(jax.random.key(1), 1.0, shape=shape, dtype=jnp.dtype(shapes.dtype))


def _sinks(shapes: KernelShapes) -> jax.Array | None:
    """From far below the scores of random queries to far above."""
    num_heads = shapes.num_kv_heads * shapes.num_groups
    return 12 * jnp.sin(jnp.arange(1, num_heads + 1, dtype=jnp.float32)) if shapes.has_sinks else None
