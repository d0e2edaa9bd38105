"""From prompts to embeddings, class scores and ranks: the work that all protocols share.

Never knows a protocol; http and grpc call it. text/ranking.py says what is asked for a score, generation.py runs the
requests.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import msgspec

from jaxsgl.errors import EngineUnavailable, InvalidRequest
from jaxsgl.frontend.generation import Generation, Generator, Pause, RequestOptions, prompted_all
from jaxsgl.requests.outputs import Pooled, Pooling, PoolingSpec, embedding_of
from jaxsgl.requests.request import POOLING_SAMPLING, Request
from jaxsgl.text.prompts import IdsPrompt, Prompt
from jaxsgl.text.ranking import Pair, num_chars_of, ranking_of
from jaxsgl.text.tokenizer import Truncation


@dataclass(frozen=True)
class PoolingCall:
    """What the prompts of a call have in common.

    Attributes:
      request_id: of the call; its prompts are numbered.
      options: for all prompts or one for each; what to pool is set for them.
      rank: the replica that must serve them, or None if any may.
    """

    request_id: str
    options: Sequence[RequestOptions] = (RequestOptions(),)
    rank: int | None = None


@dataclass(frozen=True)
class PoolingAnswer:
    """What one prompt yields."""

    pooled: Pooled
    prompt_tokens: int
    cached_tokens: int


@dataclass(frozen=True)
class Scores:
    """Scores of pairs, with the tokens that their prompts took."""

    values: list[float]
    prompt_tokens: int
    cached_tokens: int


def spec_of(generator: Generator, use_activation: bool = True) -> PoolingSpec:
    """How the model pools; scores are logits without `use_activation`.

    Raises `InvalidRequest` if the server gives no embeddings.
    """
    limits = generator.model.info.limits
    if limits.pooling is None:
        raise InvalidRequest(
            "the server gives no embeddings or scores: start it with --enable-embeddings, or with --is-embedding for "
            "nothing else"
        )
    return limits.pooling if use_activation else msgspec.structs.replace(limits.pooling, activation="none")


async def pool(
    generator: Generator, prompts: Sequence[Prompt], call: PoolingCall, pooling: Pooling = Pooling()
) -> list[PoolingAnswer]:
    """Returns what each prompt yields, in their order. Raises as `Generator.prepare_all` and `run`."""
    spec_of(generator)
    options = [replace(given, pooling=pooling) for given in call.options]
    each = options * len(prompts) if len(options) == 1 else options
    requests = await generator.prepare_all(prompted_all(prompts, POOLING_SAMPLING, call.request_id, each))
    return await run(generator, requests, call.rank)


async def run(generator: Generator, requests: Sequence[Request], rank: int | None = None) -> list[PoolingAnswer]:
    """Submits prepared requests for pooling together, and waits for all. Leaving before their end aborts them.

    Raises as `Generator.start`, and `EngineUnavailable` if an order aborts one.
    """
    generations: list[Generation] = []
    pause = Pause()
    with contextlib.ExitStack() as stack:
        for request in requests:
            generations.append(stack.enter_context(generator.start(request, text=False, rank=rank)))
            await pause.after(1)
        return [await _answer(generation) for generation in generations]


async def _answer(generation: Generation) -> PoolingAnswer:
    await generation.whole()
    end = generation.ends[0]
    if generation.pooled is None:
        raise EngineUnavailable("an order to the server has aborted the request: send it again")
    return PoolingAnswer(generation.pooled, end.prompt_tokens, end.cached_tokens)


def vector_of(answer: PoolingAnswer, spec: PoolingSpec, dimensions: int | None = None) -> list[float]:
    """What SGLang calls an embedding: the logits of a classification head's classes, of other models the embedding.

    Rewards are read as they are, and gateways put logits through a softmax themselves.
    """
    if spec.labels:
        return list(answer.pooled.logits)
    vector: list[float] = embedding_of(answer.pooled, spec, dimensions).tolist()
    return vector


async def scores_of_pairs(
    generator: Generator,
    spec: PoolingSpec,
    pairs: Sequence[Pair],
    call: PoolingCall,
    instruction: str | None,
    truncation: Truncation | None,
) -> Scores:
    """How well the second text of each pair answers the first, by a model that pools as `spec` says."""
    model = generator.model
    context_length = model.info.limits.context_length
    work = partial(ranking_of, model.tokenizer, spec, pairs, instruction, context_length, truncation)
    ranking = await generator.off_loop(num_chars_of(pairs, instruction), work)
    answers = await pool(generator, [IdsPrompt(ids) for ids in ranking.prompts], call, ranking.pooling)
    return Scores(
        ranking.values([answer.pooled for answer in answers]),
        sum(answer.prompt_tokens for answer in answers),
        sum(answer.cached_tokens for answer in answers),
    )
