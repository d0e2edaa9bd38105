"""Memory of the front end per open connection and stream."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import grpc
from fake_engine_process import Script
from http_calls import connect, generate_body, open_stream, report
from server_process import PATIENCE_S, ServerProcess, ids_request

from jaxsgl.frontend.proto import jaxsgl_pb2_grpc as pb_grpc
from tests.grids import count

FEW, MANY = 100, count(500, 4000)  # open ones at the first look at the memory and at the second
AT_ONCE = 50
MAX_KIB = {"idle connection": 24, "http stream": 64, "grpc stream": 48}  # of each

Opened = tuple[object, Callable[[], object]]  # what to keep, and how to close it


def resident_kib(server: ServerProcess) -> int:
    """Memory of the front-end process."""
    lines = Path(f"/proc/{server.process.pid}/status").read_text().splitlines()
    (kib,) = (line.split()[1] for line in lines if line.startswith("VmRSS:"))
    return int(kib)


def test_connections_and_streams_take_little_memory(start_server: Callable[..., ServerProcess]) -> None:
    server = start_server("--log-level", "info")  # of its own: memory that another test has freed would be used first
    server.wait_until_ready()
    host, _, port = server.http_address.rpartition(":")

    async def scenario() -> dict[str, float]:
        async with asyncio.timeout(PATIENCE_S), grpc.aio.insecure_channel(server.address) as channel:
            generate = pb_grpc.JaxsglStub(channel).Generate

            async def open_idle() -> Opened:
                reader, writer = await asyncio.open_connection(host, int(port))
                writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
                await reader.readuntil(b"}")
                return (reader, writer), writer.close

            async def open_http() -> Opened:
                reader, writer = await open_stream(server.http_address, generate_body(Script.PAUSE, stream=True))
                await reader.readuntil(b"data: ")
                return (reader, writer), writer.close

            async def open_grpc() -> Opened:
                call = generate(ids_request(Script.PAUSE))
                await call.read()
                return call, call.cancel

            opened: list[Opened] = []

            async def kib_of(open_one: Callable[[], Awaitable[Opened]]) -> float:
                """Opens some, then more, and returns the memory that each of the latter takes. All stay open."""
                used = []
                for number in (FEW, MANY - FEW):
                    for _ in range(number // AT_ONCE):
                        opened.extend(await asyncio.gather(*(open_one() for _ in range(AT_ONCE))))
                    used.append(resident_kib(server))
                return (used[1] - used[0]) / (MANY - FEW)

            try:
                kinds = {"idle connection": open_idle, "http stream": open_http, "grpc stream": open_grpc}
                taken = {name: await kib_of(open_one) for name, open_one in kinds.items()}
                with connect(server) as http:
                    running, _, _ = await asyncio.to_thread(report, http)
                assert running == 2 * MANY
                return taken
            finally:
                for _, close in opened:
                    close()
                await asyncio.sleep(0)  # the transports close

    taken = asyncio.run(scenario())
    assert all(kib < MAX_KIB[name] for name, kib in taken.items()), taken
