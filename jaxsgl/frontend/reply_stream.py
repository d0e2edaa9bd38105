"""The replies of one open call, between the engine's pace and the client's.

A stream ends once: with the last sample's end, with a refusal, or with an error. It ends the request in the engine if
that still runs, and never holds more than a bounded number of unread replies. Never knows text or processes; EngineLink
fills it, Generation reads it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from jaxsgl.config.engine import DEFAULT_WEIGHT_VERSION
from jaxsgl.errors import JaxsglError, Overloaded
from jaxsgl.messages.orders import Abort
from jaxsgl.messages.replies import Reply

MAX_UNREAD = 16384  # replies of one request: minutes of one sample, or seconds of very many


class ReplyStream:
    """Replies of one request, in order. A slow reader gets at once all replies that it has not read, within bounds.

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
            await self._waiter
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
        if len(self._replies) > self._max_unread:
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
