"""The HTTP application: its routers and what holds for all of them."""

from __future__ import annotations

from collections.abc import Callable

from fastapi import APIRouter, FastAPI

import jaxsgl
from jaxsgl.frontend.front_end import FrontEnd
from jaxsgl.frontend.http import errors, health, metrics
from jaxsgl.frontend.http.guard import ApiKey, BodyLimit, RequestIds
from jaxsgl.frontend.http.openai import routes as openai
from jaxsgl.frontend.http.sglang import routes as sglang

# Of each module, `router(front_end) -> APIRouter`.
ROUTERS: tuple[Callable[[FrontEnd], APIRouter], ...] = (health.router, metrics.router, openai.router, sglang.router)


def build_app(front_end: FrontEnd) -> FastAPI:
    """All endpoints, for `front_end`."""
    app = FastAPI(title="jaxsgl", version=jaxsgl.__version__, responses=errors.RESPONSES, redoc_url=None)
    errors.add_handlers(app)
    for router in ROUTERS:
        app.include_router(router(front_end))
    # The last one added is the first that a request passes.
    app.add_middleware(BodyLimit, max_bytes=front_end.config.max_request_bytes)
    if front_end.config.api_key is not None:
        app.add_middleware(ApiKey, key=front_end.config.api_key)
    app.add_middleware(RequestIds)
    return app
