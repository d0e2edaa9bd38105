"""The host tier's pages in a file, so that a restarted server finds the prefixes of the one before.

A file holds the pages of one model under one layout; its name is a hash of both, so another model, another format of
the cache or another page size finds nothing. It is written whole next to the old one and then takes its name: a server
that is killed meanwhile leaves the old file, and its own unfinished one to the next start. Only this user may read it,
since it holds prompts. What disk or memory has changed since is not taken: index and pages have digests. Read and
written at start and end only; wiring.py calls it.

    magic | pages | index: names, digests, parents, tokens, order of use (MessagePack) | its length and digest
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO

import msgspec
import numpy as np

from jaxsgl.cache.host_pages import NAME_BYTES, HostPage, HostPages
from jaxsgl.cache.pages import IntArray

MAGIC = b"jaxsgl KV pages 2\n"
BATCH = 64  # pages that are read or written at once
NUM_THREADS = 8  # that compute digests, which leaves Python's lock alone
DIGEST_BYTES = 16
_TAIL = struct.Struct(f"<Q{DIGEST_BYTES}s")  # bytes of the index, and its digest
_UNFINISHED = ".new"

logger = logging.getLogger(__name__)


class _Index(msgspec.Struct, frozen=True):
    """What the file holds of n pages, parents before children.

    Attributes:
      names: n names.
      digests: n digests of the pages.
      parents: `[n]` int32, the place of each page's parent in this list; -1 at the start of a sequence.
      is_private: n bytes, 1 where the tokens are private to a salt, and left out.
      tokens: `[n, page_size]` int32.
      last_used: `[n]` int64, larger is newer.
    """

    names: bytes
    digests: bytes
    parents: bytes
    is_private: bytes
    tokens: bytes
    last_used: bytes


def save(host: HostPages, path: Path, page_size: int) -> int:
    """Writes all pages that are written to host memory; returns their number. Raises OSError, and leaves no part."""
    pages = [page for page in host.all() if page.is_written]
    with _unfinished(path) as file:
        file.write(MAGIC)
        digests: list[bytes] = []
        with ThreadPoolExecutor(NUM_THREADS) as threads:
            for first in range(0, len(pages), BATCH):
                data = host.read(pages[first : first + BATCH])
                digests += threads.map(_digest, (page.data for page in data))
                file.write(data.data)
        encoded = msgspec.msgpack.encode(_index_of(pages, digests, page_size))
        file.write(encoded)
        file.write(_TAIL.pack(len(encoded), _digest(encoded)))
    return len(pages)


def load(host: HostPages, path: Path, page_size: int) -> int:
    """Fills the empty `host` with the pages of a file, the newest if not all find room; returns their number.

    A file that is cut, isn't ours or can't be read is left alone, with a warning, and so are single pages that have
    changed, with all after them.
    """
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return 0
    except OSError as error:
        logger.warning("the prefixes of %s are not taken: %s", path, error)
        return 0
    with file:
        try:
            kept = _Kept(file, host, page_size)
            chosen = _newest(kept.parents, kept.last_used, host.num_pages)
            count = _take(host, kept, chosen)
        except Exception as error:  # nothing that a file holds may keep a server from starting
            logger.warning("the prefixes of %s are not taken: %s: %s", path, type(error).__name__, error)
            return 0
    if count < len(chosen):
        wrong = len(chosen) - count
        logger.warning(
            "%d of %d pages of %s are not taken: they changed, or what they follow", wrong, len(chosen), path
        )
    return count


def clear_unfinished(folder: Path) -> None:
    """Removes the files that servers left when they were killed while they wrote; those that are written stay."""
    for path in folder.glob(f"*{_UNFINISHED}"):
        with contextlib.suppress(OSError), path.open("rb") as file:  # locked: another server writes it
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()


class _Kept:
    """A file's pages. Raises all kinds of exceptions for a file that isn't whole, or isn't one of ours."""

    def __init__(self, file: IO[bytes], host: HostPages, page_size: int) -> None:
        self._fd = file.fileno()
        self._shape, self._dtype = host.arena.shape[1:], host.arena.dtype
        self._page_bytes = host.arena[:1].nbytes
        size = os.fstat(self._fd).st_size
        if size < len(MAGIC) + _TAIL.size or self._read(0, len(MAGIC)) != MAGIC:
            raise ValueError("it is not a file of KV pages in this version's format")
        length, digest = _TAIL.unpack(self._read(size - _TAIL.size, _TAIL.size))
        if length > size - _TAIL.size - len(MAGIC):
            raise ValueError("it was cut")
        encoded = self._read(size - _TAIL.size - length, length)
        if _digest(encoded) != digest:
            raise ValueError("its index has changed")
        index = msgspec.msgpack.decode(encoded, type=_Index)
        count = len(index.names) // NAME_BYTES
        if size != len(MAGIC) + count * self._page_bytes + length + _TAIL.size:
            raise ValueError("its pages have another size")
        self.names = [index.names[i * NAME_BYTES : (i + 1) * NAME_BYTES] for i in range(count)]
        self.parents = np.frombuffer(index.parents, "<i4")
        self.tokens = np.frombuffer(index.tokens, "<i4").reshape(count, page_size).astype(np.int32)
        self.last_used = np.frombuffer(index.last_used, "<i8")
        self.is_private = index.is_private
        self._digests = index.digests
        lengths = {len(self.parents), len(self.last_used), len(self.is_private), len(self._digests) // DIGEST_BYTES}
        if lengths != {count} or len(set(self.names)) != count:
            raise ValueError("its index holds more of one thing than of another")
        if ((self.parents < -1) | (self.parents >= np.arange(count))).any() or (self.last_used < 0).any():
            raise ValueError("its pages don't come after those that they follow")

    def page(self, i: int) -> np.ndarray | None:
        """What page `i` holds; None if that has changed since it was written."""
        data = self._read(len(MAGIC) + i * self._page_bytes, self._page_bytes)
        if _digest(data) != self._digests[i * DIGEST_BYTES : (i + 1) * DIGEST_BYTES]:
            return None
        return np.frombuffer(data, self._dtype).reshape(self._shape)

    def tokens_of(self, i: int) -> IntArray | None:
        """`[page_size]` the tokens of page `i`; None if they are private."""
        return None if self.is_private[i] else self.tokens[i]

    def _read(self, offset: int, count: int) -> bytes:
        """Up to `count` bytes; a call of the system reads at most 2 GiB."""
        parts: list[bytes] = []
        while count and (part := os.pread(self._fd, count, offset)):
            parts.append(part)
            offset, count = offset + len(part), count - len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)


def _take(host: HostPages, kept: _Kept, chosen: list[int]) -> int:
    """Fills `host` with pages `chosen`, but for those that have changed and what follows them; returns how many."""
    count = 0
    with ThreadPoolExecutor(NUM_THREADS) as threads:
        for first in range(0, len(chosen), BATCH):
            part = chosen[first : first + BATCH]
            for i, data in zip(part, threads.map(kept.page, part), strict=True):
                parent = int(kept.parents[i])
                if data is None or (parent >= 0 and host.get(kept.names[parent]) is None):
                    continue
                page = host.reserve(kept.names[i], None if parent < 0 else kept.names[parent], kept.tokens_of(i))
                assert page is not None, "host memory has no room for a page that was chosen"
                page.last_used = int(kept.last_used[i])
                host.written([page], data[None])
                count += 1
    if count:
        host.continue_after(int(kept.last_used.max()))
    return count


@contextlib.contextmanager
def _unfinished(path: Path) -> Iterator[IO[bytes]]:
    """A new file next to `path`, locked, that only this user may read; takes that name if all of it was written."""
    new = path.with_suffix(f".{os.getpid()}{_UNFINISHED}")
    new.unlink(missing_ok=True)
    with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield file
            file.flush()
            os.fsync(file.fileno())
            new.replace(path)
        finally:
            new.unlink(missing_ok=True)


def _index_of(pages: list[HostPage], digests: list[bytes], page_size: int) -> _Index:
    place = {id(page): i for i, page in enumerate(pages)}
    tokens = [np.zeros(page_size, np.int32) if page.tokens is None else page.tokens for page in pages]
    return _Index(
        names=b"".join(page.name for page in pages),
        digests=b"".join(digests),
        parents=np.array([-1 if page.parent is None else place[id(page.parent)] for page in pages], "<i4").tobytes(),
        is_private=bytes(page.tokens is None for page in pages),
        tokens=np.array(tokens, "<i4").tobytes(),
        last_used=np.array([page.last_used for page in pages], "<i8").tobytes(),
    )


def _newest(parents: np.ndarray, last_used: np.ndarray, most: int) -> list[int]:
    """At most `most` pages, the newest with all before them, in the order of the file, where parents come first."""
    chosen: set[int] = set()
    for i in np.argsort(-last_used, kind="stable").tolist():
        path: list[int] = []
        while i >= 0 and i not in chosen:
            path.append(i)
            i = int(parents[i])
        if len(chosen) + len(path) <= most:
            chosen.update(path)
    return sorted(chosen)


def _digest(data: bytes | memoryview) -> bytes:
    return hashlib.blake2b(data, digest_size=DIGEST_BYTES).digest()
