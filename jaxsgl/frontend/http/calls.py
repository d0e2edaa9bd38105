"""What holds for every call of an endpoint that takes long: it ends when its client leaves."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

from starlette.requests import Request
from starlette.types import Receive

from jaxsgl.frontend.http.errors import ClientGone

AnswerT = TypeVar("AnswerT")


async def until_gone(request: Request, answer: Awaitable[AnswerT]) -> AnswerT:
    """Returns what `answer` gives; cancels it and raises `ClientGone` when the client leaves before.

    For endpoints whose body has been read.
    """
    try:
        async with asyncio.timeout(None) as cut:
            watcher = asyncio.create_task(cut_when_gone(request.receive, cut))
            try:
                return await answer
            finally:
                watcher.cancel()
    except TimeoutError:
        if not cut.expired():
            raise
        raise ClientGone from None


async def cut_when_gone(receive: Receive, cut: asyncio.Timeout) -> None:
    """Ends the block of `cut` when the client leaves."""
    while (await receive())["type"] != "http.disconnect":
        pass
    cut.reschedule(0.0)  # a time long past: now
