"""All endpoints of Ollama's API; app.py includes the router. Their errors are {"error": "..."} (errors.py).

Ollama answers `GET /` with a text and `HEAD /` with 200, by which programs find it. Here the page is served there: its
status is the same, and its text doesn't say that Ollama runs.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import APIRouter
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

import jaxsgl
from jaxsgl.frontend.generation import FrontEnd
from jaxsgl.frontend.http.bodies import StrictJson
from jaxsgl.frontend.http.calls import while_connected
from jaxsgl.frontend.http.ollama import models
from jaxsgl.frontend.http.ollama.answering import answer_chat, answer_generate
from jaxsgl.frontend.http.ollama.answers import now
from jaxsgl.frontend.http.ollama.conversation import OllamaChatRequest, OllamaGenerateRequest
from jaxsgl.frontend.http.ollama.embeddings import (
    EmbedRequest,
    PromptEmbeddingRequest,
    answer_embed,
    answer_prompt_embedding,
)
from jaxsgl.frontend.http.ollama.models import ShowRequest, named

ORDERS = {
    "/api/pull": "POST", "/api/push": "POST", "/api/create": "POST", "/api/copy": "POST", "/api/delete": "DELETE",
}  # fmt: skip


class OllamaError(BaseModel):
    """The body of every answer that is no success."""

    error: str


class AnyTypeJson(StrictJson):
    """A route whose body is JSON whatever its content-type says: Ollama's examples send it as curl's form data.

    Pages of other sites, whose browsers send form data unasked, are refused by their origin (sites.py).
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Wraps the handler of `StrictJson`."""
        handle = super().get_route_handler()

        async def handle_as_json(request: Request) -> Response:
            others = [header for header in request.scope["headers"] if header[0] != b"content-type"]
            headers = [*others, (b"content-type", b"application/json")]
            return await handle(Request({**request.scope, "headers": headers}, request.receive))

        return handle_as_json


def router(front_end: FrontEnd) -> APIRouter:
    """Returns the endpoints, for `front_end`."""
    errors: dict[int | str, dict[str, Any]] = {status: {"model": OllamaError} for status in ("4XX", "5XX")}
    router = APIRouter(route_class=AnyTypeJson, tags=["ollama"], responses=errors)

    @router.post("/api/chat")
    @while_connected
    async def chat(body: OllamaChatRequest) -> Response:
        """The assistant's next turn, streamed unless `stream` is false."""
        return await answer_chat(front_end, body, named(front_end, body.model, body.lora_path))

    @router.post("/api/generate")
    @while_connected
    async def generate(body: OllamaGenerateRequest) -> Response:
        """The answer to a prompt, or what follows a `raw` one, streamed unless `stream` is false."""
        return await answer_generate(front_end, body, named(front_end, body.model, body.lora_path))

    @router.post("/api/embed")
    @while_connected
    async def embed(body: EmbedRequest) -> Response:
        """The vector of each input."""
        return await answer_embed(front_end, body, named(front_end, body.model, body.lora_path))

    @router.post("/api/embeddings")
    @while_connected
    async def prompt_embedding(body: PromptEmbeddingRequest) -> Response:
        """The vector of one text."""
        return await answer_prompt_embedding(front_end, body, named(front_end, body.model, body.lora_path))

    _add_models(router, front_end)
    return router


def _add_models(router: APIRouter, front_end: FrontEnd) -> None:
    started_at = now()

    @router.head("/api/tags", include_in_schema=False)
    @router.get("/api/tags")
    async def tags() -> dict[str, Any]:
        """What is served: the model, and its LoRA adapters as models of their own."""
        return models.tags(front_end, started_at)

    @router.get("/api/ps")
    async def running() -> dict[str, Any]:
        """The model, with the memory that it takes."""
        return models.running(front_end)

    @router.post("/api/show")
    async def show(body: ShowRequest) -> dict[str, Any]:
        """What a model can, its context, and its chat template."""
        return models.shown(front_end, body, started_at)

    @router.head("/api/version", include_in_schema=False)
    @router.get("/api/version")
    async def version() -> dict[str, str]:
        """The release of Ollama whose API this is, and jaxsgl's."""
        return {"version": models.API_VERSION, "server": f"jaxsgl {jaxsgl.__version__}"}

    async def refuse(request: Request) -> Response:
        models.refuse_order(request.url.path)
        raise AssertionError

    for path, method in ORDERS.items():
        router.add_api_route(path, refuse, methods=[method], include_in_schema=False)
