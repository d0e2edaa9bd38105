"""The server's life: take the ports, start the engine, serve, drain, end. `python -m jaxsgl.serve` runs it.

Owns the order of things at the start and at the end. Never handles a request: that is the business of grpc, http and
generation.py. The ports are taken before the model is loaded and answer "not ready" meanwhile, so that a port in use
costs no start-up time.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from jaxsgl.config import ServerConfig
from jaxsgl.frontend.access import Access
from jaxsgl.frontend.certificates import load_certificate
from jaxsgl.frontend.engine_link import ENGINE_COMMAND, EngineLink
from jaxsgl.frontend.exposition import StatusLine
from jaxsgl.frontend.generation import FrontEnd, Generator, ServedModel
from jaxsgl.frontend.grpc.server import GrpcServer
from jaxsgl.frontend.http.app import HttpServer
from jaxsgl.frontend.listen import is_loopback
from jaxsgl.frontend.metrics import Metrics
from jaxsgl.frontend.watchdog import Watchdog
from jaxsgl.logs import LogStyle
from jaxsgl.text.tokenizer import Tokenizer, load_tokenizer

GRACE_S = 0.2  # calls that arrive at the end get an error that says why; a stopped gRPC server would say CANCELLED
ENGINE_ERROR_S = 10.0  # a bad model folder breaks the tokenizer too, but the engine's error explains it better
POLL_S = 0.02
MAX_THREADS = 4  # that tokenize long prompts
GC_THRESHOLD = 10_000  # new objects; one step's replies exceed Python's default of 700

logger = logging.getLogger(__name__)


async def serve(config: ServerConfig, engine_command: Sequence[str] = ENGINE_COMMAND) -> int:
    """Serves until a signal comes (returns 0) or the engine dies (returns 1). Raises `StartupError`."""
    server = Server(config, engine_command)
    stopped = asyncio.create_task(_stop_signal(server))
    living = asyncio.create_task(server.run())
    try:
        await asyncio.wait({stopped, living}, return_when=asyncio.FIRST_COMPLETED)
        if living.done():
            return living.result()
        await server.drain()
        return 0
    finally:
        stopped.cancel()
        living.cancel()
        await asyncio.wait({stopped, living})
        await server.close()


@dataclass(frozen=True)
class Addresses:
    """host:port of both ports."""

    grpc: str
    http: str


class Server:
    """Both ports and the engine process together. Must be made inside the event loop that runs it.

    Raises `StartupError` for a certificate or a file of keys that doesn't work.

    Attributes:
      engine: the link to the engine process.
    """

    def __init__(self, config: ServerConfig, engine_command: Sequence[str] = ENGINE_COMMAND) -> None:
        self._start_s = time.monotonic()
        self._config = config
        self._certificate = load_certificate(config)
        access = Access(config)
        self.engine = EngineLink(config.engine, LogStyle(config.log_level, config.log_format), engine_command)
        self._threads = ThreadPoolExecutor(MAX_THREADS, "tokenizer")  # asyncio's own would delay the end
        self._metrics = Metrics(lambda: self.engine.load)
        self._generator = Generator(self.engine, self._threads, self._metrics, config.request_timeout_s)
        self._watchdog = Watchdog(self.engine, config.watchdog_s)
        self._status = StatusLine(self._metrics)
        front_end = FrontEnd(config, access, self.engine, self._generator, self._metrics)
        self._grpc = GrpcServer(front_end, self._certificate)
        self._http = HttpServer(front_end, self._certificate)

    async def run(self) -> int:
        """Starts, and serves until the engine dies; returns exit status 1 then. Raises `StartupError`."""
        await self.start()
        _spare_the_garbage_collector()
        death = asyncio.create_task(self.engine.death())
        duties = [asyncio.create_task(self._watchdog.run(self._report_health)), asyncio.create_task(self._status.run())]
        if self._certificate is not None:
            duties.append(asyncio.create_task(self._certificate.watch()))
        try:
            await asyncio.wait([death, *duties], return_when=asyncio.FIRST_COMPLETED)
            for duty in duties:
                if duty.done():
                    duty.result()  # only a bug ends a duty; without a watchdog, health would stay good forever
        finally:
            for task in (death, *duties):
                task.cancel()
        await self._end_calls(death.result())
        return 1

    async def start(self) -> Addresses:
        """Starts everything; returns the addresses when requests may come. Raises `StartupError`."""
        at = Addresses(await self._grpc.start(), await self._http.start())
        logger.info("listening on %s (gRPC) and %s (HTTP), loading %s", at.grpc, at.http, self._config.engine.model)
        if not self._config.needs_key and not is_loopback(self._config.host):
            logger.warning("%s can be reached from other machines, and no --api-key is set", self._config.host)
        await self.engine.start()
        model = await self._load_model()
        self._metrics.serve(model.info)
        self._generator.serve(model)
        await self._report_health()
        seconds = time.monotonic() - self._start_s
        logger.info(
            "ready: %s on %s (gRPC) and %s (HTTP), %.1f s after start",
            self._config.engine.model, at.grpc, at.http, seconds,
        )  # fmt: skip
        return at

    async def drain(self) -> None:
        """Refuses new calls, gives the open ones `--drain-s` seconds to finish, and ends those that are left."""
        reason = "the server is shutting down: try again elsewhere or later"
        drain_s = self._config.drain_s
        logger.info("stopping: %d open calls get %.0f s to finish", self.engine.num_open, drain_s)
        self.engine.refuse(reason)
        await self._report_health()
        deadline_s = time.monotonic() + drain_s
        while self.engine.num_open and time.monotonic() < deadline_s:
            await asyncio.sleep(POLL_S)
        await self._end_calls(reason)

    async def close(self) -> None:
        """Ends connections and the engine process. Does not wait for threads that tokenize or download."""
        await asyncio.gather(self._grpc.stop(), self._http.stop())
        self._threads.shutdown(wait=False, cancel_futures=True)
        if self.engine.stuck is not None:
            self.kill()  # it would not hear the request to end
        await self.engine.stop()
        logger.info("stopped")

    def kill(self) -> None:
        """Ends the engine process at once."""
        self.engine.kill()

    async def _end_calls(self, reason: str) -> None:
        self.engine.fail(reason)
        await self._report_health()
        await asyncio.sleep(GRACE_S)

    async def _report_health(self) -> None:
        await self._grpc.set_serving(self.engine.refusal is None)

    async def _load_model(self) -> ServedModel:
        """Loads the tokenizer while the engine starts; waits for both."""
        starting = asyncio.create_task(self.engine.ready())
        loop = asyncio.get_running_loop()
        engine = self._config.engine
        loading = loop.run_in_executor(self._threads, load_tokenizer, engine.model, engine.revision)
        try:
            either: set[asyncio.Future[Any]] = {starting, loading}
            await asyncio.wait(either, return_when=asyncio.FIRST_EXCEPTION)
            if _failed(loading):
                await asyncio.wait({starting}, timeout=ENGINE_ERROR_S)
            if _failed(starting):
                starting.result()
            tokenizer: Tokenizer = await loading
            return ServedModel(await starting, tokenizer)
        finally:
            starting.cancel()
            loading.cancel()


async def _stop_signal(server: Server) -> None:
    """Waits for Ctrl-C or SIGTERM; a second one ends both processes on the spot."""
    first = asyncio.Event()

    def on_signal(number: int) -> None:
        if first.is_set():
            server.kill()
            os._exit(128 + number)
        first.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, on_signal, number)
    await first.wait()


def _spare_the_garbage_collector() -> None:
    """Exempts all objects made at the start from collections: a full one took 150 ms, in which no token moved."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(GC_THRESHOLD)


def _failed(task: asyncio.Future[Any]) -> bool:
    return task.done() and not task.cancelled() and task.exception() is not None
