"""Calls of OpenAI's endpoints from within the server's own process: what batches do, without a port or a key."""

from __future__ import annotations

import asyncio
import uuid
from typing import Any

from fastapi import FastAPI
from starlette.types import Message

from jaxsgl.frontend.batches import Answered, BatchRequest
from jaxsgl.frontend.generation import FrontEnd
from jaxsgl.frontend.http import errors
from jaxsgl.frontend.http.middleware import REQUEST_ID_HEADER, BodyLimit, RequestIds, counting
from jaxsgl.frontend.http.openai import routes

READY_POLL_S = 0.5


class InProcess:
    """Answers requests of batches as the HTTP port answers them, for whoever the running task's caller is."""

    def __init__(self, front_end: FrontEnd) -> None:
        self._engine = front_end.engine
        self._app = FastAPI(openapi_url=None)
        errors.add_handlers(self._app, counting(front_end.metrics))
        self._app.include_router(routes.router(front_end))
        config = front_end.config
        self._app.add_middleware(BodyLimit, max_bytes=config.max_body_bytes, max_plain_bytes=config.max_message_bytes)
        self._app.add_middleware(RequestIds)  # the outermost: it answers what reaches no handler

    async def ask(self, request: BatchRequest) -> Answered:
        """Returns the whole answer; waits first while the engine takes no request, as at the start."""
        while self._engine.refusal is not None:
            await asyncio.sleep(READY_POLL_S)
        request_id, status, parts = uuid.uuid4().hex, 500, list[bytes]()
        body: list[Message] = [{"type": "http.request", "body": request.body, "more_body": False}]

        async def receive() -> Message:
            if body:
                return body.pop()
            await asyncio.Event().wait()  # this client never leaves before it has its answer
            raise AssertionError

        async def send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            else:
                parts.append(message.get("body", b""))

        scope: dict[str, Any] = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "http",
            "path": request.url, "raw_path": request.url.encode(), "root_path": "", "query_string": b"",
            "headers": [(b"content-type", b"application/json"), (REQUEST_ID_HEADER.encode(), request_id.encode())],
            "client": None, "server": None,
        }  # fmt: skip
        await self._app(scope, receive, send)
        return Answered(status, request_id, b"".join(parts))
