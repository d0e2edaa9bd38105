"""`paged_decode_attention` as a Mosaic TPU kernel: a query tile of one token per sequence. Called by `api` only."""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.mosaic_tpu_attention import attend_query_tiles, plan
from pallas_kernels.options import AttentionOptions

_OP = "paged_decode_attention"


@functools.partial(jax.jit, static_argnames=("options", "interpret"))
def decode_attention(
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    page_table: jax.Array,
    lengths: jax.Array,
    options: AttentionOptions,
    interpret: bool,
) -> jax.Array:
    """See `pallas_kernels.paged_decode_attention`. A padding row stands at position -1 and yields zeros."""
    seq = jnp.arange(q.shape[0], dtype=jnp.int32)
    tiles = jnp.stack([seq, seq, seq + 1, lengths - 1], axis=1)
    chosen = plan(_OP, q, k_pages, q.shape[0])
    return attend_query_tiles(q, k_pages, v_pages, page_table, tiles, chosen, options, interpret=interpret, name=_OP)
