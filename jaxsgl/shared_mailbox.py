"""The engine's mailbox when several front-end processes share the engine: which request is whose, and what goes where.

Owns, in the engine process, the table of lines (one per front-end process) and of the requests that run on each. Each
front-end process counts its requests and commands in a range of numbers of its own (`first_number` of orders.py), so
a number names its line, and a reply goes straight to the process whose request it is. Never knows what a request
asks for, nor sockets: ipc.py's `EngineLines` carries the messages. The scheduler's loop calls it as it calls
`EngineMailbox`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from jaxsgl.messages.orders import (
    PARENT_LINE,
    Abort,
    AbortMatching,
    Answer,
    CloseLine,
    FromEngine,
    News,
    OpenLine,
    Shutdown,
    ToEngine,
    ToMailbox,
    Withdraw,
    line_of,
)
from jaxsgl.messages.replies import (
    CacheEvents,
    EngineFailed,
    EngineInfo,
    EngineReady,
    Load,
    Refusal,
    RefusalKind,
    Replies,
    Reply,
)
from jaxsgl.requests.request import Request

LOAD_S = 0.1  # a line without replies hears of the load so often while the engine works


class Transport(Protocol):
    """Carries the messages; knows no meaning. A line that is not connected takes no messages."""

    def receive(self, wait_s: float) -> Sequence[ToMailbox]:
        """Returns what has come over all lines, each line's in order; waits up to `wait_s` seconds for at least one."""
        ...

    def wake_at(self, fd: int) -> None:
        """Lets `receive` return when the file descriptor `fd` is readable, too."""
        ...

    def connect(self, line: int) -> None:
        """Connects a line."""
        ...

    def disconnect(self, line: int) -> None:
        """Gives up a line, and what was not sent on it."""
        ...

    def send(self, line: int, message: FromEngine) -> None:
        """Sends without waiting."""
        ...


@dataclass(slots=True)
class _Line:
    """What the process at a line has been told. `watches`: it wants the events of the prefix cache."""

    load: Load
    load_s: float
    watches: bool = False


@dataclass(slots=True)
class _Running:
    """A request in the engine, with the id that its client gave it and the number of its samples that run."""

    line: int
    client_id: str
    samples: int


class SharedMailbox:
    """A `Mailbox` of several lines.

    A line that has replies in a turn gets them with the load, in one message. The others get the load every `LOAD_S`
    seconds, before any answer, and before the engine waits. Line numbers are never used again, so nothing that was
    meant for a process that died reaches the one that took its place. What comes over a line that the parent has not
    opened is dropped: a process sends nothing until it has heard `EngineReady`.
    """

    def __init__(self, transport: Transport, clock: Callable[[], float] = time.monotonic) -> None:
        self._transport = transport
        self._clock = clock
        self._lines: dict[int, _Line] = {}
        self._running: dict[str, _Running] = {}  # by the id that the request has in the engine
        self._by_client_id: dict[str, str] = {}
        self._unanswered: set[int] = set()  # numbers of commands
        self._load = Load()
        self._ready: EngineReady | None = None
        self._open(PARENT_LINE)

    @property
    def num_running(self) -> int:
        """Requests that have not ended, of all lines."""
        return len(self._running)

    @property
    def num_unanswered(self) -> int:
        """Commands that have not been answered, of all lines."""
        return len(self._unanswered)

    def wake_at(self, fd: int) -> None:
        """Lets `receive` return, perhaps without a message, when the file descriptor `fd` is readable."""
        self._transport.wake_at(fd)

    def receive(self, wait_s: float) -> list[ToEngine]:
        """Returns the messages for the scheduler, in order; waits up to `wait_s` seconds for one of any kind."""
        if wait_s:
            self._tell_load()
        return [out for message in self._transport.receive(wait_s) for out in self._take(message)]

    def send(self, news: News) -> None:
        """Sends each line its part of `news`."""
        if isinstance(news, Replies):
            self._route(news)
        elif isinstance(news, Answer):
            self._tell_load()  # no process may be asked about a state that is older than an answer
            self._unanswered.discard(news.number)
            self._send(line_of(news.number), news)
        else:
            self._tell_events(news)

    def announce(self, info: EngineInfo) -> None:
        """Tells all lines, those that will be opened later included, that the engine can take requests."""
        self._ready = EngineReady(info)
        for line in self._lines:
            self._send(line, self._ready)

    def fail(self, message: str) -> None:
        """Tells the parent why this process is about to end; the parent tells the others."""
        self._send(PARENT_LINE, EngineFailed(message))

    # What comes.

    def _take(self, message: ToMailbox) -> list[ToEngine]:
        """Returns what the scheduler must hear of a message."""
        match message:
            case Request():
                return self._enter(message)
            case AbortMatching():
                return self._abort_matching(message)
            case OpenLine(line):
                self._open(line)
                return []
            case CloseLine(line):
                return self._close(line)
            case Abort(engine_id, index):
                self._free_id(engine_id, index)
                return [message]
            case Shutdown():
                return [message]
            case Withdraw(number):
                self._unanswered.discard(number)
                return [message]
            case _:
                self._unanswered.add(message.number)
                return [message]

    def _enter(self, request: Request) -> list[ToEngine]:
        """Notes whose request this is. An id that runs on another line is refused, as the front end refuses its own."""
        client_id, _, number = request.request_id.rpartition("/")
        line = line_of(int(number))
        if line not in self._lines:
            return []  # its process has died
        other = self._by_client_id.get(client_id)
        if other is not None and self._running[other].line != line:
            text = f"request_id {client_id} is the id of a running request: choose another"
            refusal = Refusal(RefusalKind.INVALID, text)
            self._send(line, Replies([Reply(request.request_id, refusal=refusal)], self._load))
            return []
        self._running[request.request_id] = _Running(line, client_id, request.sampling.n)
        self._by_client_id[client_id] = request.request_id
        return [request]

    def _free_id(self, engine_id: str, index: int | None) -> None:
        """Lets any line use a client's id again, since all that is left of its request is to be cleared up."""
        run = self._running.get(engine_id)
        if run is not None and (index is None or run.samples == 1):
            self._drop_id(engine_id, run)

    def _abort_matching(self, command: AbortMatching) -> list[ToEngine]:
        """Aborts requests of any line by their clients' ids, and answers how many there are."""
        if command.prefix:
            found = [id for id, run in self._running.items() if run.client_id.startswith(command.request_id)]
        else:
            found = [id for id, run in self._running.items() if run.client_id == command.request_id]
        self._send(line_of(command.number), Answer(command.number, True, str(len(found))))
        return [Abort(engine_id) for engine_id in found]

    def _open(self, line: int) -> None:
        self._transport.connect(line)
        self._lines[line] = _Line(Load(), self._clock())
        self._tell_load()  # first: a process that takes a dead one's place must not tell its scrapers of zero tokens
        if self._ready is not None:
            self._send(line, self._ready)

    def _close(self, line: int) -> list[ToEngine]:
        """Forgets a process that has died; its requests are aborted, and its commands are withdrawn."""
        del self._lines[line]
        self._transport.disconnect(line)
        left = [engine_id for engine_id, run in self._running.items() if run.line == line]
        for engine_id in left:
            self._forget(engine_id)
        asked = sorted(number for number in self._unanswered if line_of(number) == line)
        self._unanswered.difference_update(asked)
        return [*map(Abort, left), *map(Withdraw, asked)]

    # What goes.

    def _route(self, news: Replies) -> None:
        self._load = news.load
        of_line: dict[int, list[Reply]] = {}
        for reply in news.replies:
            run = self._running.get(reply.request_id)
            if run is None:
                continue  # its line is closed
            replies = of_line.get(run.line)
            if replies is None:
                of_line[run.line] = [reply]
            else:
                replies.append(reply)
            if reply.finish_reason is not None or reply.refusal is not None:
                self._count_end(reply, run)
        now_s = self._clock()
        for line, told in self._lines.items():
            if line in of_line or now_s - told.load_s >= LOAD_S:
                self._tell(line, told, of_line.get(line, []), now_s)

    def _count_end(self, reply: Reply, run: _Running) -> None:
        """Forgets the request with the end of its last sample; a refusal ends all of them."""
        run.samples -= 1
        if not run.samples or reply.refusal is not None:
            self._forget(reply.request_id)

    def _forget(self, engine_id: str) -> None:
        self._drop_id(engine_id, self._running.pop(engine_id))

    def _drop_id(self, engine_id: str, run: _Running) -> None:
        if self._by_client_id.get(run.client_id) == engine_id:  # its client may have used the id again
            del self._by_client_id[run.client_id]

    def _tell_load(self) -> None:
        """Tells the load to lines that know an older one."""
        now_s = self._clock()
        for line, told in self._lines.items():
            if told.load is not self._load and told.load != self._load:
                self._tell(line, told, [], now_s)

    def _tell(self, line: int, told: _Line, replies: list[Reply], now_s: float) -> None:
        told.load, told.load_s = self._load, now_s
        self._transport.send(line, Replies(replies, self._load))

    def _tell_events(self, events: CacheEvents) -> None:
        """Sends a snapshot to the line that asked for it, and from then on all events too."""
        if events.number is not None:
            self._unanswered.discard(events.number)
            line = line_of(events.number)
            if line in self._lines:
                self._lines[line].watches = True
                self._send(line, events)
            return
        for line, told in self._lines.items():
            if told.watches:
                self._send(line, events)

    def _send(self, line: int, message: FromEngine) -> None:
        if line in self._lines:
            self._transport.send(line, message)
