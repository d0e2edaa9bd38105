"""An HTTP client that costs little: one connection per request, parsed by httptools.

A client library would cost more than the server under test. Knows no API. Called by http_backends.py.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import httptools
import msgspec

OK = 200
MAX_ERROR = 300  # characters of an error's body that are kept
DONE = b"[DONE]"


class _Exchange(asyncio.Protocol):
    """Sends `request` and passes each part of the body on, with its time. The body of an error is kept in `rest`."""

    def __init__(self, request: bytes, on_body: Callable[[float, bytes], None]) -> None:
        self._request = request
        self._on_body = on_body
        self._parser: Any = httptools.HttpResponseParser(self)
        self._now_s = 0.0
        self._transport: Any = None
        self.status = 0
        self.rest = b""
        self.broken = ""
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by asyncio."""
        self._transport = transport
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        """Called by asyncio."""
        self._now_s = time.monotonic()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:  # not HTTP, or `on_body` could not read it
            self.broken = repr(error.__context__ or error)
            self._transport.close()

    def connection_lost(self, error: Exception | None) -> None:
        """Called by asyncio."""
        if not self.ended.done():
            self.ended.set_result(None)

    def on_headers_complete(self) -> None:
        """Called by httptools."""
        self.status = self._parser.get_status_code()

    def on_body(self, data: bytes) -> None:
        """Called by httptools."""
        if self.status == OK:
            self._on_body(self._now_s, data)
        else:
            self.rest += data

    def on_message_complete(self) -> None:
        """Called by httptools."""
        self._transport.close()


class HttpServer:
    """The address of a server.

    Args:
      base_url: http or https, with or without a path; /v1 at its end is removed.
      api_key: sent as a bearer token; None for no token.
      ca: file of the certificate of an https server or its authority; None for the authorities of the system.
    """

    def __init__(self, base_url: str, api_key: str | None, ca: str | None = None) -> None:
        parts = urlsplit(base_url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{base_url!r} is no address of a server: give it as http://HOST:PORT")
        self._tls = ssl.create_default_context(cafile=ca) if parts.scheme == "https" else None
        self._host, self._port = parts.hostname, parts.port or (443 if self._tls else 80)
        self._path = parts.path.rstrip("/").removesuffix("/v1")
        key = "" if api_key is None else f"Authorization: Bearer {api_key}\r\n"
        self._headers = f"Host: {parts.netloc}\r\nContent-Type: application/json\r\nConnection: close\r\n{key}"

    async def stream(self, path: str, body: bytes, on_event: Callable[[float, bytes], None]) -> bool:
        """Posts `body`; calls `on_event` with the data of each server-sent event and its time.

        Returns:
          Whether the stream ended with [DONE].

        Raises:
          OSError: there is no connection, the server reports an error, or `on_event` can't read the event.
        """
        tail, done = b"", False

        def on_body(now_s: float, data: bytes) -> None:
            nonlocal tail, done
            *lines, tail = (tail + data).split(b"\n")
            for line in lines:
                if line.startswith(b"data:"):
                    event = line[5:].strip()
                    done = done or event == DONE
                    if not done:
                        self._hand_over(on_event, now_s, event)

        await self._exchange("POST", path, body, on_body)
        return done

    @staticmethod
    def _hand_over(on_event: Callable[[float, bytes], None], now_s: float, event: bytes) -> None:
        """Calls `on_event`. Raises `ValueError` with the event if it can't be read."""
        try:
            on_event(now_s, event)
        except msgspec.DecodeError as error:
            raise ValueError(f"{error}: {event[:MAX_ERROR].decode(errors='replace')}") from None

    async def call(self, method: str, path: str, fields: dict[str, Any] | None = None) -> bytes:
        """Sends `fields` as JSON; returns the body. Raises `OSError` for an error of the server or the network."""
        parts: list[bytes] = []
        body = b"" if fields is None else msgspec.json.encode(fields)
        await self._exchange(method, path, body, lambda _, data: parts.append(data))
        return b"".join(parts)

    async def _exchange(self, method: str, path: str, body: bytes, on_body: Callable[[float, bytes], None]) -> None:
        head = f"{method} {self._path}{path} HTTP/1.1\r\n{self._headers}Content-Length: {len(body)}\r\n\r\n"
        request = head.encode() + body
        _, exchange = await asyncio.get_running_loop().create_connection(
            lambda: _Exchange(request, on_body), self._host, self._port, ssl=self._tls
        )
        await exchange.ended
        if not exchange.status and not exchange.broken:
            raise OSError(f"{path}: the connection was closed without an answer")
        if exchange.broken or exchange.status != OK:
            told = exchange.broken or exchange.rest[:MAX_ERROR].decode(errors="replace") or "nothing"
            raise OSError(f"{path} answered {exchange.status}: {told}")
