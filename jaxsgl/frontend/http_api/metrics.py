"""GET /metrics, for Prometheus."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response
from prometheus_client.exposition import choose_encoder

from jaxsgl.frontend.exposition import registry_of
from jaxsgl.frontend.front_end import FrontEnd


def router(front_end: FrontEnd) -> APIRouter:
    """The endpoint, for `front_end`."""
    api = APIRouter()
    registry = registry_of(front_end.metrics, front_end.config.model_name)

    @api.get("/metrics", summary="Numbers for Prometheus", response_class=Response)
    async def metrics(request: Request) -> Response:
        """All metrics, as text or in the OpenMetrics format if the client prefers it."""
        encode, content_type = choose_encoder(request.headers.get("accept", ""))
        return Response(encode(registry), headers={"content-type": content_type})

    return api
