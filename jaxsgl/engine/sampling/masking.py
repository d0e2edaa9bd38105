"""Programs for steps whose tokens are held to grammars: masks between the forward and the sampling program.

    forward -> logits -> masked_step(logits, packed, masks) -> the sampling program of any other step -> tokens
                   '---> copy_step(logits), if log-probabilities are wanted ------> score_step(copy, tokens, ..)

Masks are written into the logits in place: on a CPU another array of that size costs four times as much as the mask.
Log-probabilities are the model's own, hence the copy. step_programs.py makes programs of these functions, for every
number of sequences that a step may have; an engine whose requests can't have grammars has none of them.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxsgl.batch.outputs import StepOutputs
from jaxsgl.engine.sampling import vocabulary
from jaxsgl.engine.sampling.outputs import of_choice
from jaxsgl.engine.tables import scored_ids
from jaxsgl.models.tensor_parallel import num_parts, part_index

MASKED_DONATES = (0,)  # logits
BEST = 2  # row of the packed sampling inputs that holds the most likely tokens


def masked_step(logits: jax.Array, packed: jax.Array, masks: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Takes from each row the tokens that its mask forbids; the results take the place of `logits` (donated), `packed`.

    Args:
      logits: `[S, V]` float32, this device's V.
      packed: `[SAMPLING_ROWS, S]` int32, as `pack_sampling` makes it.
      masks: `[S, ceil(V / 32)]` uint32, of the whole V; bit i % 32 of word i // 32 allows token i. No row is empty.
    """
    masked = jnp.where(_bits(masks, logits.shape[-1]), logits, -jnp.inf)
    return masked, packed.at[BEST].set(vocabulary.greedy(masked))


def copy_step(logits: jax.Array) -> jax.Array:
    """`logits`, to be kept."""
    return jnp.copy(logits)


def score_step(
    logits: jax.Array, tokens: jax.Array, edits: jax.Array, edit_rows: jax.Array, *, vocab_size: int | None = None
) -> StepOutputs[jax.Array]:
    """`of_choice` for `tokens [S]`, `edit_rows [S]` of `edits` and `logits [S, V]`, which no mask has changed.

    Padding as in `sample_step`.
    """
    return vocabulary.by_rows(of_choice, logits, tokens, scored_ids(edits, edit_rows), vocab_size=vocab_size)


def _bits(masks: jax.Array, vocab_size: int) -> jax.Array:
    """`[S, V]` bool, of this device's part of the vocabulary."""
    bits = (masks[:, :, None] >> jnp.arange(32, dtype=jnp.uint32)) & 1
    flat = bits.reshape(len(masks), -1) != 0
    if num_parts() == 1:
        return flat[:, :vocab_size]
    padding = max(vocab_size * num_parts() - flat.shape[1], 0)  # logits' padding, which no mask allows
    flat = jnp.pad(flat, ((0, 0), (0, padding)))
    return jax.lax.dynamic_slice_in_dim(flat, part_index() * vocab_size, vocab_size, axis=1)
