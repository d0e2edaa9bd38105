"""What every HTTP request passes first: an id, the API key, limits of its body.

Plain ASGI middleware: Starlette's base class would put a queue between a stream and its client.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import re
import uuid

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxsgl import logs
from jaxsgl.errors import Unauthenticated
from jaxsgl.frontend.http.errors import answer, answer_to

REQUEST_ID_HEADER = "x-request-id"
STALL_S = 60.0  # so long may a client not send
OPEN_PATHS = ("/health", "/health_generate", "/metrics")  # probes and scrapers hold no key

_REQUEST_ID = re.compile(r"[ -~]{1,256}")

logger = logging.getLogger(__name__)


class RequestIds:
    """Gives each request an id, its client's or a new one, and sends it back in a header.

    Handlers find it as `request.state.request_id`. It is for logs: clients may use one for several requests. Answers
    what nobody caught: this is the outermost middleware.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """As ASGI has it."""
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
    """Refuses requests that don't bring the key, but for `OPEN_PATHS` and preflight requests."""

    def __init__(self, app: ASGIApp, key: str) -> None:
        self._app = app
        self._expected = f"Bearer {key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """As ASGI has it."""
        if scope["type"] == "http" and not self._may_pass(scope):
            error = Unauthenticated("the API key is missing or wrong: send the header `Authorization: Bearer KEY`")
            await answer_to(error)(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _may_pass(self, scope: Scope) -> bool:
        if scope["method"] == "OPTIONS" or scope["path"] in OPEN_PATHS:
            return True
        given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        return hmac.compare_digest(given, self._expected)


class BodyLimit:
    """Refuses bodies of more than `max_bytes`: by their declared length, or when so much has come.

    And those of which nothing more comes for `stall_s` seconds: their clients would hold a connection each for ever.
    """

    def __init__(self, app: ASGIApp, max_bytes: int, stall_s: float = STALL_S) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._stall_s = stall_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """As ASGI has it."""
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
                return await receive()  # the client's departure
            try:
                async with asyncio.timeout(self._stall_s):
                    message = await receive()
            except TimeoutError:
                words = (
                    f"the body stops after {num_bytes} bytes, nothing more has come for {self._stall_s:g} s: send all"
                )
                raise HTTPException(408, words) from None  # FastAPI lets this kind pass while it reads a body
            num_bytes += len(message.get("body", b""))
            complete = not message.get("more_body", False)
            if num_bytes > self._max_bytes:
                raise HTTPException(413, self._words("more"))
            return message

        await self._app(scope, receive_some, send)

    def _words(self, size: str) -> str:
        return f"the body has {size} bytes, but may have {self._max_bytes} (--max-request-bytes): send less at once"
