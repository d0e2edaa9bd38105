"""The certificate of both ports. Checked before a port is taken, so that what is wrong with it is one clear line."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path

from jaxsgl.config import ServerConfig
from jaxsgl.errors import StartupError


@dataclass(frozen=True)
class Certificate:
    """Paths of the files, and what they hold, as PEM."""

    certfile: str
    keyfile: str
    certificate: bytes
    key: bytes


def load_certificate(config: ServerConfig) -> Certificate | None:
    """Returns what the flags name, None without TLS. Raises `StartupError` for files that can't serve."""
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
    """Instead of OpenSSL's question on the terminal."""
    raise StartupError("--ssl-keyfile is encrypted, but a server starts unattended: decrypt it (openssl pkey)")
