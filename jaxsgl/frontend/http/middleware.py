"""What an HTTP request passes before its endpoint: an id, the API key, limits of the body.

The classes are plain ASGI middleware: Starlette's base class would put a queue between a stream and its client. Knows
no endpoint. app.py installs them.
"""

from __future__ import annotations

import asyncio
import logging
import re
import uuid
from collections.abc import Callable, Iterable, Mapping

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxsgl import logs
from jaxsgl.errors import Forbidden, Unauthenticated
from jaxsgl.frontend.access import Access, enter
from jaxsgl.frontend.http.errors import answer, answer_to
from jaxsgl.frontend.metrics.measurements import Metrics
from jaxsgl.frontend.tracing import Tracer

REQUEST_ID_HEADER = "x-request-id"
ANSWERED_ID_HEADERS = (REQUEST_ID_HEADER, "request-id")  # where OpenAI's and Anthropic's clients look for it
STALL_S = 60.0  # how long a client may send nothing of a body that it has begun
NO_PATHS: Mapping[str, int] = {}
MIN_BODY_BYTES_PER_S = 1024  # on the whole, after the first `STALL_S`
OPEN_PATHS = frozenset({"/health", "/health_generate", "/load", "/metrics", "/ping"})  # probes and scrapers hold no key
# They operate the server or show what all its clients do: for the administrator, if there is one.
ORDER_PATHS = frozenset({
    "/abort_request", "/continue_generation", "/engine_events", "/flush_cache", "/get_server_info", "/internal_state",
    "/load_lora_adapter", "/unload_lora_adapter", "/v1/load_lora_adapter", "/v1/unload_lora_adapter",
    "/pause_generation", "/release_memory_occupation", "/reset_prefix_cache", "/resume_memory_occupation",
    "/server_info", "/sleep", "/start_profile", "/stop_profile", "/update_weight_version", "/update_weights_from_disk",
    "/wake_up",
})  # fmt: skip

_REQUEST_ID = re.compile(r"[ -~]{1,256}")

logger = logging.getLogger(__name__)


class RequestIds:
    """Gives each request an id (its client's or a new one) and sends it back in `ANSWERED_ID_HEADERS`.

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
        headers = [(name.encode(), request_id.encode()) for name in ANSWERED_ID_HEADERS]
        started = False

        async def send_with_id(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                message["headers"] = [*message.get("headers", ()), *headers]
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except Exception as error:
            if started:
                raise
            await answer_to(error)(scope, receive, send_with_id)


class AccessLog:
    """Leaves a line for each request that has ended: `POST /v1/chat/completions 200, 1.042 s`."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """An ASGI application."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        now_s = asyncio.get_running_loop().time
        start_s, status = now_s(), 0

        async def send_and_see(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        try:
            await self._app(scope, receive, send_and_see)
        finally:
            fields = {"client": (scope["client"] or ("-",))[0], "method": scope["method"], "path": scope["path"]}
            fields |= {"status": status or "-", "total_s": now_s() - start_s}
            logger.info("%(client)s %(method)s %(path)r %(status)s, %(total_s).3f s", fields, extra=fields)


class TraceParent:
    """Notes for `tracer` the trace that a request belongs to, if its client says so."""

    def __init__(self, app: ASGIApp, tracer: Tracer) -> None:
        self._app = app
        self._tracer = tracer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """An ASGI application."""
        if scope["type"] == "http":
            self._tracer.enter(Headers(scope=scope))
        await self._app(scope, receive, send)


class ApiKey:
    """Refuses requests without the key that they need, except on `open_paths`.

    Preflight requests of allowed sites don't get here: the middleware for CORS answers them before.
    """

    def __init__(self, app: ASGIApp, access: Access, open_paths: frozenset[str] = OPEN_PATHS) -> None:
        self._app = app
        self._access = access
        self._open_paths = open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """An ASGI application."""
        if scope["type"] == "http" and scope["path"] not in self._open_paths:
            given = _key_of(scope["headers"])
            try:
                enter(self._access.check(given, is_order=scope["path"] in ORDER_PATHS))
            except (Unauthenticated, Forbidden) as error:
                await answer_to(error)(scope, receive, send)
                return
        await self._app(scope, receive, send)


def _key_of(headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """Returns the header `authorization`, or what it would be for the key in Anthropic's header."""
    found = dict(headers)
    if b"authorization" not in found and b"x-api-key" in found:
        return b"Bearer " + found[b"x-api-key"]
    return found.get(b"authorization", b"")


def counting(metrics: Metrics) -> Callable[[Request, Exception], None]:
    """Returns what counts errors of requests: of what is posted, but for orders."""

    def count(request: Request, error: Exception) -> None:
        if request.method == "POST" and request.url.path not in ORDER_PATHS:
            metrics.failed(error)

    return count


class BodyLimit:
    """Refuses a body of more than `max_bytes`, by its declared length or as soon as that much has arrived.

    Paths of `of_paths` have limits of their own. What of a body may be other than files is `max_plain_bytes`, which
    bodies.py finds in the request's state, as compressed.py finds what a body may be once it is inflated.

    Also refuses a body of which nothing arrives for `stall_s` seconds, or that comes more slowly than
    `MIN_BODY_BYTES_PER_S`: its client would hold a connection forever.
    """

    def __init__(
        self,
        app: ASGIApp,
        max_bytes: int,
        max_plain_bytes: int,
        stall_s: float = STALL_S,
        of_paths: Mapping[str, int] = NO_PATHS,
    ) -> None:
        self._app = app
        self._max_plain_bytes = max_plain_bytes
        self._max_bytes = max_bytes
        self._of_paths = of_paths
        self._stall_s = stall_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """An ASGI application."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        max_bytes = self._of_paths.get(scope["path"], self._max_bytes)
        limits = {"max_plain_bytes": self._max_plain_bytes, "max_body_bytes": max_bytes}
        scope.setdefault("state", {}).update(limits)
        declared = Headers(scope=scope).get("content-length", "0")
        if declared.isdigit() and int(declared) > max_bytes:
            await answer(413, _words(declared, max_bytes))(scope, receive, send)
            return
        num_bytes, complete = 0, False
        now_s = asyncio.get_running_loop().time
        start_s = now_s()

        async def receive_some() -> Message:
            nonlocal num_bytes, complete
            if complete:
                return await receive()  # the disconnect
            late_s = start_s + self._stall_s + num_bytes / MIN_BODY_BYTES_PER_S
            stalled_s = now_s() + self._stall_s
            try:
                async with asyncio.timeout_at(min(stalled_s, late_s)):
                    message = await receive()
            except TimeoutError:
                words = (
                    f"the body stops after {num_bytes} bytes, nothing more has come for {self._stall_s:g} s: send all"
                    if stalled_s < late_s
                    else f"only {num_bytes} bytes of the body have come in {now_s() - start_s:.0f} s: send it faster"
                )
                raise HTTPException(408, words) from None  # FastAPI passes this exception on while it reads a body
            num_bytes += len(message.get("body", b""))
            complete = not message.get("more_body", False)
            if num_bytes > max_bytes:
                raise HTTPException(413, _words("more", max_bytes))
            return message

        await self._app(scope, receive_some, send)


def _words(size: str, max_bytes: int) -> str:
    return f"the body has {size} bytes, but may have {max_bytes} (--max-request-bytes): send less at once"
