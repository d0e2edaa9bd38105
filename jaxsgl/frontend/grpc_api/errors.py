"""Our errors as gRPC statuses. All servicers of ours use it; knows no message."""

from __future__ import annotations

import functools
import logging
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import grpc

from jaxsgl.errors import JaxsglError

logger = logging.getLogger(__name__)

MethodT = TypeVar("MethodT", bound=Callable[..., Awaitable[Any]])


def answers_errors(method: MethodT) -> MethodT:
    """Ends the call with the status and words of the error that the method raises."""

    @functools.wraps(method)
    async def wrapper(self: Any, request: Any, context: grpc.aio.ServicerContext) -> Any:
        try:
            return await method(self, request, context)
        except JaxsglError as error:
            await context.abort(grpc.StatusCode[error.grpc_status], str(error))
        except Exception as error:
            logger.exception("a call failed by our own fault")
            await context.abort(grpc.StatusCode.INTERNAL, f"internal error: {type(error).__name__}: {error}")

    return wrapper  # type: ignore[return-value]
