"""A client's HTTP connection: uvicorn's protocol, and what that one leaves unbounded. server.py hands it to uvicorn.

Uvicorn bounds neither the head of a request nor the time that it takes, closing a connection waits for a reader for
ever, and of requests that a client sends without waiting for answers only the last one is told when it leaves. Bodies
are guard.py's business, streams sse.py's.
"""

from __future__ import annotations

import asyncio
from typing import Any, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

MAX_HEAD_BYTES = 64 << 10


class Connection(HttpToolsProtocol):
    """Lets an answer break the connection, too, as `scope["jaxsgl.abort"]`.

    Attributes:
      head_s: seconds that a request's head may take, the wait for a connection's first request included.
      stall_s: seconds that a client may read nothing of an answer that is complete.
    """

    head_s = 60.0
    stall_s = 60.0
    _head_bytes = 0
    _head_timer: asyncio.TimerHandle | None = None
    _running: RequestResponseCycle | None = None  # what is answered now; those of `pipeline` wait

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client has come."""
        super().connection_made(transport)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """It is gone."""
        self._have_head()
        if self._running is not None:
            self._running.disconnected = True
            self._running.message_event.set()
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        """A request starts."""
        super().on_message_begin()
        self._head_bytes = 0
        self._have_head()
        self._await_head()
        cast(dict[str, Any], self.scope)["jaxsgl.abort"] = self.transport.abort

    def on_url(self, url: bytes) -> None:
        """A part of its URL."""
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """One of its headers."""
        self._count(len(name) + len(value))
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Its head is there."""
        self._have_head()
        super().on_headers_complete()
        if not self.pipeline:
            self._running = self.cycle

    def on_response_complete(self) -> None:
        """All of the answer is written, though the client may not have read it."""
        self._running = self.pipeline[-1][0] if self.pipeline else None
        super().on_response_complete()
        unread = self.transport.get_write_buffer_size()
        if unread:
            self.loop.call_later(self.stall_s, self._break_unless_read, self.cycle, unread)

    def _break_unless_read(self, cycle: object, unread: int) -> None:
        left = self.transport.get_write_buffer_size()
        if self.cycle is not cycle or not left:
            return
        if left >= unread:
            self.transport.abort()
        else:
            self.loop.call_later(self.stall_s, self._break_unless_read, cycle, left)

    def _count(self, num_bytes: int) -> None:
        self._head_bytes += num_bytes
        if self._head_bytes > MAX_HEAD_BYTES:
            raise ValueError(f"the head has more than {MAX_HEAD_BYTES} bytes")  # uvicorn answers 400 and closes

    def _await_head(self) -> None:
        self._head_timer = self.loop.call_later(self.head_s, self.transport.close)

    def _have_head(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
