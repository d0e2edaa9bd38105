"""Open HTTP streams: many at once, clients that leave, clients that don't read."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import random
import sys
from collections.abc import AsyncGenerator, AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from fake_engine_process import Script
from fastapi import FastAPI
from http_calls import events, generate_body, open_stream, until
from server_process import PATIENCE_S, ROOT, ServerProcess
from starlette.responses import Response

from jaxsgl.config.engine import EngineConfig
from jaxsgl.config.server import ServerConfig
from jaxsgl.errors import InvalidRequest
from jaxsgl.frontend.engines.replicas import Replicas
from jaxsgl.frontend.http import errors
from jaxsgl.frontend.http.calls import EventStream, event
from jaxsgl.frontend.http.connection import Connection
from jaxsgl.frontend.server import Server

FAKE_ENGINE = [sys.executable, str(Path(__file__).parent / "fake_engine_process.py")]


@contextlib.asynccontextmanager
async def serving(model: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[Replicas, str]]:
    """Yields the engine links of a server in this process, so that its tables can be read, and the HTTP address."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))  # the fake engine process imports jaxsgl too
    server = Server(ServerConfig(EngineConfig(model=str(model)), port=0, grpc_port=0), FAKE_ENGINE)
    try:
        async with asyncio.timeout(PATIENCE_S):
            yield server.engine, (await server.start()).http
    finally:
        await server.close()


def test_sixty_four_streams_each_get_every_token_once_and_in_order(server: ServerProcess) -> None:
    async def stream(http: httpx.AsyncClient, number: int) -> None:
        prompt = [100 + number, 200 + number, 300 + number]
        wanted = list(itertools.islice(itertools.cycle(prompt), 80))
        response = await http.post("/generate", json=generate_body(*prompt, stream=True, max_new_tokens=80))
        chunks = events(response.text)
        lengths = [len(chunk["output_ids"]) for chunk in chunks]
        assert lengths == sorted(set(lengths)), "each event brings something new"
        assert all(chunk["output_ids"] == wanted[: len(chunk["output_ids"])] for chunk in chunks)
        assert chunks[-1]["output_ids"] == wanted

    async def scenario() -> None:
        limits = httpx.Limits(max_connections=64)
        url = f"http://{server.http_address}"
        async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S, limits=limits) as http:
            await asyncio.gather(*(stream(http, number) for number in range(64)))

    asyncio.run(scenario())


async def leave(address: str, number: int, rng: random.Random) -> None:
    """Sends a request and leaves before, at or after its first events."""
    script = Script.HANG if number % 4 == 0 else Script.FOREVER
    reader, writer = await open_stream(address, generate_body(script, 5, stream=number % 3 != 0))
    if script == Script.FOREVER and number % 3 != 0:
        for _ in range(rng.randrange(10)):
            await reader.readline()
    else:
        await asyncio.sleep(rng.random() * 0.05)
    writer.transport.abort() if number % 2 else writer.close()


def test_two_hundred_disconnects_leave_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        rng = random.Random(0)
        async with serving(tmp_path, monkeypatch) as (engine, address):
            for start in range(0, 200, 20):
                await asyncio.gather(*(leave(address, start + i, rng) for i in range(20)))
            await until(lambda: engine.num_open == 0)
            assert not engine.links[0]._streams
            assert not engine.links[0]._by_request_id
            async with httpx.AsyncClient(base_url=f"http://{address}", timeout=PATIENCE_S) as http:
                for reports in itertools.count(1):
                    body = generate_body(Script.REPORT, ignore_eos=True, max_new_tokens=3)
                    running, seen, aborts = (await http.post("/generate", json=body)).json()["output_ids"]
                    if running == 0 and aborts == seen - reports:
                        break  # every request but the reports was aborted
            assert seen > 50, "the test wants requests that reach the engine"

    asyncio.run(scenario())
    # gRPC's poller serves all loops of a process, and complains in this one of a loop that an earlier test has closed.
    logged = [record for record in caplog.records if "PollerCompletionQueue" not in record.getMessage()]
    assert not [record for record in logged if record.levelno >= logging.WARNING]


class Hurried(Connection):
    head_s = 0.2
    stall_s = 0.2


class Endpoint:
    """Endpoints for these tests, with large answers."""

    def __init__(self) -> None:
        self.num_made = 0
        self.closed = False
        self.app = FastAPI()
        errors.add_handlers(self.app)
        self.app.get("/endless")(self.endless)
        self.app.get("/breaks")(self.breaks)
        self.app.get("/large")(self.large)

    async def endless(self) -> EventStream:
        return EventStream(self.many())

    async def many(self) -> AsyncGenerator[bytes, None]:
        try:
            while True:
                self.num_made += 1
                yield event(b"x" * 1000)
                await asyncio.sleep(0)
        finally:
            self.closed = True

    async def large(self) -> Response:
        return Response(b"x" * (64 << 20))

    async def breaks(self) -> EventStream:
        async def few() -> AsyncGenerator[bytes, None]:
            yield event(b"1")
            raise InvalidRequest("no more")

        return EventStream(few())

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[int]:
        options: dict[str, Any] = {"lifespan": "off", "log_config": None, "access_log": False}
        config = uvicorn.Config(self.app, port=0, http=Hurried, timeout_graceful_shutdown=1, **options)
        server = uvicorn.Server(config)
        running = asyncio.create_task(server._serve())
        await until(lambda: server.started)
        try:
            yield server.servers[0].sockets[0].getsockname()[1]
        finally:
            server.should_exit = True
            await running


def test_a_client_that_does_not_read_stops_the_stream_and_is_cut_off(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        endpoint = Endpoint()
        async with asyncio.timeout(PATIENCE_S), endpoint.serving() as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1000)
            writer.write(b"GET /endless HTTP/1.1\r\nhost: x\r\n\r\n")
            await reader.readline()
            reader._transport.pause_reading()  # type: ignore[attr-defined]
            await until(lambda: endpoint.closed)
            made = endpoint.num_made
            assert made * 1000 < 64 << 20, "what the sockets of both sides hold, and no more"
            writer.close()

    asyncio.run(scenario())
    assert "has not read" in caplog.text
    assert "Exception" not in caplog.text


def test_a_client_that_leaves_closes_the_stream_at_once() -> None:
    async def scenario() -> None:
        endpoint = Endpoint()
        async with asyncio.timeout(PATIENCE_S), endpoint.serving() as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET /endless HTTP/1.1\r\nhost: x\r\n\r\n")
            await reader.readline()
            writer.close()
            await until(lambda: endpoint.closed)

    asyncio.run(scenario())


def test_an_error_in_the_middle_is_the_last_event() -> None:
    async def scenario() -> str:
        endpoint = Endpoint()
        async with endpoint.serving() as port, httpx.AsyncClient() as http:
            return (await http.get(f"http://127.0.0.1:{port}/breaks")).text

    first, last = [line.removeprefix("data: ") for line in asyncio.run(scenario()).splitlines() if line]
    assert first == "1"
    assert json.loads(last)["error"]["message"] == "no more"


async def lost(port: int, sent: bytes, pause: bool = False) -> bytes:
    """Sends `sent` and returns what arrives until the server ends the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1000)
    writer.write(sent)
    if pause:
        await reader.readline()
        reader._transport.pause_reading()  # type: ignore[attr-defined]
        await asyncio.sleep(1.0)
        reader._transport.resume_reading()  # type: ignore[attr-defined]
    got = b""
    with contextlib.suppress(ConnectionError):
        while some := await reader.read(1 << 20):
            got += some
    writer.close()
    return got


def test_a_client_that_reads_nothing_of_a_whole_answer_loses_its_connection() -> None:
    async def scenario() -> None:
        async with asyncio.timeout(PATIENCE_S), Endpoint().serving() as port:
            for head in (b"", b"connection: close\r\n"):
                got = await lost(port, b"GET /large HTTP/1.1\r\nhost: x\r\n" + head + b"\r\n", pause=True)
                assert len(got) < 64 << 20

    asyncio.run(scenario())


def test_heads_are_bounded_in_time_and_size() -> None:
    async def scenario() -> None:
        async with asyncio.timeout(PATIENCE_S), Endpoint().serving() as port:
            for sent in (b"", b"GET /breaks HTTP/1.1\r\nhost: x\r\n"):
                assert await lost(port, sent) == b""
            for sent in (b"GET /" + b"x" * 70_000, b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 70_000):
                assert (await lost(port, sent)).startswith(b"HTTP/1.1 431")
            fits = b"GET /breaks HTTP/1.1\r\nhost: x\r\nconnection: close\r\na: " + b"x" * 60_000 + b"\r\n\r\n"
            assert (await lost(port, fits)).startswith(b"HTTP/1.1 200")

    asyncio.run(scenario())
