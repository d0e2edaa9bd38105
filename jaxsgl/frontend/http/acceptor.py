"""Accepts HTTP connections: how many there may be, and what happens past that number or without a free file.

asyncio's own accepting keeps no count, and without a free file it tries and logs thousands of times a second.
`Acceptor` serves `max_connections` at once. Past them, or when the process has no file left, it lends one of its spare
files to the next connection, which is then for probes only, so that health still answers. When all spare files are
lent, the oldest of those connections ends for the next; meanwhile clients wait in the socket's backlog.

Knows no HTTP. app.py makes it from a listening socket; `Connection` says when a connection ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import socket
import ssl
from collections.abc import Callable
from dataclasses import dataclass

from jaxsgl.frontend.http.connection import PROBE_S, Connection

NUM_SPARES = 32
ACCEPTS_PER_TURN = 64  # of the event loop: a flood of connections must not hold up streams
HANDSHAKE_S = 20.0  # for TLS
SILENT_S = 0.1  # a probe sends its request at once; a connection that doesn't may end for the next
RETRY_S = 0.1
WARN_EVERY_S = 60.0
_NO_FILES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class _Client:
    """An open connection; `for_probes`: it stands on a spare file."""

    socket: socket.socket
    connection: Connection
    for_probes: bool
    since_s: float
    lost: bool = False


class Acceptor:
    """Accepts from a socket that listens, until `close`. Must be made inside the event loop.

    `new_connection` makes the protocol of a connection; `context` is for TLS, None without. Connections in their TLS
    handshake count.
    """

    def __init__(
        self,
        listening: socket.socket,
        context: ssl.SSLContext | None,
        new_connection: Callable[[], Connection],
        max_connections: int,
    ) -> None:
        self._listening = listening
        self._context = context
        self._new_connection = new_connection
        self._max_connections = max_connections
        self._loop = asyncio.get_running_loop()
        self._spares = _Spares(NUM_SPARES)
        self._num_served = 0
        self._for_probes: dict[_Client, None] = {}  # the oldest first
        self._opening: set[asyncio.Task[None]] = set()
        self._retry: asyncio.TimerHandle | None = None
        self._warned_s = -WARN_EVERY_S
        self._num_past = 0  # connections past the cap since the last warning
        listening.setblocking(False)
        self._resume()

    def close(self) -> None:
        """Accepts no more. Open connections stay."""
        self._pause(None)
        with contextlib.suppress(OSError):
            # Another process may have the socket open too: clients must not wait in its backlog for nobody.
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        self._spares.close()
        for task in self._opening:
            task.cancel()

    async def wait_closed(self) -> None:
        """Returns at once: uvicorn ends the connections."""

    def _resume(self) -> None:
        self._pause(None)
        self._loop.add_reader(self._listening, self._accept_some)

    def _pause(self, seconds: float | None) -> None:
        """Stops accepting, for so long or for good."""
        self._loop.remove_reader(self._listening)
        if self._retry is not None:
            self._retry.cancel()
        self._retry = None if seconds is None else self._loop.call_later(seconds, self._resume)

    def _accept_some(self) -> None:
        try:
            for _ in range(ACCEPTS_PER_TURN):
                served = self._num_served < self._max_connections and self._accept(for_probes=False)
                if not served and not self._accept_for_probes():
                    self._pause(RETRY_S)
                    return
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            pass  # nothing waits any more
        except OSError:  # of the network; Linux reports a connection's errors here
            self._pause(RETRY_S)

    def _accept_for_probes(self) -> bool:
        """Accepts the next connection on a spare file; False if there is none now."""
        if not self._spares.lend():
            self._warn()
            self._end_oldest()
            return False
        accepted = False
        try:
            accepted = self._accept(for_probes=True)
        finally:
            if not accepted:
                self._spares.take_back()
        self._num_past += 1
        self._warn()
        return accepted

    def _accept(self, for_probes: bool) -> bool:
        """Accepts the next connection; False without a free file. Raises `BlockingIOError` if none waits."""
        try:
            accepted, _ = self._listening.accept()
        except OSError as error:
            if error.errno not in _NO_FILES:
                raise
            return False
        client = _Client(accepted, self._new_connection(), for_probes, self._loop.time())
        # The socket is closed right after the connection has heard of its end.
        client.connection.on_lost = lambda: self._loop.call_soon(self._forget, client)
        if for_probes:
            client.connection.serve_probes_only()
            self._for_probes[client] = None
        else:
            self._num_served += 1
        task = self._loop.create_task(self._open(client))
        self._opening.add(task)
        task.add_done_callback(self._opening.discard)
        return True

    async def _open(self, client: _Client) -> None:
        patience_s = None if self._context is None else HANDSHAKE_S
        try:
            await self._loop.connect_accepted_socket(
                lambda: client.connection, client.socket, ssl=self._context, ssl_handshake_timeout=patience_s
            )
        except OSError:  # no TLS, or not in time
            self._loop.call_soon(self._forget, client)

    def _forget(self, client: _Client) -> None:
        if client.lost:
            return
        client.lost = True
        if client.for_probes:
            self._for_probes.pop(client, None)
            self._spares.take_back()
        else:
            self._num_served -= 1
        if self._retry is not None:
            self._resume()

    def _end_oldest(self) -> None:
        """Ends a connection that has had its time, so that its spare file comes back."""
        now_s = self._loop.time()
        for client in self._for_probes:
            if now_s - client.since_s > (SILENT_S if client.connection.silent else PROBE_S):
                del self._for_probes[client]
                with contextlib.suppress(OSError):  # the client was faster
                    client.socket.shutdown(socket.SHUT_RDWR)
                return

    def _warn(self) -> None:
        if self._loop.time() - self._warned_s < WARN_EVERY_S:
            return
        self._warned_s = self._loop.time()
        logger.warning(
            "no room for more HTTP connections, so that only probes are answered: %d are open, --max-connections is "
            "%d; %d came too many since the last line",
            self._num_served, self._max_connections, self._num_past,
        )  # fmt: skip
        self._num_past = 0


class _Spares:
    """Files that are open for nothing, so that closing one makes room for a connection."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._num_lent = 0
        self._files: list[int] = []
        self._refill()

    def lend(self) -> bool:
        """Makes room for one file; False if no spare is left."""
        self._refill()
        if not self._files:
            return False
        os.close(self._files.pop())
        self._num_lent += 1
        return True

    def take_back(self) -> None:
        """The lent file is closed, or was not needed."""
        self._num_lent -= 1
        self._refill()

    def close(self) -> None:
        """Closes all."""
        self._count = 0
        while self._files:
            os.close(self._files.pop())

    def _refill(self) -> None:
        with contextlib.suppress(OSError):  # another part of the process was faster; the next time, then
            while len(self._files) + self._num_lent < self._count:
                self._files.append(os.open(os.devnull, os.O_RDONLY))
