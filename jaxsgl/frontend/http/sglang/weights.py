"""SGLang's HTTP endpoints for trainers: exchange the weights, ask for their version, release memory and take it back.

Answers are SGLang's: `success` and `message`, with status 400 if it was not done. The engine does the work
(scheduler/orders/weights.py). app.py includes the router.
"""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import APIRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from jaxsgl.errors import InvalidRequest
from jaxsgl.frontend.engine_link import UPDATE_LIMIT_S
from jaxsgl.frontend.generation import FrontEnd
from jaxsgl.frontend.http.bodies import StrictJson
from jaxsgl.frontend.http.calls import until_gone
from jaxsgl.frontend.http.sglang.schemas import MemoryBody, UpdateWeightsBody, WeightVersionBody
from jaxsgl.frontend.roots import weights_folder
from jaxsgl.messages.orders import Answer
from jaxsgl.messages.weights import (
    MemoryTag,
    ReleaseMemory,
    ResumeMemory,
    SetWeightVersion,
    UpdateMode,
    UpdateReport,
    UpdateWeights,
)


def router(front_end: FrontEnd) -> APIRouter:
    """Returns the endpoints, for `front_end`."""
    router = APIRouter(route_class=StrictJson, tags=["sglang"])
    engine = front_end.engine

    @router.post("/update_weights_from_disk")
    async def update_weights_from_disk(body: UpdateWeightsBody, http: HttpRequest) -> Response:
        """Serves the weights of another folder of the same model; if that fails, the old ones are served still."""
        mode, path, version = _mode(body), weights_folder(front_end.config, body.model_path), body.weight_version
        asked = engine.ask_each(lambda _, number: UpdateWeights(number, path, mode, version), UPDATE_LIMIT_S)
        answers = await until_gone(http, asked)
        answer = engine.together(answers)
        if not answer.ok:
            return _told(answer, "", num_paused_requests=0)
        reports = [msgspec.json.decode(answer.text, type=UpdateReport) for answer in answers.values()]
        message = f"the weights of {body.model_path} are served as version {reports[0].weight_version}"
        return _told(answer, message, num_paused_requests=sum(report.num_continued for report in reports))

    @router.get("/get_weight_version")
    @router.get("/weight_version")
    async def weight_version() -> dict[str, Any]:
        """The version of the weights that are served."""
        return {"weight_version": engine.load.weight_version}

    @router.post("/update_weight_version")
    async def update_weight_version(body: WeightVersionBody) -> Response:
        """Gives the weights that are served another version; requests end first, unless told otherwise."""
        if body.abort_all_requests is not False:
            await engine.abort_prefix("")
        answer = await engine.ask(lambda number: SetWeightVersion(number, body.new_version), UPDATE_LIMIT_S)
        message = f"the weights are called {body.new_version} now"
        return _told(answer, message, new_version=body.new_version)

    @router.post("/release_memory_occupation")
    async def release_memory_occupation(http: HttpRequest, body: MemoryBody | None = None) -> Response:
        """Gives memory back once the requests that have begun have ended; generation is paused until all is back."""
        tags = _tags(body)
        answer = await until_gone(http, engine.ask(lambda number: ReleaseMemory(number, tags), UPDATE_LIMIT_S))
        return _told(answer, "the memory is released")

    @router.post("/resume_memory_occupation")
    async def resume_memory_occupation(http: HttpRequest, body: MemoryBody | None = None) -> Response:
        """Takes memory that was released again, and fills the weights; generation goes on once all is back."""
        tags = _tags(body)
        answer = await until_gone(http, engine.ask(lambda number: ResumeMemory(number, tags), UPDATE_LIMIT_S))
        return _told(answer, answer.text or "generation goes on")

    return router


def _mode(body: UpdateWeightsBody) -> UpdateMode:
    if body.abort_all_requests and body.mode not in (None, "abort"):
        raise InvalidRequest(f"abort_all_requests is true, but mode is {body.mode}: send one of them")
    return UpdateMode.ABORT if body.abort_all_requests else UpdateMode(body.mode or "wait")


def _tags(body: MemoryBody | None) -> tuple[MemoryTag, ...]:
    return tuple(MemoryTag) if body is None or body.tags is None else tuple(map(MemoryTag, body.tags))


def _told(answer: Answer, message: str, **more: Any) -> Response:
    """Returns SGLang's answer; the engine's reason, if the order was not carried out."""
    text = message if answer.ok else answer.text
    return JSONResponse({"success": answer.ok, "message": text, **more}, 200 if answer.ok else 400)
