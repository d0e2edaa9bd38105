"""The link to one engine process: the line to it, and the calls and commands that wait for its answers.

Owns the table of open calls: a dead engine ends every open call at once, and nothing of a call outlives its `open`
block. A call's replies wait in its `ReplyStream` until the client reads them. Never knows a client protocol, text or
other replicas; ipc.py carries the messages. The link of the process that started the engine is an `OwnedEngine`
(owned_engine.py), that of each other front-end process a `WorkerLink` (worker.py). replicas.py holds the links of a
front end. Used inside one asyncio loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from collections.abc import Callable, Iterator

import msgspec

from jaxsgl.config.engine import DEFAULT_WEIGHT_VERSION
from jaxsgl.errors import EngineUnavailable, InvalidRequest, JaxsglError, Overloaded, RequestFailed, StartupError
from jaxsgl.ipc import Endpoints, EngineLine
from jaxsgl.mask_mark import Marked, MaskMark, NoMark
from jaxsgl.messages.orders import (
    Abort,
    AbortMatching,
    Answer,
    Command,
    FromEngine,
    News,
    ToMailbox,
    Withdraw,
    first_number,
)
from jaxsgl.messages.replies import EngineFailed, EngineInfo, EngineReady, HostsLoad, Load, Replies, Reply
from jaxsgl.requests.request import Request

MAX_UNREAD = 16384  # replies of one request: minutes of one sample, or seconds of very many
ANSWER_LIMIT_S = 60.0  # for a command, which the engine answers between two steps; the longest step may have to end
MAX_FLUSH_WAIT_S = 3600.0
UPDATE_LIMIT_S = 7200.0  # reading weights, and then the longest request
NOTHING_HELD = dict.fromkeys(
    ("num_running", "num_waiting", "waiting_tokens", "used_tokens", "cached_tokens", "num_retracted", "num_blocked"), 0
) | {"ranks": ()}
STARTING = "the engine is still starting: try again later"

logger = logging.getLogger(__name__)


class ReplyStream:
    """Replies of one request, in order. A slow reader gets at once all replies that it has not read, within bounds.

    A stream ends once: with the last sample's end, with a refusal, or with an error. It ends the request in the engine
    if that still runs. `EngineLink` fills it, `Generation` reads it.

    Attributes:
      engine_id: the request's id in the engine.
      ended: whether all samples of the request have ended.
      weight_version: of the weights that made the reply that came last.
    """

    def __init__(self, engine_id: str, num_samples: int, abort: Callable[[Abort], None], max_unread: int) -> None:
        self.engine_id = engine_id
        self.ended = False
        self.weight_version = DEFAULT_WEIGHT_VERSION
        self._running = set(range(num_samples))
        self._abort = abort
        self._max_unread = max_unread
        self._replies: list[Reply] = []
        self._failure: JaxsglError | None = None
        self._waiter: asyncio.Future[None] | None = None  # of `next`; an Event would cost as much as all else here

    async def next(self) -> list[Reply]:
        """Returns all replies since the last call; waits for at least one. Raises the error given to `fail`."""
        while not self._replies:
            if self._failure is not None:
                raise self._failure
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        replies, self._replies = self._replies, []
        return replies

    def put(self, reply: Reply, weight_version: str = DEFAULT_WEIGHT_VERSION) -> None:
        """Adds a reply that weights of that version made; one that comes after the end of its sample is dropped."""
        if self.ended or (reply.refusal is None and reply.index not in self._running):
            return
        if reply.finish_reason is not None:
            self._running.remove(reply.index)
        self.ended = not self._running or reply.refusal is not None
        self.weight_version = weight_version
        self._replies.append(reply)
        self._wake()
        if len(self._replies) > self._max_unread and self._waiter is None:  # else it reads as soon as it gets its turn
            self._replies.clear()  # the client is too slow to read them in time
            self._give_up(Overloaded(f"the client left {self._max_unread} replies unread: read them as they come"))

    def end_sample(self, index: int) -> None:
        """Takes no more replies of sample `index`, and ends it in the engine if it still runs there."""
        if not self.ended and index in self._running:
            self._running.remove(index)
            self.ended = not self._running
            self._abort(Abort(self.engine_id, index))

    def fail(self, error: JaxsglError) -> None:
        """Ends the stream with `error` after the replies that have come, and the request in the engine."""
        if not self.ended:
            self._give_up(error)

    def _give_up(self, error: JaxsglError) -> None:
        if not self.ended:
            self._abort(Abort(self.engine_id))
        self.ended = True
        self._failure = error
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class EngineLink:
    """The line to one engine process, and all that this front end has open on it.

    Refuses requests until `accept` is called, after `refuse`, while `stuck` is set, and once the engine is dead.

    `line` is None if this is the only front-end process; of several, it is the number of this one.

    Attributes:
      load: the engine's, after its latest step; a dead one's holds counters only.
      hosts: those that share the model, if there are several; `num_pulses` says how often that came.
      heard_s: when the engine last said anything (`time.monotonic`).
      stuck: why the engine counts as stuck, None if it doesn't. Set by the watchdog.
    """

    def __init__(self, line: int | None = None, max_unread: int = MAX_UNREAD) -> None:
        self._line_number = line
        self._max_unread = max_unread
        self._line: EngineLine | None = None
        self._mark: MaskMark | NoMark = NoMark()
        self._info: EngineInfo | None = None
        self._death: str | None = None
        self._ready_or_dead = asyncio.Event()
        self._dead = asyncio.Event()
        self._stopping = False
        self._refusal: str | None = STARTING
        self._accepts_once_ready = False
        self._streams: dict[str, ReplyStream] = {}  # by engine id
        self._by_request_id: dict[str, ReplyStream] = {}
        self._answers: dict[int, asyncio.Future[Answer]] = {}
        self._watchers: list[Callable[[News], None]] = []
        self._numbers = itertools.count(first_number(line or 0))
        self._next_token: asyncio.Future[None] | None = None
        self.load = Load()
        self.hosts = HostsLoad()
        self.num_pulses = 0
        self.heard_s = time.monotonic()
        self.stuck: str | None = None

    # Life: what the engine's owner does is in owned_engine.py.

    async def start(self) -> None:
        """Connects to the engine, which may still be loading, unless it is connected. Raises `StartupError`."""

    async def stop(self) -> None:
        """Hangs up. May be called in any state."""
        self._stopping = True
        self._hang_up()

    def kill(self) -> None:
        """Ends the engine process at once, if this process owns it."""

    def dump_stacks(self, last: bool = False) -> None:
        """Has the engine process log the stacks of its threads, if this process owns it.

        The `last` ones, of a process that is about to be ended, come even if it hangs in native code, and may crash it.
        """

    @property
    def line(self) -> int:
        """The number of this process's line to the engine; 0 for the owner of the engine process."""
        return self._line_number or 0

    async def ready(self) -> EngineInfo:
        """Waits until the engine can take requests. Raises `StartupError` if the process ends first."""
        await self._ready_or_dead.wait()
        if self._death is not None:
            raise StartupError(self._death)
        assert self._info is not None
        return self._info

    def accept(self) -> None:
        """Lets requests in."""
        self._refusal = None

    def accept_once_ready(self) -> None:
        """Lets requests in as soon as the engine is ready, unless they are refused for another reason then."""
        self._accepts_once_ready = True

    async def death(self) -> str:
        """Waits until the engine has failed or its process has ended; returns why. All open calls have failed then."""
        await self._dead.wait()
        assert self._death is not None
        return self._death

    def refuse(self, reason: str) -> None:
        """Refuses new requests from now on with `EngineUnavailable`."""
        self._refusal = reason

    @property
    def masking(self) -> Marked | None:
        """The call on a grammar that the engine is in, or was in when it died, or None."""
        return self._mark.read()

    def fail(self, reason: str, culprit: str | None = None) -> None:
        """Refuses new requests and ends all open calls with `EngineUnavailable`.

        The request that the engine calls `culprit` ends with `RequestFailed`, so that it isn't sent to another engine.
        """
        self.refuse(reason)
        for engine_id, stream in self._streams.items():
            if engine_id == culprit:
                stream.fail(RequestFailed(f"{reason} while it worked on this request's grammar: don't repeat it"))
            else:
                stream.fail(EngineUnavailable(reason))
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(EngineUnavailable(reason))

    def died(self, reason: str) -> None:
        """Notes the engine's death; the first reason counts. Before it is ready and while it stops, it ends no call."""
        if self._death is not None:
            return
        self._death = reason
        self.load = msgspec.structs.replace(self.load, **NOTHING_HELD)
        if self._info is not None and not self._stopping:
            masking = self.masking
            of_mask = "" if masking is None else f" while it worked on the grammar of request {masking.request_id}"
            logger.error("%s%s; ending %d open calls", reason, of_mask, self.num_open)
            self.fail(reason, None if masking is None else masking.request_id)
        self._ready_or_dead.set()
        self._dead.set()

    @property
    def info(self) -> EngineInfo | None:
        """What the engine has said of itself, None until it is ready."""
        return self._info

    @property
    def num_ranks(self) -> int:
        """Ranks of the engine; 1 until it is ready."""
        return 1 if self._info is None else self._info.num_ranks

    @property
    def is_dead(self) -> bool:
        """Whether the engine has failed or its process has ended."""
        return self._death is not None

    # Calls: one request each.

    @property
    def refusal(self) -> str | None:
        """Why new requests are refused now, None if they aren't. All health endpoints report it."""
        return self._death or self._refusal or self.stuck

    @property
    def state(self) -> str:
        """Where the engine stands: dead, loading, draining, stuck, paused or ready."""
        if self._death is not None:
            return "dead"
        if self._refusal is not None:
            return "loading" if self._refusal is STARTING else "draining"
        if self.stuck is not None:
            return "stuck"
        return "paused" if self.load.paused else "ready"

    @property
    def num_running(self) -> int:
        """Requests that the engine has not ended yet."""
        return sum(not stream.ended for stream in self._streams.values())

    @property
    def num_open(self) -> int:
        """Calls whose `open` block has not ended."""
        return len(self._streams)

    @contextlib.contextmanager
    def open(self, request: Request) -> Iterator[ReplyStream]:
        """Submits `request`; leaving the block before its end aborts it.

        In the engine it has an id of its own: a client may use an id again while the engine still clears up the
        request that had it before.

        Raises:
          InvalidRequest: a running request has the same id.
          EngineUnavailable: the engine is starting, stopping, stuck or dead.
        """
        if self.refusal is not None:
            raise EngineUnavailable(self.refusal)
        self.check_id(request.request_id)
        engine_id = f"{request.request_id}/{next(self._numbers)}"
        stream = ReplyStream(engine_id, request.sampling.n, self._send_abort, self._max_unread)
        self.send(msgspec.structs.replace(request, request_id=engine_id))
        self._streams[engine_id] = stream
        self._by_request_id[request.request_id] = stream
        try:
            yield stream
        finally:
            del self._streams[engine_id], self._by_request_id[request.request_id]
            self._abort(stream)

    def check_id(self, request_id: str) -> None:
        """Raises `InvalidRequest` if a running request has this id."""
        if request_id in self._by_request_id:
            raise InvalidRequest(f"request_id {request_id} is the id of a running request: choose another")

    async def abort(self, request_id: str) -> bool:
        """Aborts a running request; its stream then ends with `FinishReason.ABORT`. Returns whether it ran."""
        if self._line_number is not None:
            return await self._abort_anywhere(request_id, prefix=False) > 0
        stream = self._by_request_id.get(request_id)
        return stream is not None and self._abort(stream)

    async def abort_prefix(self, prefix: str) -> int:
        """Aborts all running requests whose ids begin with `prefix`, with "" all there are; returns how many."""
        if self._line_number is not None:
            return await self._abort_anywhere(prefix, prefix=True)
        begins = [stream for request_id, stream in self._by_request_id.items() if request_id.startswith(prefix)]
        return sum(map(self._abort, begins))

    # Commands, and what the engine says without being asked.

    async def ask(self, command: Callable[[int], Command | AbortMatching], timeout_s: float) -> Answer:
        """Sends the command that `command` makes of a new number, and waits for its answer.

        A caller that is cancelled, as when its client leaves, withdraws the command. Raises `EngineUnavailable` if no
        answer comes within `timeout_s` seconds, or if the engine is gone.
        """
        if self._info is None:
            raise EngineUnavailable(STARTING)
        number = next(self._numbers)
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._answers[number] = answer
        try:
            self.send(command(number))
            async with asyncio.timeout(timeout_s):
                return await answer
        except TimeoutError:
            raise EngineUnavailable(f"the engine gave no sign of life within {timeout_s:g} s") from None
        finally:
            del self._answers[number]
            if not (answer.done() and not answer.cancelled()):
                with contextlib.suppress(EngineUnavailable):
                    self.send(Withdraw(number))

    async def next_token(self) -> None:
        """Waits until the engine has made a token, of whatever request."""
        if self._next_token is None:
            self._next_token = asyncio.get_running_loop().create_future()
        await asyncio.shield(self._next_token)

    def send_command(self, command: Callable[[int], Command]) -> int:
        """Sends a command without waiting for its answer; returns its number. Raises `EngineUnavailable`."""
        number = next(self._numbers)
        self.send(command(number))
        return number

    def watch(self, watcher: Callable[[News], None]) -> None:
        """Shows `watcher` all that the engine says from now on, after its replies have gone to their streams."""
        self._watchers.append(watcher)

    # Messages.

    def send(self, message: ToMailbox) -> None:
        """Sends a message without waiting. Raises `EngineUnavailable` if the process doesn't listen."""
        if self._line is None or self._death is not None:
            raise EngineUnavailable(self._death or "the engine process is not running: try again later")
        self._line.send(message)

    def receive(self, message: FromEngine) -> None:
        """Takes one message of the engine. Replies of calls that have ended are dropped."""
        if isinstance(message, HostsLoad):  # from a thread of its own: no sign that the loop turns
            self.hosts, self.num_pulses = message, self.num_pulses + 1
            return
        self.heard_s = time.monotonic()
        if isinstance(message, Replies):
            if self._next_token is not None and message.load.totals.output_tokens > self.load.totals.output_tokens:
                self._next_token.set_result(None)
                self._next_token = None
            self.load = message.load
            for reply in message.replies:
                stream = self._streams.get(reply.request_id)
                if stream is not None:
                    stream.put(reply, message.load.weight_version)
        elif isinstance(message, EngineReady):
            self._info = message.info
            if self._accepts_once_ready and self._refusal is STARTING:
                self.accept()
            self._ready_or_dead.set()
            return
        elif isinstance(message, EngineFailed):
            self.died(message.message)
            return
        elif isinstance(message, Answer):
            answer = self._answers.get(message.number)
            if answer is not None and not answer.done():
                answer.set_result(message)
        for watcher in self._watchers:
            watcher(message)

    async def _abort_anywhere(self, request_id: str, prefix: bool) -> int:
        """Aborts requests of all front-end processes, this one included. Raises `EngineUnavailable`."""
        answer = await self.ask(lambda number: AbortMatching(number, request_id, prefix), ANSWER_LIMIT_S)
        return int(answer.text)

    def _abort(self, stream: ReplyStream) -> bool:
        if stream.ended:
            return False
        self._send_abort(Abort(stream.engine_id))
        return True

    def _send_abort(self, abort: Abort) -> None:
        with contextlib.suppress(EngineUnavailable):  # a dead engine needs no abort
            self.send(abort)

    def _connect(self, endpoints: Endpoints) -> None:
        self._line = EngineLine(endpoints)
        self._mark = endpoints.mask_mark()
        self._line.listen(self.receive)

    def _hang_up(self) -> None:
        if self._line is not None:
            self._line.close()
            self._line = None
