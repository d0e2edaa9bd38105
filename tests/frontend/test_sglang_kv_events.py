"""SubscribeKvEvents: a snapshot of the cache, then numbered changes; and the engine's load beside it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TypeAlias

import grpc
import pytest
from fake_engine_process import LIMITS, Script
from server_process import ServerProcess
from sglang_calls import ask, sglang_stub
from smg_grpc_proto import sglang_scheduler_pb2_grpc as pb_grpc
from smg_grpc_proto.generated import common_pb2

Stub: TypeAlias = pb_grpc.SglangSchedulerStub
Batch: TypeAlias = common_pb2.KvEventBatch


@pytest.fixture(scope="module")
def sglang(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stub]:
    """A stub of a server that only this file uses, since numbers go on from test to test."""
    model = tmp_path_factory.mktemp("model")
    server = ServerProcess(tmp_path_factory.mktemp("server"), str(model))
    server.wait_until_ready()
    with sglang_stub(server) as stub:
        yield stub
    server.end()


@contextlib.contextmanager
def subscribed(stub: Stub, start: int = 0, loads_at_once: bool = False) -> Iterator[Iterator[Batch]]:
    request = common_pb2.SubscribeKvEventsRequest(
        start_sequence_number=start, load_records_before_first_batch=loads_at_once
    )
    call = stub.SubscribeKvEvents(request)
    try:
        yield call
    finally:
        call.cancel()


def next_with_events(batches: Iterator[Batch]) -> Batch:
    return next(batch for batch in batches if not batch.load.load_only)


def flush(stub: Stub) -> None:
    assert stub.FlushCache(common_pb2.FlushCacheRequest(timeout_s=60.0)).success


def test_a_new_subscriber_gets_a_snapshot_and_then_changes(sglang: Stub) -> None:
    with subscribed(sglang) as batches:
        first = next_with_events(batches)
        assert (first.snapshot.index, first.snapshot.count, first.snapshot.blocks) == (0, 1, 1)
        assert first.snapshot.unknown_before == 0
        assert first.sequence_number >= 1
        cleared, stored = first.events
        assert cleared.HasField("cleared")
        (block,) = stored.stored.blocks
        assert (block.block_hash, list(block.token_ids), block.block_size) == (-5, [7], 1)
        assert not stored.stored.HasField("parent_block_hash")
        flush(sglang)
        news = next_with_events(batches)
        assert news.sequence_number == first.sequence_number + 1
        assert [event.WhichOneof("data") for event in news.events] == ["cleared"]
        assert not news.HasField("snapshot")
        assert news.dp_rank == 0


def test_a_subscriber_resumes_where_it_was(sglang: Stub) -> None:
    with subscribed(sglang) as batches:
        start = next_with_events(batches).sequence_number
    for _ in range(3):
        flush(sglang)
    for seen in (start, start + 1, start + 2):
        with subscribed(sglang, start=seen) as batches:
            numbers: list[int] = []
            while not numbers or numbers[-1] < start + 3:
                numbers.append(next_with_events(batches).sequence_number)
        assert numbers == list(range(numbers[0], start + 4)), "no gap"
        assert numbers[0] in (seen, seen + 1)
    with subscribed(sglang, start=start + 3) as batches:
        beat = next(batch for batch in batches if batch.load.load_only)
        assert beat.sequence_number in (start + 2, start + 3), "nothing new"


def test_a_number_that_never_was_is_out_of_range(sglang: Stub) -> None:
    with subscribed(sglang, start=1_000_000) as batches, pytest.raises(grpc.RpcError) as caught:
        next(batches)
    assert caught.value.code() is grpc.StatusCode.OUT_OF_RANGE
    assert "start from 0" in str(caught.value.details())


def test_a_server_without_subscribers_so_far_has_no_past(start_server: Callable[..., ServerProcess]) -> None:
    server = start_server()
    server.wait_until_ready()
    with sglang_stub(server) as sglang:
        with subscribed(sglang, start=1) as batches, pytest.raises(grpc.RpcError) as caught:
            next(batches)
        assert caught.value.code() is grpc.StatusCode.OUT_OF_RANGE


def test_a_server_that_starts_again_uses_no_number_twice(
    sglang: Stub, start_server: Callable[..., ServerProcess]
) -> None:
    """Otherwise a subscriber that resumes would take the new server's cache for the old one's."""
    with subscribed(sglang) as batches:
        used = next(batches).sequence_number
    again = start_server()
    again.wait_until_ready()
    with sglang_stub(again) as stub:
        with subscribed(stub) as batches:
            assert next(batches).sequence_number > used
        with subscribed(stub, start=used) as batches, pytest.raises(grpc.RpcError) as caught:
            next(batches)
        assert caught.value.code() is grpc.StatusCode.OUT_OF_RANGE


def test_every_batch_holds_the_load(sglang: Stub) -> None:
    with subscribed(sglang) as batches:
        first = next(batches).load
        assert (first.max_running_requests, first.max_total_num_tokens) == (8, LIMITS.pool_tokens)
        assert first.memory.token_capacity == LIMITS.pool_tokens
        assert first.disaggregation.mode == "null"
        assert first.engine_reports_steps
        assert not first.HasField("engine_silence_ms")
        flush(sglang)
        news = next_with_events(batches).load
        assert news.sample > first.sample
        assert not news.HasField("memory"), "what only people look at comes with the heartbeats"


def test_a_changed_load_is_sent_without_an_event(sglang: Stub) -> None:
    with subscribed(sglang) as batches:
        number = next_with_events(batches).sequence_number
        call = sglang.Generate(ask(Script.FOREVER, 5, 5, 5))
        busy = next(batch for batch in batches if batch.load.running_requests == 1)
        assert busy.load.load_only
        assert not busy.events
        assert busy.sequence_number == number
        assert busy.load.token_usage == busy.load.active_token_usage == pytest.approx(4 / LIMITS.pool_tokens)
        silence = next(batch for batch in batches if batch.load.HasField("engine_silence_ms"))
        assert silence.load.engine_silence_ms < 60_000
        call.cancel()
        idle = next(batch for batch in batches if batch.load.running_requests == 0)
        assert idle.load.load_only
        assert idle.load.memory.token_capacity == LIMITS.pool_tokens


def test_an_idle_worker_sends_heartbeats(sglang: Stub) -> None:
    with subscribed(sglang) as batches:
        number = next_with_events(batches).sequence_number
        beats = [next(batches) for _ in range(2)]
    assert all(beat.load.load_only and not beat.events for beat in beats)
    assert {beat.sequence_number for beat in beats} == {number}
    assert beats[0].load.sample < beats[1].load.sample


def test_loads_come_at_once_to_subscribers_that_take_them_before_the_first_batch(
    start_server: Callable[..., ServerProcess],
) -> None:
    """The engine stands still, so the snapshot never comes, and the records say how long the engine has been silent."""
    server = start_server()
    server.wait_until_ready()
    with sglang_stub(server) as sglang:
        call = sglang.Generate(ask(Script.STICK))
        with subscribed(sglang, loads_at_once=True) as batches:
            next(batch for batch in batches if batch.load.engine_silence_ms > 1000)  # the request has stopped it
        with subscribed(sglang, loads_at_once=True) as batches:
            taken = [next(batches) for _ in range(4)]
        assert {batch.sequence_number for batch in taken} == {0}
        assert taken[0].load.load_only
        assert taken[-1].load.engine_silence_ms > 0
        call.cancel()


def test_a_server_that_stops_ends_its_streams(start_server: Callable[..., ServerProcess]) -> None:
    server = start_server()
    server.wait_until_ready()
    with sglang_stub(server) as sglang, subscribed(sglang) as batches:
        next(batches)
        server.interrupt()
        with pytest.raises(grpc.RpcError) as caught:
            list(batches)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert server.wait_for_exit() == 0
