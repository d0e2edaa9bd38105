"""/v1/completions: prompts as texts or token ids, continued; or scored, with echo."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator

from fastapi import APIRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from jaxsgl.errors import InvalidRequest
from jaxsgl.frontend.front_end import FrontEnd
from jaxsgl.frontend.http.calls import check_num_choices, pieces, start_all, until_gone, whole
from jaxsgl.frontend.http.openai.choices import Choices
from jaxsgl.frontend.http.openai.models import check_model
from jaxsgl.frontend.http.openai.replies import Head, json_response, new_head
from jaxsgl.frontend.http.openai.schemas import CompletionRequest, sampling_of
from jaxsgl.frontend.http.openai.usage import UsageCounter
from jaxsgl.frontend.http.sse import DONE, EventStream, event
from jaxsgl.request import Request, SamplingParams
from jaxsgl.text.prompts import IdsPrompt, Prompt, TextPrompt

DEFAULT_MAX_TOKENS = 16  # OpenAI's


def add_routes(router: APIRouter, front_end: FrontEnd) -> None:
    """The endpoint."""

    @router.post("/v1/completions")
    async def completions(body: CompletionRequest, http: HttpRequest) -> Response:
        """Continues each prompt n times; choices are numbered prompt by prompt. Whole or streamed."""
        check_model(front_end, body.model)
        prompts = _prompts(body)
        sampling = _sampling(body)
        check_num_choices(len(prompts), sampling.n)
        head = new_head("cmpl", "text_completion", front_end.config.model_name)
        priority = body.priority or 0
        requests: list[Request] = []
        for number, prompt in enumerate(prompts):
            request_id = head.id if len(prompts) == 1 else f"{head.id}-{number}"
            requests.append(await front_end.generator.prepare(prompt, sampling, request_id, priority))
            await asyncio.sleep(0)  # short prompts are tokenized on the event loop, which has other things to do
        texts = await _echoed(front_end, body, prompts, requests)
        usage = UsageCounter(body.stream_options, [len(request.prompt_ids) for request in requests], sampling.n)
        tokenizer = front_end.generator.model.tokenizer
        choices = Choices(tokenizer, requests, texts, keep_output=body.max_tokens != 0, usage=usage)
        if body.stream:
            return EventStream(_stream(front_end, requests, choices, head, usage))
        return json_response(await until_gone(http, _whole(front_end, requests, choices, head, usage)))


def _prompts(body: CompletionRequest) -> list[Prompt]:
    given = body.prompt
    if isinstance(given, str):
        given = [given]
    ids = [one for one in given if isinstance(one, int)]
    if ids or not given:
        return [IdsPrompt(ids)]
    with_special = body.add_special_tokens is not False
    lists = [one for one in given if not isinstance(one, int)]
    return [TextPrompt(one, with_special) if isinstance(one, str) else IdsPrompt(one) for one in lists]


def _sampling(body: CompletionRequest) -> SamplingParams:
    """Raises `InvalidRequest` for what isn't supported, too."""
    if body.suffix:
        raise InvalidRequest("suffix is not supported: leave it out")
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise InvalidRequest(f"best_of is {body.best_of}, but only n={body.n or 1} is supported: leave it out")
    max_tokens = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    if max_tokens == 0 and not body.echo:
        raise InvalidRequest("max_tokens is 0, which asks for nothing: set it to 1 and more, or echo to true")
    # The engine samples at least one token; `Choices` drops it.
    return sampling_of(body, max(1, max_tokens), body.logprobs, body.logprobs if body.echo else None)


async def _echoed(
    front_end: FrontEnd, body: CompletionRequest, prompts: list[Prompt], requests: list[Request]
) -> list[str] | None:
    """The prompts' texts, if they are to be part of the answer."""
    if not body.echo:
        return None
    return [
        prompt.text if isinstance(prompt, TextPrompt) else await front_end.generator.decode(request.prompt_ids)
        for prompt, request in zip(prompts, requests, strict=True)
    ]


async def _whole(
    front_end: FrontEnd, requests: list[Request], choices: Choices, head: Head, usage: UsageCounter
) -> bytes:
    with start_all(front_end.generator, requests) as generations:
        samples = await whole(generations)
    return head.answer([choices.whole(number, piece) for number, piece in enumerate(samples)], usage.total)


async def _stream(
    front_end: FrontEnd, requests: list[Request], choices: Choices, head: Head, usage: UsageCounter
) -> AsyncGenerator[bytes, None]:
    with start_all(front_end.generator, requests) as generations:
        async with contextlib.aclosing(pieces(generations, requests[0].sampling.n)) as numbered:
            async for number, piece in numbered:
                news = choices.news(number, piece)
                events = [event(head.answer([choice], usage.in_chunk(choice.index))) for choice in news]
                if events:
                    yield b"".join(events)
    yield usage.last_chunk(head) + DONE
