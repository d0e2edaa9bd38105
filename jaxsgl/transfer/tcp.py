"""`TcpWire`: frames over TCP, which needs nothing installed and no registry.

A decode worker connects to the address that a request names, and both greet each other (greeting.py); a prefill worker
does so in one thread for all that come (listener.py). After that each connection has a thread that reads and one that
writes. The bytes of pages follow their frames, or NIXL carries them, as the backend says (payloads.py, nixl.py). A
worker that is silent says `Ping` every second, and one that isn't heard for `timeout_s` is dead: however long a request
queues there, its worker is heard. Memory for pages is taken only for rooms whose `Grant` went out over the same
connection, memory for images and rows only for rooms whose `Open` or `Grant` asked for them; others are read and
dropped, and prefill takes none at all.
Connections are bounded, in all and for each address that connects, and so is what each has said that nobody has polled.
One for which there is no thread is closed: the port goes on listening. Nothing is encrypted.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import queue
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from jaxsgl.shared_secret import endpoint
from jaxsgl.transfer.frames import (
    HEAD_BYTES,
    Done,
    Fail,
    Geometry,
    Grant,
    Media,
    Memory,
    Message,
    Open,
    Pages,
    Ping,
    Room,
    Rows,
    Taken,
    WireError,
    decode,
    decode_head,
    encode,
)
from jaxsgl.transfer.greeting import GREETING_S, greeting
from jaxsgl.transfer.listener import MAX_REASON_CHARS, Listener
from jaxsgl.transfer.nixl import InMemory, Nixl
from jaxsgl.transfer.payloads import InFrames, Payloads, Stream
from jaxsgl.transfer.wire import Event, Left, News, Peer, Sent

PING_S = 1.0
CONNECT_S = 3.0
MAX_LINKS = 512  # connections at once; each takes two threads
MAX_LINKS_OF_HOST = 64  # of these, from one address
MAX_UNPOLLED = 256  # messages of a connection, after which it is read no further until they are polled
MAX_UNSENT = 1 << 16  # frames for a worker that reads none of them
MAX_PINGS_PER_S = 20  # a worker says one a second

logger = logging.getLogger(__name__)


class TcpWire:
    """The connections of one worker.

    Args:
      mode: "prefill", which listens, or "decode", which connects.
      geometry: of this worker's pages, and the backend that carries them; a worker with another one is refused.
      listen: host and port; port 0 takes a free one. None: doesn't listen.
      timeout_s: seconds of silence after which a worker counts as dead.
      secret: what the other workers must know as well; b"": any worker may take part, and all are on this machine.

    Raises:
      StartupError: the port can't be bound, or the backend isn't installed.
    """

    def __init__(
        self,
        mode: str,
        geometry: Geometry,
        listen: tuple[str, int] | None = None,
        timeout_s: float = 5.0,
        secret: bytes = b"",
    ) -> None:
        self.geometry = geometry
        self.timeout_s = timeout_s
        self.proves_peers = bool(secret)
        self.payloads_of: Callable[[Stream], Payloads] = InFrames
        if geometry.backend == "nixl":
            self.payloads_of = partial(InMemory, nixl=Nixl(mode == "prefill", on_loopback=not secret))
        self.max_payload_bytes = geometry.max_payload_bytes if mode == "decode" else 0
        self.greet = partial(greeting, mode, geometry, secret)
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._numbers = itertools.count(1)
        self._links: dict[Peer, _Link] = {}
        self._by_address: dict[tuple[str, int], Peer] = {}
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)
        self._listener = None if listen is None else Listener(listen, partial(self.greet, connects=False), self._admit)
        threading.Thread(target=self._tick, name="kv-tick", daemon=True).start()

    @property
    def port(self) -> int:
        """On which it listens."""
        assert self._listener is not None
        return self._listener.port

    def connect(self, host: str, port: int) -> Peer:
        """See `Wire`."""
        with self._lock:
            known = self._by_address.get((host, port))
            if known is not None:
                return known
            link = self._new_link(f"the prefill worker at {host}:{port}", None)
            peer = self._by_address[host, port] = link.peer
            refused = self._start(link, (host, port))
        if refused is not None:
            self.forget(peer, f"{link.name} is not reachable: {refused}", logging.WARNING)
        return peer

    def send(self, peer: Peer, message: Message, payload: np.ndarray | None = None) -> None:
        """See `Wire`. `payload` must not change any more."""
        link = self._links.get(peer)
        if link is not None:
            link.send(message, payload)

    def poll(self) -> Sequence[Event]:
        """See `Wire`."""
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake_read, 4096)
        events: list[Event] = []
        with contextlib.suppress(queue.Empty):
            while True:
                event = self._events.get_nowait()
                events.append(event)
                if isinstance(event, News) and (link := self._links.get(event.peer)) is not None:
                    link.polled()
        return events

    def wait(self, timeout_s: float) -> None:
        """See `Wire`."""
        select.select([self._wake_read], [], [], timeout_s)

    def fileno(self) -> int:
        """See `Wire`."""
        return self._wake_read

    def close(self) -> None:
        """See `Wire`."""
        self._closed.set()
        if self._listener is not None:
            self._listener.close()
        for link in list(self._links.values()):
            link.end("this worker shuts down")

    def tell(self, event: Event) -> None:
        """Queues an event; called by the threads of connections."""
        self._events.put(event)
        self._wake()

    def forget(self, peer: Peer, reason: str, level: int) -> None:
        """A connection has ended; called once by its thread."""
        with self._lock:
            self._links.pop(peer, None)
            for address in [address for address, other in self._by_address.items() if other == peer]:
                del self._by_address[address]
        reason = reason[:MAX_REASON_CHARS]
        if not self._closed.is_set():
            logger.log(level, "%s", reason)
        self.tell(Left(peer, reason))

    def _new_link(self, name: str, sock: socket.socket | None, host: str = "") -> _Link:
        link = _Link(self, next(self._numbers), name, sock, host)
        self._links[link.peer] = link
        return link

    def _start(self, link: _Link, address: tuple[str, int] | None) -> str | None:
        """Starts the thread of a new link; returns why that can't be, and leaves the rest to the caller."""
        if len(self._links) > MAX_LINKS:
            return f"there are {MAX_LINKS} connections, the most"
        if link.host and sum(other.host == link.host for other in self._links.values()) > MAX_LINKS_OF_HOST:
            return f"there are {MAX_LINKS_OF_HOST} connections from {link.host}, the most"
        try:
            threading.Thread(target=link.run, args=(address,), name="kv-read", daemon=True).start()
        except RuntimeError as error:  # the system gives no more threads
            return str(error)
        return None

    def _admit(self, sock: socket.socket, host: str, name: str) -> None:
        """Takes a connection whose greeting is over."""
        with self._lock:
            link = self._new_link(name, sock, host)
            refused = self._start(link, None)
        if refused is not None:
            sock.close()
            self.forget(link.peer, f"{link.name} is refused: {refused}", logging.INFO)

    def _tick(self) -> None:
        """Wakes the loop, so that it finds what has expired."""
        while not self._closed.wait(PING_S):
            self._wake()

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.write(self._wake_write, b"x")


class _Link:
    """One connection: the reader is the thread of `run`, the writer a thread that it starts."""

    def __init__(self, wire: TcpWire, peer: Peer, name: str, sock: socket.socket | None, host: str) -> None:
        self.peer = peer
        self.name = name
        self.host = host  # from which it came; "": it was made here
        self._wire = wire
        self._sock = sock
        self._out: queue.SimpleQueue[tuple[Message, np.ndarray | None] | None] = queue.SimpleQueue()
        self._granted: dict[Room, int] = {}  # pages that may still come
        self._asked: set[Room] = set()  # whose images may still come
        self._lacking: set[Room] = set()  # whose images' embeddings may still come
        self._reason: str | None = None
        self._unpolled = threading.Semaphore(MAX_UNPOLLED)
        self._pings_left, self._pings_since_s = MAX_PINGS_PER_S, time.monotonic()
        self.timeout_s = wire.timeout_s
        self.slot_bytes = wire.geometry.max_payload_bytes
        self.takes_payloads = wire.max_payload_bytes > 0
        self._payloads = wire.payloads_of(self)

    @property
    def has_ended(self) -> bool:
        """See `Stream`."""
        return self._reason is not None

    def send(self, message: Message, payload: np.ndarray | None = None) -> None:
        """Queues a frame."""
        if isinstance(message, Grant):
            self._granted[message.room] = message.num_pages
            if message.images:
                self._lacking.add(message.room)
        elif isinstance(message, Open) and message.images is None:
            self._asked.add(message.room)
        elif isinstance(message, Fail):
            self._end_room(message.room)
        if self._out.qsize() >= MAX_UNSENT:
            self.end(f"{self.name} is refused: it reads none of {MAX_UNSENT} frames")
        self._out.put((message, payload))

    def polled(self) -> None:
        """One of its messages was polled."""
        self._unpolled.release()

    def end(self, reason: str) -> None:
        """Closes the connection, whose threads then end. The first reason counts."""
        if self._reason is None:
            self._reason = reason
        self._out.put(None)
        self._unpolled.release()  # the reader may wait for it
        if self._sock is not None:
            with contextlib.suppress(OSError):
                self._sock.shutdown(socket.SHUT_RDWR)

    def run(self, address: tuple[str, int] | None = None) -> None:
        """Connects to `address` if given, reads until the connection ends, and tells the reason."""
        writer: threading.Thread | None = None
        try:
            if address is not None:
                self._sock = socket.create_connection(address, timeout=CONNECT_S)
                self._greet(self._sock)
            assert self._sock is not None
            _set_options(self._sock, self._wire.timeout_s)
            writer = threading.Thread(target=self._send_queued, name="kv-write", daemon=True)
            writer.start()
            while self._reason is None:
                news = self._read()
                self._unpolled.acquire()
                self._wire.tell(news)
        except WireError as error:
            self.end(f"{self.name} is refused: {error}")
        except OSError as error:
            self.end(f"{self.name} is not reachable: {error}")
        except Exception as error:
            logger.exception("the connection to %s failed", self.name)
            self.end(f"the connection to {self.name} failed: {type(error).__name__}")
        if writer is not None and writer.ident is not None:  # it was started
            writer.join()
        self._payloads.end()
        if self._sock is not None:
            self._sock.close()
        assert self._reason is not None
        self._wire.forget(self.peer, self._reason, logging.WARNING)

    def _greet(self, sock: socket.socket) -> None:
        """Raises WireError if the other side is refused, OSError if it leaves or takes more than `GREETING_S`."""
        deadline_s = time.monotonic() + GREETING_S
        talk = self._wire.greet(endpoint(sock.getpeername()), connects=True)
        got: bytes | None = None
        with contextlib.suppress(StopIteration):
            while True:
                step = next(talk) if got is None else talk.send(got)
                sock.sendall(step.send)
                got = b""
                while len(got) < step.wanted:
                    sock.settimeout(max(deadline_s - time.monotonic(), 1e-3))
                    try:
                        data = sock.recv(step.wanted - len(got))
                    except TimeoutError:
                        raise OSError(f"its greeting took more than {GREETING_S:g} s") from None
                    if not data:
                        raise OSError("it has closed the connection during the greeting: its log says why")
                    got += data

    def _read(self) -> News:
        """Returns the next message that is one for the scheduler."""
        while True:
            head = decode_head(self._receive(HEAD_BYTES), self._wire.max_payload_bytes)
            body = self._receive(head.message_bytes)
            message = decode(body, head.payload_bytes, self._wire.geometry.page_bytes)
            if isinstance(message, Pages | Media | Rows):
                payload = self._payloads.take(head.payload_bytes, self._is_awaited(message))
                if payload is not None:
                    return News(self.peer, message, payload)
            elif isinstance(message, Ping):
                self._count_ping()
            elif isinstance(message, Memory | Taken):
                self._payloads.hear(message)
            else:
                if isinstance(message, Done | Fail):
                    self._end_room(message.room)
                return News(self.peer, message)

    def _count_ping(self) -> None:
        """Raises WireError if there are too many; those may come together that were sent while nothing was read."""
        passed_s = time.monotonic() - self._pings_since_s
        if passed_s >= 1:
            self._pings_left, self._pings_since_s = int(MAX_PINGS_PER_S * passed_s), self._pings_since_s + passed_s
        self._pings_left -= 1
        if self._pings_left < 0:
            raise WireError(f"it says more than {MAX_PINGS_PER_S} times a second that it lives")

    def _end_room(self, room: Room) -> None:
        self._granted.pop(room, None)
        self._asked.discard(room)
        self._lacking.discard(room)

    def _is_awaited(self, message: Pages | Media | Rows) -> bool:
        """Whether decode has granted these pages, or asked for these images or rows; it gets pages once."""
        if isinstance(message, Rows):
            return message.room in self._lacking
        if isinstance(message, Media):
            return message.room in self._asked
        left = self._granted.get(message.room, 0) - message.num_pages
        if left >= 0:
            self._granted[message.room] = left
        return left >= 0

    def _receive(self, num_bytes: int) -> bytearray:
        data = bytearray(num_bytes)
        self.fill(memoryview(data))
        return data

    def fill(self, view: memoryview) -> None:
        """See `Stream`. Also raises OSError if nothing comes for `timeout_s` seconds, or the other side closes."""
        assert self._sock is not None
        while view:
            try:
                count = self._sock.recv_into(view, len(view), socket.MSG_WAITALL)
            except (BlockingIOError, TimeoutError):
                raise OSError(f"nothing was heard for {self.timeout_s:g} s") from None
            if not count:
                raise OSError("it has closed the connection")
            view = view[count:]

    def write(self, data: bytes | memoryview) -> None:
        """See `Stream`."""
        assert self._sock is not None
        self._sock.sendall(data)

    def left(self, message: Pages | Media | Rows, num_bytes: int) -> None:
        """See `Stream`."""
        if isinstance(message, Pages | Rows):
            self._wire.tell(Sent(self.peer, message.room, num_bytes, time.monotonic()))

    def _send_queued(self) -> None:
        try:
            while True:
                try:
                    item = self._out.get(timeout=PING_S)
                except queue.Empty:
                    item = Ping(), None
                if item is None:
                    return
                message, payload = item
                if payload is None:
                    self.write(encode(message))
                else:
                    assert isinstance(message, Pages | Media | Rows), message
                    self._payloads.send(message, np.ascontiguousarray(payload).view(np.uint8).reshape(-1).data)
        except OSError as error:
            self.end(f"{self.name} is not reachable: {error}")


def _set_options(sock: socket.socket, timeout_s: float) -> None:
    """Lets reads that get nothing for `timeout_s` fail; the socket stays blocking, so that one call fills a page."""
    sock.settimeout(None)
    limit = struct.pack("ll", int(timeout_s), int(timeout_s % 1 * 1e6))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
