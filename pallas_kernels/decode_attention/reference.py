"""What `paged_decode_attention` means: an extend by one token for each sequence that isn't padding."""

import jax
import jax.numpy as jnp

from pallas_kernels.extend_attention import reference
from pallas_kernels.options import AttentionOptions


def decode_attention(
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    page_table: jax.Array,
    lengths: jax.Array,
    options: AttentionOptions,
) -> jax.Array:
    """See `pallas_kernels.paged_decode_attention`. A padding row, of length 0, sees nothing and yields zeros."""
    offsets = jnp.arange(q.shape[0] + 1, dtype=jnp.int32)
    return reference.extend_attention(q, k_pages, v_pages, page_table, lengths, offsets, options)
