"""What every gRPC call passes: the check of keys, the parsing of its message, and errors as gRPC statuses.

The two interceptors stand in front of all services of server.py; the services' methods wear `answers_errors` and send
streams by `write`. Never knows a message's meaning.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Awaitable, Callable
from typing import Any, Protocol, TypeVar

import grpc
from google.protobuf.message import DecodeError

from jaxsgl.errors import (
    RETRY_AFTER_S,
    EngineUnavailable,
    Forbidden,
    InvalidRequest,
    JaxsglError,
    NotFound,
    Overloaded,
    Unauthenticated,
    Unsupported,
)
from jaxsgl.frontend.access import Access, enter
from jaxsgl.frontend.metrics.measurements import Metrics
from jaxsgl.frontend.tracing import Tracer
from jaxsgl.logs import OF_CLIENTS

OPEN_SERVICE = "/grpc.health.v1.Health/"  # probes have no key
# They operate the server or show what all its clients do, their prompts included: for the administrator, if there is
# one.
ORDERS = frozenset({
    "/jaxsgl.v1.Jaxsgl/Abort",
    *(f"/sglang.grpc.scheduler.SglangScheduler/{name}" for name in (
        "Abort", "FlushCache", "GetServerInfo", "LoadLoRAAdapter", "StartProfile", "StopProfile", "SubscribeKvEvents",
        "UnloadLoRAAdapter",
    )),
})  # fmt: skip
RETRY_AFTER = ("retry-after", str(RETRY_AFTER_S))  # trailing metadata, named like HTTP's header
STALL_S = 60.0  # a client that reads nothing for so long is cut off
LOGGED = (
    InvalidRequest,
    Forbidden,
    NotFound,
    Unsupported,
)  # mistakes of clients, whose authors look for them in the log
MAX_LOGGED_CHARS = 300

logger = logging.getLogger(__name__)

MethodT = TypeVar("MethodT", bound=Callable[..., Awaitable[Any]])


class ApiKeyInterceptor(grpc.aio.ServerInterceptor):
    """Ends calls without the key that they need: UNAUTHENTICATED, PERMISSION_DENIED. gRPC's health stays open."""

    def __init__(self, access: Access) -> None:
        self._access = access

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler | None]],
        details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler | None:
        """Returns the method's handler, or one that refuses."""
        if not details.method.startswith(OPEN_SERVICE):
            given = dict(details.invocation_metadata).get("authorization", "")
            try:
                enter(self._access.check(given.encode(), is_order=details.method in ORDERS))
            except (Unauthenticated, Forbidden) as error:
                return _refusing(details.method, error)
        return await continuation(details)


class TraceInterceptor(grpc.aio.ServerInterceptor):
    """Notes for `tracer` the trace that a call belongs to, if its client says so in the metadata."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler | None]],
        details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler | None:
        """Returns the method's handler."""
        self._tracer.enter(dict(details.invocation_metadata))
        return await continuation(details)


def _refusing(method: str, error: JaxsglError) -> grpc.RpcMethodHandler:
    async def refuse_call(requests: Any, context: grpc.aio.ServicerContext) -> None:
        await refuse(context, method, error)

    return grpc.stream_stream_rpc_method_handler(refuse_call)  # on the wire all kinds of calls begin alike


async def refuse(context: grpc.aio.ServicerContext, method: str, error: JaxsglError) -> None:
    """Ends a call of `method` with the status and the text of `error`, and logs a mistake of its client."""
    if isinstance(error, LOGGED):
        words = ascii(str(error)[:MAX_LOGGED_CHARS])
        logger.info("%s: %s, %s", method, error.grpc_status, words, extra=OF_CLIENTS)
    again = (RETRY_AFTER,) if isinstance(error, Overloaded | EngineUnavailable) else ()
    await context.abort(grpc.StatusCode[error.grpc_status], str(error), again)


class MalformedInterceptor(grpc.aio.ServerInterceptor):
    """Ends calls whose bytes are no message with INVALID_ARGUMENT; gRPC would say UNKNOWN and log a traceback.

    Ends calls whose message doesn't come in `message_s` seconds, too, for which gRPC would wait forever. Methods that
    read a stream of requests (reflection) are left alone.
    """

    def __init__(self, message_s: float = STALL_S) -> None:
        self._message_s = message_s
        self._handlers: dict[str, grpc.RpcMethodHandler] = {}

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler | None]],
        details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler | None:
        """Returns the method's handler, wrapped so that it refuses what can't be parsed."""
        known = self._handlers.get(details.method)
        if known is not None:
            return known
        handler = await continuation(details)
        if handler is None or handler.request_streaming:
            return handler
        return self._handlers.setdefault(details.method, _refusing_malformed(details.method, handler, self._message_s))


def _refusing_malformed(method: str, handler: grpc.RpcMethodHandler, message_s: float) -> grpc.RpcMethodHandler:
    """Returns a handler that reads the one message itself, since gRPC hands no call over that has none yet."""
    serve = handler.unary_stream if handler.response_streaming else handler.unary_unary
    kind = grpc.stream_stream_rpc_method_handler if handler.response_streaming else grpc.stream_unary_rpc_method_handler

    def parse(data: bytes) -> Any:
        try:
            return handler.request_deserializer(data)
        except DecodeError as error:
            return error

    async def serve_if_parsed(_: Any, context: grpc.aio.ServicerContext) -> Any:
        try:
            async with asyncio.timeout(message_s):
                request = await context.read()
        except TimeoutError:
            words = f"the request has not come within {message_s:g} s: send it at once"
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, words)
        if request is grpc.aio.EOF:
            await refuse(context, method, InvalidRequest("the call ends without a request: send one"))
        if isinstance(request, DecodeError):
            await refuse(context, method, InvalidRequest(f"the request is no message of this method: {request}"))
        return await serve(request, context)

    return kind(serve_if_parsed, parse, handler.response_serializer)


async def write(context: grpc.aio.ServicerContext, reply: Any, stall_s: float = STALL_S) -> None:
    """Sends one reply of a stream. Raises `Overloaded` if the client reads nothing for `stall_s` seconds."""
    try:
        async with asyncio.timeout(stall_s):
            await context.write(reply)
    except TimeoutError:
        raise Overloaded(f"the client has read nothing for {stall_s:g} s: read replies as they come") from None


def answers_errors(method: MethodT) -> MethodT:
    """Makes an error that `method` raises the status and the message with which the call ends."""

    @functools.wraps(method)
    async def wrapper(self: Any, request: Any, context: grpc.aio.ServicerContext) -> Any:
        try:
            return await method(self, request, context)
        except JaxsglError as error:
            await refuse(context, method.__qualname__, error)
        except Exception as error:
            logger.exception("a call failed by our own fault")
            words = f"internal error: {type(error).__name__}; the server's log says more"
            await context.abort(grpc.StatusCode.INTERNAL, words)

    return wrapper  # type: ignore[return-value]


class Counting(Protocol):
    """A servicer whose requests are counted."""

    _metrics: Metrics


def counts_errors(method: MethodT) -> MethodT:
    """Counts an error that `method` raises as the end of a request, even if none was made of the message."""

    @functools.wraps(method)
    async def wrapper(self: Counting, request: Any, context: grpc.aio.ServicerContext) -> Any:
        with self._metrics.counting_errors():
            return await method(self, request, context)

    return wrapper  # type: ignore[return-value]
