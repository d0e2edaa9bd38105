"""Where the servers listen: a TCP port for each, and how many connections each may have.

Everything that can be wrong with them is one clear `StartupError` before the model is loaded. Never knows a protocol.
server.py raises the limit of open files. The gRPC and the HTTP server take their ports, but those of several front-end
processes are taken by their parent (workers.py).
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import resource
import socket
from dataclasses import dataclass

from jaxsgl.config.server import ServerConfig
from jaxsgl.errors import StartupError

BACKLOG = 512  # connections that wait to be accepted
MAX_FILES = 1 << 20  # asked of systems that set no limit; Linux gives no process more by default
OWN_FILES = 256  # that a front-end process needs at most, its clients' connections not counted
MAX_CONNECTIONS = 16_384  # of each port by default: twice as many as requests may wait

logger = logging.getLogger(__name__)


def take_port(host: str, port: int, flag: str, shared: bool = False, listens: bool = True) -> socket.socket:
    """Returns a socket that is bound to `host:port` (0: a free one) and `listens`.

    If `shared`, more sockets may be bound to the port, and the kernel spreads connections over those that listen.
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
            if shared:
                taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            taken.bind(address)
            if listens:
                taken.listen(BACKLOG)
        except OSError:
            taken.close()
            raise
    except OSError as error:
        raise StartupError(
            f"can't listen on {where}: {error.strerror or error}; choose another port or address"
        ) from None
    return taken


def reserve_port(host: str, port: int, flag: str, count: int, listens: bool) -> list[socket.socket]:
    """Returns `count` sockets bound to one port, which no other server has and no other server gets.

    Raises `StartupError` naming `flag`.
    """
    alone = take_port(host, port, flag)  # fails if another server has the port, even one that would share it
    port = alone.getsockname()[1]
    alone.close()
    return [take_port(host, port, flag, shared=True, listens=listens) for _ in range(count)]


def raise_file_limit() -> None:
    """Lets this process, and those that it starts, open as many files as the system allows."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_FILES if most == resource.RLIM_INFINITY else most
    with contextlib.suppress(OSError, ValueError):  # some systems allow less than they say
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))


def max_connections(asked: int | None) -> int:
    """Returns how many connections each port may have: `asked`, or else what fits into the limit of open files.

    Raises `StartupError` if `asked` doesn't fit.
    """
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    files = MAX_FILES if files == resource.RLIM_INFINITY else files
    room = max(1, (files - min(OWN_FILES, files // 2)) // 2)
    if asked is not None and asked > room:
        raise StartupError(
            f"--max-connections is {asked}, but this process may open {files} files, which is enough for {room} "
            "connections of each port: choose less, or allow more files (ulimit -n)"
        )
    return min(room, MAX_CONNECTIONS) if asked is None else asked


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach `host`."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def address_of(host: str, port: int) -> str:
    """`host:port`, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


@dataclass(frozen=True)
class Addresses:
    """host:port of both ports."""

    grpc: str
    http: str


def log_listening(config: ServerConfig, at: Addresses) -> None:
    """Logs where the server listens."""
    logger.info("listening on %s (gRPC) and %s (HTTP), loading %s", at.grpc, at.http, config.engine.model)
    if not config.needs_key and not is_loopback(config.host):
        logger.warning("%s can be reached from other machines, and no --api-key is set", config.host)


def log_ready(config: ServerConfig, at: Addresses, seconds: float) -> None:
    """Logs that requests may come, `seconds` after the start."""
    words = "ready: %s on %s (gRPC) and %s (HTTP), %.1f s after start"
    logger.info(words, config.engine.model, at.grpc, at.http, seconds)
