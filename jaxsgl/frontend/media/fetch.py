"""Fetches pictures and videos by http(s), from the hosts that a flag names, within limits of bytes and seconds.

`target_of` takes a URL only as browsers and resolvers alike understand it: no user, no backslash, nothing but ASCII. A
host is resolved once, all its addresses must be global ones (also where an address holds another), and one of these is
dialled: the name is not looked up again. Each redirect is a new URL under the same rules. Nothing is decompressed.
loader.py calls it, and says how many files are fetched at a time; it knows no pictures.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import ipaddress
import re
import socket
import ssl
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from urllib.parse import urljoin, urlsplit

import httptools

from jaxsgl.config.features import MediaConfig
from jaxsgl.errors import InvalidRequest
from jaxsgl.preprocess.sources import Budget, check_type

MAX_URL_CHARS = 8192
DEFAULT_PORTS = {"http": 80, "https": 443}
_UNSAFE = re.compile(r"[^!-\[\]-~]")  # all but visible ASCII, and the backslash
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
MAX_REDIRECTS = 3
MAX_HEAD_BYTES = 32 << 10
MAX_LOOK_UPS = 64  # at a time
MAX_ADDRESSES = 4  # of a host that are tried
READ_BYTES = 1 << 16
_REDIRECTS = (301, 302, 303, 307, 308)
_INTERIM = (100, *range(102, 200))  # before the final answer; after 101 another protocol would be spoken

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]
Resolve = Callable[[str, int], Awaitable[list[str]]]


@dataclass(frozen=True)
class Target:
    """Where a request goes.

    Attributes:
      scheme: "http" or "https".
      host: in small letters, without a final dot.
      port: given, or the scheme's.
      path: with the query.
    """

    scheme: str
    host: str
    port: int
    path: str

    @property
    def authority(self) -> str:
        """What the Host header says."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == DEFAULT_PORTS[self.scheme] else f"{host}:{self.port}"


def target_of(url: str, allowed: Sequence[str], name: str) -> Target:
    """Returns where `url` leads. Raises `InvalidRequest` unless its host is among the `allowed` ones.

    `name` says in errors which picture it is.
    """
    if len(url) > MAX_URL_CHARS:
        raise InvalidRequest(f"the URL of {name} has {len(url)} characters, but may have {MAX_URL_CHARS}")
    if _UNSAFE.search(url):
        raise InvalidRequest(f"the URL of {name} holds a space, a backslash or a letter beyond ASCII: encode it")
    try:
        parts = urlsplit(url)
        host, port = (parts.hostname or "").rstrip("."), parts.port
    except ValueError:
        raise InvalidRequest(f"the URL of {name} is none: {url[:100]!r}") from None
    if parts.scheme not in DEFAULT_PORTS or not host:
        raise InvalidRequest(f"the URL of {name} is {url[:100]!r}, but must be data:, http: or https: with a host")
    if "@" in parts.netloc:
        raise InvalidRequest(f"the URL of {name} names a user: leave user and password out")
    default = DEFAULT_PORTS[parts.scheme]
    target = Target(parts.scheme, host, default if port is None else port, (parts.path or "/") + _query(parts.query))
    if not any(_fits(target, entry) for entry in allowed):
        raise InvalidRequest(
            f"{name} is at {target.authority[:100]}, which the server does not fetch from (--allowed-media-domains): "
            "send it as a data: URL"
        )
    return target


def is_global(address: str) -> bool:
    """Whether `address` belongs to the public internet, and so does an IPv4 address inside of it."""
    try:
        ip = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return False
    if isinstance(ip, ipaddress.IPv6Address):
        inner = ip.ipv4_mapped or ip.sixtofour or (ip.teredo[1] if ip.teredo else None)
        if ip in _NAT64:
            inner = ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)
        if inner is not None:
            return is_global(str(inner))
        if ip.is_site_local:
            return False
    return ip.is_global and not (ip.is_multicast or ip.is_reserved or ip.is_unspecified)


def _query(query: str) -> str:
    return f"?{query}" if query else ""


def _fits(target: Target, entry: str) -> bool:
    """Without a port, an entry stands for the scheme's own."""
    host, _, port = entry.partition(":")
    if target.port != (int(port) if port else DEFAULT_PORTS[target.scheme]):
        return False
    return host == "*" or target.host == host or (host.startswith("*.") and target.host.endswith(host[1:]))


Connect = Callable[[str, Target], Awaitable[Streams]]


class Fetcher:
    """Fetches files.

    Args:
      config: flags.
      resolve: returns the addresses of a host; the system's resolver does if it is None.
      connect: connects with an address; if None, over TCP, with TLS where the scheme wants it.
    """

    def __init__(self, config: MediaConfig, resolve: Resolve | None = None, connect: Connect | None = None) -> None:
        self._config = config
        # Of its own, since a look-up can't be ended: a slow one holds up no other work of the process.
        self._resolvers = ThreadPoolExecutor(MAX_LOOK_UPS, "names")
        self._resolve = resolve or self._look_up
        self._connect = connect or _connect

    def close(self) -> None:
        """Looks up no more names."""
        self._resolvers.shutdown(wait=False, cancel_futures=True)

    def check(self, url: str, name: str) -> None:
        """Raises `InvalidRequest` for a URL that is not fetched, whatever is there."""
        target_of(url, self._config.allowed_media_domains, name)

    async def fetch(self, url: str, kinds: tuple[str, ...], budget: Budget, name: str) -> bytes:
        """Returns the content at `url`, counted in `budget`. Raises `InvalidRequest`.

        `kinds` are the main media types that are taken, as "image"; `name` says in errors which picture it is.
        """
        try:
            async with asyncio.timeout(self._config.media_timeout_s):
                return await self._follow(url, kinds, budget, name)
        except TimeoutError:
            raise InvalidRequest(
                f"fetching {name} took longer than {self._config.media_timeout_s:g} s (--media-timeout-s): send it as "
                "a data: URL"
            ) from None

    async def _follow(self, url: str, kinds: tuple[str, ...], budget: Budget, name: str) -> bytes:
        for _ in range(1 + MAX_REDIRECTS):
            target = target_of(url, self._config.allowed_media_domains, name)
            answer = _FetchedFile(kinds, budget, name)
            reader, writer = await self._dial(target, name)
            try:
                await _exchange(target, reader, writer, answer)
            except (OSError, ssl.SSLError):
                raise InvalidRequest(f"{target.authority} broke off while {name} was fetched: try again") from None
            finally:
                writer.transport.abort()  # closing TLS in good order could take half a minute
            if answer.location is None:
                return answer.content()
            try:
                url = urljoin(url, answer.location)
            except ValueError:
                raise InvalidRequest(
                    f"the server of {name} redirects to {answer.location[:100]!r}, which is no URL: send a data: URL"
                ) from None
        raise InvalidRequest(f"{name} is redirected more than {MAX_REDIRECTS} times: send its final URL")

    async def _dial(self, target: Target, name: str) -> Streams:
        """Connects with an address of the host, after all of them are checked."""
        try:
            addresses = await self._resolve(target.host, target.port)
        except (OSError, UnicodeError):  # a name whose parts are too long or empty can't be written for a look-up
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
        found = await asyncio.get_running_loop().run_in_executor(self._resolvers, look_up)
        return list(dict.fromkeys(str(entry[4][0]) for entry in found))


class _FetchedFile:
    """An answer as it arrives; httptools calls the methods with small names.

    Attributes:
      location: where a redirect leads, or None if it is no redirect.
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
        status, headers = self._parser.get_status_code(), self._headers
        if status in _INTERIM:
            headers.clear()
            return
        self._has_head = True
        if status in _REDIRECTS and "location" in headers:
            self.location = headers["location"]
            return
        if status != 200:
            raise self._refused(f"status {status}")
        if headers.get("content-encoding", "").strip().lower() not in ("", "identity"):
            raise self._refused("a compressed answer")
        media_type = headers.get("content-type", "").partition(";")[0].strip().lower()
        check_type(media_type, self._kinds, self._name)
        length = headers.get("content-length", "0")
        self._budget.check(int(length) if length.isdecimal() else 0, self._name)

    def on_body(self, data: bytes) -> None:
        """Keeps a part of the body."""
        if self.location is None:
            self._budget.take(len(data), self._name)
            self._body += data

    def on_message_complete(self) -> None:
        """Notes that nothing else will come, unless this was no final answer."""
        self.is_whole = self._has_head

    def _refused(self, what: str) -> InvalidRequest:
        return InvalidRequest(f"the server of {self._name} sent {what}: send a data: URL")


async def _exchange(
    target: Target, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, answer: _FetchedFile
) -> None:
    """Sends the request and reads the answer, up to its end or to a redirect."""
    writer.write(
        f"GET {target.path} HTTP/1.1\r\nHost: {target.authority}\r\nUser-Agent: jaxsgl\r\n"
        "Accept: image/*, video/*, audio/*\r\nAccept-Encoding: identity\r\nConnection: close\r\n\r\n".encode("ascii")
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
