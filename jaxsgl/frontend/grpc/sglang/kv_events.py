"""SubscribeKvEvents: what happens to the prefix cache, as numbered batches that each subscriber reads at its own pace.

`KvLog` owns the numbers and the last batches. A subscriber holds nothing but a number, so a slow one costs no memory;
when the batch that it wants next is gone, it has lost data and must start over. The engine sends its events from the
first subscriber on, and a snapshot whenever a subscriber starts over. `KvStream` is one subscriber: a snapshot or the
batches that it missed, then news, and the engine's load beside them. What the protocol calls a block is a page of our
KV cache. Never knows a call's context; service.py runs the streams.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence

from smg_grpc_proto.generated import common_pb2

from jaxsgl.errors import EngineUnavailable, JaxsglError
from jaxsgl.frontend.engine_link import EngineLink
from jaxsgl.frontend.grpc.sglang.loads import Busy, load_record
from jaxsgl.messages import CacheCleared, CacheEvent, CacheEvents, Load, News, PagesRemoved, PagesStored, WatchCache

MAX_BATCHES = 4096
MAX_BLOCKS = 32768  # in all batches that are kept
CHUNK_BLOCKS = 1024  # about 100 KB; gateways take messages of up to 4 MiB
LOOK_S = 0.1  # the load is looked at so often, and sent alone if it changed
HEARTBEAT_S = 1.0


class OutOfRange(JaxsglError):
    """A number to resume from that this server can't serve; the subscriber has to start over."""

    grpc_status = "OUT_OF_RANGE"


class DataLoss(JaxsglError):
    """The subscriber read so slowly that batches are gone; it has to start over."""

    grpc_status = "DATA_LOSS"


class KvLog:
    """Follows the cache of `engine` for as long as the server lives. `last` is the last number used.

    The first number follows `last`. It has to be larger than any that a server at the same address used before: a
    gateway that resumes after a restart would otherwise be told the new cache's news on top of the old one's.
    """

    def __init__(
        self, engine: EngineLink, max_batches: int = MAX_BATCHES, max_blocks: int = MAX_BLOCKS, last: int = 0
    ) -> None:
        self._engine = engine
        self._max_batches = max_batches
        self._max_blocks = max_blocks
        self._batches: deque[common_pb2.KvEventBatch] = deque()
        self._num_blocks = 0
        self._event_ids = itertools.count(1)
        self._snapshots: dict[int, asyncio.Future[list[common_pb2.KvEventBatch]]] = {}
        self._watching = False
        self._news = asyncio.Event()
        self.last = last

    async def snapshot(self) -> list[common_pb2.KvEventBatch]:
        """Returns all that is cached now, in chunks; the last chunk's number is that of the last batch it includes.

        Waits for the engine without a limit. Raises `EngineUnavailable`.
        """
        if not self._watching:
            self._watching = True  # from now on: a subscriber that resumes later must find no gap
            self._engine.watch(self._take)
        number = self._engine.send_command(WatchCache)
        self._snapshots[number] = asyncio.get_running_loop().create_future()
        try:
            return await self._snapshots[number]
        finally:
            del self._snapshots[number]

    def after(self, number: int) -> int:
        """Returns the number of the last batch that a subscriber has seen if it asks to resume from `number`.

        Gateways send the last number that they saw; the protocol can also be read as asking for the next one. This
        works for both, since a subscriber knows a batch that comes twice by its number. Raises `OutOfRange`.
        """
        oldest = self.last - len(self._batches) + 1
        if not self._watching or not self.last or not oldest - 1 <= number <= self.last + 1:
            can = f"from {oldest} to {self.last}" if self._watching else "from nowhere yet"
            raise OutOfRange(f"start_sequence_number is {number}, but this server can resume {can}: start from 0")
        return max(number, oldest) - 1

    def get(self, number: int) -> common_pb2.KvEventBatch | None:
        """Returns the batch with this number, None if it is still to come. Raises `DataLoss` if it is gone."""
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


class KvStream:
    """What one subscriber is sent. `busy` tells how busy the engine is.

    The load goes with every batch, and alone when it changed without a batch or when nothing was sent for a while.
    """

    def __init__(self, log: KvLog, engine: EngineLink, busy: Callable[[], Busy], loads_at_once: bool) -> None:
        """`loads_at_once`: the subscriber takes loads before the first batch."""
        self._log = log
        self._engine = engine
        self._busy = busy
        self._loads_at_once = loads_at_once
        self._seen = 0
        self._num_records = 0
        self._told: Load | None = None
        self._told_s = 0.0
        self._busy_since_s: float | None = None

    async def batches(self, start: int) -> AsyncGenerator[common_pb2.KvEventBatch, None]:
        """Yields all there is to send, without end. Raises `OutOfRange`, `DataLoss` and `EngineUnavailable`."""
        if start:
            self._seen = self._log.after(start)
        else:
            async for batch in self._snapshot():
                yield batch
        while True:
            while (batch := self._log.get(self._seen + 1)) is not None:
                self._seen += 1
                yield self._with_load(batch)
            if (load_only := self._load_only()) is not None:
                yield load_only
            await self._log.news(LOOK_S)

    async def _snapshot(self) -> AsyncGenerator[common_pb2.KvEventBatch, None]:
        """Yields what is cached now, and the load while a busy engine takes its time to tell it."""
        asking = asyncio.ensure_future(self._log.snapshot())
        try:
            while not asking.done():
                if self._loads_at_once and (load_only := self._load_only()) is not None:
                    yield load_only
                self._check_engine()
                await asyncio.wait({asking}, timeout=LOOK_S)
            for chunk in asking.result():
                self._seen = chunk.sequence_number
                yield self._with_load(chunk)
        finally:
            asking.cancel()

    def _load_only(self) -> common_pb2.KvEventBatch | None:
        """Returns a batch with a load and no event, under the last number; None if there is nothing to say."""
        self._check_engine()
        due_s = HEARTBEAT_S if self._engine.load == self._told else LOOK_S
        if time.monotonic() - self._told_s < due_s:
            return None
        batch = common_pb2.KvEventBatch(sequence_number=self._seen, timestamp=time.time(), dp_rank=0)
        batch.load.CopyFrom(self._record(telemetry=True))
        batch.load.load_only = True
        return batch

    def _with_load(self, batch: common_pb2.KvEventBatch) -> common_pb2.KvEventBatch:
        """Returns a copy with the load; the log's batch is shared by all subscribers."""
        copy = common_pb2.KvEventBatch()
        copy.CopyFrom(batch)
        copy.load.CopyFrom(self._record(telemetry=not self._num_records))
        return copy

    def _record(self, telemetry: bool) -> common_pb2.EngineLoad:
        busy = self._busy()
        self._num_records += 1
        self._told, self._told_s = busy.load, time.monotonic()
        return load_record(busy, self._num_records, self._silence_s(), telemetry)

    def _silence_s(self) -> float | None:
        """Returns the seconds since the engine said something or was given work; None while it has none."""
        if not self._engine.num_running:
            self._busy_since_s = None
            return None
        now_s = time.monotonic()
        self._busy_since_s = self._busy_since_s or now_s
        return now_s - max(self._busy_since_s, self._engine.heard_s)

    def _check_engine(self) -> None:
        """Raises `EngineUnavailable` if the server stops. A stuck engine ends no stream: loads tell its silence."""
        if self._engine.refusal is not None and self._engine.stuck is None:
            raise EngineUnavailable(self._engine.refusal)


def batch_of(events: Sequence[CacheEvent], number: int, event_ids: Iterator[int]) -> common_pb2.KvEventBatch:
    """Returns the batch `number` of these events."""
    converted = [_event(event, event_id) for event, event_id in zip(events, event_ids, strict=False)]
    return common_pb2.KvEventBatch(sequence_number=number, timestamp=time.time(), events=converted, dp_rank=0)


def num_blocks(batch: common_pb2.KvEventBatch) -> int:
    """Returns the number of blocks in a batch's events."""
    return sum(len(event.stored.blocks) + len(event.removed.block_hashes) for event in batch.events)


def snapshot_chunks(
    stored: Sequence[PagesStored], last: int, chunk_blocks: int = CHUNK_BLOCKS
) -> list[common_pb2.KvEventBatch]:
    """Returns all that is cached, as chunks whose numbers end at `last`; if that is 0 they start at 1.

    Args:
      stored: parents before children.
      last: the number of the last batch that `stored` includes. There are at most as many chunks.
      chunk_blocks: blocks in a chunk at most, unless `last` asks for larger ones.
    """
    total = sum(len(event.hashes) for event in stored)
    if last:
        chunk_blocks = max(chunk_blocks, -(-total // last))
    groups: list[list[CacheEvent]] = list(_groups(stored, chunk_blocks)) or [[]]
    groups[0].insert(0, CacheCleared())
    first = last - len(groups) + 1 if last else 1
    chunks = [batch_of(group, number, itertools.repeat(0)) for number, group in enumerate(groups, first)]
    for index, chunk in enumerate(chunks):
        chunk.snapshot.CopyFrom(common_pb2.KvSnapshotChunk(index=index, count=len(chunks), blocks=total))
    return chunks


def _groups(stored: Sequence[PagesStored], size: int) -> Iterator[list[CacheEvent]]:
    """Yields the same pages in groups of `size`; the last group may be smaller."""
    group: list[CacheEvent] = []
    room = size
    for event in stored:
        start = 0
        while start < len(event.hashes):
            count = min(room, len(event.hashes) - start)
            group.append(_part(event, start, start + count))
            start += count
            room -= count
            if not room:
                yield group
                group, room = [], size
    if group:
        yield group


def _part(event: PagesStored, start: int, stop: int) -> PagesStored:
    """Returns the event's pages from `start` to `stop`."""
    tokens_each = len(event.token_ids) // len(event.hashes)
    token_ids = event.token_ids[start * tokens_each : stop * tokens_each]
    return PagesStored(event.hashes[start:stop], token_ids, event.hashes[start - 1] if start else event.parent)


def _event(event: CacheEvent, event_id: int) -> common_pb2.KvCacheEvent:
    match event:
        case PagesStored():
            return common_pb2.KvCacheEvent(event_id=event_id, stored=_stored(event))
        case PagesRemoved(hashes):
            removed = common_pb2.KvBlocksRemoved(block_hashes=hashes)
            return common_pb2.KvCacheEvent(event_id=event_id, removed=removed)
        case CacheCleared():
            return common_pb2.KvCacheEvent(event_id=event_id, cleared=common_pb2.KvCacheCleared())


def _stored(event: PagesStored) -> common_pb2.KvBlocksStored:
    size = len(event.token_ids) // len(event.hashes)
    blocks = [
        common_pb2.KvBlock(block_hash=name, token_ids=event.token_ids[i * size : (i + 1) * size], block_size=size)
        for i, name in enumerate(event.hashes)
    ]
    return common_pb2.KvBlocksStored(blocks=blocks, parent_block_hash=event.parent)
