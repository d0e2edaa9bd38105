"""Attention to a window of tokens and to entries of groups of tokens, in XLA on every device (`xla.grouped`).

Owns the checks. Used by the engine for layers whose tokens are condensed (`grouped_tokens`).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.grouped_tokens import GroupedCache, GroupedQkv, num_sums
from pallas_kernels.options import AttentionOptions
from pallas_kernels.xla import grouped as xla


def attend_to_groups(
    qkv: GroupedQkv,
    cache: GroupedCache,
    slots: jax.Array,
    query_offsets: jax.Array,
    options: AttentionOptions,
    sinks: jax.Array | None = None,
) -> tuple[jax.Array, GroupedCache]:
    """Stores the step's T tokens and what they make of their groups, then attends: `[T, N, H]`, and the cache.

    A query sees the tokens of its window, itself included, and the entries of groups whose last token is none after
    itself: of these, with an index, the `num_chosen` with the highest scores, of equal ones the earlier.

    Args:
        qkv: what the tokens attend with.
        cache: of which the first page is for padding.
        slots: `[T]` int32, where tokens are stored.
        query_offsets: `[S + 1]` int32, whose tokens are whose, as for `paged_extend_attention`.
        options: scale and window.
        sinks: `[N]` float32, which join the denominators of the softmaxes; None: there are none.

    Raises:
        ValueError: shapes that don't fit each other, or pages that don't hold whole groups.
    """
    num_tokens, _, head_dim = qkv.queries.shape
    _, num_heads, page_size, width = cache.tokens.shape
    if qkv.entries.shape != (num_tokens, head_dim) or (num_heads, width) != (1, head_dim):
        raise ValueError(
            f"entries {qkv.entries.shape} must be [T, H] of queries {qkv.queries.shape}, and pages "
            f"{cache.tokens.shape} [n, 1, page_size, H]"
        )
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
    return xla.store_and_attend(qkv, cache, slots, query_offsets, options, sinks)
