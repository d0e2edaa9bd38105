"""Finds how far below the most likely token a row's tokens are kept: top-k, top-p and min-p, without a sort.

A filter keeps the tokens within some distance of the largest logit, and that distance is searched for. Distances are
nonnegative floats, whose bit patterns order as integers do, so a search among the 31-bit integers is exact. Each probe
sums the weights (1 for top-k, probabilities for top-p) of all tokens within a distance, which reads the logits once.

- `by_digits`, on accelerators: finds 4 bits at a time, by 15 sums in one pass, so it takes 8 passes. Their number is
  fixed, because a GPU's program that decides whether to go on waits for the host.
- `by_narrowing`, on a CPU, where 15 sums take 15 times as long as one: halves the range. Once few chunks of the
  vocabulary hold tokens within the range, it reads those chunks only.

What a row keeps depends on that row alone, bit for bit: the order in which its weights are added depends neither on
other rows nor on when a search narrows. Called by `sampler`. Knows no draws and no programs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp

from jaxsgl.batch.sampling import SamplingArrays
from pallas_kernels.sums import logs, row_sums

INFINITY_BITS = 0x7F800000
BITS, DIGIT = 31, 4  # of a distance; how many of them a pass finds
LONG_CHUNK = 8192  # tokens at most
FEW_CHUNKS = 64  # so many are read alone: as many as top-k with k up to 64 needs
BLOCK_BYTES = 1 << 21  # of logits: rows that are searched together on a CPU, whose cache should hold them
FIRST_STEP, DOUBLINGS = 1 << 24, 6  # a search goes down from a known bound to 1/4, 1/64, ... before it halves


class Tokens(NamedTuple):
    """The tokens of S rows, in C chunks of L.

    Attributes:
      chunks: `[S, C, L]` float32 logits, minus infinity for padding.
      top: `[S]` the largest logit of each row.
      scale: `[S]` 1 / temperature.
    """

    chunks: jax.Array
    top: jax.Array
    scale: jax.Array

    def distances(self) -> jax.Array:
        """How far each logit lies below its row's largest, before temperature: `[S, C, L]`, 0 to infinity."""
        return self.top[:, None, None] - self.chunks

    def weights(self) -> jax.Array:
        """Probability of each token, relative to its row's most likely one: `[S, C, L]`."""
        return jnp.exp(-self.distances() * self.scale[:, None, None])

    def ones(self) -> jax.Array:
        """1 for each token, float32, since a search counts as it sums: exact up to 2^24 tokens."""
        return jnp.ones_like(self.chunks)

    def at(self, places: jax.Array) -> Tokens:
        """The chunks `places [S, n]`."""
        return self._replace(chunks=self.chunks[jnp.arange(len(places))[:, None], places])


Weigh: TypeAlias = Callable[[Tokens], jax.Array]
OfTotal: TypeAlias = Callable[[jax.Array], jax.Array]  # from a row's total weight, [S] each
Search: TypeAlias = Callable[[Tokens, Weigh, jax.Array, OfTotal, OfTotal], jax.Array]


def keep_limit(tokens: Tokens, sampling: SamplingArrays[jax.Array], platform: str) -> jax.Array:
    """The distance `[S]` up to which a row's tokens are kept; tokens as likely as the last one kept stay too.

    Top-k first, then top-p over what top-k kept, then min-p (Hugging Face's and SGLang's order). Without filters the
    distance is infinite.
    """
    if platform != "cpu":
        return _keep_limit(tokens, sampling, by_digits)
    num_rows, _, _ = shape = tokens.chunks.shape
    fitting = max(BLOCK_BYTES // (4 * math.prod(shape[1:])), 1)
    block = next(size for size in range(min(fitting, num_rows), 0, -1) if num_rows % size == 0)
    if block == num_rows:
        return _keep_limit(tokens, sampling, by_narrowing)
    blocks = jax.tree.map(lambda x: x.reshape(-1, block, *x.shape[1:]), (tokens, sampling))
    return jax.lax.map(lambda rows: _keep_limit(rows[0], rows[1], by_narrowing), blocks).reshape(num_rows)


def _keep_limit(tokens: Tokens, sampling: SamplingArrays[jax.Array], search: Search) -> jax.Array:
    everything = jnp.full_like(tokens.top, jnp.inf)
    count = jnp.maximum(sampling.top_k, 0).astype(jnp.float32)
    top_p, (_, num_chunks, chunk_size) = sampling.top_p, tokens.chunks.shape

    found = search(tokens, Tokens.ones, everything, lambda _: count, lambda _: _chunks_within(tokens, count))
    limit = jnp.where(count > 0, found, everything)

    def tail(total: jax.Array) -> jax.Array:
        """Beyond this distance tokens are so unlikely that all of them together weigh less than what top-p drops."""
        return jnp.log(num_chunks * chunk_size / ((1 - top_p) * total)) / tokens.scale

    found = search(tokens, Tokens.weights, limit, lambda total: jnp.where(top_p < 1, top_p * total, 0.0), tail)
    # With top_p 1, rounding would drop the tail, whose weights vanish in the sum.
    limit = jnp.where(top_p < 1, jnp.minimum(limit, found), limit)
    return jnp.minimum(limit, -logs(sampling.min_p) / tokens.scale)


def by_digits(tokens: Tokens, weigh: Weigh, high: jax.Array, target: OfTotal, guess: OfTotal) -> jax.Array:
    """The least distance `[S]` within which a row's tokens weigh at least the `target` of their weight within `high`.

    `guess` is not needed here; see `by_narrowing`.
    """
    del guess
    tokens = _in_long_chunks(tokens)
    goal = target(_sums_within(tokens, weigh, [_bits(high)])[:, 0])
    found = jnp.zeros(goal.shape, jnp.int32)
    for shift in reversed(range(0, BITS, DIGIT)):
        digits = range(min(1 << DIGIT, 1 << BITS - shift) - 1)
        sums = _sums_within(tokens, weigh, [found + (((digit + 1) << shift) - 1) for digit in digits])
        found = found + (jnp.sum(sums < goal[:, None], axis=-1, dtype=jnp.int32) << shift)
    return _floats(jnp.minimum(found, INFINITY_BITS))


def _in_long_chunks(tokens: Tokens) -> Tokens:
    """In chunks of some thousands: the threads of a GPU that share one exchange their sums at its end."""
    num_rows, num_chunks, chunk_size = tokens.chunks.shape
    size = next(size for size in range(LONG_CHUNK, 0, -1) if num_chunks * chunk_size % size == 0)
    return tokens._replace(chunks=tokens.chunks.reshape(num_rows, -1, max(size, chunk_size)))


def _sums_within(tokens: Tokens, weigh: Weigh, limits: list[jax.Array]) -> jax.Array:
    """Weights within each of the n `limits [S]` (bits), summed: `[S, n]`. Reads the logits once.

    One reduction of n operands, since a compiler may give n reductions a pass each. It runs along the last axis: XLA
    fuses no reduction of so many operands along another one for GPUs, and writes the operands to memory instead.
    """
    bits, weights = _bits(tokens.distances()), weigh(tokens)
    parts = [jnp.where(bits <= limit[:, None, None], weights, 0) for limit in limits]
    zeros = [jnp.zeros((), weights.dtype)] * len(parts)
    by_chunk = jax.lax.reduce(parts, zeros, lambda sums, more: [a + b for a, b in zip(sums, more, strict=True)], (2,))
    return jnp.sum(jnp.stack(by_chunk, axis=1), axis=-1)


class _Range(NamedTuple):
    """Where the distance of each row is looked for.

    Attributes:
      low, high: `[S]` bits of the least and the largest distance that it may be.
      below, above: `[S, C]` weight of each chunk within less than `low`, and within `high`. Where both are equal, the
        chunk has no token in between.
    """

    low: jax.Array
    high: jax.Array
    below: jax.Array
    above: jax.Array

    @property
    def open_chunks(self) -> jax.Array:
        """Which chunks `[S, C]` matter still; none, if all tokens of the row are decided."""
        return (self.below != self.above) & (self.low < self.high)[:, None]

    def middle(self, num_probes: jax.Array) -> jax.Array:
        """The next distance to try `[S]` (bits), less than `high` where the row is open."""
        step = FIRST_STEP << jnp.minimum(num_probes, DOUBLINGS)
        return self.high - jnp.minimum(step, (self.high - self.low + 1) // 2)

    def after(self, middle: jax.Array, sums: jax.Array, goal: jax.Array) -> _Range:
        """What is left when the chunks weigh `sums [S, C]` within `middle`. A row that is decided stays as it is."""
        is_open = jnp.any(self.open_chunks, axis=-1)
        enough = row_sums(sums) >= goal
        lower, higher = is_open & ~enough, is_open & enough
        return _Range(
            low=jnp.where(lower, middle + 1, self.low),
            high=jnp.where(higher, middle, self.high),
            below=jnp.where(lower[:, None], sums, self.below),
            above=jnp.where(higher[:, None], sums, self.above),
        )


def by_narrowing(tokens: Tokens, weigh: Weigh, high: jax.Array, target: OfTotal, guess: OfTotal) -> jax.Array:
    """As `by_digits`, but the distance may be larger than the least one, as long as the same tokens lie within.

    `guess` is tried first: a distance that is enough, and near enough to make the other probes cheap.
    """

    def sums_within(tokens: Tokens, limit: jax.Array) -> jax.Array:
        kept = _bits(tokens.distances()) <= limit[:, None, None]
        # After the barrier chunks stay chunks: XLA may merge this sum with that of a row, which isn't vectorized.
        return jax.lax.optimization_barrier(row_sums(jnp.where(kept, weigh(tokens), 0)))

    above = sums_within(tokens, _bits(high))
    total = row_sums(above)
    goal, first = target(total), _bits(jnp.maximum(guess(total), 0.0))
    low = jnp.zeros(goal.shape, jnp.int32)
    # A row whose goal is 0 has no filter: nothing is looked for.
    start = _Range(low, jnp.where(goal > 0, _bits(high), low), jnp.zeros_like(above), above)

    def probed(range_: _Range, num_probes: jax.Array, sums: Callable[[jax.Array], jax.Array]) -> _Range:
        guessed = jnp.clip(first, range_.low, jnp.maximum(range_.high - 1, range_.low))
        middle = jnp.where(num_probes == 0, guessed, range_.middle(num_probes))
        return range_.after(middle, sums(middle), goal)

    def is_open(state: tuple[_Range, jax.Array]) -> jax.Array:
        return jnp.any(state[0].open_chunks)

    def is_wide(state: tuple[_Range, jax.Array]) -> jax.Array:
        return jnp.any(jnp.sum(state[0].open_chunks, axis=-1) > FEW_CHUNKS)

    def probe_all(state: tuple[_Range, jax.Array]) -> tuple[_Range, jax.Array]:
        return probed(*state, lambda middle: sums_within(tokens, middle)), state[1] + 1

    state = start, jnp.int32(0)
    if above.shape[-1] <= FEW_CHUNKS:
        return _floats(jax.lax.while_loop(is_open, probe_all, state)[0].high)
    state = jax.lax.while_loop(is_wide, probe_all, state)
    _, places = jax.lax.top_k(state[0].open_chunks.astype(jnp.float32), FEW_CHUNKS)
    few, rows = tokens.at(places), jnp.arange(len(places))[:, None]

    def probe_few(state: tuple[_Range, jax.Array]) -> tuple[_Range, jax.Array]:
        # The other chunks weigh the same within any distance of the range. Adding all of them again, each at its
        # place, keeps the order of the sum.
        below = state[0].below
        return probed(*state, lambda middle: below.at[rows, places].set(sums_within(few, middle))), state[1] + 1

    return _floats(jax.lax.while_loop(is_open, probe_few, state)[0].high)


def _chunks_within(tokens: Tokens, count: jax.Array) -> jax.Array:
    """A distance `[S]` within which at least `count [S]` chunks have a token, and hardly more; else infinity."""
    if tokens.chunks.shape[1] <= FEW_CHUNKS:
        return jnp.full_like(tokens.top, jnp.inf)  # all chunks are read in any case
    nearest = tokens._replace(chunks=jnp.max(tokens.chunks, axis=-1)[:, None, :])
    everything = jnp.full_like(tokens.top, jnp.inf)
    return by_narrowing(nearest, Tokens.ones, everything, lambda _: count, lambda _: everything)


def _bits(x: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(x, jnp.int32)


def _floats(bits: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(bits, jnp.float32)
