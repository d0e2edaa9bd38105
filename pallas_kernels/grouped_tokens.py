"""What a layer attends with that sees a window of tokens and, of all before, one entry for each group of m tokens.

A token's entry is its key and its value, the same for all heads. Of the tokens of a group one entry more is made, a
mean weighted by softmax over the tokens, each number by itself:

    entry = sum over tokens j of  softmax(gate + bias[place in the group])[j] * numbers[j]

then normalized, and turned with the position of the group's first token. Where groups overlap, the tokens of the group
before take part by numbers and gates of their own. A key of an index, which chooses entries, is made in the same way.

Groups begin at multiples of m and pages hold whole groups. So a page holds the entries of its groups and, in `sums`,
what the softmax has added up for the group that its last token is in: the next step goes on from there, and a prefix of
whole pages needs nothing else. Sums are no function of what a token stores alone: a token must be computed once, in
order. Source: DeepSeek-V4's report, 2.3. Made by models; read by
`api.grouped` and by what it calls.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.paged_kv import PagedKv
from pallas_kernels.token_index import TokenIndex

LOWEST = -1e30  # the gate of no token: finite, so that subtracting it from itself gives 0


class Sums(NamedTuple):
    """Softmaxes of which a part of the tokens is added up, `[..., W]` float32 each.

    Attributes:
      top: the highest gate so far.
      total: the sum of exp(gate - top).
      read: the sum of exp(gate - top) * number.
    """

    top: jax.Array
    total: jax.Array
    read: jax.Array

    def merged(self, others: Sums) -> Sums:
        """With the tokens of both."""
        top = jnp.maximum(self.top, others.top)
        mine, theirs = jnp.exp(self.top - top), jnp.exp(others.top - top)
        return Sums(top, mine * self.total + theirs * others.total, mine * self.read + theirs * others.read)

    def where(self, condition: jax.Array, others: Sums) -> Sums:
        """These where the condition holds, else the others."""
        return Sums(*(jnp.where(condition, *both) for both in zip(self, others, strict=True)))

    def part(self, index: int) -> Sums:
        """Those at `index` of the last axis but one."""
        return Sums(*(each[..., index, :] for each in self))


def no_tokens(like: jax.Array) -> Sums:
    """Of no tokens, with the shape of `like`."""
    nothing = jnp.zeros_like(like)
    return Sums(jnp.full_like(like, LOWEST), nothing, nothing)


def num_sums(parts: int) -> int:
    """Rows of `sums` of a page: top, total and read of each part and, of two, of the first one of the group before."""
    return 3 * (1 if parts == 1 else 3)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class GroupParts:
    """What T tokens give to the entries of their groups; a JAX pytree. W is H, and I more with an index."""

    numbers: jax.Array
    """`[T, parts, W]` float32: with two parts, what goes to the next group's entry comes first."""
    gates: jax.Array
    """`[T, parts, W]` float32."""
    bias: jax.Array
    """`[m, parts, W]` float32, added to gates."""
    scales: jax.Array
    """`[W]` float32, of the norms of an entry and of a key of the index."""
    frequencies: jax.Array
    """`[R / 2]` float32, radians per position of each pair of neighbours among the last R numbers of both."""
    index_queries: jax.Array | None
    """`[T, heads, I]`, turned; None: all entries are attended to."""
    index_weights: jax.Array | None
    """`[T, heads]` float32."""
    eps: float = dataclasses.field(metadata={"static": True})
    num_chosen: int = dataclasses.field(metadata={"static": True})

    @property
    def size(self) -> int:
        """m, tokens of a group."""
        return int(self.bias.shape[0])

    @property
    def index(self) -> TokenIndex | None:
        """What the tokens ask. They bring no keys: those of groups are stored with entries."""
        if self.index_queries is None or self.index_weights is None:
            return None
        return TokenIndex(self.index_queries, self.index_weights, self.index_queries[:0, 0])


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class GroupedQkv:
    """What T tokens attend with; a JAX pytree."""

    queries: jax.Array
    """`[T, N, H]`, turned."""
    entries: jax.Array
    """`[T, H]`, turned: keys and values."""
    groups: GroupParts | None
    """None: queries attend to the window alone."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class GroupedCache:
    """What such a layer keeps, and where sequences have it; a JAX pytree."""

    tokens: jax.Array
    """`[num_pages, 1, page_size, H]` entries of tokens."""
    groups: jax.Array | None
    """`[num_pages, 1, page_size / m, W]` entries of groups; None with the next one: there are none."""
    sums: jax.Array | None
    """`[num_pages, num_sums, W]` float32."""
    page_table: jax.Array
    """`[S, P]` int32."""
    lengths: jax.Array
    """`[S]` int32, tokens of each sequence, the step's included."""

    def of_tokens(self) -> PagedKv:
        """Entries of tokens as keys and values."""
        return PagedKv(self.tokens, self.tokens, self.page_table, self.lengths)

    def of_groups(self) -> PagedKv:
        """Entries of groups likewise; lengths count tokens."""
        assert self.groups is not None
        return PagedKv(self.groups, self.groups, self.page_table, self.lengths)

    @property
    def most_groups(self) -> int:
        """The most that a sequence has."""
        return 0 if self.groups is None else self.page_table.shape[1] * self.groups.shape[2]


class Places(NamedTuple):
    """Where a step's T tokens are.

    Attributes:
      seqs: `[T]` the sequence of each.
      positions: `[T]` int32, -1 for padding.
    """

    seqs: jax.Array
    positions: jax.Array


def places_of(query_offsets: jax.Array, lengths: jax.Array, num_tokens: int) -> Places:
    """Of the last tokens of sequences of `lengths [S]`, which are whose as `query_offsets [S + 1]` say."""
    number = jnp.arange(num_tokens, dtype=jnp.int32)
    seqs = jnp.minimum(jnp.sum(query_offsets[1:] <= number[:, None], axis=1), len(lengths) - 1)
    positions = number + (lengths - query_offsets[1:]).at[seqs].get(mode="promise_in_bounds")
    return Places(seqs, jnp.where((number < query_offsets[-1]) & (positions >= 0), positions, -1))


def turn_pairs(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """`x [..., H]` with its last R numbers turned, pairs of neighbours together, by tables `[..., R / 2]` float32."""
    still = x.shape[-1] - 2 * cos.shape[-1]
    pairs = x[..., still:].astype(jnp.float32).reshape(*x.shape[:-1], -1, 2)
    first, second = pairs[..., 0], pairs[..., 1]
    turned = jnp.stack([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return jnp.concatenate([x[..., :still], turned.reshape(*x.shape[:-1], -1).astype(x.dtype)], axis=-1)
