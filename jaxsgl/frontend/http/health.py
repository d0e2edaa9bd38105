"""What probes and scrapers ask without a key: GET /health, /ping, /health_generate, /load and /metrics.

Reads the watchdog and the metrics; decides neither. app.py includes the router.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from typing import Any

from fastapi import APIRouter, Response
from prometheus_client import generate_latest

from jaxsgl.errors import EngineUnavailable, Overloaded
from jaxsgl.frontend.generation import FrontEnd, Prompted, RequestOptions
from jaxsgl.frontend.metrics.exposition import registry_of, registry_of_all
from jaxsgl.requests.outputs import Pooling
from jaxsgl.requests.request import SamplingParams
from jaxsgl.text.prompts import IdsPrompt

GENERATE_S = 20.0  # for one token, as in SGLang
OTHERS_S = 1.0  # for a token of running requests; then the probe asks for one of its own
# Never OpenMetrics, even if the client prefers it: there, prometheus_client writes colons of names as underscores.
METRICS_CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def router(front_end: FrontEnd) -> APIRouter:
    """Returns the endpoints, for `front_end`."""
    api = APIRouter()
    probe = _Probe(front_end)
    registry = registry_of(front_end.metrics, front_end.config.model_name)

    @api.head("/health", include_in_schema=False)  # of wget --spider and of monitors
    @api.head("/ping", include_in_schema=False)
    @api.get("/ping", include_in_schema=False)  # SageMaker's
    @api.post("/ping", include_in_schema=False)
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

    @api.get("/load")
    async def load() -> dict[str, int]:
        """Requests under way, under vLLM's name; /get_load says more of each replica."""
        return {"server_load": await front_end.num_open()}

    @api.get("/metrics", summary="Numbers for Prometheus", response_class=Response)
    async def metrics() -> Response:
        """All metrics in Prometheus' text format."""
        shown = registry
        if front_end.peers is not None:
            counts = await front_end.peers.counts()
            shown = registry_of_all(front_end.metrics, front_end.config.model_name, counts)
        return Response(generate_latest(shown), headers={"content-type": METRICS_CONTENT_TYPE})

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
