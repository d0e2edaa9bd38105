"""/v1/chat/completions: a conversation in the model's chat template, and the assistant's next turn."""

from __future__ import annotations

from collections.abc import AsyncGenerator

from fastapi import APIRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from jaxsgl.errors import InvalidRequest
from jaxsgl.frontend.front_end import FrontEnd
from jaxsgl.frontend.http.calls import start_all, until_gone, whole
from jaxsgl.frontend.http.openai.logprobs import chat_logprobs
from jaxsgl.frontend.http.openai.messages import chat_prompt
from jaxsgl.frontend.http.openai.models import check_model
from jaxsgl.frontend.http.openai.replies import (
    ChatChoice,
    ChatDelta,
    Delta,
    Head,
    Message,
    Usage,
    json_response,
    new_head,
)
from jaxsgl.frontend.http.openai.schemas import ChatRequest, sampling_of
from jaxsgl.frontend.http.openai.usage import UsageCounter
from jaxsgl.frontend.http.sse import DONE, EventStream, event
from jaxsgl.request import Request, SamplingParams
from jaxsgl.text.sample import Piece
from jaxsgl.text.tokenizer import Tokenizer


def add_routes(router: APIRouter, front_end: FrontEnd) -> None:
    """The endpoint."""

    @router.post("/v1/chat/completions")
    async def chat_completions(body: ChatRequest, http: HttpRequest) -> Response:
        """The assistant's next turn, whole or streamed."""
        check_model(front_end, body.model)
        generator = front_end.generator
        sampling = _sampling(body)
        prompt = chat_prompt(body, generator.model.tokenizer, with_tools=body.tool_choice != "none")
        kind = "chat.completion.chunk" if body.stream else "chat.completion"
        head = new_head("chatcmpl", kind, front_end.config.model_name)
        request = await generator.prepare(prompt, sampling, head.id, body.priority or 0)
        if body.stream:
            usage = UsageCounter(body.stream_options, [len(request.prompt_ids)], sampling.n)
            return EventStream(_stream(front_end, request, head, usage))
        return json_response(await until_gone(http, _whole(front_end, request, head)))


def _sampling(body: ChatRequest) -> SamplingParams:
    """Raises `InvalidRequest` for what would need a grammar, too."""
    if body.tool_choice not in (None, "auto", "none"):
        raise InvalidRequest("tool_choice can be auto or none: forcing a call needs a grammar, which isn't built yet")
    if body.response_format is not None and body.response_format.type != "text":
        raise InvalidRequest(
            f"response_format {body.response_format.type} needs a grammar, which isn't built yet: leave it out"
        )
    if body.top_logprobs and not body.logprobs:
        raise InvalidRequest("top_logprobs are given, but logprobs is not true: set it to true")
    max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    return sampling_of(body, max_tokens, (body.top_logprobs or 0) if body.logprobs else None)


async def _whole(front_end: FrontEnd, request: Request, head: Head) -> bytes:
    tokenizer = front_end.generator.model.tokenizer
    with start_all(front_end.generator, [request]) as generations:
        samples = await whole(generations)
    usage = Usage()
    choices: list[ChatChoice] = []
    for index, sample in enumerate(samples):
        assert sample.end is not None
        usage.add(sample.end, index)
        scores = (
            None if request.sampling.logprobs is None else chat_logprobs(tokenizer, sample.token_ids, sample.logprobs)
        )
        end = sample.end
        choices.append(ChatChoice(index, Message("assistant", sample.text), scores, end.reason.value, end.matched_stop))
    return head.answer(choices, usage)


async def _stream(
    front_end: FrontEnd, request: Request, head: Head, usage: UsageCounter
) -> AsyncGenerator[bytes, None]:
    tokenizer = front_end.generator.model.tokenizer
    started = [False] * request.sampling.n
    with start_all(front_end.generator, [request]) as generations:
        async for piece in generations[0]:
            index = piece.index
            role = b""
            if not started[index]:
                started[index] = True
                role = event(head.answer([ChatDelta(index, Delta("assistant", ""))], usage.in_chunk(index)))
            usage.add(index, piece)
            delta = _delta(request, tokenizer, index, piece)
            if delta is not None:
                yield role + event(head.answer([delta], usage.in_chunk(index)))
            elif role:
                yield role
    yield usage.last_chunk(head) + DONE


def _delta(request: Request, tokenizer: Tokenizer, index: int, piece: Piece) -> ChatDelta | None:
    """None for a piece without news, such as a part of a character."""
    scores = None
    if request.sampling.logprobs is not None:
        scores = chat_logprobs(tokenizer, piece.token_ids, piece.logprobs)
    if piece.end is not None:
        delta = Delta(content=piece.text or None)
        return ChatDelta(index, delta, scores, piece.end.reason.value, piece.end.matched_stop)
    if piece.text or scores is not None:
        return ChatDelta(index, Delta(content=piece.text), scores)
    return None
