"""The work list of an extend: which queries of which sequence make up each tile, computed on the device.

Owns the table of query tiles. Never knows kernels, pages or heads. Called by the Pallas backends of the op; XLA
computes it once for all layers of a step, since it depends on lengths and offsets alone.
"""

import jax
import jax.numpy as jnp

# Columns of a tile: its sequence, first token, the token after its last, and the position of the first token.
SEQUENCE, BEGIN, END, POSITION = range(4)


def query_tiles(lengths: jax.Array, query_offsets: jax.Array, num_tokens: int, tile_queries: int) -> jax.Array:
    """`[num_tiles, 4]` int32, tiles of at most tile_queries tokens; see the columns above.

    Tiles lie in the order of their tokens. Padding tokens, from query_offsets[S] on, become tiles without KV (position
    -num_tokens or below), so that their output gets written. The number of tiles is an upper bound; those at the end
    that don't exist hold no tokens.
    """
    num_seqs = lengths.shape[0]
    ends = jnp.append(query_offsets[1:], jnp.int32(num_tokens))
    counts = ends - query_offsets
    first_positions = jnp.append(lengths, -num_tokens) - counts
    num_tiles = (counts + tile_queries - 1) // tile_queries
    tiles_end = jnp.cumsum(num_tiles)
    tile = jnp.arange(-(-num_tokens // tile_queries) + num_seqs + 1, dtype=jnp.int32)
    seq = jnp.minimum(jnp.sum(tile[:, None] >= tiles_end, axis=1), num_seqs)
    done = (tile - (tiles_end - num_tiles)[seq]) * tile_queries
    begin = query_offsets[seq] + done
    end = jnp.minimum(begin + tile_queries, ends[seq])
    return jnp.stack([jnp.minimum(seq, num_seqs - 1), begin, end, first_positions[seq] + done], 1).astype(jnp.int32)
