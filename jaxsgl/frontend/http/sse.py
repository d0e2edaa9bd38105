"""Sends an answer as server-sent events, with flow control, and ends it when the client leaves.

Knows nothing of an event's content; endpoints pass in bytes. Uvicorn's write buffer (64 KiB) does the flow control:
`send` blocks while the client doesn't read. Replies that arrive meanwhile wait in a `ReplyStream`, merged and bounded.
A client that stops reading loses its connection (connection.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from jaxsgl.frontend.http.calls import cut_when_gone
from jaxsgl.frontend.http.errors import event_of

DONE = b"data: [DONE]\n\n"


def event(data: bytes) -> bytes:
    """Returns the event that holds `data`, which must have no line break (JSON has none)."""
    return b"data: " + data + b"\n\n"


class EventStream(Response):
    """Sends `events` (each ended by an empty line) as they arrive.

    The status is sent with the first event, so an error before it is answered like any other error. A later error
    becomes the last event. However the answer ends, `events` is closed first, so that the requests it holds open are
    aborted at once.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None]) -> None:
        self.status_code = 200
        self.background = None
        self._events = events
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """An ASGI application."""
        try:
            async with asyncio.timeout(None) as cut:
                watcher = asyncio.create_task(cut_when_gone(receive, cut))
                try:
                    # A task of its own: otherwise each event would wake a chain of some 20 coroutines.
                    await asyncio.create_task(self._send_all(send))
                finally:
                    watcher.cancel()
        except TimeoutError:
            if not cut.expired():
                raise
        finally:
            await self._events.aclose()

    async def _send_all(self, send: Send) -> None:
        events = self._events
        first = await anext(events, b"")
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": first, "more_body": True})
        try:
            async for data in events:
                await send({"type": "http.response.body", "body": data, "more_body": True})
        except Exception as error:  # the status has been sent
            await send({"type": "http.response.body", "body": event_of(error), "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
