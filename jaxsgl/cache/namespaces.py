"""Namespaces: what separates prefixes of equal tokens whose KV must not be shared.

    common                         b""
    under a request's salt         the salt as UTF-8
    of an adapter                  _ADAPTER, 16 bytes that stand for one loading of it, the salt as UTF-8
    of KV from an unproved server  _SOURCE, 16 bytes that stand for its address, what it would be otherwise
    of weights that were replaced  _RETIRED, 8 bytes that count replacements, what it was before

UTF-8 has no byte 0xfd, 0xfe or 0xff, and what follows them is of fixed length, so no salt reaches into another
namespace. The prefix tree has a root for each namespace, and names of pages begin with it. Never knows tokens; the
scheduler makes a namespace once for each request.
"""

from __future__ import annotations

import hashlib

_SOURCE = b"\xfd"
_ADAPTER = b"\xfe"
_RETIRED = b"\xff"


def namespace_of(cache_salt: str, adapter: str | None = None, source: str = "") -> bytes:
    """The namespace of a request's prefixes.

    `adapter` stands for one loading of an adapter, in this start of the server and any other, since pages in host
    memory outlive both: loading other weights under the same name must give another text. `source` is that of
    `Request.kv_source`.
    """
    namespace = cache_salt.encode("utf-8", "surrogatepass")
    if adapter is not None:
        namespace = _ADAPTER + _digest(adapter) + namespace
    return _SOURCE + _digest(source) + namespace if source else namespace


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def retired(number: int) -> bytes:
    """What comes before all namespaces of the weights that were replaced as number `number`."""
    return _RETIRED + number.to_bytes(8, "big")
