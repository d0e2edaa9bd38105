"""The host tier's pages in a file, so that a restarted server finds the prefixes of the one before.

A file holds the pages of one model under one layout; its name is a hash of both, so another model, another format of
the cache or another page size finds nothing. It is written whole beside the old one and then takes its name: a server
that is killed meanwhile leaves the old file. Read and written at start and end only; wiring.py calls it.

    magic, length of the index | index: names, parents, tokens, order of use (MessagePack) | pages, in the index's order
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

import msgspec
import numpy as np

from jaxsgl.cache.host_pages import NAME_BYTES, HostPage, HostPages

MAGIC = b"jaxsgl KV pages 1\n"
BATCH = 64  # pages that are copied at once

logger = logging.getLogger(__name__)


class _Index(msgspec.Struct, frozen=True):
    """What the file holds of n pages, parents before children.

    Attributes:
      names: n names.
      parents: `[n]` int32, the place of each page's parent in this list; -1 at the start of a sequence.
      is_private: n bytes, 1 where the tokens are private to a salt, and left out.
      tokens: `[n, page_size]` int32.
      last_used: `[n]` int64, larger is newer.
    """

    names: bytes
    parents: bytes
    is_private: bytes
    tokens: bytes
    last_used: bytes


def save(host: HostPages, path: Path, page_size: int) -> int:
    """Writes all pages that are written to host memory; returns their number. Raises OSError."""
    pages = [page for page in host.all() if page.is_written]
    place = {id(page): i for i, page in enumerate(pages)}
    tokens = [np.zeros(page_size, np.int32) if page.tokens is None else page.tokens for page in pages]
    index = _Index(
        names=b"".join(page.name for page in pages),
        parents=np.array([-1 if page.parent is None else place[id(page.parent)] for page in pages], "<i4").tobytes(),
        is_private=bytes(page.tokens is None for page in pages),
        tokens=np.array(tokens, "<i4").tobytes(),
        last_used=np.array([page.last_used for page in pages], "<i8").tobytes(),
    )
    encoded = msgspec.msgpack.encode(index)
    new = path.with_suffix(f".{os.getpid()}.new")
    with new.open("wb") as file:
        file.write(MAGIC + len(encoded).to_bytes(8, "little") + encoded)
        for first in range(0, len(pages), BATCH):
            file.write(host.read(pages[first : first + BATCH]).data)
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)
    return len(pages)


def load(host: HostPages, path: Path, page_size: int) -> int:
    """Fills the empty `host` with the pages of a file, the newest if not all find room; returns their number.

    A file that is cut or isn't ours is left alone, with a warning.
    """
    try:
        with path.open("rb") as file:
            assert file.read(len(MAGIC)) == MAGIC, "it is not a file of KV pages"
            index = msgspec.msgpack.decode(file.read(int.from_bytes(file.read(8), "little")), type=_Index)
            first_byte, page_bytes = file.tell(), host.arena[:1].nbytes
            count = len(index.names) // NAME_BYTES
            assert os.fstat(file.fileno()).st_size == first_byte + count * page_bytes, "it was cut"
        parents = np.frombuffer(index.parents, "<i4")
        tokens = np.frombuffer(index.tokens, "<i4").reshape(count, page_size)
        last_used = np.frombuffer(index.last_used, "<i8")
        assert len(parents) == len(last_used) == len(index.is_private) == count
    except FileNotFoundError:
        return 0
    except (OSError, AssertionError, ValueError, msgspec.MsgspecError) as error:
        logger.warning("the prefixes of %s are not taken: %s", path, error)
        return 0
    chosen = _newest(parents, last_used, host.num_pages)
    if not chosen:
        return 0
    data = np.memmap(path, host.arena.dtype, "r", first_byte, (count, *host.arena.shape[1:]))
    for first in range(0, len(chosen), BATCH):
        part = chosen[first : first + BATCH]
        pages: list[HostPage] = []
        for i in part:
            parent = None if parents[i] < 0 else _name(index, int(parents[i]))
            page = host.reserve(_name(index, i), parent, None if index.is_private[i] else tokens[i].astype(np.int32))
            assert page is not None
            page.last_used = int(last_used[i])
            pages.append(page)
        host.written(pages, data[part])
    host.continue_after(int(last_used.max()))
    return len(chosen)


def _newest(parents: np.ndarray, last_used: np.ndarray, most: int) -> list[int]:
    """At most `most` pages, the newest with all before them, in the order of the file."""
    chosen: set[int] = set()
    for i in np.argsort(-last_used, kind="stable").tolist():
        path: list[int] = []
        while i >= 0 and i not in chosen:
            path.append(i)
            i = int(parents[i])
        if len(chosen) + len(path) <= most:
            chosen.update(path)
    return sorted(chosen)


def _name(index: _Index, i: int) -> bytes:
    return index.names[i * NAME_BYTES : (i + 1) * NAME_BYTES]
