"""Answers /api/chat and /api/generate, whole or as a stream of lines of JSON.

A turn is prepared as OpenAI's chat.py does it; a text that is continued as it is (raw, suffix, a model without a chat
template), as completions.py does. conversation.py reads bodies, an `Answer` writes the lines. routes.py calls it.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from functools import partial

from starlette.responses import Response

from jaxsgl.frontend.generation import FrontEnd, Prompted
from jaxsgl.frontend.http.bodies import options_of
from jaxsgl.frontend.http.calls import EventStream, start_all
from jaxsgl.frontend.http.ollama.answers import Answer, Layout, Said, as_message, as_response, line
from jaxsgl.frontend.http.ollama.conversation import (
    OllamaChatRequest,
    OllamaGenerateRequest,
    chat_of,
    completion_of,
    max_tokens_of,
)
from jaxsgl.frontend.http.ollama.models import check_can
from jaxsgl.frontend.http.openai.chat import prepare_chat
from jaxsgl.frontend.http.openai.completions import with_infill_ends
from jaxsgl.frontend.http.openai.replies import json_response
from jaxsgl.frontend.http.openai.schemas import sampling_of
from jaxsgl.requests.request import Request
from jaxsgl.text.answer import Parser, PlainParser
from jaxsgl.text.prompts import TextPrompt
from jaxsgl.text.sample import join

LINES = "application/x-ndjson"


@dataclass(frozen=True)
class _Prepared:
    """A request, and how to read its answer."""

    request: Request
    parser: Parser
    visible: frozenset[int] = frozenset()
    thinks: bool = True


async def answer_chat(front_end: FrontEnd, body: OllamaChatRequest, adapter: str = "") -> Response:
    """Returns the assistant's next turn, of the model with `adapter`.

    Raises `InvalidRequest`, and as `Generator.start`.
    """
    if not body.messages:
        return _loaded(front_end, body, adapter, as_message)
    started_ns = time.perf_counter_ns()
    check_can(front_end, tools=bool(body.tools), thinking=bool(body.think))
    return await _answer(front_end, body, adapter, await _turn(front_end, body, adapter), as_message, started_ns)


async def answer_generate(front_end: FrontEnd, body: OllamaGenerateRequest, adapter: str = "") -> Response:
    """Returns what follows the prompt. Otherwise as `answer_chat`."""
    if not (body.prompt or body.suffix):
        return _loaded(front_end, body, adapter, as_response)
    started_ns = time.perf_counter_ns()
    if body.raw or body.suffix or not front_end.generator.model.tokenizer.has_chat_template:
        prepared = await _text(front_end, body, adapter)
    else:
        check_can(front_end, thinking=bool(body.think))
        prepared = await _turn(front_end, body, adapter)
    return await _answer(front_end, body, adapter, prepared, as_response, started_ns)


def _loaded(
    front_end: FrontEnd, body: OllamaChatRequest | OllamaGenerateRequest, adapter: str, layout: Layout
) -> Response:
    """Answers what asks for no token, but that the model be loaded. Raises `EngineUnavailable` until it is."""
    check_can(front_end, completion=True)
    loaded = line(adapter or front_end.config.model_name, layout(Said()), done=True, done_reason="load")
    return json_response(loaded) if body.stream is False else Response(loaded, media_type=LINES)


async def _turn(front_end: FrontEnd, body: OllamaChatRequest | OllamaGenerateRequest, adapter: str) -> _Prepared:
    request, form = await prepare_chat(front_end, chat_of(body), _new_id(), adapter)
    return _Prepared(request, form.parser(), form.visible, form.include)


async def _text(front_end: FrontEnd, body: OllamaGenerateRequest, adapter: str) -> _Prepared:
    model, completion = front_end.generator.model, completion_of(body)
    sampling = sampling_of(completion, max_tokens_of(body), completion.logprobs, None, model.sampling_defaults)
    if body.suffix:
        sampling = with_infill_ends(sampling, model.tokenizer)
    (options,) = options_of(completion, [adapter])
    prompt = TextPrompt(body.prompt or "", suffix=body.suffix or "")
    request = await front_end.generator.prepare(Prompted(prompt, sampling, _new_id(), options))
    return _Prepared(request, PlainParser())


def _new_id() -> str:
    return f"ollama-{uuid.uuid4().hex}"


async def _answer(
    front_end: FrontEnd,
    body: OllamaChatRequest | OllamaGenerateRequest,
    adapter: str,
    prepared: _Prepared,
    layout: Layout,
    started_ns: int,
) -> Response:
    name, tokenizer = adapter or front_end.config.model_name, front_end.generator.model.tokenizer
    answer = Answer(name, layout, prepared.parser, tokenizer, started_ns, prepared.thinks)
    if body.stream is not False:
        return EventStream(_lines(front_end, prepared, answer), LINES)
    return json_response(await _whole(front_end, prepared, answer))


async def _whole(front_end: FrontEnd, prepared: _Prepared, answer: Answer) -> bytes:
    generator = front_end.generator
    async with start_all(generator, [prepared.request], visible=prepared.visible) as generations:
        piece = join([answer.timed(piece) async for piece in generations[0]])
    return await generator.off_loop(piece.num_scores, partial(answer.whole, piece))


async def _lines(front_end: FrontEnd, prepared: _Prepared, answer: Answer) -> AsyncGenerator[bytes, None]:
    generator = front_end.generator
    async with start_all(generator, [prepared.request], visible=prepared.visible) as generations:
        async for piece in generations[0]:
            write = partial(answer.lines, answer.timed(piece))
            if lines := await generator.off_loop(piece.num_scores, write) if piece.logprobs else write():
                yield lines
