"""Both ports of a server together: they open, report health and close as one. Made by frontend/server.py."""

from __future__ import annotations

import asyncio
import socket

from jaxsgl.frontend.certificates import Certificate
from jaxsgl.frontend.generation import FrontEnd
from jaxsgl.frontend.grpc.server import GrpcServer
from jaxsgl.frontend.http.app import HttpServer, build_app
from jaxsgl.frontend.listen import Addresses


class Ports:
    """The gRPC and the HTTP port of `front_end`. Must be made inside the event loop.

    `listener` has the HTTP port already, or is None.
    """

    def __init__(self, front_end: FrontEnd, certificate: Certificate | None, listener: socket.socket | None) -> None:
        self._grpc = GrpcServer(front_end, certificate)
        self._http = HttpServer(build_app(front_end), front_end.config, certificate, listener)

    async def open(self) -> Addresses:
        """Takes the ports and returns their addresses. Raises `StartupError`."""
        return Addresses(await self._grpc.start(), await self._http.start())

    async def set_serving(self, serving: bool) -> None:
        """Sets what gRPC's health checks answer from now on."""
        await self._grpc.set_serving(serving)

    @property
    def is_answering(self) -> bool:
        """Whether HTTP requests are being answered, or clients have answers to read."""
        return self._http.is_answering

    async def stop(self) -> None:
        """Closes all connections."""
        await asyncio.gather(self._grpc.stop(), self._http.stop())
