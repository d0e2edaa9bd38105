"""Attention to a window of tokens and to entries of groups of tokens: stores, an index's choice, and attention.

Owns the checks and the order of these. XLA stores and makes entries on every device (`xla.grouped`); kernels choose and
attend, or itself. Used by the engine for layers whose tokens are condensed (`grouped_tokens`).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.choice import AUTO
from pallas_kernels.dispatch import choose_kernel, choose_kernel_or_xla
from pallas_kernels.grouped_tokens import GroupedCache, GroupedQkv, GroupParts, num_sums
from pallas_kernels.options import AttentionOptions
from pallas_kernels.xla import grouped as xla
from pallas_kernels.xla.chosen import choose_tokens


def attend_to_groups(
    qkv: GroupedQkv,
    cache: GroupedCache,
    slots: jax.Array,
    query_offsets: jax.Array | None,
    options: AttentionOptions,
    sinks: jax.Array | None = None,
    *,
    chooses: bool = True,
    backend: str = AUTO,
    index_backend: str = AUTO,
    interpret: bool = False,
) -> tuple[jax.Array, GroupedCache]:
    """Stores the step's T tokens and what they make of their groups, then attends: `[T, N, H]`, and the cache.

    A query sees the tokens of its window, itself included, and the entries of groups whose last token is none after
    itself: of these, with an index, the `num_chosen` with the highest scores, of equal ones the earlier.

    Args:
        qkv: what the tokens attend with.
        cache: of which the first page is for padding.
        slots: `[T]` int32, where tokens are stored.
        query_offsets: `[S + 1]` int32, whose tokens are whose, as for `paged_extend_attention`; None: each sequence
            has one, in a decode.
        options: scale and window.
        sinks: `[N]` float32, which join the denominators of the softmaxes; None: there are none.
        chooses: whether the index, if there is one, chooses; False where it would choose all that any query sees.
        backend: of the attention: one that has the op, or "auto", the best one that can run.
        index_backend: of the index's scores: one that has a kernel for them, "xla", or "auto".
        interpret: run a Pallas backend in its interpreter, on any platform.

    Raises:
        ValueError: shapes that don't fit each other, pages that don't hold whole groups, or a backend that can't run
            here.
    """
    num_tokens, _, head_dim = qkv.queries.shape
    _, num_heads, page_size, width = cache.tokens.shape
    if qkv.entries.shape != (num_tokens, head_dim) or (num_heads, width) != (1, head_dim):
        raise ValueError(
            f"entries {qkv.entries.shape} must be [T, H] of queries {qkv.queries.shape}, and pages "
            f"{cache.tokens.shape} [n, 1, page_size, H]"
        )
    one_each = query_offsets is None
    if query_offsets is None:
        query_offsets = jnp.arange(num_tokens + 1, dtype=jnp.int32)
    if query_offsets.shape != (len(cache.lengths) + 1,) or query_offsets.dtype != jnp.int32:
        raise ValueError(f"query_offsets is {query_offsets.shape} {query_offsets.dtype}; it must be [S + 1] int32")
    if qkv.groups is not None:
        size, parts, entry = qkv.groups.bias.shape
        groups = None if cache.groups is None else cache.groups.shape[1:]
        sums = None if cache.sums is None else cache.sums.shape[1:]
        if page_size % size or groups != (1, page_size // size, entry) or sums != (num_sums(parts), entry):
            raise ValueError(
                f"pages of {page_size} tokens with entries {groups} and sums {sums} don't hold groups of {size}: it "
                f"takes a multiple of that, (1, {page_size // size}, {entry}) and ({num_sums(parts)}, {entry})"
            )
    cache = xla.store(qkv, cache, slots, query_offsets, one_each)
    chosen = _choose(qkv.groups, query_offsets, cache, head_dim, index_backend, interpret) if chooses else None
    size = 0 if qkv.groups is None else qkv.groups.size
    return attend_to_stored_groups(
        qkv.queries, chosen, query_offsets, cache, size, options, sinks, backend=backend, interpret=interpret
    ), cache


def attend_to_stored_groups(
    q: jax.Array,
    chosen: jax.Array | None,
    query_offsets: jax.Array,
    cache: GroupedCache,
    size: int,
    options: AttentionOptions,
    sinks: jax.Array | None = None,
    *,
    backend: str = AUTO,
    interpret: bool = False,
) -> jax.Array:
    """The attention of `attend_to_groups` alone, to what the cache has: `[T, N, H]`.

    Args:
        q: `[T, N, H]`.
        chosen: `[T, k]` int32 the groups that queries attend to, of those that have ended, then -1; None: all of them.
        query_offsets: `[S + 1]` int32; this and the rest as for `attend_to_groups`.
        cache: with the step's tokens.
        size: m, tokens of a group; 0 where the cache has none.
        options: scale and window.
        sinks: `[N]` float32, or None.
        backend: one that has the op, or "auto".
        interpret: run a Pallas backend in its interpreter, on any platform.

    Raises:
        ValueError: a backend that can't run here.
    """
    attend = choose_kernel(
        "attend_to_groups", lambda each: each.attend_to_groups, backend, q, cache, interpret=interpret
    )
    return attend(q, chosen, query_offsets, cache, size, sinks, options, interpret)


def _choose(
    parts: GroupParts | None,
    query_offsets: jax.Array,
    cache: GroupedCache,
    head_dim: int,
    backend: str,
    interpret: bool,
) -> jax.Array | None:
    """`[T, k]` the groups that an index chooses; None where all are attended to."""
    index = None if parts is None else parts.index
    if parts is None or index is None or parts.num_chosen >= cache.most_groups:
        return None
    kv = cache.of_groups()
    scored = choose_kernel_or_xla(
        "score_tokens", lambda each: each.score_tokens, backend, index, kv, interpret=interpret
    )
    return choose_tokens(index, query_offsets, kv, head_dim, parts.num_chosen, scored, interpret, parts.size)
