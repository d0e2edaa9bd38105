"""The front end of a host that follows: GET /health and /metrics, and the life of its engine process.

Clients talk to host 0. A host that is asked to stop asks host 0, which lets open requests finish, and ends with it.
`watch_hosts` is for host 0, too: it ends an engine process that stands still, as no other host can go on without it.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI, Response
from prometheus_client import generate_latest

from jaxsgl import logs
from jaxsgl.config.hosts import PULSE_S, SILENCE_S
from jaxsgl.config.server import ServerConfig
from jaxsgl.errors import EngineUnavailable
from jaxsgl.frontend.certificates import load_certificate
from jaxsgl.frontend.engines.link import EngineLink
from jaxsgl.frontend.engines.owned import ENGINE_COMMAND, owned_engines
from jaxsgl.frontend.engines.replicas import Replicas
from jaxsgl.frontend.http import errors
from jaxsgl.frontend.http.app import HttpServer
from jaxsgl.frontend.http.health import METRICS_CONTENT_TYPE
from jaxsgl.frontend.metrics.exposition import registry_of
from jaxsgl.frontend.metrics.measurements import Metrics
from jaxsgl.messages.orders import Shutdown

END_S = 15.0  # beyond --drain-s, for host 0 to end this host

logger = logging.getLogger(__name__)


class FollowingServer:
    """A `Life`. Made inside the loop that runs it. Raises `StartupError` for a certificate that doesn't work."""

    def __init__(self, config: ServerConfig, engine_command: Sequence[str] = ENGINE_COMMAND) -> None:
        self._start_s = time.monotonic()
        self._config = config
        (self._link,) = owned_engines(config, engine_command)
        self._engine = Replicas([self._link])
        metrics = Metrics(lambda: self._engine.load, log_lines=logs.line_counts(), replicas=lambda: self._engine.each)
        self._http = HttpServer(_app(self._engine, metrics, config.model_name), config, load_certificate(config))
        self._watch: asyncio.Task[None] | None = None

    async def run(self) -> int:
        """Follows until host 0 ends this host (returns 0) or anything fails (1). Raises `StartupError`."""
        at = await self._http.start()
        hosts = self._config.engine.hosts
        logger.info("host %d of %d: /health and /metrics on %s", hosts.rank, hosts.num_hosts, at)
        await self._engine.start()
        self._watch = asyncio.create_task(watch_hosts(self._link))
        await self._engine.ready()
        self._engine.accept()
        logger.info("ready: follows host 0 at %s, %.1f s after start", hosts.dist_init_addr, self._seconds)
        await self._engine.death()
        return 0 if self._link.exit_status == 0 else 1

    async def drain(self) -> None:
        """Asks host 0 to stop, and waits until it ends this host. One that still loads just ends."""
        if self._link.info is None:
            return
        logger.info("stopping: host 0 lets open requests finish")
        self._engine.refuse("the host is shutting down")
        try:
            self._link.send(Shutdown())
        except EngineUnavailable:
            return
        death = asyncio.create_task(self._engine.death())
        await asyncio.wait({death}, timeout=self._config.drain_s + END_S)
        death.cancel()

    async def close(self) -> None:
        """Ends connections and the engine process."""
        if self._watch is not None:
            self._watch.cancel()
        await self._http.stop()
        await self._engine.stop()
        logger.info("stopped")

    def kill(self) -> None:
        """Ends the engine process at once."""
        self._engine.kill()

    @property
    def _seconds(self) -> float:
        return time.monotonic() - self._start_s


async def watch_hosts(link: EngineLink) -> None:
    """Ends the engine process if it gives no sign of life; stops this server if another host was asked to stop.

    Counts its own ticks, as watchdog.py does, and none before the first sign of life.
    """
    heard = silent = 0
    asked = False
    while not link.is_dead:
        await asyncio.sleep(PULSE_S)
        silent = silent + 1 if heard and link.num_pulses == heard else 0
        heard = link.num_pulses
        if silent * PULSE_S > SILENCE_S:
            link.kill()
            link.died(f"the engine process of this host has given no sign of life for {SILENCE_S:g} s")
        if link.hosts.leaving and not asked:
            asked = True
            logger.info("%s was asked to stop, so all hosts do", link.hosts.leaving)
            signal.raise_signal(signal.SIGTERM)  # as if an operator had asked this host


def _app(engine: Replicas, metrics: Metrics, model_name: str) -> FastAPI:
    app = FastAPI(title="jaxsgl", docs_url=None, redoc_url=None, openapi_url=None)
    errors.add_handlers(app)
    registry = registry_of(metrics, model_name)

    @app.get("/health")
    async def health() -> dict[str, Any]:
        """200 while the host follows; 503 while it loads or stops."""
        if engine.refusal is not None:
            raise EngineUnavailable(engine.refusal)
        return {"status": "ok"}

    @app.get("/metrics", response_class=Response)
    async def shown() -> Response:
        """All metrics in Prometheus' text format; those of requests are host 0's."""
        return Response(generate_latest(registry), headers={"content-type": METRICS_CONTENT_TYPE})

    return app
