"""SGLang's own HTTP endpoints: /generate, and what operators and trainers call beside it; app.py includes the router.

/generate takes one prompt or several, and answers whole or as a stream whose events each hold all text so far. The
operators' endpoints abort, flush, pause, and say what is served.
"""

from __future__ import annotations

import contextlib
import json
import uuid
from collections.abc import AsyncGenerator, Sequence
from functools import partial
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Query
from msgspec import UNSET
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

import jaxsgl
from jaxsgl.config.flags import public_flags
from jaxsgl.config.server import ServerConfig
from jaxsgl.errors import InvalidRequest
from jaxsgl.frontend.adapters import adapters_of
from jaxsgl.frontend.engine_link import ANSWER_LIMIT_S, MAX_FLUSH_WAIT_S
from jaxsgl.frontend.generation import FrontEnd
from jaxsgl.frontend.http.bodies import (
    StrictJson,
    refuse_others,
    rooms_of,
    salt_of,
    sampling_params,
)
from jaxsgl.frontend.http.calls import check_num_choices, pieces, start_all, until_gone, whole
from jaxsgl.frontend.http.grammars import grammar_of
from jaxsgl.frontend.http.openai.replies import encode, json_response
from jaxsgl.frontend.http.sglang.media import with_media
from jaxsgl.frontend.http.sglang.replies import Writer
from jaxsgl.frontend.http.sglang.schemas import AbortBody, GenerateBody, PauseBody, ProfileBody, SamplingBody
from jaxsgl.frontend.http.sse import DONE, EventStream, event
from jaxsgl.messages.load import Load
from jaxsgl.messages.orders import Answer, ContinueGeneration, DumpState, FlushCache, PauseGeneration, PauseMode
from jaxsgl.requests.request import Request
from jaxsgl.requests.sampling import SamplingParams
from jaxsgl.text.prompts import IdsPrompt, Prompt, TextPrompt
from jaxsgl.text.sample import Piece

# SGLang's fields that change the answer and that aren't built. Empty or false, they ask for nothing.
NOT_BUILT = frozenset({"session_params", "token_ids_logprob"})


def router(front_end: FrontEnd) -> APIRouter:
    """Returns the endpoints, for `front_end`."""
    router = APIRouter(route_class=StrictJson, tags=["sglang"])
    _add_generate(router, front_end)
    _add_control(router, front_end)
    _add_profiles(router, front_end)
    _add_infos(router, front_end)
    return router


def _add_generate(router: APIRouter, front_end: FrontEnd) -> None:
    @router.post("/generate")
    async def generate(body: GenerateBody, http: HttpRequest) -> Response:
        """Continues prompts, as SGLang does: an object for one choice, a list for several, prompt by prompt."""
        requests = await _requests(front_end, body)
        start_len = None if body.logprob_start_len == -1 else body.logprob_start_len
        tokenizer = front_end.generator.model.tokenizer if body.return_text_in_logprobs else None
        n = requests[0].sampling.n
        alone = n == 1 and not _is_batch(body)
        states = front_end.generator.model.info.limits.states
        if body.stream and requests[0].sampling.wants_states:
            raise InvalidRequest("hidden states and experts come with whole answers: leave stream out")
        writers = [
            Writer(request, UNSET if alone or not body.stream else number * n + sample, start_len, tokenizer, states)
            for number, request in enumerate(requests)
            for sample in range(n)
        ]
        if body.stream:
            return EventStream(_stream(front_end, requests, writers, body.data_parallel_rank))
        return json_response(
            await until_gone(http, _whole(front_end, requests, writers, alone, body.data_parallel_rank))
        )


async def _requests(front_end: FrontEnd, body: GenerateBody) -> list[Request]:
    """Returns one request per prompt, all of them checked. Raises `InvalidRequest`."""
    refuse_others(body, NOT_BUILT)
    prompts = with_media(_prompts(body), body)
    given = body.sampling_params if body.sampling_params is not None else SamplingBody()
    each = given if isinstance(given, list) else [given] * len(prompts)
    _check_counts(prompts, each)
    ids = _ids(body.rid, prompts)
    salt = salt_of(body)
    samplings = [_sampling(body, params) for params in each]
    rooms = rooms_of(body, len(prompts))
    adapters = adapters_of(front_end, None, body.lora_path, len(prompts))
    return await front_end.generator.prepare_all(
        prompts, samplings, ids, body.priority or 0, salt, rooms, adapters=adapters
    )


def _is_batch(body: GenerateBody) -> bool:
    given = body.input_ids if body.text is None else body.text
    return isinstance(given, list) and bool(given) and not isinstance(given[0], int)


def _prompts(body: GenerateBody) -> list[Prompt]:
    if (body.text is None) == (body.input_ids is None):
        raise InvalidRequest("the request needs either text or input_ids: send one of them")
    if body.text is not None:
        return [TextPrompt(text) for text in ([body.text] if isinstance(body.text, str) else body.text)]
    given = body.input_ids or []
    if not given or isinstance(given[0], int):  # not copied: there may be millions
        return [IdsPrompt(given)]
    return [IdsPrompt(ids) for ids in given]


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
        grammar=grammar_of(params),
        return_hidden_states=bool(body.return_hidden_states),
        return_routed_experts=bool(body.return_routed_experts),
    )


async def _whole(
    front_end: FrontEnd, requests: Sequence[Request], writers: Sequence[Writer], alone: bool, rank: int | None
) -> bytes:
    """Returns the answer: an object for a choice that is `alone`, otherwise a list."""
    async with start_all(front_end.generator, requests, rank) as generations:
        samples = await whole(generations)

    def write() -> bytes:
        choices = [writer.add(piece) for writer, piece in zip(writers, samples, strict=True)]
        return encode(choices[0] if alone else choices)

    return await front_end.generator.off_loop(sum(sample.num_scores for sample in samples), write)


async def _stream(
    front_end: FrontEnd, requests: Sequence[Request], writers: Sequence[Writer], rank: int | None
) -> AsyncGenerator[bytes, None]:
    scored = requests[0].sampling.logprobs is not None
    async with (
        start_all(front_end.generator, requests, rank) as generations,
        contextlib.aclosing(pieces(generations, requests[0].sampling.n)) as numbered,
    ):
        async for number, piece in numbered:
            writer = writers[number]
            if scored:
                writer.num_scores += piece.num_scores  # each event repeats them all
                yield await front_end.generator.off_loop(writer.num_scores, partial(_event, writer, piece))
            else:
                yield _event(writer, piece)
    yield DONE


def _event(writer: Writer, piece: Piece) -> bytes:
    return event(encode(writer.add(piece)))


def _add_control(router: APIRouter, front_end: FrontEnd) -> None:
    @router.post("/abort_request")
    async def abort_request(body: AbortBody) -> dict[str, Any]:
        """Ends a running request by its rid, several, or all; what isn't known has ended already."""
        if body.abort_all:
            return {"num_aborted": await front_end.engine.abort_prefix("")}
        if not body.rid:
            raise InvalidRequest("neither rid nor abort_all is given: say what to abort")
        if body.prefix:
            return {"num_aborted": await front_end.engine.abort_prefix(body.rid)}
        return {"num_aborted": int(await front_end.engine.abort(body.rid))}

    @router.api_route("/flush_cache", methods=control_methods(front_end.config))
    async def flush_cache(
        http: HttpRequest, timeout: Annotated[float, Query(ge=0, le=MAX_FLUSH_WAIT_S)] = 0.0
    ) -> dict[str, Any]:
        """Empties the prefix cache; refused if requests still wait or run after `timeout` seconds."""
        asked = front_end.engine.ask(lambda number: FlushCache(number, timeout), timeout + ANSWER_LIMIT_S)
        answer = await until_gone(http, asked)
        if not answer.ok:
            raise InvalidRequest(f"the cache was not flushed: {answer.text}")
        return {"success": True, "message": "the cache is empty"}

    @router.post("/pause_generation")
    async def pause_generation(body: PauseBody | None = None) -> dict[str, Any]:
        """Generates nothing until /continue_generation; answers when the device is at rest. New requests queue up."""
        mode = PauseMode((body or PauseBody()).mode)
        answer = await front_end.engine.ask(lambda number: PauseGeneration(number, mode), ANSWER_LIMIT_S)
        if not answer.ok:
            raise InvalidRequest(f"generation is not paused: {answer.text}")
        return {"status": "ok", "message": "generation is paused"}

    @router.post("/continue_generation")
    async def continue_generation() -> dict[str, Any]:
        """Ends a pause."""
        answer = await front_end.engine.ask(ContinueGeneration, ANSWER_LIMIT_S)
        return {"status": "ok", "message": answer.text or "generation goes on"}


def _add_profiles(router: APIRouter, front_end: FrontEnd) -> None:
    methods = control_methods(front_end.config)

    @router.api_route("/start_profile", methods=methods)
    async def start_profile(body: ProfileBody | None = None) -> dict[str, Any]:
        """Records a trace of the engine, for `num_steps` steps or until /stop_profile; `message` is its folder."""
        asked = body or ProfileBody()
        if asked.start_step:
            raise InvalidRequest(f"start_step is {asked.start_step}, but recording starts at once: leave it out")
        answer = await front_end.profiles.start(asked.output_dir, asked.num_steps, bool(asked.profile_by_stage))
        return _ok(answer, "no profile is started")

    @router.api_route("/stop_profile", methods=methods)
    async def stop_profile() -> dict[str, Any]:
        """Ends the recording and answers when the trace is written; `message` is its folder."""
        return _ok(await front_end.profiles.stop(), "no profile is written")


def _ok(answer: Answer, failed: str) -> dict[str, Any]:
    if not answer.ok:
        raise InvalidRequest(f"{failed}: {answer.text}")
    return {"status": "ok", "message": answer.text}


def control_methods(config: ServerConfig) -> list[str]:
    """Methods of orders that SGLang also takes by GET. A link or an image of any web page sends a GET."""
    return ["GET", "POST"] if config.allow_get_control else ["POST"]


def _add_infos(router: APIRouter, front_end: FrontEnd) -> None:
    @router.get("/internal_state")
    async def internal_state(check: bool = False) -> Response:
        """What the scheduler knows, and why it admits no more; with `check` after accounting for all pages.

        With several replicas, a list of what that of each knows.
        """
        answers = await front_end.engine.ask_each(lambda _, number: DumpState(number, check), ANSWER_LIMIT_S)
        texts = [answer.text if answer.ok else json.dumps({"error": answer.text}) for answer in answers.values()]
        several = len(front_end.engine.links) > 1
        return Response(f"[{','.join(texts)}]" if several else texts[0], media_type="application/json")

    @router.get("/get_model_info")
    @router.get("/model_info")
    async def model_info() -> dict[str, Any]:
        """What is served."""
        info = front_end.generator.model.info
        return {
            "model_path": info.model_path,
            "tokenizer_path": info.model_path,
            "served_model_name": front_end.config.model_name,
            "is_generation": info.limits.generates,
            "preferred_sampling_params": None,
            "weight_version": front_end.engine.load.weight_version,
            "architectures": [info.architecture],
            "dtype": info.dtype,
            "vocab_size": info.limits.vocab_size,
            "context_length": info.limits.context_length,
            "eos_token_ids": info.eos_token_ids,
        }

    @router.get("/get_server_info")
    @router.get("/server_info")
    async def server_info() -> dict[str, Any]:
        """How it is served: flags, what the engine made of them, and its load."""
        info = front_end.generator.model.info
        return {
            **_flags(front_end.config),
            **msgspec.to_builtins(info),
            "max_total_num_tokens": info.limits.pool_tokens,
            "internal_states": [_flat(link.load) for link in front_end.engine.links],
            "version": jaxsgl.__version__,
        }

    @router.get("/get_load")
    async def get_load() -> list[dict[str, int]]:
        """How busy each replica is, in short."""
        loads = [link.load for link in front_end.engine.links]
        return [
            {
                "dp_rank": rank,
                "num_reqs": load.num_running + load.num_waiting,
                "num_waiting_reqs": load.num_waiting,
                "num_tokens": load.used_tokens + load.waiting_tokens,
            }
            for rank, load in enumerate(loads)
        ]


def _flat(load: Load) -> dict[str, Any]:
    """Returns the load in one object; the names of its counters end in `_total`."""
    fields = {
        name: msgspec.structs.asdict(value) if isinstance(value, msgspec.Struct) else value
        for name, value in msgspec.structs.asdict(load).items()
    }
    del fields["step_times"]  # /metrics shows them
    totals = fields.pop("totals")
    return {**fields, **{f"{name}_total": count for name, count in totals.items()}}


def _flags(config: ServerConfig) -> dict[str, Any]:
    """Returns the flags of server and engine by name, without the secret ones."""
    flags = public_flags(config)
    engine = flags.pop("engine")
    return {**engine.pop("disaggregation"), **engine, **flags}
