"""How the bytes that follow messages travel: the protocol `Payloads`, and `InFrames`, which puts them into the frames.

nixl.py has the other one, where they lie in memory that the receiver reads. A connection has one of them. Its writer
sends and its reader takes, in the order of the messages; neither knows rooms.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from jaxsgl.transfer.frames import Media, Memory, Pages, Rows, Taken, WireError, encode
from jaxsgl.transfer.wire import Bytes


class Stream(Protocol):
    """The frames of one connection, as payloads need them. All but `send` are called by its own threads alone."""

    name: str
    timeout_s: float
    slot_bytes: int  # the most of a payload
    takes_payloads: bool  # only decode workers do

    @property
    def has_ended(self) -> bool:
        """Whether the connection is no longer of use."""
        ...

    def send(self, message: Taken) -> None:
        """Queues a frame."""
        ...

    def write(self, data: bytes | memoryview) -> None:
        """Writes all of `data`. Raises `OSError`."""
        ...

    def fill(self, view: memoryview) -> None:
        """Reads all of `view`. Raises `OSError`."""
        ...

    def left(self, message: Pages | Media | Rows, num_bytes: int) -> None:
        """The payload of `message` needs its memory no more."""
        ...


class Payloads(Protocol):
    """The bytes of `Pages`, `Media` and `Rows` of one connection."""

    def send(self, message: Pages | Media | Rows, data: memoryview) -> None:
        """Sends the frame of `message` and its bytes. Called by the writer. Raises `OSError`."""
        ...

    def take(self, num_bytes: int, is_awaited: bool) -> Bytes | None:
        """Returns the bytes that follow the message just read; None if nobody awaits them.

        Called by the reader.

        Raises:
          OSError: they don't come.
          WireError: they can't be where the other side says.
        """
        ...

    def hear(self, message: Memory | Taken) -> None:
        """Takes what the other side says of its payloads. Called by the reader. Raises `WireError`, `OSError`."""
        ...

    def end(self) -> None:
        """Frees memory. The writer has ended, and the reader calls it last."""
        ...


class InFrames:
    """Payloads follow their messages, and go into their own memory."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._scratch = np.empty(0, dtype=np.uint8)  # for what nobody awaits

    def send(self, message: Pages | Media | Rows, data: memoryview) -> None:
        """See `Payloads`."""
        self._stream.write(encode(message, len(data)))
        self._stream.write(data)
        self._stream.left(message, len(data))

    def take(self, num_bytes: int, is_awaited: bool) -> Bytes | None:
        """See `Payloads`."""
        if is_awaited:
            payload = np.empty(num_bytes, dtype=np.uint8)
            self._stream.fill(memoryview(payload.data))
            return payload
        if len(self._scratch) < num_bytes:
            self._scratch = np.empty(num_bytes, dtype=np.uint8)
        self._stream.fill(memoryview(self._scratch.data)[:num_bytes])
        return None

    def hear(self, message: Memory | Taken) -> None:
        """See `Payloads`."""
        raise WireError(f"it speaks of memory to read, but KV travels over tcp here: {type(message).__name__} came")

    def end(self) -> None:
        """See `Payloads`."""
