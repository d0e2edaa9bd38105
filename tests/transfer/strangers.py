"""Workers that a test plays over a socket of its own, as far as it wants them to be true ones; and what is between."""

from __future__ import annotations

import contextlib
import select
import socket
import threading

from jaxsgl.shared_secret import endpoint
from jaxsgl.transfer.frames import Geometry
from jaxsgl.transfer.greeting import greeting


def greet(sock: socket.socket, mode: str, geometry: Geometry, secret: bytes = b"", connects: bool = True) -> None:
    """Greets as one side. Raises `EOFError` if the other side leaves, and what `greeting` raises."""
    at = endpoint(sock.getpeername() if connects else sock.getsockname())
    talk = greeting(mode, geometry, secret, at, connects)
    step = next(talk)
    while True:
        sock.sendall(step.send)
        got = b""
        while len(got) < step.wanted:
            part = sock.recv(step.wanted - len(got))
            if not part:
                raise EOFError
            got += part
        try:
            step = talk.send(got)
        except StopIteration:
            return


class Relay:
    """Listens at a port, connects to `port` for each that comes, and carries all bytes between both."""

    def __init__(self, port: int) -> None:
        self.carried = [b"", b""]  # to the port, and from it
        self._to = port
        self._socket = socket.create_server(("127.0.0.1", 0))
        self._socket.settimeout(0.1)
        self.port = int(self._socket.getsockname()[1])
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._serve)

    def __enter__(self) -> Relay:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        self._thread.join()
        self._socket.close()

    def _serve(self) -> None:
        while not self._ends.is_set():
            with contextlib.suppress(TimeoutError):
                came, _ = self._socket.accept()
                with came, socket.create_connection(("127.0.0.1", self._to)) as made, contextlib.suppress(OSError):
                    self._carry((came, made))

    def _carry(self, ends: tuple[socket.socket, socket.socket]) -> None:
        while not self._ends.is_set():
            for readable in select.select(ends, (), (), 0.1)[0]:
                which = ends.index(readable)
                data = readable.recv(1 << 16)
                if not data:
                    return
                self.carried[which] += data
                ends[1 - which].sendall(data)
