"""Clients that leave: nothing of their calls stays behind, in the front end or in the engine."""

from __future__ import annotations

import asyncio
import random
import sys
from pathlib import Path

import grpc
from fake_engine_process import Script
from server_process import PATIENCE_S, ids_request

from jaxsgl.config import EngineConfig, ServerConfig
from jaxsgl.frontend.proto import jaxsgl_pb2_grpc as pb_grpc
from jaxsgl.frontend.server import Server

FAKE_ENGINE = [sys.executable, str(Path(__file__).parent / "fake_engine_process.py")]


async def until(condition: object, what: str) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():  # type: ignore[operator]
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


def test_two_hundred_disconnects_leave_nothing_behind(tmp_path: Path) -> None:
    async def scenario() -> None:
        server = Server(ServerConfig(EngineConfig(model=str(tmp_path)), grpc_port=0), FAKE_ENGINE)
        address = await server._listen()
        await server._supervisor.start(server._client.deliver)
        server._generator.serve(await server._load_model())
        client, rng = server._client, random.Random(0)
        async with grpc.aio.insecure_channel(address) as channel:
            stub = pb_grpc.JaxsglStub(channel)
            for start in range(0, 200, 20):
                await asyncio.gather(*(leave(stub, start + i, rng) for i in range(20)))
            await until(lambda: client.num_open == 0, "end of all calls")
            assert not client._streams
            assert not client._by_request_id
            call = stub.Generate(ids_request(Script.REPORT, stream=False, ignore_eos=True, max_tokens=3))
            running, seen, aborts = (await call.read()).token_ids
            assert running == 0
            assert aborts == seen - 1, "all but the report were aborted"
            assert seen > 50, "the test wants calls that reach the engine"
        await server.close()

    asyncio.run(scenario())


def test_a_connection_that_breaks_aborts_its_calls(tmp_path: Path) -> None:
    async def scenario() -> None:
        server = Server(ServerConfig(EngineConfig(model=str(tmp_path)), grpc_port=0), FAKE_ENGINE)
        address = await server._listen()
        await server._supervisor.start(server._client.deliver)
        server._generator.serve(await server._load_model())
        client = server._client
        channel = grpc.aio.insecure_channel(address)
        calls = [pb_grpc.JaxsglStub(channel).Generate(ids_request(Script.HANG)) for _ in range(10)]
        await until(lambda: client.num_open == len(calls), "open calls")
        await channel.close()
        await until(lambda: client.num_open == 0, "end of all calls")
        await server.close()

    asyncio.run(scenario())
