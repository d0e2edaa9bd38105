"""The HTTP port: the application with all its routes, and the uvicorn server that runs it on our socket.

Knows the order of routers and middleware and nothing of what an endpoint does. frontend/server.py starts and stops it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable, Iterator
from typing import Any

import uvicorn
from fastapi import APIRouter, FastAPI
from fastapi.routing import APIRoute
from starlette.middleware.cors import CORSMiddleware

import jaxsgl
from jaxsgl.config.server import ServerConfig
from jaxsgl.frontend.certificates import Certificate
from jaxsgl.frontend.generation import FrontEnd
from jaxsgl.frontend.http import errors, health, vllm
from jaxsgl.frontend.http.acceptor import Acceptor
from jaxsgl.frontend.http.anthropic import messages as anthropic
from jaxsgl.frontend.http.compressed import Gunzip
from jaxsgl.frontend.http.connection import KEEP_ALIVE_S, Connection
from jaxsgl.frontend.http.middleware import (
    ANSWERED_ID_HEADERS,
    OPEN_PATHS,
    AccessLog,
    ApiKey,
    BodyLimit,
    RequestIds,
    TraceParent,
    counting,
)
from jaxsgl.frontend.http.ollama import routes as ollama
from jaxsgl.frontend.http.openai import batches
from jaxsgl.frontend.http.openai import routes as openai
from jaxsgl.frontend.http.page import live, static
from jaxsgl.frontend.http.sglang import admin, encode, generate
from jaxsgl.frontend.http.sites import PageGuard
from jaxsgl.frontend.listen import address_of, max_connections, take_port
from jaxsgl.frontend.tracing import NO_TRACER

# `router(front_end) -> APIRouter` of each module.
ROUTERS: tuple[Callable[[FrontEnd], APIRouter], ...] = (
    health.router, static.router, live.router, openai.router, batches.router, anthropic.router, ollama.router,
    generate.router, admin.router, encode.router, vllm.router,
)  # fmt: skip
SHUTDOWN_GRACE_S = 1.0  # for final answers to reach their clients before connections close
POLL_S = 0.01

logger = logging.getLogger(__name__)


def build_app(front_end: FrontEnd) -> FastAPI:
    """Returns the application with every endpoint, for `front_end`."""
    app = FastAPI(title="jaxsgl", version=jaxsgl.__version__, responses=errors.RESPONSES, docs_url=None, redoc_url=None)
    errors.add_handlers(app, counting(front_end.metrics))
    routers = [router(front_end) for router in ROUTERS]
    for router in routers:
        app.include_router(router)
    app.state.paths = tuple(route.path for router in routers for route in router.routes if isinstance(route, APIRoute))
    # The middleware added last is the first that a request passes.
    config = front_end.config
    files = {batches.FILES_PATH: batches.MAX_FILE_BYTES} if config.batch_dir is not None else {}
    app.add_middleware(Gunzip)
    app.add_middleware(
        BodyLimit, max_bytes=config.max_body_bytes, max_plain_bytes=config.max_message_bytes, of_paths=files
    )
    if front_end.access.guards:
        app.add_middleware(ApiKey, access=front_end.access, open_paths=OPEN_PATHS | static.PATHS)
    if front_end.config.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=[origin.lower() for origin in front_end.config.allowed_origins],
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=ANSWERED_ID_HEADERS,
        )
    app.add_middleware(PageGuard, config=front_end.config)
    if front_end.config.access_log:
        app.add_middleware(AccessLog)
    if front_end.tracer is not NO_TRACER:
        app.add_middleware(TraceParent, tracer=front_end.tracer)
    app.add_middleware(RequestIds)
    return app


class _Uvicorn(uvicorn.Server):
    """Leaves signals to frontend/server.py, and accepts at most `max_connections` at once."""

    def __init__(self, config: uvicorn.Config, max_connections: int) -> None:
        super().__init__(config)
        self._max_connections = max_connections

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begins to accept from `sockets`, which listen."""

        def new_connection() -> Connection:
            return Connection(self.config, self.server_state, app_state={})

        context = self.config.ssl
        self.servers: list[Any] = [
            Acceptor(listening, context, new_connection, self._max_connections) for listening in sockets or []
        ]
        self.started = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Accepts no more, and closes all connections: those that still run or send after a moment are cut."""
        for server in self.servers:
            server.close()
        state = self.server_state
        for connection in list(state.connections):
            connection.shutdown()
        deadline_s = asyncio.get_running_loop().time() + SHUTDOWN_GRACE_S
        while (state.connections or state.tasks) and asyncio.get_running_loop().time() < deadline_s:
            await asyncio.sleep(POLL_S)
        if state.connections:
            logger.warning("cutting %d HTTP connections: calls run, or clients have not read", len(state.connections))
        for task in state.tasks:
            task.cancel()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Captures none."""
        yield


class HttpServer:
    """Serves `app` from `start` to `stop`. Must be made inside the event loop. `listener` has the port already."""

    def __init__(
        self,
        app: FastAPI,
        server_config: ServerConfig,
        certificate: Certificate | None,
        listener: socket.socket | None = None,
    ) -> None:
        self._config = server_config
        self._listener = listener
        config = uvicorn.Config(
            app,
            ws="none",
            log_config=None,
            access_log=False,
            lifespan="off",
            ssl_certfile=None if certificate is None else certificate.certfile,
            ssl_keyfile=None if certificate is None else certificate.keyfile,
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_S,
        )
        if certificate is not None:
            config.load()
            assert config.ssl is not None
            certificate.serve_http(config.ssl)
        self._server = _Uvicorn(config, max_connections(server_config.max_connections))
        self._serving: asyncio.Task[None] | None = None

    async def start(self) -> str:
        """Takes the port and returns its address. Raises `StartupError`."""
        listener = self._listener or take_port(self._config.host, self._config.port, "--port")
        self._serving = asyncio.create_task(self._server.serve([listener]))
        while not self._server.started and not self._serving.done():
            await asyncio.sleep(POLL_S)
        return address_of(self._config.host, listener.getsockname()[1])

    @property
    def is_answering(self) -> bool:
        """Whether requests are being answered, or clients have answers to read."""
        connections: set[Any] = self._server.server_state.connections
        return any(connection.owes for connection in connections)

    async def stop(self) -> None:
        """Closes all connections."""
        self._server.should_exit = True
        if self._serving is not None:
            await self._serving
