"""What an HTTP request passes before its endpoint: limits of the connection, an id, the API key, limits of the body.

`Connection` is uvicorn's protocol with the bounds that uvicorn lacks. The other classes are plain ASGI middleware:
Starlette's base class would put a queue between a stream and its client. Knows no endpoint. app.py installs them.
"""

from __future__ import annotations

import asyncio
import logging
import re
import uuid
from typing import Any, cast

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from jaxsgl import logs
from jaxsgl.errors import Forbidden, Unauthenticated
from jaxsgl.frontend.access import Access, enter
from jaxsgl.frontend.http.errors import answer, answer_to

MAX_HEAD_BYTES = 64 << 10
REQUEST_ID_HEADER = "x-request-id"
STALL_S = 60.0  # how long a client may send nothing of a body that it has begun
OPEN_PATHS = ("/health", "/health_generate", "/metrics")  # probes and scrapers hold no key
# They operate the server or show what all its clients do: for the administrator, if there is one.
ORDER_PATHS = frozenset({
    "/abort_request", "/continue_generation", "/flush_cache", "/get_server_info", "/internal_state",
    "/pause_generation", "/server_info", "/start_profile", "/stop_profile",
})  # fmt: skip

_REQUEST_ID = re.compile(r"[ -~]{1,256}")

logger = logging.getLogger(__name__)


class Connection(HttpToolsProtocol):
    """A client's connection. Lets an answer break it, too, by calling `scope["jaxsgl.abort"]`.

    Uvicorn bounds neither the size of a request's head nor the time it takes. It waits forever to close a connection
    whose client doesn't read. When a client pipelines requests and leaves, it tells only the last of them. Bodies are
    bounded by `BodyLimit`, streams by sse.py.

    Attributes:
      head_s: seconds that a request's head may take, including the wait for a connection's first request.
      stall_s: seconds that a client may read nothing of an answer that is complete.
    """

    head_s = 60.0
    stall_s = 60.0
    _head_bytes = 0
    _head_timer: asyncio.TimerHandle | None = None
    _running: RequestResponseCycle | None = None  # the request being answered; those in `pipeline` wait

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Starts waiting for the first head."""
        super().connection_made(transport)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Tells the request being answered, too."""
        self._end_head()
        if self._running is not None:
            self._running.disconnected = True
            self._running.message_event.set()
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        """A request starts."""
        super().on_message_begin()
        self._head_bytes = 0
        self._end_head()
        self._await_head()
        cast(dict[str, Any], self.scope)["jaxsgl.abort"] = self.transport.abort

    def on_url(self, url: bytes) -> None:
        """Counts a part of the URL."""
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Counts a header."""
        self._count(len(name) + len(value))
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """The head is complete."""
        self._end_head()
        super().on_headers_complete()
        if not self.pipeline:
            self._running = self.cycle

    def on_response_complete(self) -> None:
        """The answer is written completely; the client may not have read it yet."""
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

    def _end_head(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None


class RequestIds:
    """Gives each request an id (its client's or a new one) and sends it back in a header.

    Handlers read it from `request.state.request_id`. It is for logs: clients may use one id for several requests. This
    is the outermost middleware, so it also answers exceptions that reach no handler.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """An ASGI application."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get(REQUEST_ID_HEADER, "")
        request_id = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = request_id
        logs.name_request(request_id)
        header = (REQUEST_ID_HEADER.encode(), request_id.encode())
        started = False

        async def send_with_id(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                message["headers"] = [*message.get("headers", ()), header]
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except Exception as error:
            if started:
                raise
            await answer_to(error)(scope, receive, send_with_id)


class ApiKey:
    """Refuses requests without the key that they need, except on `OPEN_PATHS` and for preflight requests."""

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self._app = app
        self._access = access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """An ASGI application."""
        if scope["type"] == "http" and scope["method"] != "OPTIONS" and scope["path"] not in OPEN_PATHS:
            given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
            try:
                enter(self._access.check(given, is_order=scope["path"] in ORDER_PATHS))
            except (Unauthenticated, Forbidden) as error:
                await answer_to(error)(scope, receive, send)
                return
        await self._app(scope, receive, send)


class BodyLimit:
    """Refuses a body of more than `max_bytes`, by its declared length or as soon as that much has arrived.

    Also refuses a body of which nothing arrives for `stall_s` seconds: its client would hold a connection forever.
    """

    def __init__(self, app: ASGIApp, max_bytes: int, stall_s: float = STALL_S) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._stall_s = stall_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """An ASGI application."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        declared = Headers(scope=scope).get("content-length", "0")
        if declared.isdigit() and int(declared) > self._max_bytes:
            await answer(413, self._words(declared))(scope, receive, send)
            return
        num_bytes, complete = 0, False

        async def receive_some() -> Message:
            nonlocal num_bytes, complete
            if complete:
                return await receive()  # the disconnect
            try:
                async with asyncio.timeout(self._stall_s):
                    message = await receive()
            except TimeoutError:
                words = (
                    f"the body stops after {num_bytes} bytes, nothing more has come for {self._stall_s:g} s: send all"
                )
                raise HTTPException(408, words) from None  # FastAPI passes this exception on while it reads a body
            num_bytes += len(message.get("body", b""))
            complete = not message.get("more_body", False)
            if num_bytes > self._max_bytes:
                raise HTTPException(413, self._words("more"))
            return message

        await self._app(scope, receive_some, send)

    def _words(self, size: str) -> str:
        return f"the body has {size} bytes, but may have {self._max_bytes} (--max-request-bytes): send less at once"
