"""What a step yields besides tokens, computed inside jitted programs as the table of `batch/outputs.py` says.

    of_tokens   what the layers computed for single tokens: hidden states and experts
    of_heads    what heads make of that: scores of the prompt, pooled states, logits of labels
    of_choice   scores of the tokens that were chosen, in the program that chooses them

The last token's state serves prompts whose beginning is cached; of a mean each step yields the sum over the tokens that
it computes, or the mean of a whole prompt. Logits of a few tokens need these rows of the vocabulary head, not the head.
Knows neither requests nor how prompts are cut; `step` calls it.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jaxsgl.batch.inputs import StepArrays
from jaxsgl.batch.outputs import StepOutputs
from jaxsgl.engine.sampling import vocabulary
from jaxsgl.engine.sampling.sampler import score
from jaxsgl.models import Decoder
from jaxsgl.requests.outputs import PoolingSpec
from pallas_kernels.sums import log_sum_exp


def of_tokens(hidden_TD: jax.Array, experts: Sequence[jax.Array]) -> StepOutputs[jax.Array]:
    """`hidden` and `experts`, of the experts of each layer `[T, k]`, in layers without `[T, 0]`.

    What is missing is -1, which is no expert. If no layer has any, there is no such array.
    """
    most = max((chosen.shape[1] for chosen in experts), default=0)
    padded = [jnp.pad(chosen, ((0, 0), (0, most - chosen.shape[1])), constant_values=-1) for chosen in experts]
    return StepOutputs(hidden=hidden_TD.astype(jnp.float32), experts=jnp.stack(padded, axis=1) if most else None)


def of_heads(
    model: Decoder,
    hidden_TD: jax.Array,
    last_SD: jax.Array,
    logits_SV: jax.Array | None,
    arrays: StepArrays[jax.Array],
    outputs: StepOutputs[jax.Array],
) -> StepOutputs[jax.Array]:
    """`outputs` with the scores of the prompt if the step has targets, and pooled states if it has labels.

    Args:
      model: with `arch.pooling`.
      hidden_TD: of all tokens of the step, normalized.
      last_SD: of each sequence's last token.
      logits_SV: after each sequence; None if the server doesn't generate.
      arrays: the step's.
      outputs: of its tokens.
    """
    if arrays.targets is not None:
        scores = vocabulary.score_in_slices(model.logits, hidden_TD, arrays.targets, model.arch.vocab_size)
        outputs = outputs._replace(
            prompt_logprobs=scores.logprobs, prompt_top_ids=scores.top_ids, prompt_top_logprobs=scores.top_logprobs
        )
    if arrays.label_ids is None:
        return outputs
    spec = model.arch.pooling
    assert spec is not None
    pooled = _pooled(spec, hidden_TD, last_SD, arrays.query_offsets)
    if spec.labels:
        logits = model.class_logits(pooled.astype(hidden_TD.dtype) if spec.sees_whole else last_SD)
    elif spec.token_logits:
        logits = model.logits_of(last_SD, arrays.label_ids)
    else:
        logits = jnp.zeros((len(last_SD), 0), jnp.float32)
    if model.dense_net is not None:
        pooled = model.dense_net(pooled)
    log_total = None
    if logits_SV is not None:
        log_total = vocabulary.by_rows(_log_total, logits_SV, vocab_size=model.arch.vocab_size)
    return outputs._replace(pooled=pooled, label_logits=logits, log_total=log_total)


def of_choice(logits_SV: jax.Array, tokens_S: jax.Array, named_SA: jax.Array) -> StepOutputs[jax.Array]:
    """The log-probabilities of `tokens_S`, and of `named_SA` in their places, by the whole vocabulary's `logits_SV`."""
    return StepOutputs(**score(logits_SV, tokens_S, named_SA)._asdict())


def _log_total(logits_SV: jax.Array) -> jax.Array:
    return log_sum_exp(logits_SV)


def _pooled(spec: PoolingSpec, hidden_TD: jax.Array, last_SD: jax.Array, query_offsets: jax.Array) -> jax.Array:
    """`[S, D]` float32: of each sequence the state of a token, or the sum of all that the step computes; their mean
    where prompts are never cut.
    """
    if spec.kind == "last":
        return last_SD.astype(jnp.float32)
    if spec.kind == "first":
        return hidden_TD.at[query_offsets[:-1]].get(mode="clip").astype(jnp.float32)
    sums_SD = _sums(hidden_TD, query_offsets)
    return sums_SD / jnp.maximum(jnp.diff(query_offsets), 1)[:, None] if spec.sees_whole else sums_SD


def _sums(hidden_TD: jax.Array, query_offsets: jax.Array) -> jax.Array:
    """`[S, D]` float32 sums over the tokens of each sequence; padding tokens come after all of them.

    A product with ones and zeros: a GPU would add rows up one after the other, outside of its command buffer.
    """
    places_T = jnp.arange(len(hidden_TD))
    is_own_ST = (places_T >= query_offsets[:-1, None]) & (places_T < query_offsets[1:, None])
    rows_TD = jnp.where((places_T < query_offsets[-1])[:, None], hidden_TD.astype(jnp.float32), 0.0)
    return jnp.matmul(is_own_ST.astype(jnp.float32), rows_TD, precision="highest")
