"""The certificate of both ports: read and checked at the start, and read again when its files change.

New connections get the newest pair of files that works; open connections keep theirs. Everything that is wrong with the
files at the start is one clear `StartupError` before the model is loaded; later it is a warning, and the last good pair
stays in use. Never knows a protocol beyond what hands it the certificate. server.py loads and watches it, the gRPC and
the HTTP server take it.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from pathlib import Path
from typing import NamedTuple, TypeAlias

import grpc

from jaxsgl.config.server import ServerConfig
from jaxsgl.errors import StartupError

CHECK_S = 1.0  # between two looks at the files; they are read once they stayed the same from one look to the next

logger = logging.getLogger(__name__)

Signature: TypeAlias = tuple[tuple[int, ...] | None, ...]  # equal while the files are neither written nor replaced


class Pair(NamedTuple):
    """A certificate and its private key as PEM, and a TLS context that has both."""

    certificate: bytes
    key: bytes
    context: ssl.SSLContext


class Certificate:
    """The certificate and key that new connections get.

    Attributes:
      certfile, keyfile: paths of the files.
    """

    def __init__(self, certfile: str, keyfile: str) -> None:
        """Reads the files. Raises `StartupError` if they can't be used."""
        self.certfile, self.keyfile = certfile, keyfile
        self._seen = self._signature()
        self._pair = self._read()

    def serve_http(self, context: ssl.SSLContext) -> None:
        """Lets every new connection of `context` have the newest pair."""

        def choose(connection: ssl.SSLObject | ssl.SSLSocket, name: str | None, context: ssl.SSLContext) -> None:
            connection.context = self._pair.context

        context.sni_callback = choose  # called for clients that name no server too

    def grpc_credentials(self) -> grpc.ServerCredentials:
        """Credentials that give every new connection the newest pair; gRPC asks from a thread of its own."""
        given = self._pair

        def news() -> grpc.ServerCertificateConfiguration | None:
            nonlocal given
            if given is self._pair:
                return None
            given = self._pair
            return _for_grpc(given)

        return grpc.dynamic_ssl_server_credentials(_for_grpc(given), news)

    async def watch(self) -> None:
        """Reads the files again whenever they have changed; never ends."""
        last = self._seen
        while True:
            await asyncio.sleep(CHECK_S)
            now = self._signature()
            if now == last and now != self._seen:
                self.read_again()
            last = now

    def read_again(self) -> bool:
        """Takes the pair that the files hold now; if it can't be used, warns and keeps the old one."""
        self._seen = self._signature()
        try:
            self._pair = self._read()
        except StartupError as error:
            logger.warning("the old certificate stays in use until its files change again: %s", error)
            return False
        logger.info("new connections get the certificate that is now in %s", self.certfile)
        return True

    def _read(self) -> Pair:
        files = []
        for flag, path in (("--ssl-certfile", self.certfile), ("--ssl-keyfile", self.keyfile)):
            try:
                files.append(Path(path).read_bytes())
            except OSError as error:
                raise StartupError(f"{flag} {path} can't be read: {error.strerror}") from None
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            context.load_cert_chain(self.certfile, self.keyfile, _no_password)
        except (ssl.SSLError, OSError) as error:
            raise StartupError(
                f"--ssl-certfile {self.certfile} and --ssl-keyfile {self.keyfile} are no certificate and its key, both "
                f"as PEM: {getattr(error, 'reason', None) or error}"
            ) from None
        return Pair(files[0], files[1], context)

    def _signature(self) -> Signature:
        signature: list[tuple[int, ...] | None] = []
        for path in (self.certfile, self.keyfile):
            try:
                found = Path(path).stat()  # of the file that a link leads to
                signature.append((found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns))
            except OSError:
                signature.append(None)
        return tuple(signature)


def load_certificate(config: ServerConfig) -> Certificate | None:
    """Returns the certificate that the flags name, None without TLS. Raises `StartupError` for unusable files."""
    if config.ssl_certfile is None or config.ssl_keyfile is None:
        return None
    return Certificate(config.ssl_certfile, config.ssl_keyfile)


def _for_grpc(pair: Pair) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(pair.key, pair.certificate)])


def _no_password() -> str:
    """Refuses an encrypted key: OpenSSL would ask for its password on the terminal."""
    raise StartupError("--ssl-keyfile is encrypted, but a server starts unattended: decrypt it (openssl pkey)")
