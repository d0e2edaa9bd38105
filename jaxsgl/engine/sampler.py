"""Chooses the next token from logits, and scores tokens, inside jitted programs. Knows no requests and no buckets.

No sort over the vocabulary: a filter keeps the tokens within some distance of the largest logit, and that distance is
found by bisection. Distances are nonnegative floats, whose bit patterns order as integers do; bisecting the integers
is exact after 31 halvings. A drawn token depends on the row's logits, seed and position alone, not on other rows.

Log-probabilities are those of the model's own logits, before penalties and temperature, in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxsgl.batch.sampling import SamplingArrays
from jaxsgl.request import MAX_TOP_LOGPROBS

MIN_TEMPERATURE = 1e-5  # below this a row is greedy: float32 has no room for the quotient
INFINITY_BITS = 0x7F800000
HALVINGS = 31  # of the range 0 .. INFINITY_BITS
MIN_CHUNK, MAX_CHUNK = 32, 256  # tokens
SLICE = 128  # tokens of a prompt whose logits exist at a time: V float32 each

jax.tree_util.register_dataclass(SamplingArrays)


def greedy(logits: jax.Array) -> jax.Array:
    """The most likely token of each row of `logits [S, V]`, the lowest id among equals; int32 `[S]`.

    Finds the chunk, then the token in it: XLA's argmax over a whole vocabulary takes 10 times longer on CPU.
    """
    chunks = in_chunks(logits, -jnp.inf)
    chunk = jnp.argmax(jnp.max(chunks, axis=-1), axis=-1)
    inside = chunks[jnp.arange(len(chunks)), chunk]
    return (chunk * chunks.shape[-1] + jnp.argmax(inside, axis=-1)).astype(jnp.int32)


def sample(logits: jax.Array, sampling: SamplingArrays[jax.Array], positions: jax.Array) -> jax.Array:
    """Draws one token per row; int32 `[S]`. Rows with temperature 0 or top_k 1 take the most likely one.

    Args:
      logits: `[S, V]` float32.
      sampling: `[S]` each.
      positions: `[S]` int32, the position of the drawn token in its sequence.
    """
    best = greedy(logits)
    distance = distances(logits, sampling.temperature)
    limit = keep_limit(distance, sampling)
    weights = jnp.where(distance <= limit[:, None], jnp.exp(-distance), 0.0)
    drawn = draw(weights, uniform(sampling.seeds, positions), otherwise=best)
    return jnp.where((sampling.temperature < MIN_TEMPERATURE) | (sampling.top_k == 1), best, drawn)


def distances(logits: jax.Array, temperature: jax.Array) -> jax.Array:
    """How far each logit lies below its row's largest, after temperature: `[S, V]`, at least 0, at most infinity."""
    top = jnp.max(logits, axis=-1, keepdims=True)
    return (top - logits) / jnp.maximum(temperature, MIN_TEMPERATURE)[:, None]


def keep_limit(distance: jax.Array, sampling: SamplingArrays[jax.Array]) -> jax.Array:
    """The distance `[S]` up to which a row's tokens are kept; tokens as likely as the last one kept stay too.

    Top-k first, then top-p over what top-k kept, then min-p (Hugging Face's and SGLang's order).
    """
    vocab_size = distance.shape[-1]
    k, top_p = sampling.top_k, sampling.top_p
    count = jnp.where(k <= 0, vocab_size, jnp.minimum(k, vocab_size)).astype(jnp.float32)
    limit = _smallest_reaching(distance, jnp.ones_like(distance), count)

    weights = jnp.where(distance <= limit[:, None], jnp.exp(-distance), 0.0)
    total = jnp.sum(weights, axis=-1)
    nucleus = _smallest_reaching(distance, weights, top_p * total)
    # With top_p 1, rounding would drop the tail, whose weights vanish in the sum.
    limit = jnp.where(top_p >= 1.0, limit, jnp.minimum(limit, nucleus))
    return jnp.minimum(limit, -jnp.log(sampling.min_p))


def _smallest_reaching(distance: jax.Array, weights: jax.Array, target: jax.Array) -> jax.Array:
    """The smallest distance within which a row's `weights [S, V]` sum to at least `target [S]`."""
    bits = jax.lax.bitcast_convert_type(distance, jnp.int32)

    def halve(_: jax.Array, bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = bounds
        middle = low + (high - low) // 2
        within = jnp.sum(jnp.where(bits <= middle[:, None], weights, 0), axis=-1)
        enough = within >= target
        return jnp.where(enough, low, middle + 1), jnp.where(enough, middle, high)

    low = jnp.zeros(target.shape, jnp.int32)
    _, found = jax.lax.fori_loop(0, HALVINGS, halve, (low, jnp.full_like(low, INFINITY_BITS)))
    return jax.lax.bitcast_convert_type(found, jnp.float32)


def uniform(seeds: jax.Array, positions: jax.Array) -> jax.Array:
    """One number in [0, 1) per row: Threefry (Salmon et al. 2011), keyed by seed and position; float32 `[S]`."""
    bits = jax.lax.bitcast_convert_type(jnp.stack([seeds, positions], axis=-1), jnp.uint32)
    keys = jax.random.wrap_key_data(bits, impl="threefry2x32")
    return jax.vmap(jax.random.uniform)(keys)


def draw(weights: jax.Array, where: jax.Array, *, otherwise: jax.Array) -> jax.Array:
    """The token at `where [S]` (in [0, 1)) of the cumulated `weights [S, V]`; int32 `[S]`.

    Cumulates sums of chunks, then inside one chunk, so that the vocabulary is read once. Where rounding leaves no
    token (about once in 10^7 draws), takes `otherwise [S]`.
    """
    chunks = in_chunks(weights, 0.0)
    num_rows, num_chunks, chunk_size = chunks.shape
    chunk_ends = jnp.cumsum(jnp.sum(chunks, axis=-1), axis=-1)
    goal = where * chunk_ends[:, -1]
    chunk = jnp.minimum(jnp.sum(chunk_ends <= goal[:, None], axis=-1), num_chunks - 1)

    rows = jnp.arange(num_rows)
    before = jnp.where(chunk > 0, chunk_ends[rows, chunk - 1], 0.0)
    inside = chunks[rows, chunk]
    passed = (jnp.cumsum(inside, axis=-1) > (goal - before)[:, None]) & (inside > 0)
    token = chunk * chunk_size + jnp.argmax(passed, axis=-1)
    return jnp.where(jnp.any(passed, axis=-1), token, otherwise).astype(jnp.int32)


def in_chunks(x: jax.Array, fill: float) -> jax.Array:
    """`x [S, V]` as `[S, chunks, chunk size]`; `fill` pads the last chunk where V has no suitable divisor."""
    num_rows, vocab_size = x.shape
    divisors = (size for size in range(MAX_CHUNK, MIN_CHUNK - 1, -1) if vocab_size % size == 0)
    chunk_size = next(divisors, MAX_CHUNK)
    padding = -vocab_size % chunk_size
    if padding:  # costs a copy, so not for vocabularies that divide, as nearly all do
        x = jnp.pad(x, ((0, 0), (0, padding)), constant_values=fill)
    return x.reshape(num_rows, -1, chunk_size)


class Logprobs(NamedTuple):
    """Log-probabilities of n tokens on the device; the arrays of `engine_api.TokenScores`."""

    logprobs: jax.Array
    top_ids: jax.Array
    top_logprobs: jax.Array


def score(logits: jax.Array, tokens: jax.Array) -> Logprobs:
    """Log-probabilities of `tokens [n]` and of the K most likely tokens, by `logits [n, V]` float32."""
    total = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    top_logits, top_ids = top_k(logits, min(MAX_TOP_LOGPROBS, logits.shape[-1]))
    chosen = jnp.take_along_axis(logits, tokens[:, None], axis=-1)
    return Logprobs((chosen - total)[:, 0], top_ids, top_logits - total)


def score_in_slices(logits_of: Callable[[jax.Array], jax.Array], hidden: jax.Array, targets: jax.Array) -> Logprobs:
    """Like `score`, of `targets [T]`: `logits_of` makes the logits of `hidden [T, D]`, a slice of T at a time."""
    num_tokens = len(targets)
    padding = -num_tokens % SLICE
    hidden, targets = jnp.pad(hidden, ((0, padding), (0, 0))), jnp.pad(targets, (0, padding))
    slices = hidden.reshape(-1, SLICE, hidden.shape[-1]), targets.reshape(-1, SLICE)
    scores = jax.lax.map(lambda part: score(logits_of(part[0]), part[1]), slices)
    return Logprobs(*(jnp.reshape(x, (-1, *x.shape[2:]))[:num_tokens] for x in scores))


def top_k(logits: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """The k largest of each row `[S, V]`, largest first, and their ids; the lowest ids among equals.

    They lie in the k chunks with the largest maxima, so only those chunks are sorted, not the vocabulary.
    """
    chunks = in_chunks(logits, -jnp.inf)
    num_rows, num_chunks, chunk_size = chunks.shape
    _, best = jax.lax.top_k(jnp.max(chunks, axis=-1), min(k, num_chunks))
    best = jnp.sort(best, axis=-1)  # so that equal logits stay in the order of their ids
    candidates = chunks[jnp.arange(num_rows)[:, None], best].reshape(num_rows, -1)
    values, places = jax.lax.top_k(candidates, k)
    ids = jnp.take_along_axis(best, places // chunk_size, axis=-1) * chunk_size + places % chunk_size
    return values, ids.astype(jnp.int32)
