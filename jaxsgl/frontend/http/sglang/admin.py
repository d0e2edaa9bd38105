"""SGLang's HTTP endpoints for operators and trainers: abort, flush, pause, profile, what is served, weights, adapters.

Orders become messages to the engines, which do the work (scheduler/orders/); an order that was not carried out is
answered with status 400 and the engine's reason. app.py includes the router.
"""

from __future__ import annotations

import json
from http import HTTPStatus
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Query
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

import jaxsgl
from jaxsgl.config.flags import public_flags
from jaxsgl.config.server import ServerConfig
from jaxsgl.errors import InvalidRequest
from jaxsgl.frontend import adapters
from jaxsgl.frontend.access import weights_folder
from jaxsgl.frontend.engines.link import ANSWER_LIMIT_S, MAX_FLUSH_WAIT_S, UPDATE_LIMIT_S
from jaxsgl.frontend.engines.replicas import Replicas
from jaxsgl.frontend.generation import FrontEnd
from jaxsgl.frontend.http.bodies import StrictJson
from jaxsgl.frontend.http.calls import while_connected
from jaxsgl.frontend.http.sglang.schemas import (
    AbortBody,
    LoadAdapterBody,
    MemoryBody,
    PauseBody,
    ProfileBody,
    UnloadAdapterBody,
    UpdateWeightsBody,
    WeightVersionBody,
)
from jaxsgl.messages.orders import (
    Answer,
    ContinueGeneration,
    DumpState,
    FlushCache,
    MemoryTag,
    PauseGeneration,
    PauseMode,
    ReleaseMemory,
    ResumeMemory,
    SetWeightVersion,
    UpdateMode,
    UpdateReport,
    UpdateWeights,
)
from jaxsgl.messages.replies import Load


def router(front_end: FrontEnd) -> APIRouter:
    """Returns the endpoints, for `front_end`."""
    router = APIRouter(route_class=StrictJson, tags=["sglang"])
    _add_control(router, front_end)
    _add_profiles(router, front_end)
    if not front_end.config.allow_get_control:
        _refuse_get(router, "/flush_cache", "/start_profile", "/stop_profile")
    _add_infos(router, front_end)
    _add_weights(router, front_end)
    _add_adapters(router, front_end)
    return router


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
        return {"num_aborted": await _abort_call(front_end.engine, body.rid)}

    @router.api_route("/flush_cache", methods=control_methods(front_end.config))
    @while_connected
    async def flush_cache(timeout: Annotated[float, Query(ge=0, le=MAX_FLUSH_WAIT_S)] = 0.0) -> dict[str, Any]:
        """Empties the prefix cache; refused if requests still wait or run after `timeout` seconds."""
        asked = front_end.engine.ask(lambda number: FlushCache(number, timeout), timeout + ANSWER_LIMIT_S)
        answer = await asked
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


async def _abort_call(engine: Replicas, rid: str) -> int:
    """Ends the requests of one call. Several prompts are numbered: rid-0 in OpenAI's endpoints, rid_0 in SGLang's."""
    if await engine.abort(rid):
        return 1
    return sum([await engine.abort_prefix(f"{rid}{mark}{digit}") for mark in "-_" for digit in range(10)])


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


def _refuse_get(router: APIRouter, *paths: str) -> None:
    """Answers GET of orders that SGLang takes by it. After the routes themselves, whose method other answers name."""

    async def refuse(request: Request) -> Response:
        path = request.url.path
        words = f"{path} changes the server's state: send POST, or start the server with --allow-get-control"
        raise HTTPException(HTTPStatus.METHOD_NOT_ALLOWED, words, {"Allow": "POST"})

    for path in paths:
        router.add_api_route(path, refuse, methods=["GET"], include_in_schema=False)


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
            "has_image_understanding": front_end.generator.model.media is not None,
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
            "internal_states": [flat_load(link.load) for link in front_end.engine.links],
            "version": jaxsgl.__version__,
        }

    @router.get("/get_load")
    async def get_load() -> list[dict[str, int]]:
        """How busy each replica is, or each rank, in short."""
        loads = [load for link in front_end.engine.links for load in link.load.ranks or (link.load,)]
        return [
            {
                "dp_rank": rank,
                "num_reqs": load.num_running + load.num_waiting,
                "num_waiting_reqs": load.num_waiting,
                "num_tokens": load.used_tokens + load.waiting_tokens,
            }
            for rank, load in enumerate(loads)
        ]


def flat_load(load: Load) -> dict[str, Any]:
    """Returns the load in one object; the names of its counters end in `_total`."""
    fields = {
        name: msgspec.structs.asdict(value) if isinstance(value, msgspec.Struct) else value
        for name, value in msgspec.structs.asdict(load).items()
    }
    fields["ranks"] = [msgspec.structs.asdict(rank) for rank in load.ranks]
    del fields["step_times"]  # /metrics shows them
    totals = fields.pop("totals")
    return {**fields, **{f"{name}_total": count for name, count in totals.items()}}


def _flags(config: ServerConfig) -> dict[str, Any]:
    """Returns the flags of server and engine by name, without the secret ones."""
    flags = public_flags(config)
    engine = flags.pop("engine")
    return {**engine.pop("disaggregation"), **engine, **flags}


def _add_weights(router: APIRouter, front_end: FrontEnd) -> None:
    engine = front_end.engine

    @router.post("/update_weights_from_disk")
    @while_connected
    async def update_weights_from_disk(body: UpdateWeightsBody) -> Response:
        """Serves the weights of another folder of the same model; if that fails, the old ones are served still."""
        mode, path, version = _mode(body), weights_folder(front_end.config, body.model_path), body.weight_version
        asked = engine.ask_each(lambda _, number: UpdateWeights(number, path, mode, version), UPDATE_LIMIT_S)
        answers = await asked
        answer = engine.together(answers)
        if not answer.ok:
            return _weights_answer(answer, "", num_paused_requests=0)
        reports = [msgspec.json.decode(answer.text, type=UpdateReport) for answer in answers.values()]
        message = f"the weights of {body.model_path} are served as version {reports[0].weight_version}"
        return _weights_answer(answer, message, num_paused_requests=sum(report.num_continued for report in reports))

    @router.get("/get_weight_version")
    @router.get("/weight_version")
    async def weight_version() -> dict[str, Any]:
        """The version of the weights that are served."""
        return {"weight_version": engine.load.weight_version}

    @router.post("/update_weight_version")
    @while_connected
    async def update_weight_version(body: WeightVersionBody) -> Response:
        """Gives the weights that are served another version; requests end first, unless told otherwise."""
        if body.abort_all_requests is not False:
            await engine.abort_prefix("")
        answer = await engine.ask(lambda number: SetWeightVersion(number, body.new_version), UPDATE_LIMIT_S)
        message = f"the weights are called {body.new_version} now"
        return _weights_answer(answer, message, new_version=body.new_version)

    @router.post("/release_memory_occupation")
    @while_connected
    async def release_memory_occupation(body: MemoryBody | None = None) -> Response:
        """Gives memory back once the requests that have begun have ended; generation is paused until all is back."""
        tags = _tags(body)
        answer = await engine.ask(lambda number: ReleaseMemory(number, tags), UPDATE_LIMIT_S)
        return _weights_answer(answer, "the memory is released")

    @router.post("/resume_memory_occupation")
    @while_connected
    async def resume_memory_occupation(body: MemoryBody | None = None) -> Response:
        """Takes memory that was released again, and fills the weights; generation goes on once all is back."""
        tags = _tags(body)
        answer = await engine.ask(lambda number: ResumeMemory(number, tags), UPDATE_LIMIT_S)
        return _weights_answer(answer, answer.text or "generation goes on")


def _mode(body: UpdateWeightsBody) -> UpdateMode:
    if body.abort_all_requests and body.mode not in (None, "abort"):
        raise InvalidRequest(f"abort_all_requests is true, but mode is {body.mode}: send one of them")
    return UpdateMode.ABORT if body.abort_all_requests else UpdateMode(body.mode or "wait")


def _tags(body: MemoryBody | None) -> tuple[MemoryTag, ...]:
    known = tuple(MemoryTag)
    return known if body is None or body.tags is None else tuple(tag for tag in known if tag.value in body.tags)


def _weights_answer(answer: Answer, message: str, **more: Any) -> Response:
    """Returns SGLang's answer; the engine's reason, if the order was not carried out."""
    text = message if answer.ok else answer.text
    return JSONResponse({"success": answer.ok, "message": text, **more}, 200 if answer.ok else 400)


def _add_adapters(router: APIRouter, front_end: FrontEnd) -> None:
    engine, config = front_end.engine, front_end.config

    @router.post("/load_lora_adapter")
    @router.post("/v1/load_lora_adapter")
    @while_connected
    async def load_lora_adapter(body: LoadAdapterBody) -> Response:
        """Loads an adapter from a folder that the server can read; requests may name it once this is answered."""
        asked = adapters.load(
            engine,
            config,
            body.lora_name,
            body.lora_path,
            pinned=bool(body.pinned),
            replace=bool(body.load_inplace),
        )
        return await _adapters_answer(front_end, await asked)

    @router.post("/unload_lora_adapter")
    @router.post("/v1/unload_lora_adapter")
    @while_connected
    async def unload_lora_adapter(body: UnloadAdapterBody) -> Response:
        """Forgets an adapter, once the requests that have it have ended; further ones are refused at once."""
        return await _adapters_answer(front_end, await adapters.unload(engine, body.lora_name))


async def _adapters_answer(front_end: FrontEnd, answer: Answer) -> Response:
    loaded = {adapter.name: adapter.folder for adapter in await adapters.loaded(front_end.engine)}
    text = "" if answer.ok else answer.text
    body = {"success": answer.ok, "error_message": text, "loaded_adapters": loaded}
    return JSONResponse(body, 200 if answer.ok else 400)
