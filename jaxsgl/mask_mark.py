"""`MaskMark`: whose grammar the engine works on right now, in memory that outlives the engine.

Grammars are the one place where native code works on a client's data inside the engine's loop: it makes masks, and
takes and tries tokens. If the engine dies or hangs there, its front ends read here whose request it was: that one must
not be sent again, all others may. The engine's loop writes (requests/grammar_work.py), each front-end process reads
(frontend/engines/link.py); ipc.py says where.
"""

from __future__ import annotations

import logging
import mmap
import os
import struct
from pathlib import Path
from typing import NamedTuple

MAX_ID_BYTES = 1024  # of a longer id only so much is kept, and it isn't found
_HEAD = struct.Struct("<QH")  # number of the call, bytes of the id; 0: none runs

logger = logging.getLogger(__name__)


class Marked(NamedTuple):
    """A call on a grammar, for a mask or with a token, that runs.

    Attributes:
      number: of all such calls since the engine's start.
      request_id: whose it is, as the engine calls it.
    """

    number: int
    request_id: str


class MaskMark:
    """Shared memory in a file, for one writer. A microsecond for each call."""

    def __init__(self, path: Path) -> None:
        """Opens the file, which is made if it is missing. Raises OSError."""
        size = _HEAD.size + MAX_ID_BYTES
        fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            if os.fstat(fd).st_size < size:  # written, so that the disk has room for it: a page without ends a process
                os.pwrite(fd, bytes(size), 0)
            self._memory = mmap.mmap(fd, size)
        except ValueError:
            raise OSError(f"{path} has no room for {size} bytes") from None
        finally:
            os.close(fd)
        self._number = 0

    def begin(self, request_id: str) -> None:
        """The engine begins a call on the grammar of a request."""
        self._number += 1
        name = request_id.encode()[:MAX_ID_BYTES]
        self._memory[_HEAD.size : _HEAD.size + len(name)] = name
        _HEAD.pack_into(self._memory, 0, self._number, len(name))

    def end(self) -> None:
        """The call has returned."""
        _HEAD.pack_into(self._memory, 0, self._number, 0)

    def read(self) -> Marked | None:
        """The call that runs; None: none does."""
        number, length = _HEAD.unpack_from(self._memory, 0)
        if not length:
            return None
        return Marked(number, self._memory[_HEAD.size : _HEAD.size + length].decode(errors="replace"))


class NoMark:
    """In its place where no process outlives this one, or the disk is full."""

    def begin(self, request_id: str) -> None:
        """Notes nothing."""

    def end(self) -> None:
        """Notes nothing."""

    def read(self) -> Marked | None:
        """Nothing."""
        return None


def open_mark(path: Path) -> MaskMark | NoMark:
    """The mark in this file; none, with a warning, if the file can't be used."""
    try:
        return MaskMark(path)
    except OSError as error:
        logger.warning("if a grammar ends the engine, its request can't be told: %s", error)
        return NoMark()
