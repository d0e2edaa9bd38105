"""gRPC connections whose clients stop in the middle of something, ping too often or hold many streams."""

from __future__ import annotations

import asyncio
import contextlib
import struct
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from http_calls import until
from played_link import PlayedLink
from server_process import PATIENCE_S, ServerProcess, ids_request

from jaxsgl.config.engine import EngineConfig, Limits
from jaxsgl.config.server import ServerConfig
from jaxsgl.frontend.access import Access
from jaxsgl.frontend.engines.replicas import Replicas
from jaxsgl.frontend.generation import FrontEnd, Generator, ServedModel
from jaxsgl.frontend.grpc.limits import MAX_HELD_PER_CONNECTION, Timeouts, connection_options
from jaxsgl.frontend.grpc.server import GrpcServer
from jaxsgl.frontend.metrics.measurements import Metrics
from jaxsgl.frontend.profiles import Profiles
from jaxsgl.frontend.proto import jaxsgl_pb2 as pb
from jaxsgl.frontend.proto import jaxsgl_pb2_grpc as pb_grpc
from jaxsgl.messages.replies import EngineInfo, Replies, Reply
from jaxsgl.requests.request import FinishReason, Request
from jaxsgl.text.tokenizer import load_tokenizer
from tests.grids import daily

SHORT = Timeouts(handshake_s=0.3, idle_s=0.3, message_s=0.3)
SLACK_S = 15.0
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS, PING, GOAWAY = 4, 6, 7  # kinds of HTTP/2 frames


class Recorder:
    """Passes connections on to `address` and keeps what clients send."""

    def __init__(self, address: str) -> None:
        self._address = address
        self.sent: list[bytearray] = []

    @contextlib.asynccontextmanager
    async def passing_on(self) -> AsyncIterator[str]:
        """Yields the address to call."""
        server = await asyncio.start_server(self._pass_on, "127.0.0.1", 0)
        async with server:
            yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"

    async def _pass_on(self, client: asyncio.StreamReader, answer: asyncio.StreamWriter) -> None:
        of_this = bytearray()
        self.sent.append(of_this)
        server, ask = await asyncio.open_connection(*self._address.split(":"))

        async def copy(source: asyncio.StreamReader, sink: asyncio.StreamWriter, kept: bytearray) -> None:
            with contextlib.suppress(ConnectionError):
                while some := await source.read(1 << 16):
                    kept += some
                    sink.write(some)
            sink.close()

        await asyncio.gather(copy(client, ask, of_this), copy(server, answer, bytearray()))


@contextlib.asynccontextmanager
async def serving(link: PlayedLink, timeouts: Timeouts, folder: str) -> AsyncIterator[str]:
    """Yields the address of a gRPC server in this process, whose engine the test plays."""
    metrics = Metrics(lambda: link.load)
    config = ServerConfig(grpc_port=0)
    with ThreadPoolExecutor(1) as threads:
        engine = Replicas([link])
        generator = Generator(engine, threads, metrics, timeout_s=PATIENCE_S)
        info = EngineInfo("m", "FakeForCausalLM", "float32", Limits(1000, 200, 160), (1,), 16, 8, "xla", "cpu", 1, 1, 0)
        generator.serve(ServedModel(info, load_tokenizer(folder)))
        front_end = FrontEnd(config, Access(config), engine, generator, metrics, Profiles(config, engine))
        server = GrpcServer(front_end, None, timeouts)
        try:
            async with asyncio.timeout(PATIENCE_S):
                yield await server.start()
        finally:
            await server.stop()


async def bytes_until_closed(address: str, sent: bytes) -> bytes:
    """Sends, is silent then, and returns what comes until the server closes the connection."""
    reader, writer = await asyncio.open_connection(*address.split(":"))
    got = bytearray()
    try:
        async with asyncio.timeout(SLACK_S):
            with contextlib.suppress(ConnectionError):
                writer.write(sent)
                while some := await reader.read(1 << 16):
                    got += some
    finally:
        writer.close()
    return bytes(got)


def frame(kind: int, payload: bytes = b"", flags: int = 0) -> bytes:
    return struct.pack(">I", len(payload))[1:] + bytes((kind, flags)) + bytes(4) + payload


def kinds_of(frames: bytes) -> list[int]:
    kinds = []
    while frames:
        kinds.append(frames[3])
        frames = frames[9 + int.from_bytes(frames[:3]) :]
    return kinds


def test_a_client_that_falls_silent_after_any_byte_loses_its_connection(model_folder: str) -> None:
    async def scenario() -> None:
        async with serving(PlayedLink(), SHORT, model_folder) as address:
            recorder = Recorder(address)
            async with recorder.passing_on() as passing, grpc.aio.insecure_channel(passing) as channel:
                await health_pb2_grpc.HealthStub(channel).Check(
                    health_pb2.HealthCheckRequest(service="jaxsgl.v1.Jaxsgl")
                )
            (sent,) = recorder.sent
            assert len(sent) > 300
            lengths = {*daily(range(len(sent) + 1), every=10), len(sent) - 1, len(sent)}
            await asyncio.gather(*(bytes_until_closed(address, bytes(sent[:length])) for length in lengths))

    asyncio.run(scenario())


@pytest.mark.parametrize("method", ["GetModelInfo", "Generate"])
def test_a_call_without_its_message_ends(model_folder: str, method: str) -> None:
    async def scenario() -> None:
        async with serving(PlayedLink(), SHORT, model_folder) as address, grpc.aio.insecure_channel(address) as channel:
            call = channel.stream_stream(f"/jaxsgl.v1.Jaxsgl/{method}")()
            assert await call.code() == grpc.StatusCode.DEADLINE_EXCEEDED
            assert "has not come within 0.3 s" in (await call.details() or "")
            empty = channel.stream_stream(f"/jaxsgl.v1.Jaxsgl/{method}")()
            await empty.done_writing()
            assert await empty.code() == grpc.StatusCode.INVALID_ARGUMENT

    asyncio.run(scenario())


def test_a_client_that_pings_without_end_loses_its_connection(model_folder: str) -> None:
    async def scenario() -> bytes:
        async with serving(PlayedLink(), Timeouts(), model_folder) as address:
            start = PREFACE + frame(SETTINGS) + frame(SETTINGS, flags=1)
            return await bytes_until_closed(address, start + 20 * frame(PING, bytes(8)))

    assert GOAWAY in kinds_of(asyncio.run(scenario()))


def test_a_connection_that_is_too_old_finishes_its_calls(model_folder: str) -> None:
    async def scenario() -> None:
        link = PlayedLink()
        async with serving(link, Timeouts(age_s=0.3), model_folder) as address:
            recorder = Recorder(address)
            async with recorder.passing_on() as passing, grpc.aio.insecure_channel(passing) as channel:
                call = pb_grpc.JaxsglStub(channel).Generate(ids_request(5, stream=False))
                await until(lambda: any(isinstance(message, Request) for message in link.sent))
                while len(recorder.sent) < 3:  # the client takes new connections meanwhile
                    await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
                    await asyncio.sleep(0.01)
                (request,) = (message for message in link.sent if isinstance(message, Request))
                link.receive(Replies([Reply(request.request_id, (5,), FinishReason.LENGTH)]))
                assert (await call.read()).finish_reason == pb.FINISH_REASON_LENGTH

    asyncio.run(scenario())


def test_an_old_connection_has_as_long_as_a_request_may_take() -> None:
    config = ServerConfig(EngineConfig(max_queued_requests=100, max_running_requests=20), request_timeout_s=7200.0)
    options = dict(connection_options(config, 50, Timeouts()))
    assert options["grpc.max_connection_age_grace_ms"] > 7_200_000
    assert options["grpc.max_concurrent_streams"] > 120, "all requests of a gateway come over one connection"
    assert options["grpc.max_allowed_incoming_connections"] == 50
    for timeout_s in (1e9, float("inf")):
        endless = dict(connection_options(ServerConfig(request_timeout_s=timeout_s), 50, Timeouts()))
        assert endless["grpc.max_connection_age_grace_ms"] == 2**31 - 1


def test_limits_beyond_grpcs_largest_number_are_that_number() -> None:
    config = ServerConfig(EngineConfig(max_queued_requests=3_000_000_000), max_request_bytes=3_000_000_000)
    options = dict(connection_options(config, 50, Timeouts()))
    assert options["grpc.max_concurrent_streams"] == options["grpc.max_receive_message_length"] == 2**31 - 1


def test_one_connection_holds_few_endless_calls(server: ServerProcess) -> None:
    """More of them are refused at once, and one that ends makes room for another."""
    most = MAX_HELD_PER_CONNECTION

    async def scenario() -> None:
        async with asyncio.timeout(PATIENCE_S), grpc.aio.insecure_channel(server.address) as channel:
            watch = health_pb2_grpc.HealthStub(channel).Watch
            reflect = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo
            watches = [watch(health_pb2.HealthCheckRequest()) for _ in range(most)]
            for call in watches:
                assert (await call.read()).status == health_pb2.HealthCheckResponse.SERVING
            reflections = [reflect() for _ in range(most)]
            for call in reflections:
                await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
                await call.read()
            for refused in (watch(health_pb2.HealthCheckRequest()), reflect()):
                assert await refused.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
                assert f"holds {most} calls" in (await refused.details() or "")
            assert await pb_grpc.JaxsglStub(channel).GetModelInfo(pb.GetModelInfoRequest())
            watches[0].cancel()
            accepted = False
            while not accepted:  # as soon as the server has noticed
                with contextlib.suppress(grpc.aio.AioRpcError):
                    accepted = bool(await watch(health_pb2.HealthCheckRequest()).read())

    asyncio.run(scenario())
