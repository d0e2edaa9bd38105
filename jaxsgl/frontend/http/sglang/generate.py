"""SGLang's /generate: one prompt or several, whole or as a stream whose events each hold all text so far."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import AsyncGenerator, Sequence

from fastapi import APIRouter
from msgspec import UNSET
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from jaxsgl.errors import InvalidRequest
from jaxsgl.frontend.front_end import FrontEnd
from jaxsgl.frontend.http.bodies import refuse_not_built, refuse_special_tokens, sampling_params
from jaxsgl.frontend.http.calls import check_num_choices, pieces, start_all, until_gone, whole
from jaxsgl.frontend.http.openai.replies import encode, json_response
from jaxsgl.frontend.http.sglang.replies import Choice, Writer
from jaxsgl.frontend.http.sglang.schemas import GenerateBody, SamplingBody
from jaxsgl.frontend.http.sse import DONE, EventStream, event
from jaxsgl.request import Request, SamplingParams
from jaxsgl.text.prompts import IdsPrompt, Prompt, TextPrompt

# Fields of SGLang's that change the answer and that aren't built. Empty or false, they ask for nothing.
NOT_BUILT = frozenset({
    "audio_data", "custom_logit_processor", "image_data", "input_embeds", "lora_path", "return_hidden_states",
    "session_params", "token_ids_logprob", "video_data",
})  # fmt: skip


def add_routes(router: APIRouter, front_end: FrontEnd) -> None:
    """The endpoint."""

    @router.post("/generate")
    async def generate(body: GenerateBody, http: HttpRequest) -> Response:
        """Continues prompts, as SGLang does: an object for one choice, a list for several, prompt by prompt."""
        requests = await _requests(front_end, body)
        start_len = None if body.logprob_start_len == -1 else body.logprob_start_len
        tokenizer = front_end.generator.model.tokenizer if body.return_text_in_logprobs else None
        n = requests[0].sampling.n
        alone = n == 1 and not _is_batch(body)
        writers = [
            Writer(request, UNSET if alone or not body.stream else number * n + sample, start_len, tokenizer)
            for number, request in enumerate(requests)
            for sample in range(n)
        ]
        if body.stream:
            return EventStream(_stream(front_end, requests, writers))
        choices = await until_gone(http, _whole(front_end, requests, writers))
        return json_response(encode(choices[0] if alone else choices))


async def _requests(front_end: FrontEnd, body: GenerateBody) -> list[Request]:
    """One per prompt, all of them checked. Raises `InvalidRequest`."""
    refuse_not_built(body, NOT_BUILT)
    prompts = _prompts(body)
    given = body.sampling_params if body.sampling_params is not None else SamplingBody()
    each = given if isinstance(given, list) else [given] * len(prompts)
    _check_counts(prompts, each)
    ids = _ids(body.rid, prompts)
    samplings = [_sampling(body, params) for params in each]
    return [
        await front_end.generator.prepare(prompt, sampling, request_id, body.priority or 0)
        for prompt, sampling, request_id in zip(prompts, samplings, ids, strict=True)
    ]


def _is_batch(body: GenerateBody) -> bool:
    given = body.input_ids if body.text is None else body.text
    return isinstance(given, list) and bool(given) and not isinstance(given[0], int)


def _prompts(body: GenerateBody) -> list[Prompt]:
    if (body.text is None) == (body.input_ids is None):
        raise InvalidRequest("the request needs either text or input_ids: send one of them")
    if body.text is not None:
        return [TextPrompt(text) for text in ([body.text] if isinstance(body.text, str) else body.text)]
    given = body.input_ids or []
    ids = [entry for entry in given if isinstance(entry, int)]
    lists = [entry for entry in given if isinstance(entry, list)]
    return [IdsPrompt(entry) for entry in lists] or [IdsPrompt(ids)]


def _check_counts(prompts: Sequence[Prompt], each: Sequence[SamplingBody]) -> None:
    if len(each) != len(prompts):
        raise InvalidRequest(f"sampling_params has {len(each)} entries for {len(prompts)} prompts: send one per prompt")
    n = each[0].n
    if any(params.n != n for params in each):
        raise InvalidRequest("n differs between the entries of sampling_params: send such prompts apart")
    check_num_choices(len(prompts), n)


def _ids(rid: str | list[str] | None, prompts: Sequence[Prompt]) -> list[str]:
    if rid is None:
        return [uuid.uuid4().hex for _ in prompts]
    if isinstance(rid, str):
        return [rid] if len(prompts) == 1 else [f"{rid}_{number}" for number in range(len(prompts))]
    if len(rid) != len(prompts):
        raise InvalidRequest(f"rid has {len(rid)} entries for {len(prompts)} prompts: send one per prompt")
    return rid


def _sampling(body: GenerateBody, params: SamplingBody) -> SamplingParams:
    refuse_special_tokens(params.skip_special_tokens)
    top = (body.top_logprobs_num or 0) if body.return_logprob else None
    scores_prompt = body.logprob_start_len is not None and body.logprob_start_len >= 0
    return sampling_params(
        params,
        max_tokens=params.max_new_tokens,
        min_tokens=params.min_new_tokens,
        seed=params.sampling_seed,
        include_stop_str_in_output=params.no_stop_trim,
        logprobs=top,
        prompt_logprobs=top if scores_prompt else None,
    )


async def _whole(front_end: FrontEnd, requests: Sequence[Request], writers: Sequence[Writer]) -> list[Choice]:
    with start_all(front_end.generator, requests) as generations:
        samples = await whole(generations)
    return [writer.add(piece) for writer, piece in zip(writers, samples, strict=True)]


async def _stream(
    front_end: FrontEnd, requests: Sequence[Request], writers: Sequence[Writer]
) -> AsyncGenerator[bytes, None]:
    with start_all(front_end.generator, requests) as generations:
        async with contextlib.aclosing(pieces(generations, requests[0].sampling.n)) as numbered:
            async for number, piece in numbered:
                yield event(encode(writers[number].add(piece)))
    yield DONE
