"""What pipeline stages pass on between hosts: each host connects to the next one, and sends it the residual stream.

    calls      host 0 -> all others (line.py)
    streams    host 1 -> host 2 -> .. -> the last host -> host 0, which chooses tokens

Arrays go through host memory and a socket, so hosts need nothing in common but a network, and none of JAX's ways
between processes, which hang if a process ends. The order of steps says what an array is: both sides take the same
calls, so a frame has its number and its size alone. It is read once the step that takes it is on its way, so that a
host that is ahead waits. Frames are neither encrypted nor signed. Who lives is seen on the lines of leader.py and
follower.py; here a host may be silent for as long as no step runs. Knows no engine and no JAX.
"""

from __future__ import annotations

import contextlib
import logging
import math
import socket
import struct
import time
from typing import Any

import numpy as np
import numpy.typing as npt

from jaxsgl.config.hosts import HostsConfig
from jaxsgl.errors import StartupError
from jaxsgl.hosts.group import Hosts, Neighbours
from jaxsgl.hosts.line import LineLost, connect, greet, read_exactly

_WHO = struct.Struct("<4sI")  # and the rank of the host that connects
_HEAD = struct.Struct("<4sQQ")  # and the number of a frame and its bytes
_MAGIC = b"JPAS"

logger = logging.getLogger(__name__)


class Passage:
    """Arrays on their way from one host to the next one: a `Before` on one side, an `After` on the other.

    Args:
      connection: a socket whose other side has proved itself.
      peer: what messages call the other side.
    """

    def __init__(self, connection: socket.socket, peer: str) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.settimeout(None)
        self._connection, self._peer = connection, peer
        self._count = 0

    def send(self, array: npt.NDArray[Any]) -> None:
        """See `After`. One thread sends."""
        numbers = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        try:
            self._connection.sendall(_HEAD.pack(_MAGIC, self._count, numbers.nbytes))
            self._connection.sendall(numbers.data)
        except OSError as error:
            raise self._gone(error) from None
        self._count += 1

    def receive(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """See `Before`. One thread receives."""
        count, num_bytes = self._count, math.prod(shape) * np.dtype(dtype).itemsize
        try:
            found = _HEAD.unpack(read_exactly(self._connection, _HEAD.size))
            if found != (_MAGIC, count, num_bytes):
                raise LineLost(
                    f"{self._peer} passes on {found[2]} bytes as array {found[1]}, but array {count} has {num_bytes}: "
                    "run the same version on all hosts"
                )
            numbers = read_exactly(self._connection, num_bytes)
        except OSError as error:
            raise self._gone(error) from None
        self._count += 1
        return np.frombuffer(numbers, dtype).reshape(shape)

    def close(self) -> None:
        """Hangs up; a thread that sends or receives gets `LineLost`."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()

    def _gone(self, error: OSError) -> LineLost:
        return LineLost(f"{self._peer} is gone ({error.strerror or error})")


def meet_neighbours(config: HostsConfig, hosts: Hosts) -> Neighbours:
    """Connects this host to the next one, and takes in the one before. Called by all hosts at the same point.

    Raises:
      StartupError: the port can't be bound, or a host doesn't come.
    """
    if hosts.size == 1:
        return Neighbours()
    has_first, has_last = hosts.rank == 1, hosts.rank == 0
    with contextlib.ExitStack() as closing:
        listening = None if has_first else closing.enter_context(_listening(config, hosts))
        addresses = hosts.all_of("the addresses", hosts.address)  # after which all listen
        before = () if listening is None else (_taken_in(listening, config, (hosts.rank - 1) % hosts.size),)
    after = () if has_last else (_connected(config, hosts.rank, (hosts.rank + 1) % hosts.size, addresses),)
    return Neighbours(before, after)


def _port(config: HostsConfig, rank: int) -> int:
    """Where a host waits for the one before: next to --dist-init-addr; hosts of one machine have ports of their own."""
    return config.address[1] + (rank or 1)  # host 1 waits for none


def _listening(config: HostsConfig, hosts: Hosts) -> socket.socket:
    address = (hosts.address, _port(config, hosts.rank))
    try:
        family = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server(address, family=family)
    except OSError as error:
        raise StartupError(
            f"host {hosts.rank} can't wait for other hosts at {address[0]}:{address[1]}: {error.strerror}; ports after "
            f"that of --dist-init-addr {config.dist_init_addr} must be free"
        ) from None


def _taken_in(listening: socket.socket, config: HostsConfig, rank: int) -> Passage:
    """Waits until host `rank` connects; refuses others."""
    deadline_s = time.monotonic() + config.dist_timeout
    while True:
        listening.settimeout(max(deadline_s - time.monotonic(), 0.01))
        try:
            connection, address = listening.accept()
        except TimeoutError:
            raise StartupError(
                f"host {rank} has not connected to pass on what its stages compute within {config.dist_timeout:g} s "
                "(--dist-timeout)"
            ) from None
        try:
            greet(connection, config.read_secret(), connects=False)
            who = _WHO.unpack(read_exactly(connection, _WHO.size))
            if who != (_MAGIC, rank):
                raise LineLost(f"is not host {rank}")
            return Passage(connection, f"host {rank} ({address[0]})")
        except (LineLost, OSError) as error:
            connection.close()
            logger.warning("a connection from %s is refused: it %s", address[0], error)


def _connected(config: HostsConfig, own_rank: int, rank: int, addresses: tuple[str, ...]) -> Passage:
    """Connects to host `rank`, which listens, but may be busy. Raises `StartupError`."""
    address = (addresses[rank], _port(config, rank))
    whom = f"host {rank} at {address[0]}:{address[1]}, to which stages pass on what they compute,"
    return connect(address, config.dist_timeout, whom, lambda found: _introduced(found, config, own_rank, rank))


def _introduced(connection: socket.socket, config: HostsConfig, own_rank: int, rank: int) -> Passage:
    """The way to host `rank`. Closes the connection if it fails."""
    with contextlib.ExitStack() as closing:
        closing.enter_context(connection)
        greet(connection, config.read_secret(), connects=True)
        connection.sendall(_WHO.pack(_MAGIC, own_rank))
        closing.pop_all()
        return Passage(connection, f"host {rank} ({connection.getpeername()[0]})")
