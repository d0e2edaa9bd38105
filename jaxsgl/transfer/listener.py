"""`Listener`: the port at which decode workers connect, and the connections whose greeting isn't over.

One thread accepts and greets them all, so that a stranger takes a socket and some hundred bytes, no thread. Each has
`GREETING_S` in all, whatever it sends and how slowly. Beyond `MAX_PENDING` the oldest goes of the address that has
most, so that strangers of one address take no place from a worker at another. Knows nothing of what is said after the
greeting: tcp.py gets each socket then.
"""

from __future__ import annotations

import contextlib
import logging
import selectors
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable

from jaxsgl.errors import StartupError
from jaxsgl.shared_secret import endpoint
from jaxsgl.transfer.frames import WireError
from jaxsgl.transfer.greeting import GREETING_S, Greeting

MAX_PENDING = 256  # connections whose greeting isn't over
MAX_REASON_CHARS = 200  # of the end of a connection, since peers' texts may be in it

logger = logging.getLogger(__name__)


class Listener:
    """Listens until `close`.

    Args:
      address: host and port; port 0 takes a free one.
      greet: begins a greeting with what has connected to this `endpoint`.
      admit: gets the socket, blocking again, and the host and name of each worker that has greeted; must not wait.

    Attributes:
      port: on which it listens.

    Raises:
      StartupError: the port can't be bound.
    """

    def __init__(
        self,
        address: tuple[str, int],
        greet: Callable[[bytes], Greeting],
        admit: Callable[[socket.socket, str, str], None],
    ) -> None:
        self._greet, self._admit = greet, admit
        self._socket = _bound(address)
        self._socket.setblocking(False)
        self.port = int(self._socket.getsockname()[1])
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._socket, selectors.EVENT_READ)
        self._pending: dict[_Pending, None] = {}  # in order of time
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kv-accept", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the port and all greetings; the port is free afterwards."""
        self._closed.set()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._thread.join()

    def _run(self) -> None:
        while not self._closed.is_set():
            for key, _ in self._selector.select(0.5):  # seconds
                if key.data is None:
                    self._accept()
                elif key.data in self._pending:  # else it has just left for another one
                    self._advance(key.data)
            now_s = time.monotonic()
            for late in [pending for pending in self._pending if pending.deadline_s <= now_s]:
                self._end(late, f"its greeting took more than {GREETING_S:g} s", logging.WARNING)
        for pending in list(self._pending):
            self._take(pending).close()
        self._selector.close()
        self._socket.close()

    def _accept(self) -> None:
        try:
            sock, (host, port, *_) = self._socket.accept()
        except OSError:
            self._closed.wait(0.1)  # also out of file descriptors: the next try may succeed
            return
        sock.setblocking(False)
        talk = self._greet(endpoint(sock.getsockname()))
        pending = _Pending(sock, host, f"the decode worker at {host}:{port}", talk)
        self._pending[pending] = None
        self._selector.register(sock, selectors.EVENT_READ, pending)
        self._advance(pending)
        if len(self._pending) > MAX_PENDING:
            ((greediest, _),) = Counter(other.host for other in self._pending).most_common(1)
            oldest = next(other for other in self._pending if other.host == greediest)
            text = f"{MAX_PENDING} connections haven't greeted yet, the most, and most are from {greediest}"
            self._end(oldest, text, logging.INFO)

    def _advance(self, pending: _Pending) -> None:
        """Takes what has come."""
        try:
            is_over = pending.advance()
        except WireError as error:
            self._end(pending, str(error), logging.WARNING)
        except OSError as error:
            probed = not pending.has_spoken  # by a gateway, to see whether the port is open
            self._end(pending, str(error), logging.INFO if probed else logging.WARNING)
        except Exception as error:  # a stranger's bytes must not end the thread that listens
            logger.exception("the greeting of %s failed", pending.name)
            self._end(pending, type(error).__name__, logging.ERROR)
        else:
            if is_over:
                sock = self._take(pending)
                sock.setblocking(True)
                self._admit(sock, pending.host, pending.name)

    def _end(self, pending: _Pending, reason: str, level: int) -> None:
        self._take(pending).close()
        logger.log(level, "%s", f"{pending.name} is refused: {reason}"[:MAX_REASON_CHARS])

    def _take(self, pending: _Pending) -> socket.socket:
        del self._pending[pending]
        self._selector.unregister(pending.sock)
        return pending.sock


class _Pending:
    """A connection whose greeting isn't over."""

    def __init__(self, sock: socket.socket, host: str, name: str, greeting: Greeting) -> None:
        self.sock = sock
        self.host = host
        self.name = name
        self.deadline_s = time.monotonic() + GREETING_S
        self.has_spoken = False
        self._greeting = greeting
        self._wanted = -1  # bytes; -1: the greeting hasn't begun
        self._got = bytearray()

    def advance(self) -> bool:
        """Reads and answers without waiting; returns whether the greeting is over.

        Raises:
          WireError: the other side is refused.
          OSError: it has left, or reads nothing of an answer that any socket holds.
        """
        while True:
            if len(self._got) == self._wanted or self._wanted < 0:
                try:
                    step = next(self._greeting) if self._wanted < 0 else self._greeting.send(bytes(self._got))
                except StopIteration:
                    return True
                self._wanted, self._got = step.wanted, bytearray()
                if self.sock.send(step.send) < len(step.send):
                    raise OSError("it doesn't read")
                continue
            try:
                data = self.sock.recv(self._wanted - len(self._got))
            except BlockingIOError:
                return False
            if not data:
                raise OSError("it has closed the connection")
            self.has_spoken = True
            self._got += data


def _bound(address: tuple[str, int]) -> socket.socket:
    host, port = address
    try:
        family = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
        takes_both = family == socket.AF_INET6 and socket.has_dualstack_ipv6()  # as the server's other ports do at ::
        return socket.create_server(address, family=family, backlog=128, dualstack_ipv6=takes_both)
    except OSError as error:
        raise StartupError(
            f"{host}:{port} can't be bound for KV transfers ({error}): choose another --disaggregation-bootstrap-port"
        ) from None
