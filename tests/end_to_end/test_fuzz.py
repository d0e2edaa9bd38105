"""Malformed requests and disconnects against the real engine: none of them leaves anything behind."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from smg_grpc_proto import sglang_scheduler_pb2 as sglang_pb
from smg_grpc_proto import sglang_scheduler_pb2_grpc as sglang_grpc
from smg_grpc_proto.generated import common_pb2

from jaxsgl.frontend.proto import jaxsgl_pb2 as pb
from jaxsgl.frontend.proto import jaxsgl_pb2_grpc as pb_grpc
from jaxsgl.requests.request import SamplingParams
from tests.end_to_end.apis import PATIENCE_S, OwnGrpc
from tests.end_to_end.openai_apis import OpenAIChat, OpenAICompletions
from tests.end_to_end.servers import RunningServer
from tests.end_to_end.sglang_apis import SglangGrpc, SglangHttp
from tests.grids import count
from tests.junk_grpc import ALLOWED, METHODS, some_bytes, status
from tests.junk_http import Junk, exchange, junk_request, request

LONG = 1024  # tokens: sixteen such answers take the whole pool
NO_TRACE_S = 2.0
CLIENTS = 200
MALFORMED = count(300, 1000)
AT_ONCE = 16
QUIET_METHODS = [method for method in METHODS if method.name not in ("StartProfile", "StopProfile")]  # they write files


@pytest.fixture(scope="module")
def channel(shared_server: RunningServer) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(shared_server.address) as channel:
        yield channel


def load(channel: grpc.Channel) -> tuple[int, int, int, int]:
    """Running and queued samples, tokens in use, calls that the front end has open."""
    stub = sglang_grpc.SglangSchedulerStub(channel)
    (now,) = stub.GetLoads(sglang_pb.GetLoadsRequest()).loads
    open_calls = stub.GetServerInfo(sglang_pb.GetServerInfoRequest()).active_requests
    return now.num_running_reqs, now.num_waiting_reqs, now.num_used_tokens, open_calls


def wait_until_idle(channel: grpc.Channel) -> float:
    """Waits until no request is left; returns the seconds that it took."""
    start_s = time.monotonic()
    while (busy := load(channel)) != (0, 0, 0, 0):
        assert time.monotonic() - start_s < PATIENCE_S, busy
        time.sleep(0.02)
    return time.monotonic() - start_s


def check_good_ones(server: RunningServer, channel: grpc.Channel) -> None:
    """Checks that every protocol answers, all rows serve, and after a flush of the prefix cache all pages are free."""
    params = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
    chat = [{"role": "user", "content": "Hello"}]
    with httpx.Client(base_url=f"http://{server.http_address}", timeout=PATIENCE_S) as http:
        assert OpenAIChat(http).ask(chat, params, True).output_tokens == 5
        answers = [api.ask([5, 6, 7], params, True) for api in (OpenAICompletions(http), SglangHttp(http))]
        answers += [api.ask([5, 6, 7], params, True) for api in (OwnGrpc(channel), SglangGrpc(channel))]
        assert [answer.output_tokens for answer in answers] == [5] * 4
        whole_pool = OwnGrpc(channel).ask([5] * (LONG - 8), SamplingParams(n=16, max_tokens=8, ignore_eos=True), False)
        assert whole_pool.output_tokens == 16 * 8
        wait_until_idle(channel)
        flushed = sglang_grpc.SglangSchedulerStub(channel).FlushCache(common_pb2.FlushCacheRequest(timeout_s=60))
        assert flushed.success
    assert metric(server, "jaxsgl:num_cached_tokens") == 0


def metric(server: RunningServer, name: str) -> float:
    text = httpx.get(f"http://{server.http_address}/metrics", timeout=PATIENCE_S).text
    (value,) = re.findall(rf"^{name}{{.*}} (\S+)$", text, re.MULTILINE)
    return float(value)


def test_after_hundreds_of_malformed_requests_good_ones_are_answered_and_no_page_is_lost(
    shared_server: RunningServer, channel: grpc.Channel
) -> None:
    rng = random.Random(6)
    over_http = [(junk_request(rng), rng.random() < 0.2) for _ in range(MALFORMED // 2)]
    methods = [rng.choice(QUIET_METHODS) for _ in range(MALFORMED // 2)]
    over_grpc = [(method, some_bytes(rng, method)) for method in methods]

    async def send_all() -> list[list[int]]:
        places = asyncio.Semaphore(AT_ONCE)

        async def send(junk: Junk, leave: bool) -> list[int]:
            async with places:
                return await exchange(shared_server.http_address, junk, leave)

        return await asyncio.gather(*(send(*each) for each in over_http))

    with ThreadPoolExecutor(AT_ONCE) as pool:
        codes = [pool.submit(status, channel, *each) for each in over_grpc]
        statuses = asyncio.run(send_all())
    assert {code.result() for code in codes} <= ALLOWED
    assert max(max(got, default=0) for got in statuses) < 500
    wait_until_idle(channel)
    check_good_ones(shared_server, channel)


async def leave_http(address: str, number: int) -> None:
    """Leaves in the middle of a stream, or while waiting for a whole answer."""
    stream = number % 3 > 0
    sampling = {"max_new_tokens": LONG, "ignore_eos": True, "n": 1 + number % 2}
    bodies: dict[str, dict[str, Any]] = {
        "/generate": {"input_ids": [5, number], "sampling_params": sampling},
        "/v1/completions": {"prompt": [[6, number], [7]], "max_tokens": LONG, "ignore_eos": True},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": f"{number}"}], "ignore_eos": True},
    }
    path = list(bodies)[number % len(bodies)]
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(request("POST", path, json.dumps(bodies[path] | {"stream": stream}).encode()))
    if stream:
        await reader.readuntil(b"data: ")
    else:
        await asyncio.sleep(0.05)
    if number % 4:
        writer.close()
    else:
        writer.transport.abort()  # a reset instead of an end


async def leave_grpc(address: str, shared: grpc.aio.Channel, number: int) -> None:
    """Leaves by cancelling the call, or by closing the whole connection."""
    async with grpc.aio.insecure_channel(address) if number % 4 == 3 else contextlib.nullcontext(shared) as channel:
        ids = [8, number]
        if number % 2:
            own = pb.SamplingParams(ignore_eos=True, n=1 + number % 3)
            call = pb_grpc.JaxsglStub(channel).Generate(
                pb.GenerateRequest(token_ids=pb.TokenIds(ids=ids), sampling=own, stream=True)
            )
        else:
            sampling = sglang_pb.SamplingParams(ignore_eos=True, temperature=1.0, n=1 + number % 3)
            call = sglang_grpc.SglangSchedulerStub(channel).Generate(
                sglang_pb.GenerateRequest(
                    tokenized=sglang_pb.TokenizedInput(input_ids=ids), sampling_params=sampling, stream=True
                )
            )
        if number % 5:
            await call.read()
        if channel is shared:
            call.cancel()


def open_files(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def test_two_hundred_clients_that_leave_leave_nothing_behind(
    shared_server: RunningServer, channel: grpc.Channel
) -> None:
    """Each leaves after its first tokens, so that all eight rows and a long queue are full all the time."""

    async def leave_all() -> None:
        async with grpc.aio.insecure_channel(shared_server.address) as shared, asyncio.timeout(PATIENCE_S):
            await asyncio.gather(
                *(leave_http(shared_server.http_address, number) for number in range(CLIENTS // 2)),
                *(leave_grpc(shared_server.address, shared, number) for number in range(CLIENTS // 2)),
            )

    wait_until_idle(channel)
    files, aborted = open_files(shared_server.process.pid), metric(shared_server, "sglang:num_aborted_requests_total")
    asyncio.run(leave_all())
    assert wait_until_idle(channel) < NO_TRACE_S
    assert metric(shared_server, "sglang:num_aborted_requests_total") - aborted >= CLIENTS * 0.9, (
        "some left before they came"
    )
    check_good_ones(shared_server, channel)
    assert open_files(shared_server.process.pid) <= files + 2
