"""Where the servers listen: a TCP port for each.

Everything that can be wrong with a port is one clear `StartupError` before the model is loaded. Never knows a protocol.
The gRPC and the HTTP server take their ports.
"""

from __future__ import annotations

import ipaddress
import socket

from jaxsgl.errors import StartupError

BACKLOG = 2048  # connections that wait to be accepted, as in uvicorn


def take_port(host: str, port: int, flag: str) -> socket.socket:
    """Returns a socket that is bound to `host:port` (0: a free one) and listens.

    Raises `StartupError` naming `flag` if it can't.
    """
    where = f"{host}:{port} (--host, {flag})"
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        taken = socket.socket(family, kind, protocol)
        try:
            taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            taken.bind(address)
            taken.listen(BACKLOG)
        except OSError:
            taken.close()
            raise
    except OSError as error:
        raise StartupError(
            f"can't listen on {where}: {error.strerror or error}; choose another port or address"
        ) from None
    return taken


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach `host`."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def address_of(host: str, port: int) -> str:
    """`host:port`, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
