"""A network of wires in memory: messages travel when a test says so, and connections can be cut."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

from jaxsgl.transfer.frames import Done, Fail, Grant, Media, Message, Open, Pages, Room, Rows
from jaxsgl.transfer.wire import Event, Left, News, Peer, Sent


class Network:
    """All wires, by address.

    Attributes:
      clock: gives seconds, for what has left.
      links: connections that hold, as (wire, its peer, other wire, that one's peer).
    """

    def __init__(self) -> None:
        self.listening: dict[tuple[str, int], MemoryWire] = {}
        self.links: dict[tuple[MemoryWire, Peer], tuple[MemoryWire, Peer]] = {}
        self.on_way: dict[tuple[MemoryWire, Peer], deque[tuple[Message, np.ndarray | None]]] = {}
        self.num_peers = 0
        self.clock: Callable[[], float] = lambda: 0.0

    def link(self, one: MemoryWire, other: MemoryWire) -> Peer:
        self.num_peers += 2
        ends = (one, self.num_peers - 1), (other, self.num_peers)
        self.links[ends[0]], self.links[ends[1]] = ends[1], ends[0]
        for end in ends:
            self.on_way[end] = deque()
        return ends[0][1]

    def deliver(self, end: tuple[MemoryWire, Peer], twice: bool = False) -> None:
        """Hands over the oldest message that `end` has sent; `twice`, unless it is a part of rows, as parts add up."""
        message, payload = self.on_way[end].popleft()
        wire, peer = end
        if payload is not None and isinstance(message, Pages | Rows):
            wire.events.append(Sent(peer, message.room, payload.nbytes, self.clock()))
        other, at_other = self.links[end]
        for _ in range(1 + (twice and not isinstance(message, Rows))):
            if payload is None or other.takes(message, at_other):
                copied = None if payload is None else payload.reshape(-1).view(np.uint8).copy()
                other.events.append(News(at_other, message, copied))

    def deliver_all(self) -> None:
        for end, messages in self.on_way.items():
            while messages:
                self.deliver(end)

    def cut(self, end: tuple[MemoryWire, Peer]) -> None:
        """Both sides learn that the other is gone; what was on its way is lost."""
        for wire, peer in (end, self.links[end]):
            del self.links[wire, peer], self.on_way[wire, peer]
            wire.events.append(Left(peer, f"peer {peer} has left"))
            wire.forget(peer)


class MemoryWire:
    """A `Wire` of `network` that listens at `address`, if given. Drops pages that were not granted, as TCP does."""

    def __init__(self, network: Network, address: tuple[str, int] | None = None) -> None:
        self.network = network
        self.events: deque[Event] = deque()
        self.proves_peers = True
        self._peers: dict[tuple[str, int], Peer] = {}
        self._granted: dict[tuple[Peer, Room], int] = {}
        self._asked: set[tuple[Peer, Room]] = set()
        self._lacking: set[tuple[Peer, Room]] = set()
        if address is not None:
            network.listening[address] = self

    def connect(self, host: str, port: int) -> Peer:
        if (host, port) not in self._peers:
            other = self.network.listening.get((host, port))
            if other is None:
                self.network.num_peers += 1
                self.events.append(Left(self.network.num_peers, f"{host}:{port} refuses connections"))
                return self.network.num_peers
            self._peers[host, port] = self.network.link(self, other)
        return self._peers[host, port]

    def send(self, peer: Peer, message: Message, payload: np.ndarray | None = None) -> None:
        if isinstance(message, Grant):
            self._granted[peer, message.room] = message.num_pages
            if message.images:
                self._lacking.add((peer, message.room))
        elif isinstance(message, Open) and message.images is None:
            self._asked.add((peer, message.room))
        elif isinstance(message, Fail):
            self._granted.pop((peer, message.room), None)
        if (self, peer) in self.network.on_way:
            self.network.on_way[self, peer].append((message, payload))

    def takes(self, message: Message, peer: Peer) -> bool:
        if isinstance(message, Media):
            return (peer, message.room) in self._asked
        if isinstance(message, Rows):
            return (peer, message.room) in self._lacking
        assert isinstance(message, Pages)
        left = self._granted.get((peer, message.room), 0)
        return left >= message.num_pages

    def poll(self) -> Sequence[Event]:
        events = list(self.events)
        self.events.clear()
        for event in events:
            if isinstance(event, News) and isinstance(event.message, Done | Fail):
                self._granted.pop((event.peer, event.message.room), None)
        return events

    def forget(self, peer: Peer) -> None:
        self._peers = {address: other for address, other in self._peers.items() if other != peer}
        self._granted = {key: left for key, left in self._granted.items() if key[0] != peer}

    def wait(self, timeout_s: float) -> None:
        raise AssertionError("nothing comes while one waits")

    def fileno(self) -> int:
        raise AssertionError("there is no file")

    def close(self) -> None:
        pass
