"""Our errors as gRPC statuses. All servicers of ours use it; knows no message."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import grpc

from jaxsgl.errors import RETRY_AFTER_S, EngineUnavailable, JaxsglError, Overloaded

RETRY_AFTER = ("retry-after", str(RETRY_AFTER_S))  # trailing metadata, named as HTTP's header
STALL_S = 60.0  # so long may a client not read

logger = logging.getLogger(__name__)

MethodT = TypeVar("MethodT", bound=Callable[..., Awaitable[Any]])


async def write(context: grpc.aio.ServicerContext, reply: Any, stall_s: float = STALL_S) -> None:
    """Sends one reply of a stream. Raises `Overloaded` if the client reads nothing for `stall_s` seconds."""
    try:
        async with asyncio.timeout(stall_s):
            await context.write(reply)
    except TimeoutError:
        raise Overloaded(f"the client has read nothing for {stall_s:g} s: read replies as they come") from None


def answers_errors(method: MethodT) -> MethodT:
    """Ends the call with the status and words of the error that the method raises."""

    @functools.wraps(method)
    async def wrapper(self: Any, request: Any, context: grpc.aio.ServicerContext) -> Any:
        try:
            return await method(self, request, context)
        except JaxsglError as error:
            again = (RETRY_AFTER,) if isinstance(error, Overloaded | EngineUnavailable) else ()
            await context.abort(grpc.StatusCode[error.grpc_status], str(error), again)
        except Exception as error:
            logger.exception("a call failed by our own fault")
            await context.abort(grpc.StatusCode.INTERNAL, f"internal error: {type(error).__name__}: {error}")

    return wrapper  # type: ignore[return-value]
