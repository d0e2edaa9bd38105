"""SGLang's endpoints for operators: abort, flush, pause, and what is served."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Query
from starlette.responses import Response

import jaxsgl
from jaxsgl.config import ServerConfig
from jaxsgl.errors import InvalidRequest
from jaxsgl.frontend.front_end import FrontEnd
from jaxsgl.frontend.http.sglang.schemas import AbortBody, PauseBody
from jaxsgl.messages import ContinueGeneration, DumpState, FlushCache, PauseGeneration, PauseMode

ANSWER_S = 60.0  # for the engine, whose longest step may have to end first
MAX_FLUSH_WAIT_S = 3600.0
SECRETS = ("api_key", "engine")  # left out of what is told; the engine's fields are told by themselves


def add_routes(router: APIRouter, front_end: FrontEnd) -> None:
    """The endpoints."""

    @router.post("/abort_request")
    async def abort_request(body: AbortBody) -> dict[str, Any]:
        """Ends a running request by its rid, several, or all; what isn't known has ended already."""
        if body.abort_all:
            return {"num_aborted": front_end.engine.abort_prefix("")}
        if not body.rid:
            raise InvalidRequest("neither rid nor abort_all is given: say what to abort")
        if body.prefix:
            return {"num_aborted": front_end.engine.abort_prefix(body.rid)}
        return {"num_aborted": int(front_end.engine.abort(body.rid))}

    @router.get("/flush_cache")
    @router.post("/flush_cache")
    async def flush_cache(timeout: Annotated[float, Query(ge=0, le=MAX_FLUSH_WAIT_S)] = 0.0) -> dict[str, Any]:
        """Empties the prefix cache; refused if requests still wait or run after `timeout` seconds."""
        answer = await front_end.engine.ask(lambda number: FlushCache(number, timeout), timeout + ANSWER_S)
        if not answer.ok:
            raise InvalidRequest(f"the cache was not flushed: {answer.text}")
        return {"success": True, "message": "the cache is empty"}

    @router.post("/pause_generation")
    async def pause_generation(body: PauseBody | None = None) -> dict[str, Any]:
        """Generates nothing until /continue_generation; answers when the device is at rest. New requests queue up."""
        mode = PauseMode((body or PauseBody()).mode)
        answer = await front_end.engine.ask(lambda number: PauseGeneration(number, mode), ANSWER_S)
        if not answer.ok:
            raise InvalidRequest(f"generation is not paused: {answer.text}")
        return {"status": "ok", "message": "generation is paused"}

    @router.post("/continue_generation")
    async def continue_generation() -> dict[str, Any]:
        """Ends a pause."""
        await front_end.engine.ask(ContinueGeneration, ANSWER_S)
        return {"status": "ok", "message": "generation goes on"}

    @router.get("/internal_state")
    async def internal_state(check: bool = False) -> Response:
        """What the scheduler knows, and why it admits no more; with `check` after accounting for all pages."""
        answer = await front_end.engine.ask(lambda number: DumpState(number, check), ANSWER_S)
        return Response(answer.text, media_type="application/json")

    @router.get("/get_model_info")
    @router.get("/model_info")
    async def model_info() -> dict[str, Any]:
        """What is served."""
        info = front_end.generator.model.info
        return {
            "model_path": info.model_path,
            "tokenizer_path": info.model_path,
            "served_model_name": front_end.config.model_name,
            "is_generation": True,
            "preferred_sampling_params": None,
            "weight_version": "default",
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
            "internal_states": [msgspec.structs.asdict(front_end.engine.load)],
            "version": jaxsgl.__version__,
        }


def _flags(config: ServerConfig) -> dict[str, Any]:
    both = {**dataclasses.asdict(config.engine), **dataclasses.asdict(config)}
    return {name: value for name, value in both.items() if name not in SECRETS}
