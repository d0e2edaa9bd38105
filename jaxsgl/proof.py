"""How two processes on a network prove to each other that both know a secret, without sending it.

Each side says something new (a nonce) and what it is; the proof of a side is the HMAC-SHA256 of what both have said and
of the address at which the connection arrived, as each side sees it. So a proof can't be sent back, used again, or
passed on by a stranger between them. Knows neither sockets nor what is said. The greetings of prefill and decode
servers (transfer/greeting.py) and of hosts (hosts/line.py) use it.
"""

from __future__ import annotations

import hmac
import ipaddress
from typing import Any

PROOF_BYTES = 32
NONCE_BYTES = 32


def proof(secret: bytes, purpose: bytes, of_connecting: bool, said: bytes) -> bytes:
    """That of one side over what both have `said`; the side's label keeps it from sending back what it was sent."""
    label = b"connects" if of_connecting else b"listens"
    return hmac.digest(secret, purpose + b", side that " + label + b"\0" + said, "sha256")


def is_proof(given: bytes, expected: bytes) -> bool:
    """Whether they are equal; takes the same time for any two."""
    return hmac.compare_digest(given, expected)


def endpoint(address: tuple[Any, ...]) -> bytes:
    """The same bytes on both sides for the address at which the side that listens gets a connection.

    Args:
      address: of an IP socket; `getpeername` where the connection was made, `getsockname` where it arrived.
    """
    host, port = address[:2]
    ip = ipaddress.ip_address(host.partition("%")[0])  # a zone has a name on each machine
    if isinstance(ip, ipaddress.IPv6Address) and ip.ipv4_mapped is not None:
        ip = ip.ipv4_mapped
    return f"{ip} {port}".encode()
