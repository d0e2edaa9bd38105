"""What probes, scrapers and people ask without a key: GET /health, /health_generate, /metrics, / and /docs.

Reads the watchdog and the metrics; decides neither. GET / shows the model, the state and where to read more; without
the API key it shows no more than /health. GET /docs lists the endpoints, in place of FastAPI's page, which runs scripts
from elsewhere. app.py includes the router.
"""

from __future__ import annotations

import asyncio
import contextlib
import html
import uuid
from typing import Any

from fastapi import APIRouter, Request, Response
from prometheus_client import generate_latest

import jaxsgl
from jaxsgl.errors import EngineUnavailable, Overloaded
from jaxsgl.frontend.exposition import registry_of, registry_of_all
from jaxsgl.frontend.generation import FrontEnd, Prompted, RequestOptions
from jaxsgl.requests.outputs import Pooling
from jaxsgl.requests.sampling import SamplingParams
from jaxsgl.text.prompts import IdsPrompt

GENERATE_S = 20.0  # for one token, as in SGLang
OTHERS_S = 1.0  # for a token of running requests; then the probe asks for one of its own
# Never OpenMetrics, even if the client prefers it: there, prometheus_client writes colons of names as underscores.
METRICS_CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
# The page loads nothing and runs nothing.
PAGE_HEADERS = {
    "cache-control": "no-store",
    "content-security-policy": "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
}
_HEAD = """<!doctype html>
<html lang="en">
<head><meta charset="utf-8"><title>jaxsgl</title>
<style>body { font-family: sans-serif; margin: 3em; max-width: 60em } dt { font-weight: bold }
td { padding: 0.2em 1em 0.2em 0; vertical-align: top }</style></head>
<body>
<h1>jaxsgl</h1>
"""
_PAGE = """
<dl>
{rows}
</dl>
<p><a href="docs">API documentation</a> | <a href="metrics">metrics</a> | <a href="health">health</a></p>
</body>
</html>
"""


def router(front_end: FrontEnd) -> APIRouter:
    """Returns the endpoints, for `front_end`."""
    api = APIRouter()
    probe = _Probe(front_end)
    registry = registry_of(front_end.metrics, front_end.config.model_name)

    @api.get("/health")
    async def health() -> dict[str, Any]:
        """200 when requests make sense; 503 while the engine starts, is stuck or dead, and while the server stops.

        With several replicas it is 200 as long as one serves; `problems` says why others don't.
        """
        return _status(front_end)

    @api.get("/health_generate")
    async def health_generate() -> dict[str, Any]:
        """As /health, and a token has come since, of any request, unless generation is paused."""
        status = _status(front_end)
        if not front_end.engine.load.paused:
            await probe.run()
        return status

    @api.get("/metrics", summary="Numbers for Prometheus", response_class=Response)
    async def metrics() -> Response:
        """All metrics in Prometheus' text format."""
        shown = registry
        if front_end.peers is not None:
            counts = await front_end.peers.counts()
            shown = registry_of_all(front_end.metrics, front_end.config.model_name, counts)
        return Response(generate_latest(shown), headers={"content-type": METRICS_CONTENT_TYPE})

    @api.api_route("/", methods=["GET", "HEAD"], include_in_schema=False)
    async def page() -> Response:
        """The page; with status 503 while /health is bad."""
        status = 200 if front_end.engine.refusal is None else 503
        return Response(_page(front_end), status, PAGE_HEADERS, "text/html; charset=utf-8")

    @api.get("/docs", include_in_schema=False)
    async def docs(request: Request) -> Response:
        """All endpoints, with what they do."""
        return Response(_docs(request.app.openapi()), 200, PAGE_HEADERS, "text/html; charset=utf-8")

    return api


def _status(front_end: FrontEnd) -> dict[str, Any]:
    engine = front_end.engine
    if engine.refusal is not None:
        raise EngineUnavailable(engine.refusal)
    return {"status": "degraded", "problems": engine.problems} if engine.problems else {"status": "ok"}


class _Probe:
    """Waits for a token of any request, and has the engine make one if it has nothing to do.

    Callers need no key, so all that ask at the same time share one wait. A token that ends it came after each of them
    asked.
    """

    def __init__(self, front_end: FrontEnd) -> None:
        self._front_end = front_end
        self._running: asyncio.Task[None] | None = None

    async def run(self) -> None:
        """Raises `EngineUnavailable` if neither a token nor a step of a busy engine comes in time."""
        if self._running is None or self._running.done():
            self._running = asyncio.create_task(self._wait())
        await asyncio.shield(self._running)

    async def _wait(self) -> None:
        engine = self._front_end.engine
        steps = engine.load.totals.steps
        coming = asyncio.ensure_future(engine.next_token())
        generating: asyncio.Task[None] | None = None
        try:
            async with asyncio.timeout(GENERATE_S):
                if engine.load.num_running:
                    await asyncio.wait({coming}, timeout=OTHERS_S)
                if not coming.done():
                    generating = asyncio.create_task(self._generate())
                    await asyncio.wait({coming, generating}, return_when=asyncio.FIRST_COMPLETED)
                    if generating.done():
                        generating.result()
        except TimeoutError:
            if engine.load.totals.steps == steps:
                raise EngineUnavailable(f"the engine has made no token within {GENERATE_S:g} s") from None
        finally:
            coming.cancel()
            if generating is not None:
                generating.cancel()

    async def _generate(self) -> None:
        generator = self._front_end.generator
        sampling = SamplingParams(max_tokens=1, temperature=0.0)
        options = RequestOptions(pooling=None if generator.model.info.limits.generates else Pooling())
        prompted = Prompted(IdsPrompt([0]), sampling, f"health-{uuid.uuid4().hex}", options)
        request = await generator.prepare(prompted)
        with contextlib.suppress(Overloaded), generator.start(request) as generation:  # a full queue: the engine lives
            await generation.whole()


def _docs(schema: dict[str, Any]) -> str:
    rows = [
        (method.upper(), path, operation.get("description") or operation.get("summary") or "")
        for path, operations in schema["paths"].items()
        for method, operation in operations.items()
    ]
    cells = ("".join(f"<td>{html.escape(cell)}</td>" for cell in row) for row in rows)
    table = "\n".join(f"<tr>{row}</tr>" for row in cells)
    about = 'Bodies and answers are described in <a href="openapi.json">openapi.json</a>, for any viewer of OpenAPI.'
    return f"{_HEAD}<p>{about}</p>\n<table>\n{table}\n</table>\n</body>\n</html>\n"


def _page(front_end: FrontEnd) -> str:
    """Returns the page. Browsers send no key, so with one set it names neither the model nor the version."""
    engine, config = front_end.engine, front_end.config
    rows = {"State": engine.state}
    if engine.state != "loading" and engine.problems:
        rows["Reason"] = "; ".join(engine.problems)
    if not config.needs_key:
        rows |= {"Model": config.model_name, "Version": jaxsgl.__version__}
    else:
        rows["Access"] = "everything but health and metrics needs an API key"
    return _HEAD + _PAGE.format(
        rows="\n".join(f"<dt>{name}</dt><dd>{html.escape(text)}</dd>" for name, text in rows.items())
    )
