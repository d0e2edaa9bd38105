"""Pools the hidden states of a step's sequences, or yields those of its tokens, inside jitted programs.

The last token's state serves prompts whose beginning is cached; of a mean each step yields the sum over the tokens that
it computes. Logits of a few tokens need these rows of the vocabulary head, not the head. Knows neither requests nor how
prompts are cut; `step` calls it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxsgl.batch.inputs import StepArrays
from jaxsgl.engine import vocabulary
from jaxsgl.models import Decoder


class PooledSeqs(NamedTuple):
    """What a step that pools yields; see `engine_api.PooledRows`.

    Attributes:
      hidden: `[S, D]` float32.
      logits: `[S, L]` float32.
      log_total: `[S]` float32, or None.
    """

    hidden: jax.Array
    logits: jax.Array
    log_total: jax.Array | None


class TokenArrays(NamedTuple):
    """What a step yields of its tokens; see `engine_api.StatesRows`.

    Attributes:
      hidden: `[T, D]` float32.
      experts: `[T, layers, k]` int32, or None.
    """

    hidden: jax.Array
    experts: jax.Array | None


def token_arrays(hidden_TD: jax.Array, experts: Sequence[jax.Array]) -> TokenArrays:
    """`experts` are those of each layer `[T, k]`, in layers without `[T, 0]`; none of any layer: there are no experts.

    What is missing is -1, which is no expert.
    """
    most = max((chosen.shape[1] for chosen in experts), default=0)
    padded = [jnp.pad(chosen, ((0, 0), (0, most - chosen.shape[1])), constant_values=-1) for chosen in experts]
    return TokenArrays(hidden_TD.astype(jnp.float32), jnp.stack(padded, axis=1) if most else None)


def pool(
    model: Decoder, hidden_TD: jax.Array, last_SD: jax.Array, arrays: StepArrays[jax.Array], logits_SV: jax.Array | None
) -> PooledSeqs:
    """Pools as the model's spec says.

    Args:
      model: with `arch.pooling`.
      hidden_TD: of all tokens of the step, normalized.
      last_SD: of each sequence's last token.
      arrays: the step's.
      logits_SV: behind each sequence; None if the server doesn't generate.
    """
    spec = model.arch.pooling
    assert spec is not None
    hidden = _sums(hidden_TD, arrays.query_offsets) if spec.kind == "mean" else last_SD.astype(jnp.float32)
    if spec.labels:
        logits = model.class_logits(last_SD)
    elif spec.token_logits:
        assert arrays.label_ids is not None
        logits = model.logits_of(last_SD, arrays.label_ids)
    else:
        logits = jnp.zeros((len(last_SD), 0), jnp.float32)
    log_total = None
    if logits_SV is not None:
        log_total = vocabulary.by_rows(_log_total, logits_SV, vocab_size=model.arch.vocab_size)
    return PooledSeqs(hidden, logits, log_total)


def _log_total(logits_SV: jax.Array) -> jax.Array:
    return jax.nn.logsumexp(logits_SV, axis=-1)


def _sums(hidden_TD: jax.Array, query_offsets: jax.Array) -> jax.Array:
    """`[S, D]` float32 sums over the tokens of each sequence; padding tokens come after all of them."""
    num_seqs = len(query_offsets) - 1
    seqs_T = jnp.searchsorted(query_offsets[1:], jnp.arange(len(hidden_TD)), side="right")
    sums_SD = jnp.zeros((num_seqs, hidden_TD.shape[1]), jnp.float32)
    return sums_SD.at[seqs_T].add(hidden_TD.astype(jnp.float32), mode="drop")
