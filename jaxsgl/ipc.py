"""The line between the two processes: ZeroMQ over Unix sockets, those of messages/orders.py as MessagePack.

Owns the sockets and the folder they are in; never knows what a message means. The front end (`EngineLine`, asyncio) and
the engine process (`EngineMailbox`, blocking) hold one end each. If several front-end processes share the engine, each
has a line of its own, and `EngineLines` is the end of all of them (shared_mailbox.py says what goes where). The number
of waiting messages has no limit here: the engine must never block on a slow front end, and a request brings at most
max_tokens replies.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import itertools
import logging
import math
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TypeVar

import msgspec
import zmq

from jaxsgl.config.engine import EngineConfig
from jaxsgl.errors import EngineUnavailable, StartupError
from jaxsgl.logs import LogStyle
from jaxsgl.mask_mark import MaskMark, NoMark, open_mark
from jaxsgl.messages.orders import FromEngine, News, ToEngine, ToMailbox
from jaxsgl.messages.replies import EngineFailed, EngineInfo, EngineReady, HostsLoad
from jaxsgl.shared_mailbox import SharedMailbox

PREFIX, LOCK, MARK = "jaxsgl-", "lock", "mask_mark"
MESSAGES_A_TURN = 64  # of the event loop; then those who wait for their replies get their turn
MAX_SOCKET_PATH = 100  # Linux allows 107 bytes, macOS 103
MAX_POLL_MS = 2**31 - 1  # 24 days
FINAL_MESSAGE_MS = 1000  # a closing engine waits so long for its final message to leave

MessageT = TypeVar("MessageT")

logger = logging.getLogger(__name__)

_encoder = msgspec.msgpack.Encoder()


class Endpoints(msgspec.Struct, frozen=True):
    """The private folder (mode 0700) of the sockets; the process that ends last removes it.

    The process that makes it holds a lock on it (`hold`) as long as it lives. If a server is killed with all its
    processes, the folder stays without a holder, and the next server that makes one removes it.

    Attributes:
      folder: its path.
      line: None: the only front-end process; else the number of this one, whose socket has it in its name.
    """

    folder: str
    line: int | None = None

    @classmethod
    def create(cls, line: int | None = None) -> Endpoints:
        """Makes the folder in the system's temporary folder, or in /tmp if the sockets' paths would get too long.

        Raises `StartupError` if it can't be made.
        """
        try:
            folder = tempfile.mkdtemp(prefix=PREFIX)
            if len(folder) > MAX_SOCKET_PATH - len("/from_engine.12345"):
                shutil.rmtree(folder)
                folder = tempfile.mkdtemp(prefix=PREFIX, dir="/tmp")
            _remove_left({Path(tempfile.gettempdir()), Path(folder).parent})
        except OSError as error:
            raise StartupError(f"no folder for sockets: {error}; set TMPDIR to a folder that can be written") from None
        return cls(folder, line)

    @property
    def to_engine(self) -> str:
        """Address of the socket on which the engine receives."""
        return f"ipc://{self.folder}/to_engine"

    @property
    def from_engine(self) -> str:
        """Address of the socket on which the engine sends, to the process at `line`."""
        return f"ipc://{self.folder}/from_engine" + ("" if self.line is None else f".{self.line}")

    def mask_mark(self) -> MaskMark | NoMark:
        """Opens the memory that says which request the engine makes a mask for."""
        return open_mark(Path(self.folder, MARK))

    def at(self, line: int) -> Endpoints:
        """Returns those of the front-end process number `line`, of several."""
        return Endpoints(self.folder, line)

    def hold(self) -> int:
        """Locks the folder for as long as the returned file descriptor is open; child processes don't inherit it."""
        new = Path(self.folder, f"{LOCK}.new")
        lock = os.open(new, os.O_WRONLY | os.O_CREAT, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX)
        new.rename(new.with_name(LOCK))  # when it is locked: another server would take it for that of a dead one
        return lock

    def remove(self) -> None:
        """Removes the folder and the sockets in it."""
        shutil.rmtree(self.folder, ignore_errors=True)


def _remove_left(parents: Iterable[Path]) -> None:
    """Removes folders of this user in `parents` that had a holder once and have none now."""
    for folder in itertools.chain.from_iterable(parent.glob(f"{PREFIX}*") for parent in parents):
        with contextlib.suppress(OSError):  # another server removes it, or it is another user's
            if folder.is_symlink() or folder.stat().st_uid != os.getuid():
                continue
            with (folder / LOCK).open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)


class EngineLaunch(msgspec.Struct, frozen=True):
    """What the engine process reads from the first line of its standard input, as JSON.

    If `endpoints` name a line, several front-end processes will share the engine. Log lines bear `name`.
    """

    config: EngineConfig
    endpoints: Endpoints
    log_style: LogStyle
    name: str = "engine"


@contextlib.contextmanager
def open_mailbox(endpoints: Endpoints) -> Iterator[EngineMailbox | SharedMailbox]:
    """Yields the engine process's end, for one front-end process or for several; closes it after the final message."""
    if endpoints.line is None:
        with contextlib.closing(EngineMailbox(endpoints)) as mailbox:
            yield mailbox
    else:
        with contextlib.closing(EngineLines(endpoints)) as lines:
            yield SharedMailbox(lines)


class EngineMailbox:
    """The engine process's end, for the scheduler's loop. Used by one thread."""

    def __init__(self, endpoints: Endpoints) -> None:
        self._context = zmq.Context()
        self._in = _socket(self._context, zmq.PULL)
        self._out = _socket(self._context, zmq.PUSH)
        self._in.connect(endpoints.to_engine)
        self._out.connect(endpoints.from_engine)
        self._decoder = msgspec.msgpack.Decoder(ToEngine)
        self._poller = _poller(self._in)

    def wake_at(self, fd: int) -> None:
        """Lets `receive` return, perhaps without a message, when the file descriptor `fd` is readable."""
        self._poller.register(fd, zmq.POLLIN)

    def receive(self, wait_s: float) -> list[ToEngine]:
        """Returns all messages that wait, in order; waits up to `wait_s` seconds for one. Drops what it can't read."""
        _wait(self._poller, wait_s)
        return _all_waiting(self._in, self._decoder)

    def send(self, news: News) -> None:
        """Sends the news of a step, or the answer to a command."""
        self._out.send(_encoder.encode(news))

    def announce(self, info: EngineInfo) -> None:
        """Tells the front end that the engine can take requests."""
        self._out.send(_encoder.encode(EngineReady(info)))

    def fail(self, message: str) -> None:
        """Tells the front end why this process is about to end."""
        self._out.send(_encoder.encode(EngineFailed(message)))

    def close(self) -> None:
        """Closes the sockets, after giving the final message a moment to leave."""
        self._in.close(linger=0)
        self._out.close(linger=FINAL_MESSAGE_MS)
        self._context.term()


class HostReport:
    """A `Report` (hosts/group.py): tells the front end of other hosts, from any thread, since the loop may hang.

    Args:
      endpoints: of the engine process, which has one front end.
    """

    def __init__(self, endpoints: Endpoints) -> None:
        self._context = zmq.Context()
        self._out = _socket(self._context, zmq.PUSH)
        self._out.connect(endpoints.from_engine)
        self._sending = threading.Lock()

    def hosts(self, load: HostsLoad) -> None:
        """See `Report`."""
        with self._sending:
            self._out.send(_encoder.encode(load))

    def fail(self, text: str) -> None:
        """See `Report`. Ends the process, as no other thread can leave a step that waits for a host that is gone."""
        with self._sending:
            self._out.send(_encoder.encode(EngineFailed(text)))
            self._out.close(linger=FINAL_MESSAGE_MS)
            self._context.term()
            logging.shutdown()
            os._exit(1)


class EngineLines:
    """The engine process's end of the lines to several front-end processes: a `Transport`. Used by one thread."""

    def __init__(self, endpoints: Endpoints) -> None:
        self._endpoints = endpoints
        self._context = zmq.Context()
        self._in = _socket(self._context, zmq.PULL)  # takes turns between the lines
        self._in.bind(endpoints.to_engine)
        self._out: dict[int, zmq.Socket[bytes]] = {}
        self._decoder = msgspec.msgpack.Decoder(ToMailbox)
        self._poller = _poller(self._in)

    def wake_at(self, fd: int) -> None:
        """See `EngineMailbox`."""
        self._poller.register(fd, zmq.POLLIN)

    def receive(self, wait_s: float) -> list[ToMailbox]:
        """See `Transport`."""
        _wait(self._poller, wait_s)
        return _all_waiting(self._in, self._decoder)

    def connect(self, line: int) -> None:
        """See `Transport`. The process may bind its socket later."""
        self._out[line] = _socket(self._context, zmq.PUSH)
        self._out[line].connect(self._endpoints.at(line).from_engine)

    def disconnect(self, line: int) -> None:
        """See `Transport`."""
        self._out.pop(line).close(linger=0)

    def send(self, line: int, message: FromEngine) -> None:
        """See `Transport`."""
        self._out[line].send(_encoder.encode(message))

    def close(self) -> None:
        """Closes the sockets, after giving the final messages a moment to leave."""
        self._in.close(linger=0)
        for socket in self._out.values():
            socket.close(linger=FINAL_MESSAGE_MS)
        self._context.term()


class EngineLine:
    """A front-end process's end, inside an asyncio loop. Received messages go to a callback, in order."""

    def __init__(self, endpoints: Endpoints) -> None:
        self._context = zmq.Context()
        self._in = _socket(self._context, zmq.PULL)
        self._out = _socket(self._context, zmq.PUSH)
        self._in.bind(endpoints.from_engine)
        if endpoints.line is None:
            self._out.bind(endpoints.to_engine)
        else:
            self._out.connect(endpoints.to_engine)  # the engine's, for all lines
        self._decoder = msgspec.msgpack.Decoder(FromEngine)
        self._receiver: Callable[[FromEngine], None] | None = None

    def listen(self, receiver: Callable[[FromEngine], None]) -> None:
        """Calls `receiver` with every message from now on, from the running loop."""
        self._receiver = receiver
        asyncio.get_running_loop().add_reader(self._in.fileno(), self.drain)
        self.drain()

    def drain(self) -> None:
        """Hands over all messages that have arrived, in this turn of the event loop and in those that follow.

        ZeroMQ's file descriptor is edge-triggered, so every wake-up must read until no message is left.
        """
        for _ in range(MESSAGES_A_TURN):
            if self._receiver is None:
                return
            try:
                message = self._in.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._receiver(self._decoder.decode(message))
        asyncio.get_running_loop().call_soon(self.drain)

    def send(self, message: ToMailbox) -> None:
        """Sends without waiting. Raises `EngineUnavailable` if no engine is connected."""
        try:
            self._out.send(_encoder.encode(message), zmq.NOBLOCK)
        except zmq.Again:
            raise EngineUnavailable("the engine process is not connected: try again later") from None

    def close(self) -> None:
        """Stops listening, and drops messages that were not sent."""
        if self._receiver is not None:
            self._receiver = None
            with contextlib.suppress(RuntimeError):  # the loop may be closed already
                asyncio.get_running_loop().remove_reader(self._in.fileno())
        self._in.close(linger=0)
        self._out.close(linger=0)
        self._context.term()


def _all_waiting(socket: zmq.Socket[bytes], decoder: msgspec.msgpack.Decoder[MessageT]) -> list[MessageT]:
    """Returns all messages that wait, in order.

    One that can't be read, by a fault of the front end, is dropped with a line in the log: it must not end all others.
    """
    messages: list[MessageT] = []
    while True:
        try:
            messages.append(decoder.decode(socket.recv(zmq.NOBLOCK)))
        except zmq.Again:
            return messages
        except msgspec.MsgspecError:
            logger.exception("a message of the front end can't be read, and is dropped")


def _poller(socket: zmq.Socket[bytes]) -> zmq.Poller:
    poller = zmq.Poller()
    poller.register(socket, zmq.POLLIN)
    return poller


def _wait(poller: zmq.Poller, wait_s: float) -> None:
    """Waits until there is something to read, up to `wait_s` seconds."""
    if wait_s:
        poller.poll(math.ceil(min(1000 * wait_s, MAX_POLL_MS)))


def _socket(context: zmq.Context[zmq.Socket[bytes]], kind: int) -> zmq.Socket[bytes]:
    socket = context.socket(kind)
    socket.set_hwm(0)
    return socket
