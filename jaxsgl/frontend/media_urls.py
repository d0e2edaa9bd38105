"""Which http(s) URLs of pictures may be fetched, and from which addresses. Pure functions; media_fetch.py obeys them.

A URL is taken only as browsers and resolvers alike understand it: no user, no backslash, nothing but ASCII. Its host
must be named by a flag, and every address of that host must be a global one, also where an address holds another.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from jaxsgl.errors import InvalidRequest

MAX_URL_CHARS = 8192
DEFAULT_PORTS = {"http": 80, "https": 443}
_UNSAFE = re.compile(r"[^!-\[\]-~]")  # all but visible ASCII, and the backslash
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")


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
    return ip.is_global and not (ip.is_multicast or ip.is_reserved or ip.is_unspecified)


def _query(query: str) -> str:
    return f"?{query}" if query else ""


def _fits(target: Target, entry: str) -> bool:
    """Without a port, an entry stands for the scheme's own."""
    host, _, port = entry.partition(":")
    if target.port != (int(port) if port else DEFAULT_PORTS[target.scheme]):
        return False
    return host == "*" or target.host == host or (host.startswith("*.") and target.host.endswith(host[1:]))
