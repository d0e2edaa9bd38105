"""Attention to some of a sequence's tokens: which ones an index chooses, and attention of each query to those.

Owns the checks of both. XLA cuts queries into tiles on every device, and kernels choose for them, or itself
(`xla.chosen`). Used by the engine for layers over a latent, whose cache entries hold the index's keys, too.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.choice import AUTO
from pallas_kernels.dispatch import choose_kernel, choose_kernel_or_xla
from pallas_kernels.options import AttentionOptions
from pallas_kernels.paged_kv import PagedKv, check_pages
from pallas_kernels.token_index import TokenIndex
from pallas_kernels.xla import chosen as xla


def choose_tokens(
    index: TokenIndex,
    query_offsets: jax.Array,
    kv: PagedKv,
    first: int,
    count: int,
    *,
    backend: str = AUTO,
    interpret: bool = False,
) -> jax.Array:
    """The positions `[T, count]` int32 of the tokens of a query's sequence, up to itself, with the highest scores.

    Where a query sees fewer, -1 follows, and for padding tokens all are -1. Of equal scores the earlier token counts.
    They come in any order.

    Args:
        index: of the T tokens, whose keys are stored already.
        query_offsets: `[S + 1]` int32, whose tokens are whose, as for `paged_extend_attention`.
        kv: the cache, of one kv head.
        first: where in an entry of the cache the index's key begins.
        count: tokens to choose, fewer than a sequence of the cache can have.
        backend: of the scores: one that has a kernel for them, "xla", or "auto", the best one that can run.
        interpret: run a Pallas backend in its interpreter, on any platform.

    Raises:
        ValueError: shapes that don't fit each other, or a backend that can't run here.
    """
    _check(kv, query_offsets)
    if first + index.size > kv.head_dim:
        raise ValueError(f"keys of {index.size} numbers from {first} on don't fit into entries of {kv.head_dim}")
    if not 0 < count < kv.max_len:
        raise ValueError(
            f"count is {count}; it must be 1 to {kv.max_len - 1}: a sequence has up to {kv.max_len} tokens"
        )
    scored = choose_kernel_or_xla(
        "score_tokens", lambda each: each.score_tokens, backend, index, kv, interpret=interpret
    )
    return xla.choose_tokens(index, query_offsets, kv, first, count, scored, interpret)


def attend_to_chosen(
    q: jax.Array,
    chosen: jax.Array,
    query_offsets: jax.Array,
    kv: PagedKv,
    options: AttentionOptions,
    *,
    backend: str = AUTO,
    interpret: bool = False,
) -> jax.Array:
    """Attention of each query to the tokens at `chosen` of its sequence alone: `[T, N, C]` in q's dtype.

    Args:
        q: `[T, N, H]`; H may be less than the cache's: of an entry the first H numbers are the key.
        chosen: `[T, k]` int32 positions, -1 for none; of a query without any the output is zeros.
        query_offsets: as for `choose_tokens`.
        kv: the cache, of one kv head; `v` is `k`.
        options: the scale, and `value_dim`, C; no window and no cap.
        backend: a backend that has the op, or "auto": the best one that can run.
        interpret: run a Pallas backend in its interpreter, on any platform.

    Raises:
        ValueError: shapes or options that don't fit, or a backend that can't run here.
    """
    _check(kv, query_offsets)
    if q.ndim != 3 or chosen.ndim != 2 or len(q) != len(chosen) or q.shape[2] > kv.head_dim:
        raise ValueError(f"q {q.shape} must be [T, N, H], chosen {chosen.shape} [T, k], H at most {kv.head_dim}")
    if options.value_dim is None or options.sliding_window is not None or options.logit_soft_cap is not None:
        raise ValueError(f"{options}: attention to chosen tokens takes a value_dim, no window and no soft cap")
    attend = choose_kernel("attend_to_chosen", lambda each: each.attend_to_chosen, backend, q, kv, interpret=interpret)
    return attend(q, chosen, query_offsets, kv, options, interpret)[..., : options.value_dim]


def _check(kv: PagedKv, query_offsets: jax.Array) -> None:
    check_pages(kv)
    if kv.num_kv_heads != 1:
        raise ValueError(f"the cache has {kv.num_kv_heads} kv heads; tokens are chosen in caches of one")
    if query_offsets.shape != (kv.num_seqs + 1,) or query_offsets.dtype != jnp.int32:
        raise ValueError(f"query_offsets is {query_offsets.shape} {query_offsets.dtype}; it must be [S + 1] int32")
