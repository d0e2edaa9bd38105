"""Where the servers listen: a TCP port for each, and the certificate of both.

Everything that can be wrong with a port or a certificate is one clear `StartupError` before the model is loaded. Never
knows a protocol. server.py loads the certificate; the gRPC and the HTTP server take their ports.
"""

from __future__ import annotations

import ipaddress
import socket
import ssl
from dataclasses import dataclass
from pathlib import Path

from jaxsgl.config import ServerConfig
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


@dataclass(frozen=True)
class Certificate:
    """A certificate and its private key: paths of the files, and their content, as PEM."""

    certfile: str
    keyfile: str
    certificate: bytes
    key: bytes


def load_certificate(config: ServerConfig) -> Certificate | None:
    """Returns the certificate that the flags name, None without TLS. Raises `StartupError` for unusable files."""
    if config.ssl_certfile is None or config.ssl_keyfile is None:
        return None
    files = []
    for flag, path in (("--ssl-certfile", config.ssl_certfile), ("--ssl-keyfile", config.ssl_keyfile)):
        try:
            files.append(Path(path).read_bytes())
        except OSError as error:
            raise StartupError(f"{flag} {path} can't be read: {error.strerror}") from None
    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(config.ssl_certfile, config.ssl_keyfile, _no_password)
    except ssl.SSLError as error:
        raise StartupError(
            f"--ssl-certfile {config.ssl_certfile} and --ssl-keyfile {config.ssl_keyfile} are no certificate and its "
            f"key, both as PEM: {error.reason or error}"
        ) from None
    return Certificate(config.ssl_certfile, config.ssl_keyfile, *files)


def _no_password() -> str:
    """Refuses an encrypted key: OpenSSL would ask for its password on the terminal."""
    raise StartupError("--ssl-keyfile is encrypted, but a server starts unattended: decrypt it (openssl pkey)")
