"""The open calls: sends requests and commands to the engine and hands each call its own replies.

Owns the table of running requests, so nothing of a call may outlive its `open` block, and the latest load. Knows no
client protocol and no text; the sockets and the process belong to supervisor.py. Used inside one asyncio loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import Callable, Iterator, Sequence

import msgspec

from jaxsgl.errors import EngineUnavailable, InvalidRequest, JaxsglError, Overloaded
from jaxsgl.messages import Abort, Answer, Command, Load, News, Ping, Replies, Reply, ToEngine
from jaxsgl.request import Request

MAX_UNREAD = 16384  # replies of one request: some minutes of a sample, or seconds of very many


class ReplyStream:
    """Replies of one request, in order. What a slow reader has not fetched yet comes at once, within bounds.

    Attributes:
      engine_id: the request's id in the engine.
      ended: whether no sample of it runs any more.
    """

    def __init__(self, engine_id: str, num_samples: int, abort: Callable[[Abort], None], max_unread: int) -> None:
        self.engine_id = engine_id
        self.ended = False
        self._running = set(range(num_samples))
        self._abort = abort
        self._max_unread = max_unread
        self._replies: list[Reply] = []
        self._failure: JaxsglError | None = None
        self._waiter: asyncio.Future[None] | None = None  # of `next`; an Event would cost as much as all else here

    async def next(self) -> list[Reply]:
        """Returns all replies since the last call; waits for at least one. Raises what the stream was failed with."""
        while not self._replies:
            if self._failure is not None:
                raise self._failure
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        replies, self._replies = self._replies, []
        return replies

    def put(self, reply: Reply) -> None:
        """Adds a reply; one that comes after the end of its sample is dropped."""
        if self.ended or (reply.refusal is None and reply.index not in self._running):
            return
        if reply.finish_reason is not None:
            self._running.remove(reply.index)
        self.ended = not self._running or reply.refusal is not None
        self._replies.append(reply)
        self._wake()
        if len(self._replies) > self._max_unread:
            self._replies.clear()  # they would reach nobody in time
            self._give_up(Overloaded(f"the client left {self._max_unread} replies unread: read them as they come"))

    def end_sample(self, index: int) -> None:
        """Nothing more is wanted of sample `index`; ends it in the engine if it still runs there."""
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


class EngineClient:
    """All requests that run in the engine. Accepts none until `accept` is called.

    Attributes:
      load: the engine's, after its latest step.
      heard_s: when the engine last said anything (`time.monotonic`).
      stuck: why the engine counts as stuck, None if it doesn't; new requests are refused meanwhile. The watchdog's.
    """

    def __init__(self, send: Callable[[ToEngine], None], max_unread: int = MAX_UNREAD) -> None:
        self._send = send
        self._max_unread = max_unread
        self._refusal: str | None = "the engine is still starting: try again later"
        self._streams: dict[str, ReplyStream] = {}  # by engine id
        self._by_request_id: dict[str, ReplyStream] = {}
        self._numbers = itertools.count()
        self._answers: dict[int, asyncio.Future[Answer]] = {}
        self._watchers: list[Callable[[News], None]] = []
        self.load = Load()
        self.heard_s = time.monotonic()
        self.stuck: str | None = None

    @property
    def refusal(self) -> str | None:
        """Why new requests are refused now, None if they aren't."""
        return self._refusal or self.stuck

    @property
    def num_running(self) -> int:
        """Requests that the engine has not ended yet."""
        return sum(not stream.ended for stream in self._streams.values())

    @property
    def num_open(self) -> int:
        """Calls whose `open` block has not ended."""
        return len(self._streams)

    def accept(self) -> None:
        """Lets requests in."""
        self._refusal = None

    def refuse(self, reason: str) -> None:
        """Refuses new requests from now on with `EngineUnavailable`."""
        self._refusal = reason

    def fail(self, reason: str) -> None:
        """Refuses new requests and ends all open ones with `EngineUnavailable`."""
        self.refuse(reason)
        for stream in self._streams.values():
            stream.fail(EngineUnavailable(reason))
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(EngineUnavailable(reason))

    @contextlib.contextmanager
    def open(self, request: Request) -> Iterator[ReplyStream]:
        """Submits `request`; leaving the block before its end aborts it.

        To the engine it gets an id of its own: a client may use an id again while the engine still clears up the
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
        self._send(msgspec.structs.replace(request, request_id=stream.engine_id))
        self._streams[stream.engine_id] = stream
        self._by_request_id[request.request_id] = stream
        try:
            yield stream
        finally:
            del self._streams[stream.engine_id], self._by_request_id[request.request_id]
            self._abort(stream)

    def abort(self, request_id: str) -> bool:
        """Aborts a running request; its stream then ends with `FinishReason.ABORT`. Returns whether it ran."""
        stream = self._by_request_id.get(request_id)
        return stream is not None and self._abort(stream)

    def abort_prefix(self, prefix: str) -> int:
        """Aborts all running requests whose ids begin with `prefix`, with "" all there are; returns how many."""
        begins = [stream for request_id, stream in self._by_request_id.items() if request_id.startswith(prefix)]
        return sum(map(self._abort, begins))

    async def ask(self, command: Callable[[int], Command], timeout_s: float) -> Answer:
        """Sends the command that `command` makes of a new number, and waits for its answer.

        Raises `EngineUnavailable` if none comes within `timeout_s` seconds, or if the engine is gone.
        """
        number = next(self._numbers)
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._answers[number] = answer
        try:
            self._send(command(number))
            async with asyncio.timeout(timeout_s):
                return await answer
        except TimeoutError:
            raise EngineUnavailable(f"the engine gave no sign of life within {timeout_s:g} s") from None
        finally:
            del self._answers[number]

    async def check_alive(self, timeout_s: float) -> None:
        """Raises `EngineUnavailable` unless the engine's loop turns within `timeout_s` seconds."""
        if self.refusal is not None:
            raise EngineUnavailable(self.refusal)
        await self.ask(Ping, timeout_s)

    def send_command(self, command: Callable[[int], Command]) -> int:
        """Sends a command without waiting; returns its number. Raises `EngineUnavailable`."""
        number = next(self._numbers)
        self._send(command(number))
        return number

    @contextlib.contextmanager
    def watch(self, watcher: Callable[[News], None]) -> Iterator[None]:
        """Shows `watcher` all that the engine says, after its replies have gone to their streams."""
        self._watchers.append(watcher)
        try:
            yield
        finally:
            self._watchers.remove(watcher)

    def receive(self, news: News) -> None:
        """Takes what the engine says."""
        self.heard_s = time.monotonic()
        if isinstance(news, Replies):
            self.load = news.load
            self._deliver(news.replies)
        elif isinstance(news, Answer):
            answer = self._answers.get(news.number)
            if answer is not None and not answer.done():
                answer.set_result(news)
        for watcher in tuple(self._watchers):
            watcher(news)

    def _deliver(self, replies: Sequence[Reply]) -> None:
        """Hands replies to their streams. Those of calls that are gone are dropped."""
        for reply in replies:
            stream = self._streams.get(reply.request_id)
            if stream is not None:
                stream.put(reply)

    def _abort(self, stream: ReplyStream) -> bool:
        if stream.ended:
            return False
        self._send_abort(Abort(stream.engine_id))
        return True

    def _send_abort(self, abort: Abort) -> None:
        with contextlib.suppress(EngineUnavailable):  # a dead engine needs no abort
            self._send(abort)
