"""/v1/models, and the check of the model that a body names."""

from __future__ import annotations

import time

from fastapi import APIRouter
from starlette.responses import Response

from jaxsgl.errors import NotFound
from jaxsgl.frontend.front_end import FrontEnd
from jaxsgl.frontend.http.openai.replies import encode, json_response

ANY_MODEL = "default"  # what clients may name that don't care


def check_model(front_end: FrontEnd, model: str | None) -> None:
    """Raises `NotFound` unless `model` is served; none at all is fine."""
    served = front_end.config.model_name
    if model not in (None, "", ANY_MODEL, served, front_end.config.engine.model):
        error = NotFound(f"the model {model} does not exist: the only one here is {served}")
        error.param, error.code = "model", "model_not_found"
        raise error


def add_routes(router: APIRouter, front_end: FrontEnd) -> None:
    """The endpoints."""
    started_s = int(time.time())

    def card() -> dict[str, object]:
        return {
            "id": front_end.config.model_name,
            "object": "model",
            "created": started_s,
            "owned_by": "jaxsgl",
            "root": front_end.config.engine.model,
            "parent": None,
            "max_model_len": front_end.generator.model.info.limits.context_length,
        }

    @router.get("/v1/models")
    async def list_models() -> Response:
        """What is served: one model."""
        return json_response(encode({"object": "list", "data": [card()]}))

    @router.get("/v1/models/{model:path}")
    async def get_model(model: str) -> Response:
        """The model of this name; names may hold slashes."""
        check_model(front_end, model)
        return json_response(encode(card()))
