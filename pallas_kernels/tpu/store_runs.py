"""The work list of a store on tiled memory: tokens sorted by slot and cut into runs, computed on the device.

Owns the sorting. Never knows kernels or heads. Called by `store`; XLA computes the list once for all layers of a step,
since it depends on the slots alone.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

_NOWHERE = jnp.iinfo(jnp.int32).max


class TokenRuns(NamedTuple):
    """Entries `[chunks, C]` int32: the tokens of a chunk by ascending slot, those of the dummy page left out.

    A tile is the tokens of one aligned group of slots, which memory can only write together. A run is consecutive
    tokens for consecutive slots of one tile.
    """

    slot: jax.Array
    token: jax.Array
    """Index of the token in its chunk."""
    run_end: jax.Array
    """Index of the entry after the run to which this entry belongs."""
    tile_end: jax.Array
    """The same for its tile."""
    num_entries: jax.Array
    """`[chunks]`: entries that exist."""


def token_runs(slots: jax.Array, chunk_tokens: int, tile_slots: int, page_size: int) -> TokenRuns:
    """Sort slots `[T]` within chunks of C = chunk_tokens tokens, at most T.

    All chunks are whole: the last one begins early enough to end with the last token, and leaves out the tokens that
    the chunk before it has stored.
    """
    num_tokens = slots.shape[0]
    starts = chunk_starts(num_tokens, chunk_tokens)
    entry = jnp.arange(chunk_tokens, dtype=jnp.int32)
    source = starts[:, None] + entry
    is_new = source >= jnp.arange(len(starts), dtype=jnp.int32)[:, None] * chunk_tokens
    chosen = slots[source]
    # What the dummy page holds never matters.
    key = jnp.where(is_new & (chosen >= page_size), chosen, _NOWHERE)
    slot, token = lax.sort((key, jnp.broadcast_to(entry, key.shape)), dimension=1, num_keys=1)
    tile_starts = slot // tile_slots != jnp.roll(slot, 1, axis=1) // tile_slots
    follows = (slot == jnp.roll(slot, 1, axis=1) + 1) & (token == jnp.roll(token, 1, axis=1) + 1)
    return TokenRuns(
        slot,
        token,
        _next_start(tile_starts | ~follows, entry),
        _next_start(tile_starts, entry),
        jnp.sum(key != _NOWHERE, axis=1, dtype=jnp.int32),
    )


def chunk_starts(num_tokens: int, chunk_tokens: int) -> jax.Array:
    """First token of each chunk; the last chunk begins early enough to be whole."""
    starts = jnp.arange(0, num_tokens, chunk_tokens, dtype=jnp.int32)
    return jnp.minimum(starts, num_tokens - chunk_tokens)


def _next_start(starts: jax.Array, entry: jax.Array) -> jax.Array:
    """For each entry the index of the first start after it, or the number of entries."""
    later = jnp.where(starts, entry, entry.shape[0])[:, 1:]
    later = jnp.pad(later, ((0, 0), (0, 1)), constant_values=entry.shape[0])
    return lax.cummin(later, axis=1, reverse=True)
