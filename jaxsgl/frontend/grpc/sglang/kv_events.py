"""SubscribeKvEvents: what happens to the prefix cache, as numbered batches that each subscriber reads at its own pace.

`KvLog` owns the numbers and the last batches. A subscriber holds nothing but a number, so a slow one costs no memory;
when the batch that it wants next is gone, it has lost data and must start over. The engine sends its events from the
first subscriber on, and a snapshot whenever a subscriber starts over. `KvStream` is one subscriber: a snapshot or the
batches that it missed, then news, and the engine's load with them. What the protocol calls a block is a page of our
KV cache. Replicas and ranks have one log and one count of batches; each batch says whose it is. Never knows a call's
context; service.py runs the streams.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from smg_grpc_proto.generated import common_pb2

from jaxsgl.errors import EngineUnavailable, JaxsglError
from jaxsgl.frontend.engines.link import EngineLink
from jaxsgl.frontend.engines.replicas import Replicas
from jaxsgl.frontend.grpc.sglang.loads import Busy, load_record
from jaxsgl.messages.orders import News, WatchCache
from jaxsgl.messages.replies import CacheCleared, CacheEvent, CacheEvents, Load, PagesRemoved, PagesStored

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


@dataclass(frozen=True)
class _Stored:
    """What a replica has cached, by rank, and the number of the last batch that this includes."""

    pages: dict[int, list[PagesStored]]
    last: int


class KvLog:
    """Follows the caches of all replicas for as long as the server lives. `last` is the last number used.

    The first number follows `last`. It has to be larger than any that a server at the same address used before: a
    gateway that resumes after a restart would otherwise get the new cache's news on top of the old one's.
    """

    def __init__(
        self, engine: Replicas, max_batches: int = MAX_BATCHES, max_blocks: int = MAX_BLOCKS, last: int = 0
    ) -> None:
        self._engine = engine
        self._max_batches = max_batches
        self._max_blocks = max_blocks
        self._batches: deque[common_pb2.KvEventBatch] = deque()
        self._num_blocks = 0
        self._event_ids = itertools.count(1)
        self._snapshots: dict[tuple[int, int], asyncio.Future[_Stored]] = {}  # by replica and number of the command
        self._parts: dict[tuple[int, int], dict[int, list[PagesStored]]] = {}  # of those, what ranks have answered
        self._losses: list[asyncio.Task[None]] = []
        self._watching = False
        self._news = asyncio.Event()
        self.last = last

    async def snapshot(self) -> list[common_pb2.KvEventBatch]:
        """Returns all that is cached now, in chunks; the last chunk's number is that of the last batch it includes.

        Waits for the engines without a limit. Raises `EngineUnavailable`, or `DataLoss` if one dies meanwhile.
        """
        if not self._watching:
            self._watching = True  # from now on: a subscriber that resumes later must find no gap
            for replica, link in enumerate(self._engine.links):
                link.watch(partial(self._take, replica))
                if len(self._engine.links) > 1:
                    self._losses.append(asyncio.create_task(self._lose_at_death_of(link)))
        alive = {rank: link for rank, link in enumerate(self._engine.links) if not link.is_dead}
        asked: dict[tuple[int, int], asyncio.Future[_Stored]] = {}
        try:
            for rank, link in alive.items():
                asked[rank, link.send_command(WatchCache)] = asyncio.get_running_loop().create_future()
            self._snapshots.update(asked)
            parts = [await part for part in asked.values()]
        finally:
            for key in asked:
                self._snapshots.pop(key, None)
                self._parts.pop(key, None)
        # What came after the first answer comes again, after the chunks.
        stored = {rank: pages for part in parts for rank, pages in part.pages.items()}
        return snapshot_chunks(stored, min(part.last for part in parts))

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

    async def _lose_at_death_of(self, link: EngineLink) -> None:
        """Has all subscribers start over when a replica dies: they have no other way to forget what it had cached."""
        await link.death()
        self._batches.clear()
        self._num_blocks = 0
        self.last += 2  # so that the batch that any of them wants next is gone
        for snapshot in self._snapshots.values():
            if not snapshot.done():
                snapshot.set_exception(DataLoss("a replica has died, and its cache with it: start from 0"))
        self._wake()

    def _take(self, replica: int, news: News) -> None:
        if not isinstance(news, CacheEvents):
            return
        rank = replica + news.rank
        if news.number is None:
            self._append(rank, news)
        elif (key := (replica, news.number)) in self._snapshots:
            parts = self._parts.setdefault(key, {})
            parts[rank] = [event for event in news.events if isinstance(event, PagesStored)]
            if len(parts) == self._engine.links[replica].num_ranks and not self._snapshots[key].done():
                self.last = self.last or len(self._engine.places)
                self._snapshots[key].set_result(_Stored(parts, self.last))

    def _append(self, rank: int, news: CacheEvents) -> None:
        self.last += 1
        self._batches.append(batch_of(news.events, self.last, self._event_ids, rank))
        self._num_blocks += num_blocks(self._batches[-1])
        while len(self._batches) > self._max_batches or self._num_blocks > self._max_blocks:
            self._num_blocks -= num_blocks(self._batches.popleft())
        self._wake()

    def _wake(self) -> None:
        news_event, self._news = self._news, asyncio.Event()
        news_event.set()


class KvStream:
    """What one subscriber is sent. `busy` says how busy the replica of a rank is.

    The load of a replica goes with each of its batches, and alone when it changed without a batch or when nothing was
    sent for a while.
    """

    def __init__(self, log: KvLog, engine: Replicas, busy: Callable[[int], Busy], loads_at_once: bool) -> None:
        """`loads_at_once`: the subscriber takes loads before the first batch."""
        self._log = log
        self._engine = engine
        self._busy = busy
        self._loads_at_once = loads_at_once
        self._seen = 0
        self._num_records = 0
        self._sent: dict[int, tuple[Load, float]] = {}  # by rank: the load that was sent last, and when
        self._busy_since_s: dict[int, float] = {}  # by rank

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
            for load_only in self._loads():
                yield load_only
            await self._log.news(LOOK_S)

    async def _snapshot(self) -> AsyncGenerator[common_pb2.KvEventBatch, None]:
        """Yields what is cached now, and the load while a busy engine takes its time to answer."""
        asking = asyncio.ensure_future(self._log.snapshot())
        try:
            while not asking.done():
                if self._loads_at_once:
                    for load_only in self._loads():
                        yield load_only
                self._check_engine()
                await asyncio.wait({asking}, timeout=LOOK_S)
            for chunk in asking.result():
                self._seen = chunk.sequence_number
                yield self._with_load(chunk)
        finally:
            asking.cancel()

    def _loads(self) -> Iterator[common_pb2.KvEventBatch]:
        """Yields, for each replica whose load is due, a batch with it and no event, under the last number."""
        self._check_engine()
        for rank, (link, _) in enumerate(self._engine.places):
            sent, sent_s = self._sent.get(rank, (None, -HEARTBEAT_S))
            due_s = HEARTBEAT_S if self._busy(rank).load == sent else LOOK_S
            if link.is_dead or time.monotonic() - sent_s < due_s:
                continue
            batch = common_pb2.KvEventBatch(sequence_number=self._seen, timestamp=time.time(), dp_rank=rank)
            batch.load.CopyFrom(self._record(rank, telemetry=True))
            batch.load.load_only = True
            yield batch

    def _with_load(self, batch: common_pb2.KvEventBatch) -> common_pb2.KvEventBatch:
        """Returns a copy with the load; the log's batch is shared by all subscribers."""
        copy = common_pb2.KvEventBatch()
        copy.CopyFrom(batch)
        copy.load.CopyFrom(self._record(batch.dp_rank, telemetry=not self._num_records))
        return copy

    def _record(self, rank: int, telemetry: bool) -> common_pb2.EngineLoad:
        busy = self._busy(rank)
        self._num_records += 1
        self._sent[rank] = busy.load, time.monotonic()
        return load_record(busy, self._num_records, self._silence_s(rank), telemetry)

    def _silence_s(self, rank: int) -> float | None:
        """Returns the seconds since the engine said something or was given work; None while it has none."""
        link, _ = self._engine.places[rank]
        if not link.num_running:
            self._busy_since_s.pop(rank, None)
            return None
        now_s = time.monotonic()
        return now_s - max(self._busy_since_s.setdefault(rank, now_s), link.heard_s)

    def _check_engine(self) -> None:
        """Raises `EngineUnavailable` if the server stops. A stuck engine ends no stream: loads show its silence."""
        refusal = self._engine.refusal
        if refusal is not None and all(link.stuck is None for link in self._engine.links):
            raise EngineUnavailable(refusal)


def batch_of(
    events: Sequence[CacheEvent], number: int, event_ids: Iterator[int], rank: int = 0
) -> common_pb2.KvEventBatch:
    """Returns the batch `number` of these events of the replica `rank`."""
    converted = [_event(event, event_id) for event, event_id in zip(events, event_ids, strict=False)]
    return common_pb2.KvEventBatch(sequence_number=number, timestamp=time.time(), events=converted, dp_rank=rank)


def num_blocks(batch: common_pb2.KvEventBatch) -> int:
    """Returns the number of blocks in a batch's events."""
    return sum(len(event.stored.blocks) + len(event.removed.block_hashes) for event in batch.events)


def snapshot_chunks(
    stored: Mapping[int, Sequence[PagesStored]], last: int, chunk_blocks: int = CHUNK_BLOCKS
) -> list[common_pb2.KvEventBatch]:
    """Returns all that is cached, as chunks whose numbers end at `last`; if that is 0 they start at 1.

    Args:
      stored: of each replica, by rank; parents before children.
      last: the number of the last batch that `stored` includes. There are at most as many chunks.
      chunk_blocks: blocks in a chunk at most, unless `last` asks for larger ones.
    """
    total = sum(len(event.hashes) for events in stored.values() for event in events)
    if last:
        chunk_blocks = max(chunk_blocks, -(-total // last))
    groups = [(rank, group) for rank, events in stored.items() for group in _groups(events, chunk_blocks)]
    groups = groups or [(0, [])]
    groups[0][1].insert(0, CacheCleared())
    first = last - len(groups) + 1 if last else 1
    chunks = [batch_of(group, number, itertools.repeat(0), rank) for number, (rank, group) in enumerate(groups, first)]
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
