"""All endpoints of this folder, as one router; app.py includes it."""

from __future__ import annotations

from fastapi import APIRouter

from jaxsgl.frontend.front_end import FrontEnd
from jaxsgl.frontend.http.bodies import StrictJson
from jaxsgl.frontend.http.openai import chat, completions, models, tokenize


def router(front_end: FrontEnd) -> APIRouter:
    """The endpoints, for `front_end`."""
    router = APIRouter(route_class=StrictJson)
    for module in (chat, completions, models, tokenize):
        module.add_routes(router, front_end)
    return router
