"""By what a layer chooses the tokens that its queries attend to: an index over all tokens, small beside attention.

Each token has one key of I numbers. A query has some heads, each with a weight, and scores a token by

    sum over heads h of  weight[h] * relu(query[h] . key)

The tokens of the largest scores are attended to. Source: DeepSeek-V3.2 (arXiv 2512.02556), 2.1. Positive factors of all
scores of a query are left out, since they change no order. Made by models, as a part of a `LatentQkv`; read by
`api.chosen`. Never knows where keys are kept.
"""

from __future__ import annotations

import dataclasses

import jax


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TokenIndex:
    """What T tokens ask the index, and the keys that they add to it; a JAX pytree."""

    queries: jax.Array
    """`[T, heads, I]`, turned with their positions."""
    weights: jax.Array
    """`[T, heads]` float32."""
    keys: jax.Array
    """`[T, I]`, turned."""

    @property
    def num_heads(self) -> int:
        """Heads of a query."""
        return int(self.queries.shape[1])

    @property
    def size(self) -> int:
        """I."""
        return int(self.keys.shape[1])


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class IndexTiles:
    """n tiles of queries, each of one sequence; a JAX pytree."""

    queries: jax.Array
    """`[n, queries, heads, I]`."""
    weights: jax.Array
    """`[n, queries, heads]` float32."""
    positions: jax.Array
    """`[n, queries]` int32; -1 for a query that isn't there."""
    seqs: jax.Array
    """`[n]` int32."""
