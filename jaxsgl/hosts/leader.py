"""`Leader`: host 0's end. Takes the other hosts in, has all come to the same decisions, and sends them its calls.

A thread for each host reads what it says, and one says every second that this host lives. A host that is gone, silent,
or has played other calls ends all: its devices no longer take part in any step, so nothing can go on. Implements
`Hosts`; the engine process makes it.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import socket
import threading
import time
from collections.abc import Mapping, Sequence

from jaxsgl.config.hosts import PULSE_S, HostsConfig
from jaxsgl.errors import StartupError
from jaxsgl.hosts.calls import Call, Encoding
from jaxsgl.hosts.group import BLAME_S, Report, difference, processors, wait_patiently
from jaxsgl.hosts.line import (
    RETRY_S,
    Accepted,
    Bye,
    Fact,
    Failed,
    Frame,
    Introduction,
    Leave,
    Line,
    LineLost,
    Message,
    Pulse,
    Verdict,
    greet,
)
from jaxsgl.messages.replies import HostsLoad, HostState

KEPT_CHECKSUMS = 1 << 16  # of the latest calls: those of seconds
END_S = 3.0  # for other hosts to end

logger = logging.getLogger(__name__)


class Leader:
    """Host 0; see the module.

    Args:
      config: where other hosts connect.
      facts: what must be equal on all hosts, by name.
      report: the front end of this host.

    Raises:
      StartupError: the address can't be bound, hosts don't come, or one differs.
    """

    rank = 0

    def __init__(self, config: HostsConfig, facts: Mapping[str, str], report: Report) -> None:
        self.size = config.num_hosts
        self.num_threads = processors()
        self.address = config.address[0]
        self._config, self._facts, self._report = config, dict(facts), report
        self._secret = config.read_secret()
        self._others: dict[int, _Other] = {}
        self._leaving = ""
        self._is_serving = False
        self._ending = threading.Event()
        self._failing = threading.Lock()
        self._frames = Encoding(Message)
        self._num_calls = self._checksum = 0
        self._checksums = [0] * KEPT_CHECKSUMS  # of the stream up to call n at n % KEPT_CHECKSUMS
        threading.Thread(target=self._say_alive, name="hosts", daemon=True).start()
        with _listener(config) as listening:
            self._take_in(listening)

    def same(self, what: str, value: str, way_out: str) -> None:
        """See `Hosts`."""
        for other in self._others.values():
            theirs = other.fact(what)
            if theirs != value:
                text = f"{what} are {theirs} on {other.name}, but {value} on host 0: {way_out}"
                self._stop_all(text)
                raise StartupError(text)
        self._tell_all(Verdict(what))

    def least(self, what: str, values: Sequence[int]) -> tuple[int, ...]:
        """See `Hosts`."""
        all_values = [tuple(values)]
        for other in self._others.values():
            theirs = other.fact(what)
            assert isinstance(theirs, tuple)
            all_values.append(theirs)
        least = tuple(map(min, zip(*all_values, strict=True)))
        self._tell_all(Verdict(what, least))
        return least

    def all_of(self, what: str, value: str) -> tuple[str, ...]:
        """See `Hosts`."""
        found = (value, *(str(other.fact(what)) for other in self._others.values()))
        self._tell_all(Verdict(what, each=found))
        return found

    def call(self, call: Call) -> None:
        """Sends a call to all other hosts. Of a host that is gone its own thread tells."""
        self._is_serving = True
        frame = Frame(self._frames, call, self._checksum)
        self._checksum = frame.checksum
        self._checksums[(self._num_calls + 1) % KEPT_CHECKSUMS] = frame.checksum
        self._num_calls += 1
        for other in self._others.values():
            try:
                other.line.send_frame(frame)
            except LineLost as lost:
                self._lost(other, str(lost))

    def fail(self, text: str) -> None:
        """See `Hosts`."""
        if self._is_serving:
            time.sleep(BLAME_S)  # a step fails at the same time as the host that took part in it
        self._stop_all(text)

    def end(self) -> None:
        """Has all hosts end, and waits a moment for them."""
        self._ending.set()
        logger.info("%d calls sent, checksum %08x", self._num_calls, self._checksum)
        self._tell_all(Bye())
        deadline_s = time.monotonic() + END_S
        for other in self._others.values():
            other.reading.join(max(deadline_s - time.monotonic(), 0))

    def _take_in(self, listening: socket.socket) -> None:
        deadline_s = time.monotonic() + self._config.dist_timeout
        while len(self._others) < self.size - 1:
            missing = ", ".join(str(rank) for rank in range(1, self.size) if rank not in self._others)
            listening.settimeout(max(deadline_s - time.monotonic(), 0.01))
            try:
                connection, address = listening.accept()
            except TimeoutError:
                text = f"no sign of host {missing} within {self._config.dist_timeout:g} s (--dist-timeout)"
                self._stop_all(text)
                raise StartupError(text) from None
            try:
                other = self._greeted(connection, address[0])
            except (LineLost, OSError) as error:
                connection.close()
                logger.warning("a connection from %s is refused: it %s", address[0], error)
                continue
            logger.info("%s is there, %d of %d", other.name, 2 + len(self._others), self.size)
            self._others[other.rank] = other
            other.start()
        self._others = dict(sorted(self._others.items()))

    def _greeted(self, connection: socket.socket, address: str) -> _Other:
        """Takes a host in. Raises `LineLost` for a stranger, `StartupError` for a host that differs."""
        greet(connection, self._secret, connects=False)
        line = Line(connection, address)
        said = line.receive()
        if not isinstance(said, Introduction):
            raise LineLost(f"began with {type(said).__name__}")
        name = f"host {said.rank} ({address})"
        text = difference(self._facts, said.facts, "host 0", name)
        if not 1 <= said.rank < self.size or said.rank in self._others:
            text = f"{name} has a --node-rank that is taken or not below --nnodes {self.size}: give each host its own"
        if text is not None:
            with contextlib.suppress(LineLost):
                line.send(Failed(text))
            line.close()
            self._stop_all(text)
            raise StartupError(text)
        line.send(Accepted(self.num_threads))
        return _Other(said.rank, name, line, self)

    def _tell_all(self, message: Message) -> None:
        for other in list(self._others.values()):
            with contextlib.suppress(LineLost):  # its own thread tells
                other.line.send(message)

    def _say_alive(self) -> None:
        while True:
            for other in list(self._others.values()):
                other.line.say_alive(Pulse())
            now_s = time.monotonic()
            others = (
                HostState(each.rank, now_s - each.heard_s, max(self._num_calls - each.num_calls, 0))
                for each in list(self._others.values())
            )
            self._report.hosts(HostsLoad((HostState(0), *others), self._leaving))
            time.sleep(PULSE_S)

    def _lost(self, other: _Other, reason: str) -> None:
        """Ends everything because of a host; the first reason counts."""
        if self._ending.is_set():
            return
        with self._failing:
            if self._ending.is_set():
                return
            text = f"{other.name} {reason}"
            logger.error("%s: no step can run without it", text)
            self._stop_all(text)
            self._report.fail(text)

    def _stop_all(self, text: str) -> None:
        if not self._ending.is_set():
            self._ending.set()
            self._tell_all(Failed(text))

    def _heard(self, other: _Other, message: Message) -> None:
        match message:
            case Pulse(num_calls, checksum):
                sent = self._checksums[num_calls % KEPT_CHECKSUMS]
                if sent != checksum and self._num_calls - num_calls < KEPT_CHECKSUMS // 2:
                    self._lost(other, f"has played {num_calls} calls of checksum {checksum}, but {sent} was sent")
            case Leave():
                self._leaving = other.name
            case Failed(text):
                self._lost(other, f"failed: {text}")
            case Fact():
                other.facts.put(message)
            case _:
                self._lost(other, f"has sent {type(message).__name__}, which host 0 does not expect")


class _Other:
    """A host, as host 0 sees it.

    Attributes:
      heard_s: when it gave its last sign of life.
      num_calls: that it had played by then.
      facts: what it has found, for the main thread.
    """

    def __init__(self, rank: int, name: str, line: Line, leader: Leader) -> None:
        self.rank, self.name, self.line = rank, name, line
        self.heard_s = time.monotonic()
        self.num_calls = 0
        self.facts: queue.SimpleQueue[Fact] = queue.SimpleQueue()
        self._leader = leader
        self.reading = threading.Thread(target=self._read, name=f"host-{rank}", daemon=True)

    def start(self) -> None:
        """Begins to read what it says."""
        self.reading.start()

    def fact(self, what: str) -> str | tuple[int, ...]:
        """Waits for what it has found, as long as it lives. Raises `StartupError`."""
        fact = wait_patiently(self.facts, f"{self.name} to come to {what}")
        if fact.what != what:
            raise StartupError(f"{self.name} is at {fact.what}, but host 0 at {what}: run the same version on all")
        return fact.value

    def _read(self) -> None:
        try:
            while True:
                message = self.line.receive()
                self.heard_s = time.monotonic()
                if isinstance(message, Pulse):
                    self.num_calls = message.num_calls
                self._leader._heard(self, message)
        except LineLost as lost:
            self._leader._lost(self, str(lost))


def _listener(config: HostsConfig) -> socket.socket:
    """Listens at --dist-init-addr, which may get its address a while after the start. Raises `StartupError`."""
    host, port = config.address
    deadline_s = time.monotonic() + config.dist_timeout
    while True:
        try:
            family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            break
        except socket.gaierror as error:
            if time.monotonic() > deadline_s:
                raise StartupError(f"--dist-init-addr {config.dist_init_addr}: {error.strerror}") from None
            time.sleep(RETRY_S)
    listening = socket.socket(family, kind, protocol)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen()
    except OSError as error:
        listening.close()
        raise StartupError(
            f"host 0 can't listen at --dist-init-addr {config.dist_init_addr}: {error.strerror}; name an address of "
            "this host and a free port"
        ) from None
    logger.info("waiting for %d more hosts at %s:%d", config.num_hosts - 1, host, port)
    return listening
