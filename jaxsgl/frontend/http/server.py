"""The HTTP server: uvicorn on our socket, inside our event loop. server.py starts and ends it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator

import uvicorn

from jaxsgl.frontend.front_end import FrontEnd
from jaxsgl.frontend.http.app import build_app
from jaxsgl.frontend.http.connection import Connection
from jaxsgl.frontend.ports import BACKLOG, address_of, take_port
from jaxsgl.frontend.tls import Certificate

LAST_ANSWERS_S = 1.0  # for answers to reach their clients before the connections close
POLL_S = 0.01


class _Uvicorn(uvicorn.Server):
    """Leaves signals to server.py."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Captures none."""
        yield


class HttpServer:
    """Answers from `start` to `stop`. Made inside the event loop."""

    def __init__(self, front_end: FrontEnd, certificate: Certificate | None) -> None:
        self._config = front_end.config
        self._server = _Uvicorn(
            uvicorn.Config(
                build_app(front_end),
                http=Connection,
                ws="none",
                log_config=None,
                access_log=False,
                lifespan="off",
                backlog=BACKLOG,
                ssl_certfile=None if certificate is None else certificate.certfile,
                ssl_keyfile=None if certificate is None else certificate.keyfile,
                server_header=False,
                timeout_graceful_shutdown=round(LAST_ANSWERS_S),
            )
        )
        self._serving: asyncio.Task[None] | None = None

    async def start(self) -> str:
        """Takes the port; returns the address. Raises `StartupError`."""
        socket = take_port(self._config.host, self._config.port, "--port")
        self._serving = asyncio.create_task(self._server.serve([socket]))
        while not self._server.started and not self._serving.done():
            await asyncio.sleep(POLL_S)
        return address_of(self._config.host, socket.getsockname()[1])

    async def stop(self) -> None:
        """Ends all connections."""
        self._server.should_exit = True
        if self._serving is not None:
            await self._serving
