"""How long gRPC connections may last and how many streams they may hold.

Owns gRPC's options for connections, and `HeldStreams`, which counts the calls that have no end of their own. Calls that
generate are bounded elsewhere: in number by the engine's queue, in time by --request-timeout-s. Never knows a message.
server.py puts both into the server.
"""

from __future__ import annotations

import contextlib
import inspect
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Any

import grpc

from jaxsgl.config.server import ServerConfig

DEFAULT_ROWS = 256  # of an engine without --max-running-requests, at most
SHORT_CALLS = 128  # of one connection at once, those that generate not counted
# Methods whose calls stay open until the client or the connection ends.
ENDLESS_METHODS = (
    "/grpc.health.v1.Health/Watch",
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
    "/sglang.grpc.scheduler.SglangScheduler/SubscribeKvEvents",
)
MAX_HELD_PER_CONNECTION = 64  # calls of each endless method
MAX_HELD = 1024
MAX_NUMBER = (1 << 31) - 1  # of gRPC's options

Options = list[tuple[str, int]]


@dataclass(frozen=True)
class Timeouts:
    """Seconds that a gRPC connection may take.

    Attributes:
      handshake_s: for TLS and the first HTTP/2 settings.
      idle_s: without a call.
      age_s: after this the client is asked to use a new connection; open calls may end.
      ping_s: the server pings a client that has calls open and is silent for so long.
      pong_s: for the answer to a ping; without one the calls end.
      client_ping_s: clients may ping so often; more is taken for an attack. gRPC's default of 5 minutes ends the
        connections of clients that check every minute while their prompt waits.
      message_s: for the request of a call that has begun.
    """

    handshake_s: float = 60.0
    idle_s: float = 300.0
    age_s: float = 12 * 3600.0
    ping_s: float = 60.0
    pong_s: float = 20.0
    client_ping_s: float = 5.0
    message_s: float = 60.0


def connection_options(config: ServerConfig, max_connections: int, timeouts: Timeouts) -> Options:
    """Returns gRPC's options. A connection that is too old may finish what --request-timeout-s allows."""
    return [
        ("grpc.max_receive_message_length", min(config.max_message_bytes, MAX_NUMBER)),
        ("grpc.max_allowed_incoming_connections", max_connections),
        ("grpc.max_concurrent_streams", max_streams(config)),
        ("grpc.server_handshake_timeout_ms", _ms(timeouts.handshake_s)),
        ("grpc.max_connection_idle_ms", _ms(timeouts.idle_s)),
        ("grpc.max_connection_age_ms", _ms(timeouts.age_s)),
        ("grpc.max_connection_age_grace_ms", _ms(config.request_timeout_s + timeouts.handshake_s)),
        ("grpc.keepalive_time_ms", _ms(timeouts.ping_s)),
        ("grpc.keepalive_timeout_ms", _ms(timeouts.pong_s)),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", _ms(timeouts.client_ping_s)),
        ("grpc.http2.max_ping_strikes", 2),
    ]


def max_streams(config: ServerConfig) -> int:
    """Returns how many calls one connection may have open: a gateway sends all that may wait and run over one."""
    engine = config.engine
    return min(engine.max_queued_requests + (engine.max_running_requests or DEFAULT_ROWS) + SHORT_CALLS, MAX_NUMBER)


def _ms(seconds: float) -> int:
    return round(min(seconds * 1000, MAX_NUMBER))  # which means forever


class HeldStreams(grpc.aio.ServerInterceptor):
    """Bounds the open calls of each of `ENDLESS_METHODS`, for a connection and in all.

    More end with RESOURCE_EXHAUSTED.
    """

    def __init__(self) -> None:
        self._handlers: dict[str, grpc.RpcMethodHandler] = {}

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler | None]],
        details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler | None:
        """Returns the method's handler, wrapped if its calls are counted."""
        if details.method not in ENDLESS_METHODS:
            return await continuation(details)
        known = self._handlers.get(details.method)
        if known is None:
            handler = await continuation(details)
            if handler is None:
                return None
            known = self._handlers.setdefault(details.method, _counted(handler))
        return known


def _counted(handler: grpc.RpcMethodHandler) -> grpc.RpcMethodHandler:
    """Returns `handler` with a count of its own. It must stream its responses."""
    held: Counter[str] = Counter()
    serve: Any = handler.stream_stream if handler.request_streaming else handler.unary_stream
    kind: Any = (
        grpc.stream_stream_rpc_method_handler if handler.request_streaming else grpc.unary_stream_rpc_method_handler
    )

    async def serve_held(requests: Any, context: grpc.aio.ServicerContext) -> None:
        words = _refusal(held, context.peer())
        if words is not None:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, words)
        with _holding(held, context.peer()):
            await serve(requests, context)

    async def yield_held(requests: Any, context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
        words = _refusal(held, context.peer())
        if words is not None:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, words)
        with _holding(held, context.peer()):
            async for response in serve(requests, context):
                yield response

    wrapped = yield_held if inspect.isasyncgenfunction(serve) else serve_held
    return kind(wrapped, handler.request_deserializer, handler.response_serializer)


def _refusal(held: Counter[str], peer: str) -> str | None:
    if held[peer] >= MAX_HELD_PER_CONNECTION:
        return f"this connection holds {held[peer]} calls of this method, which is the limit: end one first"
    if held.total() >= MAX_HELD:
        return f"the server holds {MAX_HELD} calls of this method, which is the limit: end one first"
    return None


@contextlib.contextmanager
def _holding(held: Counter[str], peer: str) -> Iterator[None]:
    held[peer] += 1
    try:
        yield
    finally:
        held[peer] -= 1
        if not held[peer]:
            del held[peer]
