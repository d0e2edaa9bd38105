"""Answers as server-sent events: flow control, and an end when the client leaves or stops reading.

Knows no event's content; endpoints hand over bytes. Uvicorn's write buffer (64 KiB) does the flow control: `send`
blocks while the client doesn't read, and replies that come meanwhile wait, merged and bounded, in engine_client.py.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from jaxsgl.frontend.http.calls import cut_when_gone
from jaxsgl.frontend.http.errors import event_of

STALL_S = 60.0  # so long may a client not read
DONE = b"data: [DONE]\n\n"

logger = logging.getLogger(__name__)


def event(data: bytes) -> bytes:
    """The event that holds `data`, which has no line break (JSON)."""
    return b"data: " + data + b"\n\n"


class EventStream(Response):
    """Sends `events` (each ended by an empty line) as they come.

    The status goes out with the first event, so an error before it is answered as any other error; a later one becomes
    the last event. However the answer ends, `events` is closed before, so that what it holds open is left at once:
    by the client's departure, or if the client reads nothing for `stall_s` seconds, which breaks its connection.
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
        """As ASGI has it."""
        try:
            async with asyncio.timeout(None) as cut:
                watchers = [
                    asyncio.create_task(cut_when_gone(receive, cut)),
                    asyncio.create_task(self._cut_when_stalled(scope, cut)),
                ]
                try:
                    # In a task of its own, so that an event doesn't wake a chain of some 20 middlewares.
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
        except Exception as error:  # the status is out
            await send({"type": "http.response.body", "body": event_of(error), "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _cut_when_stalled(self, scope: Scope, cut: asyncio.Timeout) -> None:
        """Looks now and then, since a timer for each event would cost more than the event."""
        while True:
            await asyncio.sleep(self._stall_s / 4)
            since_s = self._blocked_since_s
            if since_s is not None and asyncio.get_running_loop().time() - since_s > self._stall_s:
                logger.warning("a client has not read for %.0f s: breaking its connection", self._stall_s)
                scope["jaxsgl.abort"]()
                return
