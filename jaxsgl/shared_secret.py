"""Secrets by which servers know each other: the files that hold them, and proofs that both sides know one.

Two processes on a network prove to each other that both know a secret, without sending it.

Each side says something new (a nonce) and what it is; the proof of a side is the HMAC-SHA256 of what both have said and
of the address at which the connection arrived, as each side sees it. So a proof can't be sent back, used again, or
passed on by a stranger between them. Knows neither sockets nor what is said. The greetings of prefill and decode
servers (transfer/greeting.py) and of hosts (hosts/line.py) use it.
"""

from __future__ import annotations

import hmac
import ipaddress
import os
import stat
from typing import Any

from jaxsgl.errors import ConfigError

MIN_SECRET_BYTES, MAX_SECRET_BYTES = 32, 4096


def read_secret(path: str, flag: str) -> bytes:
    """Returns what the file of `flag` holds, without white space at the end.

    Raises:
      ConfigError: it can't be read, others may use it, or its size is wrong.
    """
    name = f"{flag} {path}"
    try:
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            secret = file.read(MAX_SECRET_BYTES + 1).rstrip() if stat.S_ISREG(mode) else b""
    except OSError as error:
        raise ConfigError(f"{name} can't be read: {error.strerror}") from None
    if not stat.S_ISREG(mode):
        raise ConfigError(f"{name} is not a regular file")
    if mode & stat.S_IRWXO:
        raise ConfigError(f"{name} has mode {stat.S_IMODE(mode):04o}, so other users may use it: chmod 600 {path}")
    if not MIN_SECRET_BYTES <= len(secret) <= MAX_SECRET_BYTES:
        raise ConfigError(
            f"{name} holds {len(secret)} bytes, but must hold {MIN_SECRET_BYTES} to {MAX_SECRET_BYTES}: "
            "openssl rand -hex 32 makes a secret"
        )
    return secret


def is_this_machine(host: str) -> bool:
    """Whether a port at `host` is reached from this machine alone."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


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
