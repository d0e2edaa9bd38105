"""Chooses the next token from logits, scores tokens, and says which drafts stand, inside jitted programs.

A token is drawn by inverting the cumulated weights, without a sort; `filters` says which tokens have one. A drawn token
depends on the row's logits, parameters, seed and position alone, not on other rows, nor on whether those filter.

Log-probabilities are those of the model's own logits, before penalties and temperature, in float32.

A verify step computes the last known token of each sequence and its drafts, and chooses a token after each of them as
any other step would: by the same logits, parameters, seed and position. A draft stands if it is the token that was
chosen in the place before it, and all drafts before it stand. So a sequence gets the tokens that it would get without
drafts, whatever was proposed, and one more than drafts stand.

    places     last   draft   draft   draft        of one sequence
    chosen       a      b       c       d
    stand               a       b       x          a, b stand, x is not c: the sequence gets a, b, c

Greedy batches do this in their forward program, others after their tokens are chosen. Knows no requests and no buckets;
`step` and `step_programs` call it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxsgl.batch.inputs import StepArrays
from jaxsgl.batch.sampling import SamplingArrays
from jaxsgl.engine.sampling.filters import Tokens, keep_limit
from jaxsgl.requests.request import MAX_TOP_LOGPROBS
from pallas_kernels.sums import log_sum_exp, row_sums
from pallas_kernels.target import target_device

MIN_TEMPERATURE = 1e-5  # below this a row is greedy: float32 has no room for the quotient
MIN_CHUNK, MAX_CHUNK = 32, 256  # tokens
RUN_ROWS = 3  # of `pack_runs`
ACCEPTED_DONATES = (2,)  # last_tokens
NOT_KEPT = -1

jax.tree_util.register_dataclass(SamplingArrays)


def greedy(logits: jax.Array) -> jax.Array:
    """The most likely token of each row of `logits [S, V]`, the lowest id among equals; int32 `[S]`.

    Finds the chunk, then the token in it: XLA's argmax over a whole vocabulary takes 10 times longer on CPU. On a TPU
    chunks would cost two copies of the logits, transposed for each other; two passes over the logits as they lie find
    the maximum and its place. (XLA for TPUs rounds the maxima of an argmax to bfloat16 where nothing else reads them.)
    """
    if target_device().platform == "tpu":
        ids = jnp.arange(logits.shape[-1], dtype=jnp.int32)
        is_best = logits == jnp.max(logits, axis=-1, keepdims=True)
        return jnp.min(jnp.where(is_best, ids, ids[-1]), axis=-1)
    chunks = in_chunks(logits, -jnp.inf)
    chunk = jnp.argmax(jnp.max(chunks, axis=-1), axis=-1)
    inside = chunks[jnp.arange(len(chunks)), chunk]
    return (chunk * chunks.shape[-1] + jnp.argmax(inside, axis=-1)).astype(jnp.int32)


def sample(
    logits: jax.Array, sampling: SamplingArrays[jax.Array], positions: jax.Array, best: jax.Array, *, filtered: bool
) -> jax.Array:
    """Draws one token per row; int32 `[S]`. Rows with temperature 0 or top_k 1 take the most likely one.

    Args:
      logits: `[S, V]` float32.
      sampling: `[S]` each.
      positions: `[S]` int32, the position of the drawn token in its sequence.
      best: `[S]` int32, the most likely token of each row, as `greedy` finds it.
      filtered: whether any row may filter by top-k, top-p or min-p. A row without filters draws the same token either
        way; without them the logits are read once.
    """
    top = jnp.take_along_axis(logits, best[:, None], axis=-1)[:, 0]
    tokens = Tokens(in_chunks(logits, -jnp.inf), top, 1 / jnp.maximum(sampling.temperature, MIN_TEMPERATURE))
    limit = keep_limit(tokens, sampling, target_device().platform) if filtered else None
    drawn = draw(tokens, limit, uniform(sampling.seeds, positions), otherwise=best)
    return jnp.where((sampling.temperature < MIN_TEMPERATURE) | (sampling.top_k == 1), best, drawn)


def uniform(seeds: jax.Array, positions: jax.Array) -> jax.Array:
    """One number in [0, 1) per row: Threefry (Salmon et al. 2011), keyed by seed and position; float32 `[S]`."""
    bits = jax.lax.bitcast_convert_type(jnp.stack([seeds, positions], axis=-1), jnp.uint32)
    keys = jax.random.wrap_key_data(bits, impl="threefry2x32")
    return jax.vmap(jax.random.uniform)(keys)


def draw(tokens: Tokens, limit: jax.Array | None, where: jax.Array, *, otherwise: jax.Array) -> jax.Array:
    """The token at `where [S]` (in [0, 1)) of the cumulated weights of tokens within `limit [S]`; int32 `[S]`.

    Cumulates sums of chunks, then inside one chunk, so that the logits are read once. Where rounding leaves no token
    (about once in 10^7 draws), takes `otherwise [S]`.
    """
    chunk_ends = jnp.cumsum(row_sums(_kept_weights(tokens, limit)), axis=-1)
    num_rows, num_chunks, chunk_size = tokens.chunks.shape
    goal = where * chunk_ends[:, -1]
    chunk = jnp.minimum(jnp.sum(chunk_ends <= goal[:, None], axis=-1), num_chunks - 1)

    before = jnp.where(chunk > 0, chunk_ends[jnp.arange(num_rows), chunk - 1], 0.0)
    inside = _kept_weights(tokens.at(chunk[:, None]), limit)[:, 0]
    passed = (jnp.cumsum(inside, axis=-1) > (goal - before)[:, None]) & (inside > 0)
    token = chunk * chunk_size + jnp.argmax(passed, axis=-1)
    return jnp.where(jnp.any(passed, axis=-1), token, otherwise).astype(jnp.int32)


def _kept_weights(tokens: Tokens, limit: jax.Array | None) -> jax.Array:
    """The tokens' weights, 0 for those beyond `limit [S]`: `[S, C, L]`."""
    weights = tokens.weights()
    return weights if limit is None else jnp.where(tokens.distances() <= limit[:, None, None], weights, 0.0)


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
    """Log-probabilities of n tokens on the device; see `StepOutputs`."""

    logprobs: jax.Array
    top_ids: jax.Array
    top_logprobs: jax.Array
    named_logprobs: jax.Array | None = None


def score(logits: jax.Array, tokens: jax.Array, named: jax.Array | None = None) -> Logprobs:
    """Log-probabilities of `tokens [n]`, of the K likeliest and of `named [n, A]`, by float32 `logits [n, V]`."""
    total = log_sum_exp(logits, keepdims=True)
    top_logits, top_ids = top_k(logits, min(MAX_TOP_LOGPROBS, logits.shape[-1]))
    chosen = jnp.take_along_axis(logits, tokens[:, None], axis=-1)
    of_named = None if named is None else jnp.take_along_axis(logits, named, axis=-1) - total
    return Logprobs((chosen - total)[:, 0], top_ids, top_logits - total, of_named)


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


def pack_runs(arrays: StepArrays[Any]) -> jax.Array:
    """`[RUN_ROWS, T]` int32 for `accept`: token ids, the place of the first token of each one's sequence, its row."""
    place = jnp.arange(len(arrays.token_ids), dtype=jnp.int32)
    offsets, rows = arrays.query_offsets, arrays.token_rows
    assert rows is not None
    first = jnp.max(jnp.where(offsets <= place[:, None], offsets, 0), axis=1)
    return jnp.stack([arrays.token_ids, first, rows])


def accept(tokens: jax.Array, runs: jax.Array, last_tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
    """`(last_tokens, tokens)`: `tokens [T]`, chosen after each place, that their sequences keep; the others are -1.

    The last one that a sequence keeps goes to its row of `last_tokens [rows + 1]`. `runs` is of `pack_runs`.
    """
    ids, first, rows = runs
    place = jnp.arange(len(tokens), dtype=jnp.int32)
    misses = (place > first) & (ids != jnp.roll(tokens, 1))
    # By comparing all pairs, since XLA's CPU back end makes four kernels of a cumulated sum.
    passed = (place > first[:, None]) & (place <= place[:, None])
    kept = ~jnp.any(passed & misses, axis=1)
    goes_on = jnp.roll(kept & (place > first), -1).at[-1].set(False)
    is_last = kept & ~goes_on
    dummy_row = len(last_tokens) - 1
    last_tokens = last_tokens.at[jnp.where(is_last, rows, dummy_row)].set(tokens)
    return last_tokens, jnp.where(kept, tokens, NOT_KEPT)
