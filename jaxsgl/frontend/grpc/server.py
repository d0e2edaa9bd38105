"""The gRPC server: its port, its services, health and reflection.

Never handles a request itself. The server's life (frontend/server.py) starts and ends it.
"""

from __future__ import annotations

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from smg_grpc_proto import sglang_scheduler_pb2_grpc as sglang_grpc

from jaxsgl.errors import StartupError
from jaxsgl.frontend.certificates import Certificate
from jaxsgl.frontend.generation import FrontEnd
from jaxsgl.frontend.grpc import jaxsgl as jaxsgl_service
from jaxsgl.frontend.grpc.interceptors import ApiKeyInterceptor, MalformedInterceptor, TraceInterceptor
from jaxsgl.frontend.grpc.jaxsgl import JaxsglService
from jaxsgl.frontend.grpc.limits import HeldStreams, Timeouts, connection_options
from jaxsgl.frontend.grpc.sglang import service as sglang_service
from jaxsgl.frontend.grpc.sglang.service import SglangService
from jaxsgl.frontend.listen import address_of, max_connections, take_port
from jaxsgl.frontend.proto import jaxsgl_pb2_grpc as pb_grpc
from jaxsgl.frontend.tracing import NO_TRACER

SERVICE_NAMES = (jaxsgl_service.SERVICE_NAME, sglang_service.SERVICE_NAME)
# Calls that wait for the event loop to take them. By default, gRPC silently cancels some calls from 1,000 waiting ones
# on and all from 3,000 on, whenever the loop is behind for a moment. Refusing is up to the engine's queue, which gives
# a reason (--max-queued-requests, 8,192). This limit is far above it and only bounds memory: 16 to 35 KiB a call, 3 GB.
MAX_PENDING_CALLS = 100_000
SHUTDOWN_GRACE_S = 1.0  # for final statuses to reach their clients before the connections close


class GrpcServer:
    """Answers from `start` on; health says NOT_SERVING until `set_serving`. Must be made inside the event loop."""

    def __init__(self, front_end: FrontEnd, certificate: Certificate | None, timeouts: Timeouts = Timeouts()) -> None:
        self._config = front_end.config
        self._shares_port = front_end.peers is not None
        self._certificate = certificate
        self._health = health.aio.HealthServicer()
        access = front_end.access
        most = max_connections(front_end.config.max_connections)
        self._server = grpc.aio.server(
            interceptors=[
                *([ApiKeyInterceptor(access)] if access.guards else []),
                *([] if front_end.tracer is NO_TRACER else [TraceInterceptor(front_end.tracer)]),
                HeldStreams(),
                MalformedInterceptor(timeouts.message_s),
            ],
            options=[
                ("grpc.so_reuseport", int(self._shares_port)),
                ("grpc.server.max_pending_requests", MAX_PENDING_CALLS),
                ("grpc.server.max_pending_requests_hard_limit", MAX_PENDING_CALLS),
                *connection_options(front_end.config, most, timeouts),
            ],
        )
        pb_grpc.add_JaxsglServicer_to_server(JaxsglService(front_end), self._server)
        sglang_grpc.add_SglangSchedulerServicer_to_server(SglangService(front_end), self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        reflection.enable_server_reflection(
            (*SERVICE_NAMES, health.SERVICE_NAME, reflection.SERVICE_NAME), self._server
        )

    async def start(self) -> str:
        """Takes the port; returns the address. Raises `StartupError`."""
        host, port = self._config.host, self._config.grpc_port
        if not self._shares_port:
            take_port(host, port, "--grpc-port").close()  # gRPC opens its own socket, but its error explains less
        await self.set_serving(False)
        try:
            port = self._open(address_of(host, port))
        except RuntimeError as error:
            raise StartupError(f"can't listen on {address_of(host, port)}: {error}") from error
        await self._server.start()
        return address_of(host, port)

    def _open(self, address: str) -> int:
        if self._certificate is None:
            return int(self._server.add_insecure_port(address))
        return int(self._server.add_secure_port(address, self._certificate.grpc_credentials()))

    async def set_serving(self, serving: bool) -> None:
        """Sets what health checks answer from now on."""
        status = health_pb2.HealthCheckResponse
        for service in ("", *SERVICE_NAMES):
            await self._health.set(service, status.SERVING if serving else status.NOT_SERVING)

    async def stop(self) -> None:
        """Ends all connections."""
        await self._server.stop(SHUTDOWN_GRACE_S)
