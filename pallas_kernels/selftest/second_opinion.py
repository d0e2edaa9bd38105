"""What a kernel of others makes of a batch on which one of ours was wrong: JAX's own ragged paged attention, on TPUs.

It can't serve in place of ours: it reads one array `[num_pages, page_size, K and V in turns, H]`, of which ours would
have to be copied in each layer of each step. On the small pool of a test the copy doesn't matter, and the answer says
whom to suspect: our kernel, or the device, its driver and XLA. Owns no verdict. Called by `cases`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.options import AttentionOptions
from pallas_kernels.paged_kv import PagedKv
from pallas_kernels.target import target_device

Attend = Callable[[], list[jax.Array]]


def second_opinion(
    q: jax.Array, query_offsets: jax.Array, kv: PagedKv, options: AttentionOptions, sinks: jax.Array | None
) -> Attend | None:
    """An extend by JAX's kernel; None where it hasn't what the call needs, or on another device than a TPU."""
    if target_device().platform != "tpu" or sinks is not None or kv.k.dtype != q.dtype or kv.head_dim % 128:
        return None
    return lambda: [ragged_paged_attention(q, query_offsets, kv, options)[..., : options.value_dim]]


def second_opinion_of_decode(
    q: jax.Array, kv: PagedKv, options: AttentionOptions, sinks: jax.Array | None
) -> Attend | None:
    """The same for a decode, of which a padding row has no token of its own: its output is zeros."""
    has_token = np.asarray(kv.lengths) > 0
    attend = second_opinion(q[has_token], _offsets(has_token), kv, options, sinks)

    def scattered() -> list[jax.Array]:
        assert attend is not None
        rows = np.flatnonzero(has_token)
        return [jnp.zeros((len(q), *out.shape[1:]), out.dtype).at[rows].set(out) for out in attend()]

    return None if attend is None else scattered


def _offsets(has_token: np.ndarray[Any, Any]) -> jax.Array:
    return jnp.asarray(np.append(0, np.cumsum(has_token)), jnp.int32)


def ragged_paged_attention(q: jax.Array, query_offsets: jax.Array, kv: PagedKv, options: AttentionOptions) -> jax.Array:
    """The output `[T, N, H]` of an extend, zeros for padding tokens."""
    from jax.experimental.pallas.ops.tpu import ragged_paged_attention as jax_op  # takes a second to import

    offsets, lengths = np.asarray(query_offsets), np.asarray(kv.lengths)
    real = np.flatnonzero(np.diff(offsets) > 0)  # it takes no sequence without a query
    begins = jnp.asarray(np.append(offsets[real], offsets[-1]), jnp.int32)
    # A weight of zero doesn't silence the NaN of unused places there.
    k, v = (jnp.swapaxes(jnp.nan_to_num(pages), 1, 2) for pages in (kv.k, kv.v))
    pages = jnp.stack([k, v], axis=3).reshape(*k.shape[:2], -1, k.shape[3])
    out = jax_op.ragged_paged_attention(
        q, pages, jnp.asarray(lengths[real]), kv.page_table[real], begins, jnp.asarray([len(real)], jnp.int32),
        sm_scale=options.scale(kv.head_dim), sliding_window=options.sliding_window, soft_cap=options.logit_soft_cap,
    )  # fmt: skip
    is_token = jnp.arange(len(q)) < offsets[-1]
    return jnp.where(is_token[:, None, None], jnp.pad(out, ((0, len(q) - len(out)), (0, 0), (0, 0))), 0)
