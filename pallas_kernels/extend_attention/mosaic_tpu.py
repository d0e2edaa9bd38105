"""`paged_extend_attention` as a Mosaic TPU kernel over tiles of ragged queries. Called by `api` only."""

import functools

import jax

from pallas_kernels.extend_attention.query_tiles import query_tiles
from pallas_kernels.mosaic_tpu_attention import attend_query_tiles, plan
from pallas_kernels.options import AttentionOptions

_OP = "paged_extend_attention"


@functools.partial(jax.jit, static_argnames=("options", "interpret"))
def extend_attention(
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    page_table: jax.Array,
    lengths: jax.Array,
    query_offsets: jax.Array,
    options: AttentionOptions,
    interpret: bool,
) -> jax.Array:
    """See `pallas_kernels.paged_extend_attention`."""
    chosen = plan(_OP, q, k_pages, lengths.shape[0])
    tiles = query_tiles(lengths, query_offsets, q.shape[0], chosen.tile_queries)
    return attend_query_tiles(q, k_pages, v_pages, page_table, tiles, chosen, options, interpret=interpret, name=_OP)
