"""Sends an answer as server-sent events, with flow control, and ends it when the client leaves or stops reading.

Knows nothing of an event's content; endpoints pass in bytes. Uvicorn's write buffer (64 KiB) does the flow control:
`send` blocks while the client doesn't read. Replies that arrive meanwhile wait in reply_stream.py, merged and bounded.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from jaxsgl.frontend.http.calls import cut_when_gone
from jaxsgl.frontend.http.errors import event_of

STALL_S = 60.0  # how long a client may read nothing
DONE = b"data: [DONE]\n\n"

logger = logging.getLogger(__name__)


def event(data: bytes) -> bytes:
    """Returns the event that holds `data`, which must have no line break (JSON has none)."""
    return b"data: " + data + b"\n\n"


class EventStream(Response):
    """Sends `events` (each ended by an empty line) as they arrive.

    The status is sent with the first event, so an error before it is answered like any other error. A later error
    becomes the last event. A client that reads nothing for `stall_s` seconds has its connection broken. However the
    answer ends, `events` is closed first, so that the requests it holds open are aborted at once.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None], stall_s: float = STALL_S) -> None:
        self.status_code = 200
        self.background = None
        self._events = events
        self._stall_s = stall_s
        self._blocked_since_s: float | None = None
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """An ASGI application."""
        try:
            async with asyncio.timeout(None) as cut:
                watchers = [
                    asyncio.create_task(cut_when_gone(receive, cut)),
                    asyncio.create_task(self._cut_when_stalled(scope)),
                ]
                try:
                    # A task of its own: otherwise each event would wake a chain of some 20 coroutines.
                    await asyncio.create_task(self._send_all(send))
                finally:
                    for watcher in watchers:
                        watcher.cancel()
        except TimeoutError:
            if not cut.expired():
                raise
        finally:
            await self._events.aclose()

    async def _send_all(self, send: Send) -> None:
        events = self._events
        now_s = asyncio.get_running_loop().time
        first = await anext(events, b"")
        self._blocked_since_s = now_s()
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": first, "more_body": True})
        self._blocked_since_s = None
        try:
            async for data in events:
                self._blocked_since_s = now_s()
                await send({"type": "http.response.body", "body": data, "more_body": True})
                self._blocked_since_s = None
        except Exception as error:  # the status has been sent
            await send({"type": "http.response.body", "body": event_of(error), "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _cut_when_stalled(self, scope: Scope) -> None:
        """Checks now and then: a timer for each event would cost more than the event."""
        while True:
            await asyncio.sleep(self._stall_s / 4)
            since_s = self._blocked_since_s
            if since_s is not None and asyncio.get_running_loop().time() - since_s > self._stall_s:
                logger.warning("a client has not read for %.0f s: breaking its connection", self._stall_s)
                scope["jaxsgl.abort"]()
                return
