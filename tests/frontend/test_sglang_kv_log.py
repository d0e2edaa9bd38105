"""The log of cache events: numbers, bounds, resuming, snapshots. Played without a server."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
from played_link import PlayedLink

from jaxsgl.config.engine import Limits
from jaxsgl.frontend.engines.replicas import Replicas
from jaxsgl.frontend.grpc.sglang.kv_events import DataLoss, KvLog, KvStream, OutOfRange, batch_of, snapshot_chunks
from jaxsgl.frontend.grpc.sglang.loads import Busy
from jaxsgl.frontend.metrics.measurements import Rates
from jaxsgl.messages.orders import WatchCache
from jaxsgl.messages.replies import CacheCleared, CacheEvent, CacheEvents, EngineInfo, PagesRemoved, PagesStored

INFO = EngineInfo(
    model_path="/models/a", architecture="FakeForCausalLM", dtype="float32",
    limits=Limits(vocab_size=100, context_length=100, pool_tokens=100), eos_token_ids=(1,), page_size=2,
    max_running_requests=8, attention_backend="xla", platform="cpu", kv_bytes=1, weight_bytes=1, warmup_s=0.1,
)  # fmt: skip


class Engine:
    """An engine whose cache events the test makes."""

    def __init__(self) -> None:
        self.link = PlayedLink()
        self.all = Replicas([self.link])

    def answer_watch(self, *stored: PagesStored) -> None:
        command = next(message for message in self.link.sent if isinstance(message, WatchCache))
        self.link.sent.remove(command)
        self.link.receive(CacheEvents(list(stored), command.number))

    def tell(self, page: int) -> None:
        self.link.receive(CacheEvents([PagesStored([page], [page, page], None)]))


async def follow(log: KvLog, engine: Engine, *stored: PagesStored) -> list[int]:
    """Starts over; returns the snapshot's numbers."""
    asking = asyncio.ensure_future(log.snapshot())
    await asyncio.sleep(0)
    engine.answer_watch(*stored)
    return [chunk.sequence_number for chunk in await asking]


def page_of(log: KvLog, number: int) -> int:
    batch = log.get(number)
    assert batch is not None
    return int(batch.events[0].stored.blocks[0].block_hash)


def test_numbers_start_at_1_and_go_on() -> None:
    async def scenario() -> None:
        engine = Engine()
        log = KvLog(engine.all)
        assert await follow(log, engine) == [1]
        for page in (10, 11, 12):
            engine.tell(page)
        assert [page_of(log, number) for number in (2, 3, 4)] == [10, 11, 12]
        assert log.get(5) is None
        assert await follow(log, engine) == [4], "a snapshot has the number of the last batch that it includes"
        engine.tell(13)
        assert page_of(log, 5) == 13

    asyncio.run(scenario())


def test_ranks_of_one_engine_answer_and_report_each_for_itself() -> None:
    async def scenario() -> None:
        engine = Engine()
        engine.link._info = msgspec.structs.replace(INFO, num_ranks=2)
        log = KvLog(engine.all)
        asking = asyncio.ensure_future(log.snapshot())
        await asyncio.sleep(0)
        command = engine.link.sent.pop()
        assert isinstance(command, WatchCache)
        engine.link.receive(CacheEvents([PagesStored([10], [10, 10], None)], command.number, rank=0))
        await asyncio.sleep(0)
        assert not asking.done(), "a rank has not answered yet"
        engine.link.receive(CacheEvents([PagesStored([20], [20, 20], None)], command.number, rank=1))
        assert [chunk.dp_rank for chunk in await asking] == [0, 1]
        engine.link.receive(CacheEvents([PagesRemoved([20])], rank=1))
        batch = log.get(log.last)
        assert batch is not None and batch.dp_rank == 1

    asyncio.run(scenario())


def test_the_engine_is_not_asked_before_the_first_subscriber() -> None:
    engine = Engine()
    log = KvLog(engine.all)
    engine.tell(10)
    assert not engine.link.sent
    assert log.last == 0


@pytest.mark.parametrize(("max_batches", "max_blocks"), [(3, 1000), (1000, 3)])
def test_the_log_is_bounded_and_reading_too_slowly_is_data_loss(max_batches: int, max_blocks: int) -> None:
    async def scenario() -> None:
        engine = Engine()
        log = KvLog(engine.all, max_batches, max_blocks)
        await follow(log, engine)
        for page in range(10):
            engine.tell(page)
        assert log.last == 11
        assert [page_of(log, number) for number in (9, 10, 11)] == [7, 8, 9]
        with pytest.raises(DataLoss, match="gone unread"):
            log.get(8)

    asyncio.run(scenario())


def test_a_batch_larger_than_the_log_is_lost_and_not_kept() -> None:
    async def scenario() -> None:
        engine = Engine()
        log = KvLog(engine.all, max_blocks=3)
        await follow(log, engine)
        engine.link.receive(CacheEvents([PagesRemoved([1, 2, 3, 4])]))
        with pytest.raises(DataLoss):
            log.get(2)
        engine.tell(5)
        assert page_of(log, 3) == 5

    asyncio.run(scenario())


def test_the_stream_of_a_slow_reader_ends_with_data_loss() -> None:
    async def scenario() -> None:
        engine = Engine()
        engine.link.accept()
        log = KvLog(engine.all, max_batches=3)
        stream = KvStream(log, engine.all, lambda rank: Busy(INFO, engine.link.load, Rates()), loads_at_once=False)
        batches = stream.batches(0)
        first = asyncio.ensure_future(anext(batches))
        await asyncio.sleep(0.01)
        engine.answer_watch()
        assert (await first).sequence_number == 1
        for page in range(10):
            engine.tell(page)
        with pytest.raises(DataLoss, match="batches 2 to 8 are gone unread"):
            await anext(batches)

    asyncio.run(scenario())


def test_resuming_works_from_the_last_number_seen_and_from_the_next_one() -> None:
    async def scenario() -> None:
        engine = Engine()
        log = KvLog(engine.all, max_batches=3)
        with pytest.raises(OutOfRange):
            log.after(1)
        await follow(log, engine)
        for page in range(10):
            engine.tell(page)
        assert {number: log.after(number) for number in (8, 9, 10, 11, 12)} == {8: 8, 9: 8, 10: 9, 11: 10, 12: 11}
        for number in (1, 7, 13, 1000):
            with pytest.raises(OutOfRange, match=f"start_sequence_number is {number}"):
                log.after(number)

    asyncio.run(scenario())


def test_a_snapshot_that_no_subscriber_waits_for_any_more_is_dropped() -> None:
    async def scenario() -> None:
        engine = Engine()
        log = KvLog(engine.all)
        asking = asyncio.ensure_future(log.snapshot())
        await asyncio.sleep(0)
        asking.cancel()
        await asyncio.wait({asking})
        engine.answer_watch(PagesStored([1], [1], None))
        assert await follow(log, engine) == [1]

    asyncio.run(scenario())


def test_a_snapshot_comes_in_chunks_with_parents_before_children() -> None:
    stored = [PagesStored([1, 2, 3, 4, 5], list(range(10)), None), PagesStored([6, 7], [20, 21, 22, 23], 2)]
    first, *others = chunks = snapshot_chunks({0: stored}, last=50, chunk_blocks=2)
    assert [chunk.sequence_number for chunk in chunks] == [47, 48, 49, 50]
    assert [(chunk.snapshot.index, chunk.snapshot.count, chunk.snapshot.blocks) for chunk in chunks] == [
        (index, 4, 7) for index in range(4)
    ]
    assert first.events[0].HasField("cleared")
    events = [event.stored for chunk in chunks for event in chunk.events if event.HasField("stored")]
    blocks = [(block.block_hash, list(block.token_ids), block.block_size) for event in events for block in event.blocks]
    assert blocks == [(i + 1, [2 * i, 2 * i + 1], 2) for i in range(5)] + [(6, [20, 21], 2), (7, [22, 23], 2)]
    parents = [event.parent_block_hash if event.HasField("parent_block_hash") else None for event in events]
    assert parents == [None, 2, 4, 2, 6]
    assert all(event.event_id == 0 for chunk in chunks for event in chunk.events)
    assert not any(event.HasField("cleared") for chunk in others for event in chunk.events)


@pytest.mark.parametrize(
    ("num_pages", "last", "numbers"), [(0, 0, [1]), (0, 9, [9]), (5, 0, [1, 2, 3]), (5, 2, [1, 2])]
)
def test_a_snapshots_numbers_fit_before_the_last_batch(num_pages: int, last: int, numbers: list[int]) -> None:
    stored = [PagesStored([page], [page], None) for page in range(num_pages)]
    chunks = snapshot_chunks({0: stored}, last, chunk_blocks=2)
    assert [chunk.sequence_number for chunk in chunks] == numbers
    assert sum(len(event.stored.blocks) for chunk in chunks for event in chunk.events) == num_pages


def test_events_keep_their_order_in_a_batch() -> None:
    events: list[CacheEvent] = [PagesRemoved([-1, 2]), CacheCleared(), PagesStored([3, 4], [30, 31, 40, 41], -9)]
    removed, cleared, stored = batch_of(events, 7, iter([100, 101, 102])).events
    assert [event.event_id for event in (removed, cleared, stored)] == [100, 101, 102]
    assert list(removed.removed.block_hashes) == [-1, 2]
    assert cleared.HasField("cleared")
    assert stored.stored.parent_block_hash == -9
    assert [list(block.token_ids) for block in stored.stored.blocks] == [[30, 31], [40, 41]]


def test_the_death_of_a_replica_is_data_loss_and_a_new_start_tells_of_the_others() -> None:
    """Subscribers have no other way to forget what the dead one had cached."""

    async def scenario() -> None:
        engines = [Engine(), Engine()]
        log = KvLog(Replicas([engine.link for engine in engines]))
        asking = asyncio.ensure_future(log.snapshot())
        await asyncio.sleep(0)
        for rank, engine in enumerate(engines):
            engine.answer_watch(PagesStored([rank], [rank, rank], None))
        assert {chunk.dp_rank for chunk in await asking} == {0, 1}
        engines[1].tell(10)
        seen = log.last
        engines[1].link.died("the engine process was killed")
        await asyncio.sleep(0)
        for number in (seen, seen + 1):  # the last one is gone like all others
            with pytest.raises(DataLoss):
                log.get(number)
        with pytest.raises(OutOfRange):
            log.after(seen)
        again = asyncio.ensure_future(log.snapshot())
        await asyncio.sleep(0)
        engines[0].answer_watch(PagesStored([0], [0, 0], None))
        assert {chunk.dp_rank for chunk in await again} == {0}
        engines[0].tell(11)
        assert page_of(log, log.last) == 11

    asyncio.run(scenario())


def test_a_replica_that_dies_before_it_told_its_cache_is_data_loss() -> None:
    async def scenario() -> None:
        engines = [Engine(), Engine()]
        log = KvLog(Replicas([engine.link for engine in engines]))
        asking = asyncio.ensure_future(log.snapshot())
        await asyncio.sleep(0)
        engines[0].answer_watch()
        engines[1].link.died("the engine process was killed")
        with pytest.raises(DataLoss, match="a replica has died"):
            await asking

    asyncio.run(scenario())
