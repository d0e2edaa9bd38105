"""Answers /v1/embeddings: texts or token ids to vectors, as numbers or as base64 of float32.

routes.py calls `answer_embeddings`; frontend/pooling.py does the work.
"""

from __future__ import annotations

import base64
from typing import Annotated, Any, Literal

import msgspec
from pydantic import Field
from starlette.responses import Response

from jaxsgl.errors import InvalidRequest
from jaxsgl.frontend.adapters import adapters_of
from jaxsgl.frontend.generation import FrontEnd
from jaxsgl.frontend.http.bodies import (
    MAX_INT,
    CacheSalt,
    LoraPaths,
    Priority,
    TokenIds,
    Truncated,
    one_error,
    options_of,
    refuse_others,
    truncation_of,
)
from jaxsgl.frontend.http.openai.chat import chat_prompt
from jaxsgl.frontend.http.openai.completions import prompts_of
from jaxsgl.frontend.http.openai.replies import PromptDetails, encode, json_response, new_head
from jaxsgl.frontend.http.openai.schemas import ChatTemplate, Messages, TokenizeRequest
from jaxsgl.frontend.pooling import PoolingAnswer, PoolingCall, pool, spec_of
from jaxsgl.requests.outputs import Floats, PoolingSpec, check_dimensions, embedding_of
from jaxsgl.text.prompts import Prompt
from jaxsgl.text.tokenizer import Truncation

MAX_INPUTS = 2048  # OpenAI's
Inputs = Annotated[
    str
    | Annotated[list[str], Field(min_length=1, max_length=MAX_INPUTS, fail_fast=True)]
    | TokenIds
    | Annotated[list[TokenIds], Field(min_length=1, max_length=MAX_INPUTS, fail_fast=True)],
    one_error(
        "must be a text, a list of texts, a list of token ids, or a list of lists of token ids; "
        f"{MAX_INPUTS} texts or lists at most"
    ),
]


class Pooled(Truncated):
    """Inputs, or a chat, whose text is pooled as vLLM does."""

    input: Inputs | None = None
    messages: Annotated[Messages, Field(description="in place of input: a chat in the model's template")] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: ChatTemplate | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_special_tokens: bool | None = None


class EmbeddingRequest(Pooled):
    """Body of /v1/embeddings."""

    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    embed_dtype: (
        Annotated[
            Literal["float32"],
            one_error("must be float32: no other numbers are written"),
            Field(description="of base64"),
        ]
        | None
    ) = None
    endianness: (
        Annotated[
            Literal["native", "little"],
            one_error("must be little: the bytes of numbers stand in that order"),
            Field(description="of base64"),
        ]
        | None
    ) = None
    dimensions: (
        Annotated[int, Field(ge=1, le=MAX_INT, description="only of models whose embeddings may be cut")] | None
    ) = None
    user: str | None = None
    normalize: Annotated[bool, Field(description="false: leave the vectors at their length")] | None = None
    use_activation: Annotated[bool, Field(description="vLLM's newer word for normalize")] | None = None
    priority: Priority | None = None
    cache_salt: CacheSalt | None = None
    extra_key: Annotated[CacheSalt, Field(description="SGLang's word for cache_salt")] | None = None
    lora_path: LoraPaths | None = None


class PromptUsage(msgspec.Struct):
    """Tokens of all prompts."""

    prompt_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails


class Embedding(msgspec.Struct):
    """The vector of one input."""

    object: str
    index: int
    embedding: list[float] | str


class EmbeddingList(msgspec.Struct):
    """The answer."""

    object: str
    data: list[Embedding]
    model: str
    usage: PromptUsage


async def answer_embeddings(front_end: FrontEnd, body: EmbeddingRequest) -> Response:
    """Returns the answer. Raises `InvalidRequest`, `NotFound`, and as `Generator.start`."""
    refuse_others(body)
    generator = front_end.generator
    spec = spec_of(generator)
    check_dimensions(spec, body.dimensions)
    truncation = truncation_of(body, generator.model.info.limits)
    prompts = pooled_prompts(front_end, body, truncation)
    options = options_of(body, adapters_of(front_end, body.model, body.lora_path, len(prompts)))
    call = PoolingCall(new_head("embd", "list", "").id, options)
    answers = await pool(generator, prompts, call)
    if body.normalize is False or body.use_activation is False:
        spec = msgspec.structs.replace(spec, normalize=False)

    def write() -> bytes:
        return encode(_answer(answers, spec, body, answering(front_end, call)))

    return json_response(await generator.off_loop(len(answers) * spec.dimension, write))


def pooled_prompts(front_end: FrontEnd, body: Pooled, truncation: Truncation | None) -> list[Prompt]:
    """Raises `InvalidRequest`. By default the template begins no turn, and the tokenizer adds nothing to its text."""
    if (body.input is None) == (body.messages is None):
        raise InvalidRequest("either input or messages must be given: send one of them")
    if body.input is not None:
        return prompts_of(body.input, body.add_special_tokens is not False, truncation)
    chat = TokenizeRequest.model_construct(
        messages=body.messages,
        add_generation_prompt=bool(body.add_generation_prompt),
        continue_final_message=body.continue_final_message,
        chat_template=body.chat_template,
        chat_template_kwargs=body.chat_template_kwargs,
        add_special_tokens=body.add_special_tokens,
    )
    tokenizer, trusts = front_end.generator.model.tokenizer, front_end.config.trust_request_chat_template
    prompt = chat_prompt(chat, tokenizer, truncation=truncation, trusts_template=trusts)
    if prompt.media:
        raise InvalidRequest("the messages have pictures or sounds, but texts alone are taken: leave them out")
    return [prompt]


def _answer(answers: list[PoolingAnswer], spec: PoolingSpec, body: EmbeddingRequest, model: str) -> EmbeddingList:
    as_text = body.encoding_format == "base64"
    vectors = [embedding_of(answer.pooled, spec, body.dimensions) for answer in answers]
    data = [
        Embedding("embedding", index, base64_of(vector) if as_text else vector.tolist())
        for index, vector in enumerate(vectors)
    ]
    return EmbeddingList("list", data, model, usage_of(answers))


def answering(front_end: FrontEnd, call: PoolingCall) -> str:
    """The name of what answers `call`: that of an adapter if all its prompts have it, otherwise the model's."""
    adapter, *others = {options.adapter for options in call.options}
    return adapter if adapter and not others else front_end.config.model_name


def base64_of(vector: Floats) -> str:
    """The little-endian bytes of `vector`, as OpenAI's clients read them."""
    return base64.b64encode(vector.astype("<f4").tobytes()).decode()


def usage_of(answers: list[PoolingAnswer]) -> PromptUsage:
    """The tokens of all prompts of a call."""
    return prompt_usage(
        sum(answer.prompt_tokens for answer in answers), sum(answer.cached_tokens for answer in answers)
    )


def prompt_usage(num_tokens: int, num_cached: int) -> PromptUsage:
    """The usage of a call without output."""
    return PromptUsage(num_tokens, num_tokens, PromptDetails(num_cached))
