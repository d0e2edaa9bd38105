"""Answers /api/embed, and /api/embeddings, its older form: texts to vectors.

routes.py calls it; frontend/pooling.py does the work.
"""

from __future__ import annotations

import time
import uuid
from typing import Annotated

import msgspec
from pydantic import Field
from starlette.responses import Response

from jaxsgl.frontend.generation import FrontEnd
from jaxsgl.frontend.http.bodies import MAX_INT, Body, CacheSalt, LoraPath, Priority, one_error, options_of
from jaxsgl.frontend.http.openai.embeddings import MAX_INPUTS
from jaxsgl.frontend.http.openai.replies import encode, json_response
from jaxsgl.frontend.pooling import PoolingAnswer, PoolingCall, pool, spec_of
from jaxsgl.requests.outputs import PoolingSpec, check_dimensions, embedding_of
from jaxsgl.text.prompts import TextPrompt
from jaxsgl.text.tokenizer import Truncation


class Embedded(Body):
    """What both forms have in common."""

    model: str | None = None
    lora_path: LoraPath | None = None
    priority: Priority | None = None
    cache_salt: CacheSalt | None = None


class EmbedRequest(Embedded):
    """Body of /api/embed."""

    input: (
        Annotated[
            str | Annotated[list[str], Field(max_length=MAX_INPUTS, fail_fast=True)],
            one_error(f"must be a text, or a list of up to {MAX_INPUTS} texts"),
        ]
        | None
    ) = None
    truncate: Annotated[bool, Field(description="false: texts longer than the context are refused, not cut")] | None = (
        None
    )
    dimensions: (
        Annotated[int, Field(ge=1, le=MAX_INT, description="only of models whose embeddings may be cut")] | None
    ) = None


class PromptEmbeddingRequest(Embedded):
    """Body of /api/embeddings."""

    prompt: str | None = None


async def answer_embed(front_end: FrontEnd, body: EmbedRequest, adapter: str = "") -> Response:
    """Returns a vector of length 1 for each text. Raises `InvalidRequest`, and as `Generator.start`."""
    started_ns = time.perf_counter_ns()
    spec = msgspec.structs.replace(spec_of(front_end.generator), normalize=True)
    check_dimensions(spec, body.dimensions)
    texts = [body.input] if isinstance(body.input, str) and body.input else list(body.input or ())
    answers = await _pooled(front_end, body, texts, adapter, body.truncate is not False)

    def write() -> bytes:
        return encode(
            {
                "model": adapter or front_end.config.model_name,
                "embeddings": _vectors(answers, spec, body.dimensions),
                "total_duration": time.perf_counter_ns() - started_ns,
                "load_duration": 0,
                "prompt_eval_count": sum(answer.prompt_tokens for answer in answers),
            }
        )

    return json_response(await front_end.generator.off_loop(len(answers) * spec.dimension, write))


async def answer_prompt_embedding(front_end: FrontEnd, body: PromptEmbeddingRequest, adapter: str = "") -> Response:
    """Returns the vector of one text, as the model has it. Raises as `answer_embed`."""
    spec = spec_of(front_end.generator)
    answers = await _pooled(front_end, body, [body.prompt] if body.prompt else [], adapter)
    vectors = _vectors(answers, spec)
    return json_response(encode({"embedding": vectors[0] if vectors else []}))


async def _pooled(
    front_end: FrontEnd, body: Embedded, texts: list[str], adapter: str, cuts: bool = True
) -> list[PoolingAnswer]:
    """Returns what each text yields; one longer than the context loses its end if `cuts`."""
    if not texts:
        return []
    limits = front_end.generator.model.info.limits
    truncation = Truncation(min(limits.context_length, limits.pool_tokens), first=True) if cuts else None
    call = PoolingCall(f"ollama-{uuid.uuid4().hex}", options_of(body, [adapter]))
    return await pool(front_end.generator, [TextPrompt(text, truncation=truncation) for text in texts], call)


def _vectors(answers: list[PoolingAnswer], spec: PoolingSpec, dimensions: int | None = None) -> list[list[float]]:
    return [embedding_of(answer.pooled, spec, dimensions).tolist() for answer in answers]
