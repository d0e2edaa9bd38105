"""Which drafts of a verify step stand, inside jitted programs: those that were drawn, up to the first that was not.

A verify step computes the last known token of each sequence and its drafts, and chooses a token after each of them as
any other step would: by the same logits, parameters, seed and position. A draft stands if it is the token that was
chosen in the place before it, and all drafts before it stand. So a sequence gets the tokens that it would get without
drafts, whatever was proposed, and one more than drafts stand.

    places     last   draft   draft   draft        of one sequence
    chosen       a      b       c       d
    stand               a       b       x          a, b stand, x is not c: the sequence gets a, b, c

Greedy batches do this in their forward program, others after their tokens are chosen. Called by `step` and
`step_programs`.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jaxsgl.batch.inputs import StepArrays

RUN_ROWS = 3  # of `pack_runs`
ACCEPTED_DONATES = (2,)  # last_tokens
NOT_KEPT = -1


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
