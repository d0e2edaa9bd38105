"""`PageGuard`: keeps web pages from operating this server through the browser of a user who can reach it.

A browser adds two headers that a page can't choose. `Origin` names the site of the page that sends a request; it is
missing in requests of other programs. `Host` is the name under which the page looked the server up: a page can have a
name of its own site resolve to 127.0.0.1 (DNS rebinding), and its requests then have no foreign `Origin`, but that name
as their `Host`. An IP address as `Host` can't be rebound, so clients, probes and scrapers by address always pass.

Knows no endpoint and no key. app.py installs it; it passes CORS on to Starlette's middleware.
"""

from __future__ import annotations

import ipaddress
import socket
from typing import NamedTuple
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Receive, Scope, Send

from jaxsgl.config.server import ServerConfig
from jaxsgl.errors import Forbidden
from jaxsgl.frontend.http.errors import answer_to
from jaxsgl.frontend.listen import is_loopback

ANY = "*"
UNGUARDED_PATH = "/health"  # changes and reveals nothing, and load balancers ask for it under many names
LOOPBACK_NAMES = frozenset({"localhost", "localhost.localdomain", "ip6-localhost", "ip6-loopback"})
PRIVATE_DOMAINS = (".local", ".internal", ".lan", ".home.arpa", ".svc")  # no public name server answers for these
DEFAULT_PORTS = {"http": 80, "https": 443}


class _Address(NamedTuple):
    host: str
    port: int | None


class HostNames:
    """The names under which clients may address the server. An IP address always may be used.

    On a loopback address: the names of this machine and --allowed-hosts. On any other address also names that only the
    own network resolves (without a dot, or in `PRIVATE_DOMAINS`): a page that could abuse them comes from a machine
    that reaches the server anyway. If clients need a key: all names, unless --allowed-hosts says which, since no page
    knows the key, and such servers have public names.
    """

    def __init__(self, config: ServerConfig) -> None:
        own = socket.gethostname().lower()
        self._names = LOOPBACK_NAMES | {own, f"{own}.local", config.host.lower(), *map(str.lower, config.allowed_hosts)}
        self._any = ANY in config.allowed_hosts or (config.needs_key and not config.allowed_hosts)
        self._private = not is_loopback(config.host)

    def allow(self, host: str) -> bool:
        """Whether `host`, in small letters and without a port, is one of the names or an IP address."""
        if self._any or host in self._names or host.endswith(".localhost") or _is_ip_address(host):
            return True
        return self._private and ("." not in host or host.endswith(PRIVATE_DOMAINS))


class PageGuard:
    """Refuses requests that a web page of another site sends, or that come under a foreign name; ASGI middleware."""

    def __init__(self, app: ASGIApp, config: ServerConfig) -> None:
        self._app = app
        self._hosts = HostNames(config)
        self._origins = frozenset(origin.lower() for origin in config.allowed_origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """An ASGI application."""
        refusal = self._refusal(scope) if scope["type"] == "http" and scope["path"] != UNGUARDED_PATH else None
        if refusal is None:
            await self._app(scope, receive, send)
        else:
            await answer_to(Forbidden(refusal))(scope, receive, send)

    def _refusal(self, scope: Scope) -> str | None:
        """Why the request must not pass, or None. Several headers of one name must all be right."""
        origins = [value for name, value in scope["headers"] if name == b"origin"]
        hosts = [value for name, value in scope["headers"] if name == b"host"]
        addresses = [_address(value.decode("latin-1")) for value in hosts]
        for address in addresses:
            if address is None or not self._hosts.allow(address.host):
                return (
                    f"the header Host is {hosts[addresses.index(address)].decode('latin-1')!r}, which is no name of "
                    "this server: use its IP address or localhost, or start it with --allowed-hosts NAME (*: any)"
                )
        for origin in origins:
            if not self._knows(origin.decode("latin-1").lower(), addresses):
                return (
                    f"the header Origin is {origin.decode('latin-1')!r}: pages of other sites may not call this "
                    "server, unless it is started with --allowed-origins ORIGIN"
                )
        return None

    def _knows(self, origin: str, hosts: list[_Address | None]) -> bool:
        """Whether pages of `origin` may call: they come from this server itself, or are allowed to."""
        if ANY in self._origins or origin in self._origins:
            return True
        scheme, _, authority = origin.partition("://")
        given, default = _address(authority), DEFAULT_PORTS.get(scheme)
        if given is None or default is None:  # "null", which sandboxed frames and local files send, or an extension
            return False
        wanted = (given.host, given.port or default)
        return bool(hosts) and all(host is not None and (host.host, host.port or default) == wanted for host in hosts)


def _address(authority: str) -> _Address | None:
    """Host, in small letters, and port of `host:port` or `[address]:port`; None for what is neither."""
    try:
        parts = urlsplit(f"//{authority.strip()}")
        if not parts.hostname or parts.username is not None or parts.path or parts.query or parts.fragment:
            return None
        return _Address(parts.hostname.rstrip("."), parts.port)
    except ValueError:
        return None


def _is_ip_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
