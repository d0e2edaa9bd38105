"""The link to the engine: its process, the line to that process, and the calls that wait for its replies.

Owns the life of the engine process, from `start` to `stop`, and the table of open calls: a dead engine ends every open
call at once, and nothing of a call outlives its `open` block. Never knows a client protocol or text; ipc.py carries the
messages. server.py runs the life, generation.py opens calls, and endpoints send commands and read the load. Of several
front-end processes only the parent owns the engine process; worker.py has the link of the others. Used inside one
asyncio loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import sys
import time
from collections.abc import Callable, Iterator, Sequence

import msgspec

from jaxsgl.config import EngineConfig
from jaxsgl.errors import EngineUnavailable, InvalidRequest, StartupError
from jaxsgl.frontend.child_process import how_it_ended, start_child
from jaxsgl.frontend.reply_stream import MAX_UNREAD, ReplyStream
from jaxsgl.ipc import Endpoints, EngineLaunch, EngineLine
from jaxsgl.logs import LogStyle
from jaxsgl.messages import (
    Abort,
    AbortMatching,
    Answer,
    Command,
    EngineFailed,
    EngineInfo,
    EngineReady,
    FromEngine,
    Load,
    News,
    Ping,
    Replies,
    Shutdown,
    ToMailbox,
    Withdraw,
    first_number,
)
from jaxsgl.request import Request
from jaxsgl.stacks import DUMP_SIGNAL

ENGINE_COMMAND = (sys.executable, "-m", "jaxsgl.engine_process")
FINAL_MESSAGE_S = 0.2  # the final message of a process that has ended may still be on its way
ANSWER_LIMIT_S = 60.0  # for a command, which the engine answers between two steps; the longest step may have to end
MAX_FLUSH_WAIT_S = 3600.0
UPDATE_LIMIT_S = 7200.0  # reading weights, and then the longest request
STARTING = "the engine is still starting: try again later"
STOP_S = 5.0  # for the engine to leave its loop; then it is killed

logger = logging.getLogger(__name__)


class EngineLink:
    """One engine process, and all that the front end has open on it.

    Refuses requests until `accept` is called, after `refuse`, while `stuck` is set, and once the engine is dead.

    `line` is None if this is the only front-end process; of several, it is the number of this one.

    Attributes:
      load: the engine's, after its latest step.
      heard_s: when the engine last said anything (`time.monotonic`).
      stuck: why the engine counts as stuck, None if it doesn't. Set by the watchdog.
    """

    def __init__(
        self,
        config: EngineConfig,
        log_style: LogStyle,
        command: Sequence[str] = ENGINE_COMMAND,
        max_unread: int = MAX_UNREAD,
        line: int | None = None,
    ) -> None:
        self._config = config
        self._line_number = line
        self._log_style = log_style
        self._command = command
        self._max_unread = max_unread
        self._endpoints: Endpoints | None = None
        self._line: EngineLine | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._info: EngineInfo | None = None
        self._death: str | None = None
        self._ready_or_dead = asyncio.Event()
        self._dead = asyncio.Event()
        self._stopping = False
        self._refusal: str | None = STARTING
        self._streams: dict[str, ReplyStream] = {}  # by engine id
        self._by_request_id: dict[str, ReplyStream] = {}
        self._answers: dict[int, asyncio.Future[Answer]] = {}
        self._watchers: list[Callable[[News], None]] = []
        self._numbers = itertools.count(first_number(line or 0))
        self._next_token: asyncio.Future[None] | None = None
        self.load = Load()
        self.heard_s = time.monotonic()
        self.stuck: str | None = None

    # Life, in order.

    async def start(self) -> None:
        """Starts the process; returns before it is ready. Raises `StartupError` if there is no place for sockets."""
        self._endpoints = Endpoints.create(self._line_number)
        self._connect(self._endpoints)
        launch = EngineLaunch(self._config, self._endpoints, self._log_style)
        self._process = await start_child("engine", self._command, asyncio.subprocess.PIPE)
        self._watcher = asyncio.create_task(self._watch(self._process))
        assert self._process.stdin is not None
        with contextlib.suppress(ConnectionError):  # the process ended at once: `_watch` reports it
            self._process.stdin.write(msgspec.json.encode(launch) + b"\n")
            await self._process.stdin.drain()

    @property
    def line(self) -> int:
        """The number of this process's line to the engine; 0 for the owner of the engine process."""
        return self._line_number or 0

    @property
    def endpoints(self) -> Endpoints:
        """Where the engine process is spoken to, once `start` was called."""
        assert self._endpoints is not None
        return self._endpoints

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

    async def death(self) -> str:
        """Waits until the engine has failed or its process has ended; returns why. All open calls have failed then."""
        await self._dead.wait()
        assert self._death is not None
        return self._death

    def refuse(self, reason: str) -> None:
        """Refuses new requests from now on with `EngineUnavailable`."""
        self._refusal = reason

    def fail(self, reason: str) -> None:
        """Refuses new requests and ends all open calls with `EngineUnavailable`."""
        self.refuse(reason)
        for stream in self._streams.values():
            stream.fail(EngineUnavailable(reason))
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(EngineUnavailable(reason))

    async def stop(self) -> None:
        """Ends the process, politely if it still listens, and removes the sockets. May be called in any state."""
        self._stopping = True
        if self._process is not None and self._watcher is not None:
            await self._end(self._process, self._watcher)
        self._hang_up()
        if self._endpoints is not None:
            self._endpoints.remove()

    def kill(self) -> None:
        """Ends the process at once, when there is no time for `stop` or the engine would not hear it."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
        if self._endpoints is not None:
            self._endpoints.remove()

    def dump_stacks(self) -> None:
        """Has the process write the stacks of its threads to its log, even if it hangs."""
        if self._process is not None:
            logger.error("the engine process %d writes its stacks", self._process.pid)
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(DUMP_SIGNAL)

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
        if request.request_id in self._by_request_id:
            raise InvalidRequest(f"request_id {request.request_id} is the id of a running request: choose another")
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

    async def check_alive(self, timeout_s: float) -> None:
        """Raises `EngineUnavailable` unless the engine's loop turns within `timeout_s` seconds."""
        if self.refusal is not None:
            raise EngineUnavailable(self.refusal)
        await self.ask(Ping, timeout_s)

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
            self._ready_or_dead.set()
            return
        elif isinstance(message, EngineFailed):
            self._die(message.message)
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
        self._line.listen(self.receive)

    def _hang_up(self) -> None:
        if self._line is not None:
            self._line.close()
            self._line = None

    # The process's end.

    async def _watch(self, process: asyncio.subprocess.Process) -> None:
        """Waits for the process's end, which is the engine's death unless the engine has told of it before."""
        status = await process.wait()
        if self._death is None:
            await asyncio.sleep(FINAL_MESSAGE_S)
        reason = f"the engine process {process.pid} {how_it_ended(status)}"
        if self._death is not None and self._info is not None:  # the final message said why; this says how
            logger.error("%s", reason)
        self._die(reason)

    def _die(self, reason: str) -> None:
        """The first reason counts. Before the engine is ready and while it is stopped, its end fails no call."""
        if self._death is not None:
            return
        self._death = reason
        if self._info is not None and not self._stopping:
            logger.error("%s; ending %d open calls and the server", reason, self.num_open)
            self.fail(reason)
        self._ready_or_dead.set()
        self._dead.set()

    async def _end(self, process: asyncio.subprocess.Process, watcher: asyncio.Task[None]) -> None:
        """Waits up to `STOP_S` for a process that listens or is about to end; kills any other."""
        if self._death is not None:
            await asyncio.wait({watcher}, timeout=STOP_S)
        elif self._info is not None:
            with contextlib.suppress(EngineUnavailable):
                self.send(Shutdown())
                await asyncio.wait({watcher}, timeout=STOP_S)
        if process.returncode is None:
            if self._info is not None:
                logger.warning("the engine process %d did not end within %.0f s: killing it", process.pid, STOP_S)
            with contextlib.suppress(ProcessLookupError):
                process.kill()
        await watcher
        assert process.stdin is not None
        process.stdin.close()
