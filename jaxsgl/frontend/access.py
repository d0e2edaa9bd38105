"""Who calls, and what they may do: keys of clients and of the administrator, and the folders that orders may name.

    no key set                        every call is open
    --api-key, --api-key-file         every call needs one of these keys, which grant all
    --admin-api-key besides           orders and the state of the server need the administrator's key, which grants all
    --admin-api-key alone             orders and the state need it; all other calls are open

Knows no protocol: http/middleware.py and grpc/interceptors.py say which calls are orders, and refuse as `check` says.
The caller of a task is known to all that runs in it, so that generation.py can keep tenants' caches apart.

The engine reads adapters and weights from folders that orders name (`--lora-root`, `--weights-root`):

    no root, no key    none: whoever reaches the port could have any file parsed and any hub id downloaded
    no root, a key     any folder or hub id
    a root             folders below it, with all that links in them lead to; *: any folder or hub id

A refusal is the same for a folder that doesn't exist and one that may not be named, so that it reveals nothing about
the file system.
"""

from __future__ import annotations

import contextlib
import contextvars
import hashlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from jaxsgl.config.server import ANY_FOLDER, KEY_PATTERN, ServerConfig
from jaxsgl.errors import Forbidden, InvalidRequest, StartupError, Unauthenticated

_tenant: contextvars.ContextVar[str] = contextvars.ContextVar("tenant", default="")


class Caller(NamedTuple):
    """Who makes a call.

    Attributes:
      is_admin: whether it holds the administrator's key.
      tenant: callers of equal tenants find each other's prefixes in the cache; "" without a key of --api-key-file.
    """

    is_admin: bool = False
    tenant: str = ""


class Access:
    """The keys, and what they grant. Raises `StartupError` for a file of keys that can't be used."""

    def __init__(self, config: ServerConfig) -> None:
        # By digest: a look-up of what a client sent takes as long whether it is nearly right or not.
        self._callers: dict[bytes, Caller] = {}
        if config.api_key_file is not None:
            self._callers = {
                _digest_of(key.encode()): Caller(tenant=_tenant_of(key)) for key in _read_keys(config.api_key_file)
            }
        if config.api_key is not None:
            self._callers[_digest_of(config.api_key.encode())] = Caller()
        self._needs_key = bool(self._callers)
        self._has_admin = config.admin_api_key is not None
        if config.admin_api_key is not None:
            digest = _digest_of(config.admin_api_key.encode())
            if digest in self._callers:
                raise StartupError("--admin-api-key is also a key of clients: choose another")
            self._callers[digest] = Caller(is_admin=True)

    @property
    def guards(self) -> bool:
        """Whether any key is set."""
        return self._needs_key or self._has_admin

    def check(self, authorization: bytes, is_order: bool) -> Caller:
        """Returns who sent the header `authorization`, whose first word may be in any case.

        Raises `Unauthenticated` if the call needs a key and this is none, and `Forbidden` if it needs the
        administrator's. `is_order` says that the call operates the server or shows what other clients do.
        """
        scheme, _, key = authorization.partition(b" ")
        caller = self._callers.get(_digest_of(key)) if scheme.lower() == b"bearer" else None
        for_admin = is_order and self._has_admin
        if caller is None and (self._needs_key or for_admin):
            raise Unauthenticated(
                "the API key is missing or wrong: send the header, or over gRPC the metadata, "
                "`authorization: Bearer KEY`; over HTTP also `x-api-key: KEY`"
            )
        if for_admin and caller is not None and not caller.is_admin:
            raise Forbidden("this call needs the administrator's key (--admin-api-key): the key given is a client's")
        return caller or Caller()


def enter(caller: Caller) -> None:
    """Makes `caller` the one of the running task."""
    _tenant.set(caller.tenant)


def current_tenant() -> str:
    """The tenant of the running call; "" without a key of --api-key-file."""
    return _tenant.get()


def cache_namespace(cache_salt: str) -> str:
    """What keeps the prefixes of the running call apart from others': made of its tenant and `cache_salt`.

    "" without either. A salt can't be chosen so that it reaches into another tenant's cache.
    """
    tenant = _tenant.get()
    if not (tenant or cache_salt):
        return ""
    # Unambiguous, since all tenants' names are equally long.
    text = f"t{tenant}{cache_salt}" if tenant else f"s{cache_salt}"
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def keys_in_file(path: str | None) -> list[str]:
    """The keys of `--api-key-file`, which logs must not show; none if it can't be used, which `Access` then says."""
    with contextlib.suppress(StartupError):
        return [] if path is None else list(_read_keys(path))
    return []


def _digest_of(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _tenant_of(key: str) -> str:
    return hashlib.blake2b(key.encode(), digest_size=16).hexdigest()


def _read_keys(path: str) -> Iterator[str]:
    """Yields the keys of a file, one per line; empty lines and lines that begin with # don't count."""
    try:
        lines = Path(path).read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is no text"
        raise StartupError(f"--api-key-file {path} can't be read: {reason}") from None
    keys = [(number, line.strip()) for number, line in enumerate(lines, 1) if line.strip() and line.strip()[0] != "#"]
    if not keys:
        raise StartupError(f"--api-key-file {path} holds no key: write one per line")
    for number, key in keys:
        if re.fullmatch(KEY_PATTERN, key) is None:
            raise StartupError(f"--api-key-file {path}: line {number} is no key, but printable ASCII without spaces is")
        yield key


def adapter_folder(config: ServerConfig, given: str) -> str:
    """The folder or hub id of an adapter, if an order may load it. Raises `Forbidden`, or `InvalidRequest`."""
    return _checked(config, config.lora_root, "--lora-root", given)


def weights_folder(config: ServerConfig, given: str) -> str:
    """The folder or hub id of weights, if an order may load them. Raises as `adapter_folder`."""
    return _checked(config, config.weights_root, "--weights-root", given)


def _checked(config: ServerConfig, root: str | None, flag: str, given: str) -> str:
    if root is None and not (config.needs_key or config.admin_api_key is not None):
        raise Forbidden(
            f"no folder may be named here: start the server with {flag} FOLDER, or with a key (--api-key, "
            "--admin-api-key)"
        )
    if root in (None, ANY_FOLDER):
        return given
    assert root is not None
    try:
        home = Path(root).expanduser().resolve(strict=True)
        folder = (home / given).resolve(strict=True)
        inside = [folder, *folder.iterdir()]
        if all(path.resolve().is_relative_to(home) for path in inside):
            return str(folder)
    except (OSError, ValueError, RuntimeError):  # RuntimeError: links in a circle, before Python 3.13
        pass
    raise InvalidRequest(f"{given:.200} is no folder below {flag}, with all its files, that may be named here")
