"""Bytes that are no message: INVALID_ARGUMENT, where gRPC would say UNKNOWN and log a traceback. For server.py."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import grpc
from google.protobuf.message import DecodeError


class MalformedInterceptor(grpc.aio.ServerInterceptor):
    """Ends calls whose request can't be read. Methods that read a stream of requests (reflection) are left alone."""

    def __init__(self) -> None:
        self._handlers: dict[str, grpc.RpcMethodHandler] = {}

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler | None]],
        details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler | None:
        """Returns the method's handler, which is told of what can't be read."""
        known = self._handlers.get(details.method)
        if known is not None:
            return known
        handler = await continuation(details)
        if handler is None or handler.request_streaming:
            return handler
        return self._handlers.setdefault(details.method, _refusing(handler))


def _refusing(handler: grpc.RpcMethodHandler) -> grpc.RpcMethodHandler:
    serve = handler.unary_stream if handler.response_streaming else handler.unary_unary
    kind = grpc.unary_stream_rpc_method_handler if handler.response_streaming else grpc.unary_unary_rpc_method_handler

    def read(data: bytes) -> Any:
        try:
            return handler.request_deserializer(data)
        except DecodeError as error:
            return error

    async def serve_what_is_read(request: Any, context: grpc.aio.ServicerContext) -> Any:
        if isinstance(request, DecodeError):
            words = f"the request is no message of this method: {request}"
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, words)
        return await serve(request, context)

    return kind(serve_what_is_read, read, handler.response_serializer)
