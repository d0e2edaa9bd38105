"""Files of secrets by which servers know each other, and which addresses need none."""

from __future__ import annotations

import ipaddress
import os
import stat

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
