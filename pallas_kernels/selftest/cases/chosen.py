"""Cases of attention to tokens that an index chooses.

Owns lengths and choices: fewer tokens than are chosen and more, as decodes and extends have them, and padding.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.api.chosen import attend_to_chosen
from pallas_kernels.paged_kv import PagedKv
from pallas_kernels.selftest.batches import normal
from pallas_kernels.selftest.case import Case
from pallas_kernels.selftest.cases.arguments import attention_tolerance, full_caches, in_float32
from pallas_kernels.selftest.shapes import KernelShapes

BATCHES = {
    "one row": ([3001], [1]),
    "rows": ([1, 17, 0, 3001, 2048], [1, 1, 0, 1, 1]),
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
        functools.partial(attend, in_float32(q), exact, "xla", False),
    )


_attend_jit = jax.jit(attend_to_chosen, static_argnames=("options", "backend", "interpret"))
