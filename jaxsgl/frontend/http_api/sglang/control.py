"""SGLang's endpoints for operators: abort, flush, and what is served."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec
from fastapi import APIRouter

import jaxsgl
from jaxsgl.config import ServerConfig
from jaxsgl.errors import InvalidRequest
from jaxsgl.frontend.front_end import FrontEnd
from jaxsgl.frontend.http_api.sglang.schemas import AbortBody
from jaxsgl.messages import FlushCache

FLUSH_S = 10.0  # for the engine to answer
SECRETS = ("api_key", "engine")  # left out of what is told; the engine's fields are told by themselves


def add_routes(router: APIRouter, front_end: FrontEnd) -> None:
    """The endpoints."""

    @router.post("/abort_request")
    async def abort_request(body: AbortBody) -> dict[str, Any]:
        """Ends a running request by its rid, or all; what isn't known has ended already."""
        if body.abort_all:
            return {"num_aborted": front_end.engine.abort_all()}
        if not body.rid:
            raise InvalidRequest("neither rid nor abort_all is given: say what to abort")
        return {"num_aborted": int(front_end.engine.abort(body.rid))}

    @router.get("/flush_cache")
    @router.post("/flush_cache")
    async def flush_cache() -> dict[str, Any]:
        """Empties the prefix cache; refused while requests wait or run."""
        answer = await front_end.engine.ask(FlushCache, FLUSH_S)
        if not answer.ok:
            raise InvalidRequest(f"the cache was not flushed: {answer.text}")
        return {"success": True, "message": "the cache is empty"}

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
