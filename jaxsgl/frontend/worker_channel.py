"""What the parent and its front-end workers say to each other, and the socket that carries it.

One socket per worker, messages as JSON lines. Nothing of a request travels here: only orders, states and counts, some a
minute. The end of the stream is the death of the process at its other end. workers.py holds the parent's ends,
worker.py the worker's.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from typing import Generic, TypeAlias, TypeVar

import msgspec

from jaxsgl.config.server import ServerConfig
from jaxsgl.frontend.counts import Counts
from jaxsgl.ipc import Endpoints

MAX_MESSAGE_BYTES = 64 << 20


class WorkerLaunch(msgspec.Struct, frozen=True, tag="launch"):
    """The first message to a worker.

    Attributes:
      number: 1, 2, ...; the one that takes a dead worker's place has its number.
      config: the server's, with both ports as they were taken.
      endpoints: where each engine is, by rank; the line is this worker's alone.
      dead: why replicas have died, by rank; nothing else is known of them.
      is_late: the server is ready, and this worker takes the place of one that died.
    """

    number: int
    config: ServerConfig
    endpoints: tuple[Endpoints, ...]
    dead: dict[int, str] = {}
    is_late: bool = False


class EngineDied(msgspec.Struct, frozen=True, tag="engine_died"):
    """The open calls on the replica `rank` must fail with this reason; with the last replica the worker ends."""

    rank: int
    reason: str


class EngineStuck(msgspec.Struct, frozen=True, tag="engine_stuck"):
    """The watchdog's verdict on the replica `rank` has changed: why it is stuck, None if it works again."""

    rank: int
    reason: str | None


class Drain(msgspec.Struct, frozen=True, tag="drain"):
    """Let open calls finish within `ServerConfig.drain_s`, and end."""


class AskCounts(msgspec.Struct, frozen=True, tag="ask_counts"):
    """Asks for the worker's `Counts`; also shows that its loop turns."""


class Total(msgspec.Struct, frozen=True, tag="total"):
    """Answers `AskTotal`: the counts of all workers."""

    counts: Counts


class WorkerReady(msgspec.Struct, frozen=True, tag="ready"):
    """The worker takes requests."""


class StartFailed(msgspec.Struct, frozen=True, tag="start_failed"):
    """The worker ends because of this."""

    message: str


class AskTotal(msgspec.Struct, frozen=True, tag="ask_total"):
    """Asks for the counts of all workers, and brings those of the one that asks."""

    counts: Counts


ToWorker: TypeAlias = WorkerLaunch | EngineDied | EngineStuck | Drain | AskCounts | Total
FromWorker: TypeAlias = WorkerReady | StartFailed | Counts | AskTotal
MessageT = TypeVar("MessageT")


class Channel(Generic[MessageT]):
    """One end of a socket, which receives messages of one type. Made by `open_channel`."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        decoder: msgspec.json.Decoder[MessageT],
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._decoder = decoder

    async def receive(self) -> MessageT | None:
        """Returns the next message, None if the other process has ended."""
        with contextlib.suppress(ConnectionError):
            line = await self._reader.readline()
            if line.endswith(b"\n"):
                return self._decoder.decode(line)
        return None

    def send(self, message: ToWorker | FromWorker) -> None:
        """Sends without waiting; what is sent to a process that has ended is lost."""
        self._writer.write(msgspec.json.encode(message) + b"\n")

    def close(self) -> None:
        """Closes this end."""
        self._writer.close()


async def parents_end(end: socket.socket) -> Channel[FromWorker]:
    """Returns the parent's end."""
    reader, writer = await asyncio.open_unix_connection(sock=end, limit=MAX_MESSAGE_BYTES)
    return Channel(reader, writer, msgspec.json.Decoder(FromWorker))


async def workers_end(end: socket.socket) -> Channel[ToWorker]:
    """Returns the worker's end."""
    reader, writer = await asyncio.open_unix_connection(sock=end, limit=MAX_MESSAGE_BYTES)
    return Channel(reader, writer, msgspec.json.Decoder(ToWorker))
