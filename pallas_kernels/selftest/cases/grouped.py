"""Cases of attention to windows of tokens and to entries of groups of these.

Owns lengths, and which groups are chosen: as decodes and extends have them, with groups that haven't ended and padding.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.api.grouped import attend_to_stored_groups
from pallas_kernels.choice import XLA
from pallas_kernels.grouped_tokens import GroupedCache
from pallas_kernels.paged_kv import PagedKv
from pallas_kernels.selftest.batches import normal
from pallas_kernels.selftest.case import Case
from pallas_kernels.selftest.cases.arguments import attention_tolerance, full_caches, in_float32
from pallas_kernels.selftest.cases.chosen import BATCHES
from pallas_kernels.selftest.shapes import GroupedShape, KernelShapes


def grouped_cases(shapes: KernelShapes) -> Iterator[Case]:
    """Few queries, whose keys are split, and many, for each kind of layers."""
    for groups in shapes.grouped:
        yield from (_attend(shapes, groups, name) for name in BATCHES)


def _attend(shapes: KernelShapes, groups: GroupedShape, name: str) -> Case:
    lengths, new = map(np.array, BATCHES[name])
    cache, exact = (_with_groups(shapes, groups, kv) for kv in full_caches(_with_latents(shapes), lengths))
    offsets, num_tokens = jnp.asarray(np.cumsum([0, *new]), jnp.int32), int(new.sum()) + 3
    chosen = _chosen(groups, lengths, new, num_tokens) if groups.num_chosen else None
    shape = (num_tokens, shapes.num_groups, shapes.head_dim)
    q = normal(jax.random.key(1), 1.0, shape=shape, dtype=jnp.dtype(shapes.dtype))
    sinks = normal(jax.random.key(3), 1.0, shape=(shapes.num_groups,), dtype=jnp.dtype(jnp.float32))

    def attend(q: jax.Array, cache: GroupedCache, backend: str, interpret: bool) -> list[jax.Array]:
        options = shapes.attention[0].for_heads(shapes.head_dim)
        args = q, chosen, offsets, cache
        return [_attend_jit(*args, groups.size, options, sinks, backend=backend, interpret=interpret)]

    kind = f"groups of {groups.size}" if groups.size else "window"
    return Case(
        f"{name}, {kind}",
        attention_tolerance(shapes),
        functools.partial(attend, q, cache),
        functools.partial(attend, in_float32(q), exact, XLA, False),
    )


def _with_latents(shapes: KernelShapes) -> KernelShapes:
    """Shapes whose keys are values."""
    options = dataclasses.replace(shapes.attention[0], value_dim=shapes.head_dim)
    return dataclasses.replace(shapes, attention=(options,))


def _with_groups(shapes: KernelShapes, groups: GroupedShape, kv: PagedKv) -> GroupedCache:
    """Entries of tokens, and of groups that have ended: other numbers. Of other groups they are NaN."""
    if not groups.size:
        return GroupedCache(kv.k, None, None, kv.page_table, kv.lengths)
    of_page = shapes.page_size // groups.size
    # An entry is made of its group's last token, which is NaN where the group has none.
    last = -kv.k[:, :, groups.size - 1 :: groups.size]
    entries = jnp.tile(last, -(-groups.width // shapes.head_dim))[..., : groups.width]
    assert entries.shape[2] == of_page
    return GroupedCache(kv.k, entries, None, kv.page_table, kv.lengths)


def _chosen(
    groups: GroupedShape, lengths: np.ndarray[tuple[int], np.dtype[np.int64]],
    new: np.ndarray[tuple[int], np.dtype[np.int64]], num_tokens: int,
) -> jax.Array:  # fmt: skip
    """Some of the groups that each query may see, in any order."""
    chosen = np.full((num_tokens, groups.num_chosen), -1, np.int32)
    rng, token = np.random.default_rng(3), 0
    for length, number in zip(lengths, new, strict=True):
        for position in range(length - number, length):
            some = rng.permutation((position + 1) // groups.size)[: groups.num_chosen]
            chosen[token, : len(some)] = some
            token += 1
    return jnp.asarray(chosen)


_attend_jit = jax.jit(attend_to_stored_groups, static_argnames=("size", "options", "backend", "interpret"))
