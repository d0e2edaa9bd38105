"""Workers that a test plays over a socket of its own, as far as it wants them to be true ones."""

from __future__ import annotations

import socket

from jaxsgl.transfer.frames import Geometry
from jaxsgl.transfer.greeting import greeting


def greet(sock: socket.socket, mode: str, geometry: Geometry, secret: bytes = b"") -> None:
    """Greets as the side that connects. Raises `EOFError` if the other side leaves, and what `greeting` raises."""
    talk = greeting(mode, geometry, secret, connects=True)
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
