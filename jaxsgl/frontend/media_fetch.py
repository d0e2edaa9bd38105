"""Fetches pictures and videos by http(s), within the rules of media_urls.py and limits of bytes and seconds.

A host is resolved once, its addresses are checked, and one of these is dialled: the name is not looked up again. Each
redirect is a new URL under the same rules. Nothing is decompressed. media_loader.py calls it; it knows no pictures.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import socket
import ssl
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor
from urllib.parse import urljoin

import httptools

from jaxsgl.config.media import MediaConfig
from jaxsgl.errors import InvalidRequest
from jaxsgl.frontend.media_urls import Target, is_global, target_of
from jaxsgl.preprocess.sources import Budget, check_type

MAX_REDIRECTS = 3
MAX_HEAD_BYTES = 32 << 10
MAX_AT_ONCE = 16  # connections of this process
MAX_ADDRESSES = 4  # of a host that are tried
READ_BYTES = 1 << 16
_REDIRECTS = (301, 302, 303, 307, 308)
_UNTYPED = ("application/octet-stream", "binary/octet-stream")  # what file stores say of everything

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]
Resolve = Callable[[str, int], Awaitable[list[str]]]
Connect = Callable[[str, Target], Awaitable[Streams]]


class Fetcher:
    """Fetches files.

    Args:
      config: flags.
      threads: for the resolver.
      resolve: returns the addresses of a host; None: the system's resolver.
      connect: connects with an address; None: over TCP, with TLS where the scheme wants it.
    """

    def __init__(
        self, config: MediaConfig, threads: Executor, resolve: Resolve | None = None, connect: Connect | None = None
    ) -> None:
        self._config = config
        self._threads = threads
        self._resolve = resolve or self._look_up
        self._connect = connect or _connect
        self._turn = asyncio.Semaphore(MAX_AT_ONCE)

    async def fetch(self, url: str, kinds: tuple[str, ...], budget: Budget, name: str) -> bytes:
        """Returns the content at `url`, counted in `budget`. Raises `InvalidRequest`.

        `kinds` are the main media types that are taken, as "image"; `name` says in errors which picture it is.
        """
        target_of(url, self._config.allowed_media_domains, name)  # before it waits for its turn
        try:
            async with asyncio.timeout(self._config.media_timeout_s), self._turn:
                return await self._follow(url, kinds, budget, name)
        except TimeoutError:
            raise InvalidRequest(
                f"fetching {name} took longer than {self._config.media_timeout_s:g} s (--media-timeout-s): send it as "
                "a data: URL"
            ) from None

    async def _follow(self, url: str, kinds: tuple[str, ...], budget: Budget, name: str) -> bytes:
        for _ in range(1 + MAX_REDIRECTS):
            target = target_of(url, self._config.allowed_media_domains, name)
            answer = _Answer(kinds, budget, name)
            reader, writer = await self._dial(target, name)
            try:
                await _exchange(target, reader, writer, answer)
            except (OSError, ssl.SSLError):
                raise InvalidRequest(f"{target.authority} broke off while {name} was fetched: try again") from None
            finally:
                writer.transport.abort()  # closing TLS in good order could take half a minute
            if answer.location is None:
                return answer.content()
            url = urljoin(url, answer.location)
        raise InvalidRequest(f"{name} is redirected more than {MAX_REDIRECTS} times: send its final URL")

    async def _dial(self, target: Target, name: str) -> Streams:
        """Connects with an address of the host, after all of them are checked."""
        try:
            addresses = await self._resolve(target.host, target.port)
        except OSError:
            addresses = []
        if not addresses:
            raise InvalidRequest(f"{name} is at {target.host}, which has no address")
        if not all(map(is_global, addresses)):
            raise InvalidRequest(f"{name} is at {target.host}, whose address is not a public one: send a data: URL")
        for address in addresses[:MAX_ADDRESSES]:
            with contextlib.suppress(OSError):
                return await self._connect(address, target)
        raise InvalidRequest(f"{name} is at {target.authority}, which can't be connected with")

    async def _look_up(self, host: str, port: int) -> list[str]:
        look_up = functools.partial(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM)
        found = await asyncio.get_running_loop().run_in_executor(self._threads, look_up)
        return list(dict.fromkeys(str(entry[4][0]) for entry in found))


class _Answer:
    """An answer as it arrives; httptools calls the methods with small names.

    Attributes:
      location: where a redirect leads; None: it is none.
      is_whole: whether all of it has arrived.
    """

    def __init__(self, kinds: tuple[str, ...], budget: Budget, name: str) -> None:
        self.location: str | None = None
        self.is_whole = False
        self._kinds, self._budget, self._name = kinds, budget, name
        self._headers: dict[str, str] = {}
        self._body = bytearray()
        self._head_bytes = 0
        self._has_head = False
        self._parser = httptools.HttpResponseParser(self)

    def feed(self, data: bytes) -> None:
        """Takes what has arrived. Raises `InvalidRequest` for an answer that is not taken."""
        if not self._has_head:
            self._head_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            cause = error.__context__
            raise cause if isinstance(cause, InvalidRequest) else self._refused("an answer that is no HTTP") from None
        if not self._has_head and self._head_bytes > MAX_HEAD_BYTES:
            raise self._refused(f"more than {MAX_HEAD_BYTES} bytes of headers")

    def content(self) -> bytes:
        """Returns the body. Raises `InvalidRequest` if it is not whole."""
        is_open_ended = "content-length" not in self._headers and "transfer-encoding" not in self._headers
        if not (self.is_whole or (self._has_head and is_open_ended)):
            raise self._refused("half of an answer")
        if not self._body:
            raise self._refused("an empty answer")
        return bytes(self._body)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Keeps a header."""
        self._headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        """Checks status and headers, before the body comes."""
        self._has_head = True
        status, headers = self._parser.get_status_code(), self._headers
        if status in _REDIRECTS and "location" in headers:
            self.location = headers["location"]
            return
        if status != 200:
            raise self._refused(f"status {status}")
        if headers.get("content-encoding", "identity") != "identity":
            raise self._refused("a compressed answer")
        media_type = headers.get("content-type", _UNTYPED[0]).partition(";")[0].strip().lower()
        if media_type not in _UNTYPED:
            check_type(media_type, self._kinds, self._name)
        length = headers.get("content-length", "0")
        self._budget.check(int(length) if length.isdecimal() else 0, self._name)

    def on_body(self, data: bytes) -> None:
        """Keeps a part of the body."""
        if self.location is None:
            self._budget.take(len(data), self._name)
            self._body += data

    def on_message_complete(self) -> None:
        """Notes that nothing else will come."""
        self.is_whole = True

    def _refused(self, what: str) -> InvalidRequest:
        return InvalidRequest(f"the server of {self._name} sent {what}: send a data: URL")


async def _exchange(
    target: Target, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, answer: _Answer
) -> None:
    """Sends the request and reads the answer, up to its end or to a redirect."""
    writer.write(
        f"GET {target.path} HTTP/1.1\r\nHost: {target.authority}\r\nUser-Agent: jaxsgl\r\nAccept: image/*, video/*\r\n"
        "Accept-Encoding: identity\r\nConnection: close\r\n\r\n".encode("ascii")
    )
    await writer.drain()
    while not answer.is_whole and answer.location is None:
        data = await reader.read(READ_BYTES)
        if not data:
            return
        answer.feed(data)


async def _connect(address: str, target: Target) -> Streams:
    if target.scheme == "http":
        return await asyncio.open_connection(address, target.port)
    return await asyncio.open_connection(address, target.port, ssl=_tls(), server_hostname=target.host)


@functools.cache
def _tls() -> ssl.SSLContext:
    return ssl.create_default_context()
