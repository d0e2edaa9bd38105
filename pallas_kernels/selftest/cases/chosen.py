"""Cases of the choice of tokens by an index, and of attention to those.

Owns lengths and choices: fewer tokens than are chosen and more, as decodes and extends have them, and padding.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.api.chosen import attend_to_chosen, choose_tokens
from pallas_kernels.choice import XLA
from pallas_kernels.paged_kv import PagedKv
from pallas_kernels.selftest.batches import normal
from pallas_kernels.selftest.case import Case
from pallas_kernels.selftest.cases.arguments import attention_tolerance, full_caches, in_float32
from pallas_kernels.selftest.shapes import KernelShapes, LatentShape
from pallas_kernels.token_index import TokenIndex

EXACT = 1e-6  # of a choice, where no score is rounded
BATCHES = {
    "rows": ([1, 17, 0, 3001, 2048], [1, 1, 0, 1, 1]),
    "one row": ([3001], [1]),
    "ragged": ([3, 700, 0, 2600], [3, 65, 0, 180]),
}
"""Lengths, and how many of their last tokens are queries."""


def chosen_cases(shapes: KernelShapes) -> Iterator[Case]:
    """Few queries, whose choices are split, and many."""
    for count in dict.fromkeys(each.num_chosen for each in shapes.latents if each.num_chosen):
        yield from (_attend(shapes, count, name) for name in BATCHES)


def _attend(shapes: KernelShapes, count: int, name: str) -> Case:
    lengths, new = map(np.array, BATCHES[name])
    kv, exact = full_caches(shapes, lengths)
    offsets, num_tokens = jnp.asarray(np.cumsum([0, *new]), jnp.int32), int(new.sum()) + 3
    chosen = np.full((num_tokens, count), -1, np.int32)
    rng, token = np.random.default_rng(3), 0
    for length, number in zip(lengths, new, strict=True):
        for position in range(length - number, length):
            some = rng.permutation(position + 1)[:count]
            chosen[token, : len(some)] = some
            token += 1
    shape = (num_tokens, shapes.num_groups, shapes.query_dim)
    q = normal(jax.random.key(1), 1.0, shape=shape, dtype=jnp.dtype(shapes.dtype))

    def attend(q: jax.Array, kv: PagedKv, backend: str, interpret: bool) -> list[jax.Array]:
        options = shapes.attention[0].for_heads(shapes.query_dim)
        places = jnp.asarray(chosen)
        return [_attend_jit(q, places, offsets, kv, options=options, backend=backend, interpret=interpret)]

    return Case(
        name,
        attention_tolerance(shapes),
        functools.partial(attend, q, kv),
        functools.partial(attend, in_float32(q), exact, XLA, False),
    )


def choice_cases(shapes: KernelShapes) -> Iterator[Case]:
    """The same batches, each with an index whose numbers are small and whole; of entries of groups it is alike."""
    for each in shapes.grouped:
        if each.num_chosen:
            yield from choice_cases(each.index_shapes(shapes))
    for latent in shapes.latents:
        if latent.num_chosen:
            yield from (_choose(shapes, latent, name) for name in BATCHES)


def _choose(shapes: KernelShapes, latent: LatentShape, name: str) -> Case:
    lengths, new = map(np.array, BATCHES[name])
    kv, exact = (_in_whole_numbers(each) for each in full_caches(shapes, lengths))
    offsets, num_tokens = jnp.asarray(np.cumsum([0, *new]), jnp.int32), int(new.sum()) + 3
    rng, sizes = np.random.default_rng(4), (num_tokens, latent.index_heads)
    queries, weights = rng.integers(-2, 3, (*sizes, latent.index_size)), rng.integers(-3, 4, sizes)
    keys = jnp.zeros((num_tokens, latent.index_size))
    index = TokenIndex(jnp.asarray(queries, jnp.dtype(shapes.dtype)), jnp.asarray(weights, jnp.float32), keys)
    # A cache of few tokens has no choice.
    count = min(latent.num_chosen, kv.max_len - 1)

    def choose(index: TokenIndex, kv: PagedKv, backend: str, interpret: bool) -> list[jax.Array]:
        options = {"first": shapes.query_dim, "count": count, "backend": backend, "interpret": interpret}
        found = _choose_jit(index, offsets, kv, **options)
        is_chosen = jnp.zeros((num_tokens, kv.max_len + 1))
        return [is_chosen.at[jnp.arange(num_tokens)[:, None], found].set(1.0)]  # -1 is the last one

    return Case(
        name,
        EXACT,
        functools.partial(choose, index, kv),
        functools.partial(choose, in_float32(index), exact, XLA, False),
    )


def _in_whole_numbers(kv: PagedKv) -> PagedKv:
    pages = jnp.round(2 * kv.k)
    return dataclasses.replace(kv, k=pages, v=pages)


_choose_jit = jax.jit(choose_tokens, static_argnames=("first", "count", "backend", "interpret"))
_attend_jit = jax.jit(attend_to_chosen, static_argnames=("options", "backend", "interpret"))
