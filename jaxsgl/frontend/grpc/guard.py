"""Who may call: the API key in every gRPC call's metadata. server.py installs the interceptor."""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable
from typing import Any

import grpc

OPEN_SERVICE = "/grpc.health.v1.Health/"  # probes hold no key


class ApiKeyInterceptor(grpc.aio.ServerInterceptor):
    """Ends calls without `authorization: Bearer KEY` with UNAUTHENTICATED, but for those of gRPC's health service."""

    def __init__(self, key: str) -> None:
        self._expected = f"Bearer {key}".encode()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler | None]],
        details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler | None:
        """Returns the method's handler, or one that refuses."""
        if details.method.startswith(OPEN_SERVICE) or self._holds_key(details):
            return await continuation(details)
        return grpc.stream_stream_rpc_method_handler(_refuse)  # on the wire all kinds of calls begin alike

    def _holds_key(self, details: grpc.HandlerCallDetails) -> bool:
        given = dict(details.invocation_metadata).get("authorization", "")
        return hmac.compare_digest(given.encode(), self._expected)


async def _refuse(requests: Any, context: grpc.aio.ServicerContext) -> None:
    await context.abort(
        grpc.StatusCode.UNAUTHENTICATED,
        "the API key is missing or wrong: send the metadata authorization: Bearer KEY",
    )
