"""The cache events of this server as numbered batches: what a subscriber reads at its own pace, or resumes from.

Owns the numbers and the last batches. A subscriber holds nothing but a number, so a slow one costs
no memory; when the batch that it wants next is gone, it has lost data. The engine tells of its cache from the first
subscriber on, and of all that is cached whenever one starts anew. Knows no gRPC; kv_stream.py reads it.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import deque

from smg_grpc_proto.generated import common_pb2

from jaxsgl.errors import JaxsglError
from jaxsgl.frontend.engine_client import EngineClient
from jaxsgl.frontend.grpc.sglang.kv_messages import batch_of, num_blocks, snapshot_chunks
from jaxsgl.messages import CacheEvents, News, PagesStored, WatchCache

MAX_BATCHES = 4096
MAX_BLOCKS = 32768  # in all batches that are kept


class OutOfRange(JaxsglError):
    """A number to resume from that this server can't serve; the subscriber has to start anew."""

    grpc_status = "OUT_OF_RANGE"


class DataLoss(JaxsglError):
    """The subscriber read so slowly that batches are gone; it has to start anew."""

    grpc_status = "DATA_LOSS"


class KvLog:
    """Follows the cache of `engine` for as long as the server lives. `last` is the last number used.

    The first number follows `last`. It has to be larger than any that a server at the same address used before: a
    gateway that resumes after a restart would otherwise be told the new cache's news on top of the old one's.
    """

    def __init__(
        self, engine: EngineClient, max_batches: int = MAX_BATCHES, max_blocks: int = MAX_BLOCKS, last: int = 0
    ) -> None:
        self._engine = engine
        self._max_batches = max_batches
        self._max_blocks = max_blocks
        self._batches: deque[common_pb2.KvEventBatch] = deque()
        self._num_blocks = 0
        self._event_ids = itertools.count(1)
        self._snapshots: dict[int, asyncio.Future[list[common_pb2.KvEventBatch]]] = {}
        self._watching: contextlib.AbstractContextManager[None] | None = None
        self._news = asyncio.Event()
        self.last = last

    async def snapshot(self) -> list[common_pb2.KvEventBatch]:
        """All that is cached now, in chunks; the last one's number is that of the last batch it includes.

        Waits for the engine, however long. Raises `EngineUnavailable`.
        """
        if self._watching is None:
            self._watching = self._engine.watch(self._take)
            self._watching.__enter__()  # and never left: who resumes later must find no gap
        number = self._engine.send_command(WatchCache)
        self._snapshots[number] = asyncio.get_running_loop().create_future()
        try:
            return await self._snapshots[number]
        finally:
            del self._snapshots[number]

    def after(self, number: int) -> int:
        """The last batch that a subscriber has seen who asks to resume from `number`.

        Gateways send the last number that they saw, the protocol may also be read as the next one: it works for both,
        since a batch that comes twice is known by its number. Raises `OutOfRange`.
        """
        oldest = self.last - len(self._batches) + 1
        followed = self._watching is not None
        if not followed or not self.last or not oldest - 1 <= number <= self.last + 1:
            can = f"from {oldest} to {self.last}" if followed else "from nowhere yet"
            raise OutOfRange(f"start_sequence_number is {number}, but this server can resume {can}: start from 0")
        return max(number, oldest) - 1

    def get(self, number: int) -> common_pb2.KvEventBatch | None:
        """The batch with this number, None if it is still to come. Raises `DataLoss` if it is gone."""
        if number > self.last:
            return None
        index = len(self._batches) - 1 - (self.last - number)
        if index < 0:
            gone = self.last - len(self._batches)
            raise DataLoss(f"the batches {number} to {gone} are gone unread: start from 0, and read faster")
        return self._batches[index]

    async def news(self, timeout_s: float) -> None:
        """Waits until a batch comes, at most `timeout_s` seconds."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._news.wait()

    def _take(self, news: News) -> None:
        if not isinstance(news, CacheEvents):
            return
        if news.number is None:
            self._append(news)
        elif news.number in self._snapshots:
            stored = [event for event in news.events if isinstance(event, PagesStored)]
            chunks = snapshot_chunks(stored, self.last)
            self.last = self.last or len(chunks)
            snapshot = self._snapshots[news.number]
            if not snapshot.done():
                snapshot.set_result(chunks)

    def _append(self, news: CacheEvents) -> None:
        self.last += 1
        self._batches.append(batch_of(news.events, self.last, self._event_ids))
        self._num_blocks += num_blocks(self._batches[-1])
        while len(self._batches) > self._max_batches or self._num_blocks > self._max_blocks:
            self._num_blocks -= num_blocks(self._batches.popleft())
        news_event, self._news = self._news, asyncio.Event()
        news_event.set()
