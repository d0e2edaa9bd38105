"""Clients that leave: nothing of their calls is left behind, in the front end or in the engine."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import random
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import grpc
import pytest
from fake_engine_process import Script
from server_process import PATIENCE_S, ROOT, ids_request

from jaxsgl.config.engine import EngineConfig
from jaxsgl.config.server import ServerConfig
from jaxsgl.frontend.engines.replicas import Replicas
from jaxsgl.frontend.proto import jaxsgl_pb2_grpc as pb_grpc
from jaxsgl.frontend.server import Server

FAKE_ENGINE = [sys.executable, str(Path(__file__).parent / "fake_engine_process.py")]


@pytest.fixture(autouse=True)
def import_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fake engine process imports jaxsgl too."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.01)


async def leave(stub: pb_grpc.JaxsglStub, number: int, rng: random.Random) -> None:
    """Leaves a call before, at or after its first replies."""
    script = Script.HANG if number % 4 == 0 else Script.FOREVER
    call = stub.Generate(ids_request(script, 5, request_id=f"r{number}", stream=number % 3 != 0))
    if script == Script.FOREVER and number % 3 != 0:
        for _ in range(rng.randrange(3)):
            await call.read()
    else:
        await asyncio.sleep(rng.random() * 0.05)
    call.cancel()


@contextlib.asynccontextmanager
async def serving(model: Path) -> AsyncIterator[tuple[Replicas, str]]:
    """A server in this process, whose tables can be looked at; and its address."""
    server = Server(ServerConfig(EngineConfig(model=str(model)), port=0, grpc_port=0), FAKE_ENGINE)
    try:
        async with asyncio.timeout(PATIENCE_S):
            yield server.engine, (await server.start()).grpc
    finally:
        await server.close()


def test_two_hundred_disconnects_leave_nothing_behind(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        rng = random.Random(0)
        async with serving(tmp_path) as (link, address), grpc.aio.insecure_channel(address) as channel:
            stub = pb_grpc.JaxsglStub(channel)
            for start in range(0, 200, 20):
                await asyncio.gather(*(leave(stub, start + i, rng) for i in range(20)))
            await until(lambda: link.num_open == 0)
            assert not link.links[0]._streams
            assert not link.links[0]._by_request_id
            for reports in itertools.count(1):
                call = stub.Generate(ids_request(Script.REPORT, stream=False, ignore_eos=True, max_tokens=3))
                running, seen, aborts = (await call.read()).token_ids
                if running == 0 and aborts == seen - reports:
                    break  # every request but the reports was aborted
            assert seen > 50, "the test wants calls that reach the engine"

    asyncio.run(scenario())
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_connection_that_breaks_aborts_its_calls(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as (link, address):
            channel = grpc.aio.insecure_channel(address)
            calls = [pb_grpc.JaxsglStub(channel).Generate(ids_request(Script.HANG)) for _ in range(10)]
            await until(lambda: link.num_open == len(calls))
            await channel.close()
            await until(lambda: link.num_open == 0)

    asyncio.run(scenario())
