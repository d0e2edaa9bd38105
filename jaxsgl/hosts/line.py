"""The connection between host 0 and another host: how they greet, what they say, and its bytes.

    other host (connects)   Hello         Proof              Introduction                Fact     Pulse      Leave
    host 0 (listens)               Hello        Proof                      Accepted          Verdict   calls    Bye

`Hello` has a protocol, whether there is a secret, and a nonce; `Proof` is that of shared_secret.py. Host 0 says nothing
before a valid Hello, and decodes nothing of a host that has not proved itself. A frame is a head, a message as
MessagePack, and the bytes of its arrays. Frames are neither encrypted nor signed. Both sides say every `PULSE_S`
seconds that they live. Knows no engine; leader.py and follower.py hold the ends.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from typing import TypeAlias, TypeVar

import msgspec

from jaxsgl.config.hosts import SILENCE_S
from jaxsgl.errors import StartupError
from jaxsgl.hosts.calls import Call, Choose, Encoding, Step
from jaxsgl.shared_secret import NONCE_BYTES, PROOF_BYTES, endpoint, is_proof, proof

PROTOCOL = 1
GREETING_S = 5.0
RETRY_S = 0.5
MAX_FRAME_BYTES = 1 << 30  # of a call: masks of 256 rows take 5 MB
SMALL_BYTES = 1 << 16  # of a frame that goes in one piece
_PURPOSE = b"jaxsgl hosts"
_MAGIC = b"JHST"
_HELLO = struct.Struct(f"<4sHB{NONCE_BYTES}s")
_HEAD = struct.Struct("<4sIQ")


Introduced = TypeVar("Introduced")


class LineLost(Exception):
    """The other side is gone, silent, or speaks another protocol; the text says which."""


class Introduction(msgspec.Struct, frozen=True, array_like=True, tag="introduction"):
    """Who a host is.

    Attributes:
      rank: its --node-rank.
      facts: what must be equal on all hosts, by name: versions and flags.
    """

    rank: int
    facts: dict[str, str]


class Accepted(msgspec.Struct, frozen=True, array_like=True, tag="accepted"):
    """Host 0 takes the host in, which is to compile in `num_threads` threads."""

    num_threads: int


class Fact(msgspec.Struct, frozen=True, array_like=True, tag="fact"):
    """What a host has found at the point `what` of its start."""

    what: str
    value: str | tuple[int, ...]


class Verdict(msgspec.Struct, frozen=True, array_like=True, tag="verdict"):
    """What holds for all hosts at that point."""

    what: str
    values: tuple[int, ...] = ()
    each: tuple[str, ...] = ()


class Pulse(msgspec.Struct, frozen=True, array_like=True, tag="pulse"):
    """A sign of life: so many calls were played, and this is the checksum of their bytes, one after the other."""

    num_calls: int = 0
    checksum: int = 0


class Leave(msgspec.Struct, frozen=True, array_like=True, tag="leave"):
    """The host was asked to stop, and would like all to."""


class Bye(msgspec.Struct, frozen=True, array_like=True, tag="bye"):
    """No call comes any more: end."""


class Failed(msgspec.Struct, frozen=True, array_like=True, tag="failed"):
    """The sender ends because of this."""

    text: str


Message: TypeAlias = Introduction | Accepted | Fact | Verdict | Pulse | Leave | Bye | Failed | Call


class Frame:
    """A message as bytes, made once for all hosts.

    Attributes:
      parts: what is sent, one after the other.
      checksum: of the message and its arrays, that of the frames before being given.
    """

    def __init__(self, encoding: Encoding, message: Message, checksum: int = 0) -> None:
        body, arrays = encoding.encode(message)
        payload_bytes = sum(map(len, arrays))
        checksum = zlib.crc32(body, checksum)
        for array in arrays:
            checksum = zlib.crc32(array, checksum)
        self.checksum = checksum
        head = _HEAD.pack(_MAGIC, len(body), payload_bytes) + body
        whole = payload_bytes <= SMALL_BYTES
        self.parts: Sequence[bytes | memoryview] = [b"".join((head, *arrays))] if whole else [head, *arrays]


class Line:
    """A connection after its greeting. One thread receives; any may send.

    Args:
      connection: a socket whose other side has proved itself.
      peer: what messages call the other side.

    Attributes:
      own_address: of this side, without a port.
      received: the number of calls that have come, and the checksum of their bytes, one after the other.
    """

    def __init__(self, connection: socket.socket, peer: str) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.settimeout(SILENCE_S)
        self.peer = peer
        self.own_address = str(connection.getsockname()[0])
        self.received = (0, 0)
        self._connection = connection
        self._sending = threading.Lock()
        self._encoding = Encoding(Message)  # of received messages, and of sent ones below the lock
        self._out = Encoding(Message)

    def send(self, message: Message) -> None:
        """Raises `LineLost`."""
        with self._sending:
            frame = Frame(self._out, message)
        self.send_frame(frame)

    def say_alive(self, pulse: Pulse) -> None:
        """Sends a sign of life, unless something else is on its way, which is one too; never raises."""
        if self._sending.acquire(timeout=0.1):
            try:
                for part in Frame(self._out, pulse).parts:
                    self._connection.sendall(part)
            except OSError:
                pass  # the thread that reads tells
            finally:
                self._sending.release()

    def send_frame(self, frame: Frame) -> None:
        """Raises `LineLost`, also if the other side takes nothing for `SILENCE_S` seconds."""
        try:
            with self._sending:
                for part in frame.parts:
                    self._connection.sendall(part)
        except TimeoutError:
            raise LineLost(f"has read nothing for {SILENCE_S:g} s") from None
        except OSError as error:
            raise LineLost(f"is gone ({error.strerror or error})") from None

    def receive(self) -> Message:
        """Waits for a message. Raises `LineLost`, also if nothing comes for `SILENCE_S` seconds."""
        try:
            magic, body_bytes, payload_bytes = _HEAD.unpack(read_exactly(self._connection, _HEAD.size))
            if magic != _MAGIC or body_bytes + payload_bytes > MAX_FRAME_BYTES:
                raise LineLost("has sent what is no frame")
            body = read_exactly(self._connection, body_bytes)
            payload = read_exactly(self._connection, payload_bytes)
            message: Message = self._encoding.decode(body, payload)
        except TimeoutError:
            raise LineLost(f"has given no sign of life for {SILENCE_S:g} s") from None
        except OSError as error:
            raise LineLost(f"is gone ({error.strerror or error})") from None
        except msgspec.DecodeError as error:
            raise LineLost(f"has sent a message of another version: {error}") from None
        if isinstance(message, Step | Choose):
            num_calls, checksum = self.received
            self.received = (num_calls + 1, zlib.crc32(payload, zlib.crc32(body, checksum)))
        return message

    def close(self) -> None:
        """Ends the connection; a thread that receives gets `LineLost`."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()


def read_exactly(connection: socket.socket, count: int) -> bytearray:
    """Raises OSError, of which TimeoutError is one, if the connection ends or is silent before."""
    data = bytearray(count)
    view = memoryview(data)
    while view:
        got = connection.recv_into(view)
        if got == 0:
            raise ConnectionError("the connection was closed")
        view = view[got:]
    return data


def connect(
    address: tuple[str, int], within_s: float, whom: str, introduced: Callable[[socket.socket], Introduced]
) -> Introduced:
    """Connects to a host that may not listen yet; returns what `introduced` makes of the connection.

    Raises:
      StartupError: `whom` is not there within so many seconds, or `introduced` raised `LineLost`.
    """
    deadline_s = time.monotonic() + within_s
    while True:
        try:
            return introduced(socket.create_connection(address, timeout=GREETING_S))
        except OSError as error:
            if time.monotonic() > deadline_s:
                text = f"no connection to {whom} within {within_s:g} s (--dist-timeout): {error.strerror or error}"
                raise StartupError(text) from None
            time.sleep(RETRY_S)
        except LineLost as lost:
            raise StartupError(f"{whom} {lost}") from None


def greet(connection: socket.socket, secret: bytes, connects: bool) -> None:
    """Proves to the other side that this one has `secret` (b"": there is none), and has it do the same.

    Raises:
      LineLost: it is no host of this protocol, or has another secret.
      OSError: it is gone or silent.
    """
    connection.settimeout(GREETING_S)
    mine = _HELLO.pack(_MAGIC, PROTOCOL, bool(secret), os.urandom(NONCE_BYTES))
    if connects:
        connection.sendall(mine)
    theirs = bytes(read_exactly(connection, _HELLO.size))
    magic, protocol, secured, _ = _HELLO.unpack(theirs)
    if magic != _MAGIC:
        raise LineLost(f"began with {magic!r}, which no host of jaxsgl does")
    if not connects:
        connection.sendall(mine)  # before it is compared: the other side learns what differs, too
    if protocol != PROTOCOL:
        raise LineLost(f"speaks protocol {protocol}, but {PROTOCOL} is spoken here: run the same version on all hosts")
    if bool(secured) != bool(secret):
        here, there = ("has", "hasn't") if secret else ("hasn't", "has")
        raise LineLost(f"{there} a --dist-secret-file, but this host {here}: give all hosts the same")
    at = endpoint(connection.getpeername() if connects else connection.getsockname())
    said = (mine + theirs if connects else theirs + mine) + at
    own, expected = (proof(secret, _PURPOSE, side, said) for side in (connects, not connects))
    if connects:
        connection.sendall(own)
    if not is_proof(bytes(read_exactly(connection, PROOF_BYTES)), expected):
        if not connects:
            connection.sendall(bytes(PROOF_BYTES))  # proves nothing, and lets the other side say what is wrong
        raise LineLost(
            "has another --dist-secret-file (give all hosts the same), or the connection passes through NAT or another "
            f"program (let hosts reach {at.decode().replace(' ', ' port ')} itself)"
        )
    if not connects:
        connection.sendall(own)
