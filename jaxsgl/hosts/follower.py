"""`Follower`: the end of any other host. Connects to host 0, comes to the same decisions, and plays its calls.

A thread reads what host 0 says, one says every second that this host lives and what it has played, and one waits for
the steps that were launched, so that errors of the device are noticed. Implements `Hosts`; the engine process makes it.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence

from jaxsgl.batch.engine_api import StepEngine, StepHandle
from jaxsgl.config.hosts import PULSE_S, HostsConfig
from jaxsgl.errors import StartupError
from jaxsgl.hosts.calls import Call, Choose, Step
from jaxsgl.hosts.group import BLAME_S, Report, wait_patiently
from jaxsgl.hosts.line import (
    Accepted,
    Bye,
    Fact,
    Failed,
    Introduction,
    Leave,
    Line,
    LineLost,
    Message,
    Pulse,
    Verdict,
    connect,
    greet,
)
from jaxsgl.hosts.playing import play
from jaxsgl.messages.replies import HostsLoad, HostState

LEADER = "host 0"

logger = logging.getLogger(__name__)


class Follower:
    """A host that follows; see the module.

    Args:
      config: where host 0 is.
      facts: what must be equal on all hosts, by name.
      report: the front end of this host.

    Raises:
      StartupError: host 0 isn't there, or refuses this host.
    """

    def __init__(self, config: HostsConfig, facts: Mapping[str, str], report: Report) -> None:
        self.rank, self.size = config.rank, config.num_hosts
        self._config, self._report = config, report
        self._heard_s = time.monotonic()
        self._ending = threading.Event()
        self._decided: queue.SimpleQueue[Verdict | StartupError] = queue.SimpleQueue()
        self._calls: queue.SimpleQueue[tuple[Call, Pulse] | None] = queue.SimpleQueue()
        self._played = Pulse()
        self._is_serving = False
        self._line, self.num_threads = self._join(facts)
        self.address = self._line.own_address
        for target, name in ((self._read, "host-0"), (self._say_alive, "hosts")):
            threading.Thread(target=target, name=name, daemon=True).start()

    def same(self, what: str, value: str, way_out: str) -> None:
        """See `Hosts`; host 0 says which host differs."""
        self._ask(Fact(what, value))

    def least(self, what: str, values: Sequence[int]) -> tuple[int, ...]:
        """See `Hosts`."""
        return self._ask(Fact(what, tuple(values))).values

    def all_of(self, what: str, value: str) -> tuple[str, ...]:
        """See `Hosts`."""
        return self._ask(Fact(what, value)).each

    def play(self, engine: StepEngine) -> None:
        """Plays the calls of host 0 until that says that no more come.

        Raises what `engine` raises; an error of the device goes to the report.
        """
        self._is_serving = True
        handles: queue.SimpleQueue[StepHandle] = queue.SimpleQueue()
        threading.Thread(target=self._wait_for_steps, args=(handles,), name="steps", daemon=True).start()
        play(self._next_calls(), engine, handles.put)

    def leave(self) -> None:
        """Asks host 0 that all hosts stop."""
        self._say(Leave())

    def fail(self, text: str) -> None:
        """Tells host 0 that this one ends because of `text`, unless another host's end turns out to be the cause."""
        if self._is_serving:
            time.sleep(BLAME_S)
        if not self._ending.is_set():
            self._ending.set()
            self._say(Failed(text))

    def end(self) -> None:
        """Hangs up."""
        logger.info("%d calls played, checksum %08x", self._played.num_calls, self._played.checksum)
        self._ending.set()
        self._line.close()

    def _join(self, facts: Mapping[str, str]) -> tuple[Line, int]:
        host, port = self._config.address
        logger.info("connecting to host 0 at %s:%d", host, port)
        whom = f"{LEADER} at {self._config.dist_init_addr}"
        return connect((host, port), self._config.dist_timeout, whom, lambda found: self._introduced(found, facts))

    def _introduced(self, connection: socket.socket, facts: Mapping[str, str]) -> tuple[Line, int]:
        """The line to host 0, and the number of threads that it says. Closes the connection if it fails."""
        with contextlib.ExitStack() as closing:
            closing.enter_context(connection)
            greet(connection, self._config.read_secret(), connects=True)
            line = Line(connection, LEADER)
            line.send(Introduction(self.rank, dict(facts)))
            answer = line.receive()
            if isinstance(answer, Failed):
                raise StartupError(answer.text)
            assert isinstance(answer, Accepted), f"{LEADER} answered with {type(answer).__name__}"
            closing.pop_all()
            return line, answer.num_threads

    def _ask(self, fact: Fact) -> Verdict:
        self._say(fact)
        verdict = wait_patiently(self._decided, f"all hosts to come to {fact.what}")
        if isinstance(verdict, StartupError):
            raise verdict
        assert verdict.what == fact.what, f"{LEADER} is at {verdict.what}, but this host at {fact.what}"
        return verdict

    def _next_calls(self) -> Iterator[Call]:
        while (item := self._calls.get()) is not None:
            call, played = item
            yield call
            self._played = played

    def _read(self) -> None:
        try:
            while True:
                message = self._line.receive()
                self._heard_s = time.monotonic()
                if self._hear(message):
                    return
        except LineLost as lost:
            self._lost(f"{LEADER} {lost}")

    def _hear(self, message: Message) -> bool:
        """Takes a message; True if it is the last one."""
        match message:
            case Step() | Choose():
                self._calls.put((message, Pulse(*self._line.received)))
            case Verdict():
                self._decided.put(message)
            case Pulse():
                pass
            case Bye():
                self._ending.set()
                self._calls.put(None)
                return True
            case Failed(text):
                self._lost(f"{LEADER} failed: {text}")
            case _:
                self._lost(f"{LEADER} has sent {type(message).__name__}, which no other host expects")
        return False

    def _lost(self, text: str) -> None:
        if not self._ending.is_set():
            self._ending.set()
            logger.error("%s: ending", text)
            self._decided.put(StartupError(text))  # the main thread may wait there
            self._report.fail(text)

    def _say(self, message: Message) -> None:
        with contextlib.suppress(LineLost):  # the thread that reads tells
            self._line.send(message)

    def _say_alive(self) -> None:
        while not self._ending.is_set():
            self._line.say_alive(self._played)
            silent_s = time.monotonic() - self._heard_s
            self._report.hosts(HostsLoad((HostState(0, silent_s), HostState(self.rank))))
            time.sleep(PULSE_S)

    def _wait_for_steps(self, handles: queue.SimpleQueue[StepHandle]) -> None:
        try:
            while True:
                handles.get().tokens()
        except Exception as error:
            logger.exception("a step failed")
            text = f"a step failed: {type(error).__name__}: {' '.join(str(error).split())[:300]}"
            self.fail(text)
            self._report.fail(text)
