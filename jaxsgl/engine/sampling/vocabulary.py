"""Chooses and scores tokens by logits of which each device has a part of the vocabulary, inside jitted programs.

Greedy tokens need each device's best one, two numbers a row. For anything else the logits of some rows come together on
each device, all of their vocabulary: an exchange in which a device receives as many logits as it has, where gathering
all rows on all devices would take as many times that as there are devices. The rows are then chosen from by `sampler`
as on one device, so that tokens are the same. On one device these are the functions of `sampler`. Called by `step`.

Where the devices' number doesn't divide the vocabulary, the last parts end in padding. Its logits are -inf, which no
greedy token has, and no row that comes together has them: it is cut to the vocabulary's V, `vocab_size`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from jaxsgl.batch.sampling import SamplingArrays
from jaxsgl.engine.sampling import sampler
from jaxsgl.engine.sampling.sampler import Logprobs
from jaxsgl.models.tensor_parallel import TENSOR_AXIS, all_parts, num_parts, of_this_part, part_index

SLICE = 128  # tokens of a prompt whose logits exist at a time: V float32 each

ResultT = TypeVar("ResultT")


def greedy(logits: jax.Array) -> jax.Array:
    """The most likely token of each row, the lowest id among equals; int32 `[S]`. See `sampler.greedy`.

    logits: `[S, V]` float32, this device's V.
    """
    best = sampler.greedy(logits)
    if num_parts() == 1:
        return best
    value = jnp.take_along_axis(logits, best[:, None], axis=-1)[:, 0]
    ours = jnp.stack([jax.lax.bitcast_convert_type(value, jnp.int32), best + part_index() * logits.shape[-1]])
    bits, ids = jnp.split(all_parts(ours[None]), 2, axis=1)  # [devices, 1, S] each
    values = jax.lax.bitcast_convert_type(bits[:, 0], jnp.float32)
    winner = jnp.argmax(values, axis=0)  # the first of equals has the lowest ids
    return jnp.take_along_axis(ids[:, 0], winner[None], axis=0)[0]


def sample(
    logits: jax.Array,
    sampling: SamplingArrays[jax.Array],
    positions: jax.Array,
    best: jax.Array,
    *,
    filtered: bool,
    vocab_size: int | None = None,
) -> jax.Array:
    """See `sampler.sample`; logits: `[S, V]` float32, this device's V."""
    function = partial(sampler.sample, filtered=filtered)
    return by_rows(function, logits, sampling, positions, best, vocab_size=vocab_size)


def by_rows(
    function: Callable[..., ResultT], logits: jax.Array, *arguments: Any, vocab_size: int | None = None
) -> ResultT:
    """`function(logits, *arguments)`, which treats each row by itself; each device computes some of the rows.

    Args:
      function: takes logits of n rows over the whole vocabulary, and n rows of all else; returns a tree of such.
      logits: `[S, V]`, this device's V.
      arguments: trees of arrays `[S, ..]` that are the same on each device.
      vocab_size: V of the model; None: no device has padding.
    """
    if num_parts() == 1:
        return function(logits, *arguments)
    num_rows = len(logits)
    padding = -num_rows % num_parts()

    def padded(x: jax.Array) -> jax.Array:
        return jnp.pad(x, ((0, padding), *((0, 0) for _ in x.shape[1:]))) if padding else x

    whole = jax.lax.all_to_all(padded(logits), TENSOR_AXIS, split_axis=0, concat_axis=1, tiled=True)
    if vocab_size not in (None, whole.shape[1]):
        whole = whole[:, :vocab_size]
    ours = jax.tree.map(lambda x: of_this_part(padded(x)), arguments)
    result: ResultT = jax.tree.map(lambda x: all_parts(x)[:num_rows], function(whole, *ours))
    return result


def score_in_slices(
    logits_of: Callable[[jax.Array], jax.Array],
    hidden: jax.Array,
    targets: jax.Array,
    vocab_size: int | None = None,
) -> Logprobs:
    """Like `sampler.score`, of `targets [T]`: `logits_of` makes the logits of `hidden [T, D]`, a slice at a time."""
    num_tokens = len(targets)
    padding = -num_tokens % SLICE
    hidden, targets = jnp.pad(hidden, ((0, padding), (0, 0))), jnp.pad(targets, (0, padding))
    slices = hidden.reshape(-1, SLICE, hidden.shape[-1]), targets.reshape(-1, SLICE)

    def score(part: tuple[jax.Array, jax.Array]) -> Logprobs:
        return by_rows(sampler.score, logits_of(part[0]), part[1], vocab_size=vocab_size)

    scores = jax.lax.map(score, slices)
    found: Logprobs = jax.tree.map(lambda x: jnp.reshape(x, (-1, *x.shape[2:]))[:num_tokens], scores)
    return found
