"""What the scheduler needs of a wire between workers: the protocol `Wire`, and the events that it yields.

tcp.py implements it with sockets and threads; tests/transfer has one in memory. Knows no rooms and no requests beyond
what a frame says.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from jaxsgl.transfer.frames import Message, Room

Peer: TypeAlias = int  # names a connection; never used again
Bytes: TypeAlias = npt.NDArray[np.uint8]


class News(NamedTuple):
    """`peer` has sent `message`; `payload` is the bytes that follow it, uint8, of pages `[num_pages * page_bytes]`."""

    peer: Peer
    message: Message
    payload: Bytes | None = None


class Sent(NamedTuple):
    """`num_bytes` of pages or rows of `room` left this process at `at_s` (monotonic); the memory they took is free."""

    peer: Peer
    room: Room
    num_bytes: int
    at_s: float


class Left(NamedTuple):
    """There is no connection to `peer` any more, or never was, for `reason`; nothing more comes of it."""

    peer: Peer
    reason: str


Event: TypeAlias = News | Sent | Left


class Wire(Protocol):
    """Connections to other workers. All methods return at once.

    Attributes:
      proves_peers: whether peers have proved that they have this worker's secret. Else anything may be at an address.
    """

    proves_peers: bool

    def connect(self, host: str, port: int) -> Peer:
        """The connection to a prefill worker, which is made unless there is one."""
        ...

    def send(self, peer: Peer, message: Message, payload: np.ndarray | None = None) -> None:
        """Sends in order. What is sent to a peer that has left is dropped."""
        ...

    def poll(self) -> Sequence[Event]:
        """What has happened since the last call, in order for each peer."""
        ...

    def wait(self, timeout_s: float) -> None:
        """Waits for an event, at most `timeout_s` seconds."""
        ...

    def fileno(self) -> int:
        """A file descriptor that is readable while events wait, and from time to time without."""
        ...

    def close(self) -> None:
        """Ends all connections."""
        ...
