"""Limits of what a client may use: time, room in the queue, memory for replies that it doesn't read."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest
from fake_engine_process import Script
from http_calls import connect, error_of, generate_body, report
from played_link import PlayedLink
from server_process import PATIENCE_S, ServerProcess, ids_request, wait_for

from jaxsgl.errors import Overloaded, TimedOut
from jaxsgl.frontend.grpc.interceptors import answers_errors, write
from jaxsgl.frontend.proto import jaxsgl_pb2_grpc as pb_grpc
from jaxsgl.messages.orders import Abort, ToEngine
from jaxsgl.messages.replies import Replies, Reply
from jaxsgl.requests.request import FinishReason, Request, SamplingParams


@pytest.fixture(scope="module")
def hurried(ids_folder: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server that gives each request 0.3 s."""
    server = ServerProcess(tmp_path_factory.mktemp("hurried"), ids_folder, "--request-timeout-s", "0.3")
    server.wait_until_ready()
    yield server
    server.end()


def test_a_request_that_takes_too_long_ends_over_http(hurried: ServerProcess) -> None:
    with connect(hurried) as http:
        for stream in (False, True):
            response = http.post("/generate", json=generate_body(Script.HANG, stream=stream))
            assert response.status_code == 504
            assert "--request-timeout-s" in error_of(response)["message"]
        wait_for(lambda: report(http)[0] == 0, "abort of what took too long")


def test_a_stream_that_takes_too_long_keeps_what_it_has(hurried: ServerProcess) -> None:
    with connect(hurried) as http:
        body = generate_body(Script.FOREVER, stream=True, max_new_tokens=150)
        text = http.post("/generate", json=body).text
    first, *_, last = [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line]
    assert first["output_ids"]
    assert "took longer than 0.3 s" in last["error"]["message"]


def test_a_request_that_takes_too_long_ends_over_grpc(hurried: ServerProcess) -> None:
    with hurried.stub() as stub:
        for streamed in (False, True):
            with pytest.raises(grpc.RpcError) as caught:
                list(stub.Generate(ids_request(Script.HANG, stream=streamed)))
            assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
            assert "--request-timeout-s" in caught.value.details()


def test_a_grpc_deadline_aborts_the_request(server: ServerProcess, stub: pb_grpc.JaxsglStub) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        list(stub.Generate(ids_request(Script.HANG), timeout=0.2))
    assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    with connect(server) as http:
        wait_for(lambda: report(http)[0] == 0, "abort")


def test_a_full_queue_tells_grpc_clients_when_to_try_again(stub: pb_grpc.JaxsglStub) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        list(stub.Generate(ids_request(Script.REFUSE, 1)))
    assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert ("retry-after", "1") in [tuple(entry) for entry in caught.value.trailing_metadata()]


def test_a_large_grpc_message_is_refused(start_server: Callable[..., ServerProcess]) -> None:
    server = start_server("--max-request-bytes", "2000")
    server.wait_until_ready()
    with server.stub() as stub, pytest.raises(grpc.RpcError) as caught:
        list(stub.Generate(ids_request(*[500] * 2000)))
    assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED


def test_no_grpc_call_of_thousands_at_once_is_cancelled(server: ServerProcess) -> None:
    """The server stands still while they come, so that all of them wait for its event loop."""
    request = ids_request(*[500] * 3, stream=False, max_tokens=1)

    async def code_of(call: Any) -> grpc.StatusCode:
        with contextlib.suppress(grpc.aio.AioRpcError):  # its code is looked at
            await call.read()
        code: grpc.StatusCode = await call.code()
        return code

    async def codes() -> Counter[grpc.StatusCode]:
        async with asyncio.timeout(PATIENCE_S), grpc.aio.insecure_channel(server.address) as channel:
            await channel.channel_ready()
            server.process.send_signal(signal.SIGSTOP)
            try:
                generate: Any = pb_grpc.JaxsglStub(channel).Generate
                calls = [generate(request) for _ in range(2000)]
                await asyncio.sleep(0.5)  # they are on their way
            finally:
                server.process.send_signal(signal.SIGCONT)
            return Counter(await asyncio.gather(*(code_of(call) for call in calls)))

    assert asyncio.run(codes()) == {grpc.StatusCode.OK: 2000}


class Engine:
    """An engine that replies as the test says."""

    def __init__(self, max_unread: int) -> None:
        self.link = PlayedLink(max_unread)
        self.link.accept()

    def reply(self, engine_id: str, finish_reason: FinishReason | None = None) -> None:
        self.link.receive(Replies([Reply(engine_id, (5,), finish_reason)]))

    @property
    def aborts(self) -> list[ToEngine]:
        return [message for message in self.link.sent if isinstance(message, Abort)]


def test_replies_that_are_not_read_end_their_request() -> None:
    async def scenario() -> None:
        engine = Engine(max_unread=3)
        with engine.link.open(Request("r", [1], SamplingParams())) as stream:
            for _ in range(3):
                engine.reply(stream.engine_id)
            assert len(await stream.next()) == 3, "reading makes room"
            for _ in range(100):
                engine.reply(stream.engine_id)
            assert engine.aborts == [Abort(stream.engine_id)]
            with pytest.raises(Overloaded, match="3 replies unread"):
                await stream.next()
        assert engine.aborts == [Abort(stream.engine_id)]

    asyncio.run(scenario())


def test_replies_from_before_a_timeout_are_still_read() -> None:
    async def scenario() -> None:
        engine = Engine(max_unread=3)
        with engine.link.open(Request("r", [1], SamplingParams())) as stream:
            engine.reply(stream.engine_id)
            stream.fail(TimedOut("too late"))
            engine.reply(stream.engine_id)
            assert len(await stream.next()) == 1
            with pytest.raises(TimedOut):
                await stream.next()
        assert engine.aborts == [Abort(stream.engine_id)]

    asyncio.run(scenario())


def test_a_request_that_ended_in_time_is_not_too_late() -> None:
    async def scenario() -> None:
        engine = Engine(max_unread=3)
        with engine.link.open(Request("r", [1], SamplingParams())) as stream:
            engine.reply(stream.engine_id, FinishReason.STOP)
            stream.fail(TimedOut("too late"))
            (reply,) = await stream.next()
            assert reply.finish_reason is FinishReason.STOP
        assert not engine.aborts

    asyncio.run(scenario())


class Endless:
    """A servicer that writes until its client is too slow."""

    def __init__(self) -> None:
        self.num_written = 0

    @answers_errors
    async def stream(self, request: bytes, context: Any) -> None:
        while True:
            await write(context, b"x" * 10_000, stall_s=0.2)
            self.num_written += 1


def test_a_grpc_client_that_does_not_read_is_cut_off() -> None:
    async def scenario() -> None:
        endless = Endless()
        server = grpc.aio.server()
        handler = grpc.unary_stream_rpc_method_handler(endless.stream)
        server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("a.B", {"Stream": handler})])
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        async with asyncio.timeout(PATIENCE_S), grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            call = channel.unary_stream("/a.B/Stream")(b"")
            await call.read()
            written = -1
            while written != endless.num_written:
                written = endless.num_written
                await asyncio.sleep(0.5)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                while await call.read() is not grpc.aio.EOF:
                    pass
            assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
            assert "read nothing" in (caught.value.details() or "")
        await server.stop(None)

    asyncio.run(scenario())
