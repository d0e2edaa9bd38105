"""GET /metrics, for Prometheus."""

from __future__ import annotations

from fastapi import APIRouter, Response
from prometheus_client import generate_latest

from jaxsgl.frontend.exposition import registry_of
from jaxsgl.frontend.front_end import FrontEnd

# Not OpenMetrics, whatever the client prefers: prometheus_client writes the colons of our names as underscores there.
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def router(front_end: FrontEnd) -> APIRouter:
    """The endpoint, for `front_end`."""
    api = APIRouter()
    registry = registry_of(front_end.metrics, front_end.config.model_name)

    @api.get("/metrics", summary="Numbers for Prometheus", response_class=Response)
    async def metrics() -> Response:
        """All metrics in Prometheus' text format."""
        return Response(generate_latest(registry), headers={"content-type": CONTENT_TYPE})

    return api
