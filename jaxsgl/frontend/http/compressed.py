"""Bodies that come with `Content-Encoding: gzip`, inflated before anything reads them.

What comes out is bounded as plain bodies are (middleware.py's `BodyLimit` says how), and is made in small parts, so
that a bomb costs no more than a large body. Other encodings are refused where bodies are parsed. app.py installs it.
"""

from __future__ import annotations

import asyncio
import zlib
from typing import Any

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

PART_BYTES = 1 << 18  # inflated between two turns of the event loop: about a millisecond
_GZIP = 16 + zlib.MAX_WBITS  # zlib's word for gzip's head and end
_DROPPED = (b"content-encoding", b"content-length")  # headers that are not true of what comes out


class Gunzip:
    """Inflates bodies in gzip. Bad ones raise `HTTPException` where the endpoint reads them."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """An ASGI application."""
        if scope["type"] != "http" or _encoding_of(scope) not in ("gzip", "x-gzip"):
            await self._app(scope, receive, send)
            return
        plain: dict[str, Any] = {**scope, "headers": [each for each in scope["headers"] if each[0] not in _DROPPED]}
        body = GzipBody(scope["state"]["max_body_bytes"])

        async def receive_inflated() -> Message:
            while not body.ended:
                if data := body.take():
                    await asyncio.sleep(0)
                    return {"type": "http.request", "body": data, "more_body": True}
                if body.complete:
                    body.end()
                    return {"type": "http.request", "body": b"", "more_body": False}
                message = await receive()
                if message["type"] != "http.request":
                    return message
                body.add(message.get("body", b""), complete=not message.get("more_body", False))
            return await receive()  # the disconnect

        await self._app(plain, receive_inflated, send)


def _encoding_of(scope: Scope) -> str:
    return Headers(scope=scope).get("content-encoding", "").strip().lower()


class GzipBody:
    """One body: what has arrived of it, inflated part by part.

    Attributes:
      complete: all of it has arrived.
      ended: and all of it is inflated.
    """

    def __init__(self, max_bytes: int) -> None:
        self.complete = self.ended = False
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._arrived = b""
        self._inflater = zlib.decompressobj(_GZIP)

    def add(self, data: bytes, complete: bool) -> None:
        """Takes bytes that have arrived; `take` has returned all of those before."""
        self._arrived, self.complete = data, complete

    def take(self) -> bytes:
        """Returns the next part; nothing if more must arrive first. Raises `HTTPException`."""
        if self._inflater.eof:
            return b""
        try:
            data = self._inflater.decompress(self._arrived, PART_BYTES)
        except zlib.error as error:
            raise HTTPException(400, f"the body is not what content-encoding says, gzip: {error}") from None
        self._arrived = self._inflater.unconsumed_tail
        self._num_bytes += len(data)
        if self._num_bytes > self._max_bytes:
            words = f"the inflated body has more bytes than the {self._max_bytes} that it may have"
            raise HTTPException(413, f"{words} (--max-request-bytes): send less at once")
        if self._inflater.unused_data:
            raise HTTPException(400, "the body goes on after the end of its gzip stream: compress all of it in one")
        return data

    def end(self) -> None:
        """Ends a complete body. Raises `HTTPException` for one that is cut."""
        if not self._inflater.eof:
            raise HTTPException(
                400, f"the gzip stream of the body is cut after {self._num_bytes} bytes: send all of it"
            )
        self.ended = True
