"""All endpoints of this folder, as one router; app.py includes it."""

from __future__ import annotations

from fastapi import APIRouter

from jaxsgl.frontend.front_end import FrontEnd
from jaxsgl.frontend.http.bodies import StrictJson
from jaxsgl.frontend.http.sglang import control, generate


def router(front_end: FrontEnd) -> APIRouter:
    """The endpoints, for `front_end`."""
    router = APIRouter(route_class=StrictJson, tags=["sglang"])
    for module in (generate, control):
        module.add_routes(router, front_end)
    return router
