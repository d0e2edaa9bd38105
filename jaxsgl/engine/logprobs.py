"""Log-probabilities of tokens, and the most likely ones, inside jitted programs. Knows nothing about requests.

By the model's own logits, before penalties and temperature, in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxsgl.engine.sampler import in_chunks
from jaxsgl.request import MAX_TOP_LOGPROBS

SLICE = 128  # tokens of a prompt whose logits exist at a time: V float32 each


class Logprobs(NamedTuple):
    """Of n tokens; the arrays of `engine_api.TokenScores`."""

    logprobs: jax.Array
    top_ids: jax.Array
    top_logprobs: jax.Array


def score(logits: jax.Array, tokens: jax.Array) -> Logprobs:
    """Of `tokens [n]` and of the K most likely ones, by `logits [n, V]` float32."""
    total = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    top_logits, top_ids = top_k(logits, min(MAX_TOP_LOGPROBS, logits.shape[-1]))
    chosen = jnp.take_along_axis(logits, tokens[:, None], axis=-1)
    return Logprobs((chosen - total)[:, 0], top_ids, top_logits - total)


def score_in_slices(logits_of: Callable[[jax.Array], jax.Array], hidden: jax.Array, targets: jax.Array) -> Logprobs:
    """Of `targets [T]`, by the logits that `logits_of` makes of `hidden [T, D]`, a slice of T at a time."""
    num_tokens = len(targets)
    padding = -num_tokens % SLICE
    hidden, targets = jnp.pad(hidden, ((0, padding), (0, 0))), jnp.pad(targets, (0, padding))
    slices = hidden.reshape(-1, SLICE, hidden.shape[-1]), targets.reshape(-1, SLICE)
    scores = jax.lax.map(lambda part: score(logits_of(part[0]), part[1]), slices)
    return Logprobs(*(jnp.reshape(x, (-1, *x.shape[2:]))[:num_tokens] for x in scores))


def top_k(logits: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """The k largest of each row `[S, V]`, largest first, and their ids; the lowest ids among equals.

    They lie in the k chunks with the largest maxima, so only these are sorted, not the vocabulary.
    """
    chunks = in_chunks(logits, -jnp.inf)
    num_rows, num_chunks, chunk_size = chunks.shape
    _, best = jax.lax.top_k(jnp.max(chunks, axis=-1), min(k, num_chunks))
    best = jnp.sort(best, axis=-1)  # so that equal logits stay in the order of their ids
    candidates = chunks[jnp.arange(num_rows)[:, None], best].reshape(num_rows, -1)
    values, places = jax.lax.top_k(candidates, k)
    ids = jnp.take_along_axis(best, places // chunk_size, axis=-1) * chunk_size + places % chunk_size
    return values, ids.astype(jnp.int32)
