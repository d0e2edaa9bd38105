"""HTTP connections whose clients stop in the middle of something, and those past the cap."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import logging
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import uvicorn
from fastapi import FastAPI, Request
from http_calls import connect, generate_body, until
from server_process import PATIENCE_S, ServerProcess
from starlette.responses import Response, StreamingResponse
from tls_files import make_certificate
from uvicorn.server import ServerState

from jaxsgl.config.server import ServerConfig
from jaxsgl.frontend.access import Access
from jaxsgl.frontend.http import acceptor, connection, errors
from jaxsgl.frontend.http.app import HttpServer
from jaxsgl.frontend.http.connection import MAX_HEAD_BYTES, MAX_PIPELINED, Connection
from jaxsgl.frontend.http.middleware import ApiKey, BodyLimit
from tests.grids import daily

LIMIT_S = 0.3  # of every wait in these tests
SLACK_S = 20.0  # for a machine that is busy
BODY = b'{"a": 1}'
POST = b"POST /read HTTP/1.1\r\nhost: x\r\nauthorization: Bearer k\r\ncontent-length: 8\r\n\r\n" + BODY
REFUSED = b"POST /read HTTP/1.1\r\nhost: x\r\ncontent-length: 8\r\n\r\n" + BODY
CHUNKED = b"POST /read HTTP/1.1\r\nhost: x\r\nauthorization: Bearer k\r\ntransfer-encoding: chunked\r\n\r\n"
CHUNKED += b"8\r\n" + BODY + b"\r\n0\r\n\r\n"
UNREAD = b"GET /unread HTTP/1.1\r\nhost: x\r\nauthorization: Bearer k\r\ncontent-length: 8\r\n\r\n" + BODY
UPGRADE = b"GET /unread HTTP/1.1\r\nhost: x\r\nauthorization: Bearer k\r\nupgrade: h2c\r\nconnection: upgrade\r\n\r\n"
WEBSOCKET = "connection: upgrade\r\nupgrade: websocket\r\nsec-websocket-key: dGVzdA=="
JUNK = b"\x16\x03\x01\x02\r\n\r\n"
REQUESTS = {
    "whole body": POST,
    "refused": REFUSED,
    "chunked": CHUNKED,
    "body unread": UNREAD,
    "upgrade": UPGRADE + b"\r\nabc",
    "second request": POST + b"\r\n" + POST,
    "empty lines": b"\r\n" * 4 + POST + b"\r\n" * 4,
    "junk": JUNK,
}


class Hurried(Connection):
    head_s = LIMIT_S
    stall_s = LIMIT_S
    linger_s = LIMIT_S


def new_app() -> FastAPI:
    app = FastAPI()
    errors.add_handlers(app)

    @app.post("/read")
    async def read(request: Request) -> Response:
        return Response(await request.body())

    @app.get("/unread")
    async def unread() -> Response:
        return Response(b"early")

    @app.get("/hang")
    async def hang(request: Request) -> Response:
        while not await request.is_disconnected():
            await asyncio.sleep(0.01)
        return Response()

    @app.get("/large")
    async def large() -> Response:
        return Response(b"x" * (16 << 20))

    @app.get("/stream")
    async def stream() -> Response:
        async def letters() -> AsyncIterator[bytes]:
            for letter in (b"a", b"b", b"c"):
                yield letter

        return StreamingResponse(letters())

    app.add_middleware(BodyLimit, max_bytes=100, max_plain_bytes=100, stall_s=LIMIT_S)
    app.add_middleware(ApiKey, access=Access(ServerConfig(api_key="k")))
    return app


@contextlib.asynccontextmanager
async def serving() -> AsyncIterator[tuple[int, set[Any]]]:
    """Yields the port and the connections of a server in this process."""
    options: dict[str, Any] = {"lifespan": "off", "log_config": None, "ws": "none", "timeout_keep_alive": LIMIT_S}
    server = uvicorn.Server(uvicorn.Config(new_app(), port=0, http=Hurried, timeout_graceful_shutdown=1, **options))
    running = asyncio.create_task(server._serve())
    await until(lambda: server.started)
    try:
        async with asyncio.timeout(PATIENCE_S):
            yield server.servers[0].sockets[0].getsockname()[1], server.server_state.connections
    finally:
        server.should_exit = True
        await running


async def answer_to(port: int, *pieces: bytes, pause_s: float = 0.0) -> bytes:
    """Sends the pieces, is silent then, and returns what comes until the server closes the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    got = b""
    try:
        async with asyncio.timeout(SLACK_S):
            with contextlib.suppress(ConnectionError):
                for piece in pieces:
                    writer.write(piece)
                    await asyncio.sleep(pause_s)
                while some := await reader.read(1 << 16):
                    got += some
    finally:
        writer.close()
    return got


def offsets() -> list[Any]:
    """(request, number of its bytes): by day the ends of requests and one offset in 6, by night all."""
    cases = []
    for name, sent in REQUESTS.items():
        chosen = {*daily(range(len(sent) + 1), every=6), len(sent) - 1, len(sent)}
        cases.append(pytest.param(sent, sorted(chosen), id=name))
    return cases


@pytest.mark.parametrize(("sent", "lengths"), offsets())
def test_a_client_that_falls_silent_after_any_byte_loses_its_connection(sent: bytes, lengths: list[int]) -> None:
    async def scenario() -> None:
        async with serving() as (port, _):
            cuts = [(sent[: length - 1], sent[length - 1 : length]) for length in lengths]
            await asyncio.gather(*(answer_to(port, *pieces, pause_s=LIMIT_S / 6) for pieces in cuts))

    asyncio.run(scenario())


@pytest.mark.parametrize("pause_s", [0.0, LIMIT_S / 6], ids=["at once", "in pieces"])
@pytest.mark.parametrize("wish", ["connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c", WEBSOCKET], ids=["h2", "ws"])
def test_a_request_that_would_change_the_protocol_is_answered_with_its_body(
    wish: str, pause_s: float, caplog: pytest.LogCaptureFixture
) -> None:
    head, _, body = POST.partition(b"\r\n\r\n")
    asks = b"%s\r\n%s\r\n\r\n" % (head, wish.encode())
    chunked = CHUNKED.replace(b"\r\n\r\n", b"\r\n%s\r\n\r\n" % wish.encode(), 1)
    last = asks.replace(b"\r\n", b"\r\nconnection: close\r\n", 1)

    async def scenario() -> bytes:
        async with serving() as (port, _):
            pieces = (asks, body[:3], body[3:], POST, chunked, asks + body + last, body)
            return await answer_to(port, *(pieces if pause_s else [b"".join(pieces)]), pause_s=pause_s)

    got = asyncio.run(scenario())
    assert got.count(b"HTTP/1.1 200") == got.count(BODY) == 5 and got.count(b"HTTP/1.1") == 5
    assert got.count(b"connection: close") == 1
    assert not caplog.records


def test_the_body_of_a_request_that_would_change_the_protocol_is_no_request() -> None:
    async def scenario() -> bytes:
        async with serving() as (port, _):
            head = POST[: -len(BODY)].replace(b"content-length: 8", b"content-length: %d" % len(UNREAD))
            return await answer_to(port, head.replace(b"\r\n", b"\r\n%s\r\n" % WEBSOCKET.encode(), 1) + UNREAD)

    got = asyncio.run(scenario())
    assert got.count(b"HTTP/1.1 ") == 1 and got.endswith(UNREAD)


def test_no_tunnel_is_made() -> None:
    async def scenario() -> bytes:
        async with serving() as (port, _):
            return await answer_to(port, b"CONNECT http://x/unread HTTP/1.1\r\nhost: x\r\n\r\n" + UNREAD)

    got = asyncio.run(scenario())
    assert got.startswith(b"HTTP/1.1 400") and got.count(b"HTTP/1.1 ") == 1
    assert b"this server is no proxy" in got


@pytest.mark.parametrize(
    ("sent", "way_out"),
    [(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"--grpc-port"), (bytes.fromhex("160301020001"), b"--ssl-certfile")],
    ids=["http2", "tls"],
)
def test_a_client_of_another_protocol_is_told_which_port_or_flag_it_wants(sent: bytes, way_out: bytes) -> None:
    async def scenario() -> bytes:
        async with serving() as (port, _):
            return await answer_to(port, sent)

    answer = asyncio.run(scenario())
    assert answer.startswith(b"HTTP/1.1 400 ") and way_out in answer


def test_a_head_that_is_too_large_is_told_so() -> None:
    async def scenario() -> bytes:
        async with serving() as (port, _):
            return await answer_to(
                port, b"GET /unread HTTP/1.1\r\nhost: x\r\ncookie: " + b"a" * MAX_HEAD_BYTES + b"\r\n\r\n"
            )

    head, _, body = asyncio.run(scenario()).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 431 Request Header Fields Too Large")
    error = json.loads(body)["error"]
    assert error["message"] == "the request's head has more than 65536 bytes: send shorter headers"
    assert error["type"] == "invalid_request_error"


def test_a_client_that_leaves_while_a_further_request_waits_ends_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "LEFT_S", 0.05)

    async def scenario() -> None:
        async with serving() as (port, connections):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET /hang HTTP/1.1\r\nhost: x\r\nauthorization: Bearer k\r\n\r\n" + POST)
            await until(lambda: any(each.pipeline for each in connections))
            await asyncio.sleep(0.2)
            assert connections, "it stays as long as its client does"
            writer.close()
            await until(lambda: not connections)

    asyncio.run(scenario())


def test_a_client_of_http_1_0_gets_the_bytes_of_a_stream_alone() -> None:
    async def scenario() -> tuple[bytes, bytes]:
        async with serving() as (port, _):
            head = b"GET /stream HTTP/1.%d\r\nhost: x\r\nauthorization: Bearer k\r\n\r\n"
            return await answer_to(port, head % 0), await answer_to(port, head % 1)

    old, new = asyncio.run(scenario())
    assert b"connection: close" in old and b"transfer-encoding" not in old and old.endswith(b"\r\n\r\nabc")
    assert b"transfer-encoding: chunked" in new and new.endswith(b"1\r\nc\r\n0\r\n\r\n")


@pytest.mark.parametrize("dripping", [b"\r\n", b"a"], ids=["lines", "letters"])
@pytest.mark.parametrize("first", [b"", POST, REFUSED[:-5], UPGRADE], ids=["nothing", "request", "refused", "upgrade"])
def test_a_client_that_sends_a_byte_now_and_then_loses_its_connection(first: bytes, dripping: bytes) -> None:
    async def scenario() -> None:
        async with serving() as (port, _):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            ended = asyncio.create_task(reader.read())
            writer.write(first)
            with contextlib.suppress(ConnectionError):
                async with asyncio.timeout(SLACK_S):
                    while not ended.done():
                        await asyncio.sleep(LIMIT_S / 3)
                        writer.write(dripping)
                    await ended
            writer.close()

    asyncio.run(scenario())


def test_an_answer_before_the_body_arrives_whole_and_ends_the_connection() -> None:
    async def scenario() -> None:
        async with serving() as (port, _):
            head = b"POST /read HTTP/1.1\r\nhost: x\r\ncontent-length: 10000000\r\n\r\n"
            early = await answer_to(port, head, *[b"x" * 100_000] * 20, pause_s=0.001)
            assert early.startswith(b"HTTP/1.1 401")
            assert b"connection: close" in early
            assert early.endswith(b"}}")
            unread = await answer_to(port, UNREAD[:-1])
            assert unread.startswith(b"HTTP/1.1 200")
            assert b"connection: close" in unread

    asyncio.run(scenario())


def test_a_body_that_comes_with_its_head_keeps_the_connection() -> None:
    async def scenario() -> None:
        async with serving() as (port, _):
            got = await answer_to(port, POST, POST, REFUSED, pause_s=LIMIT_S / 3)
            assert [got.count(b"HTTP/1.1 " + status) for status in (b"200", b"401")] == [2, 1]
            assert b"connection: close" not in got

    asyncio.run(scenario())


def test_a_client_that_reads_a_little_now_and_then_loses_its_connection() -> None:
    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        async with serving() as (port, connections):
            with socket.socket() as client:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                client.setblocking(False)
                await loop.sock_connect(client, ("127.0.0.1", port))
                get = b"GET /large HTTP/1.1\r\nhost: x\r\nauthorization: Bearer k\r\n\r\n"
                await loop.sock_sendall(client, get + get)  # the second waits until the first answer is read
                async with asyncio.timeout(SLACK_S):
                    await loop.sock_recv(client, 10)
                    while connections:
                        await loop.sock_recv(client, 10)
                        await asyncio.sleep(LIMIT_S / 3)

    asyncio.run(scenario())


def test_junk_behind_a_request_ends_both() -> None:
    async def scenario() -> bytes:
        async with serving() as (port, _):
            return await answer_to(port, POST + JUNK)

    assert b"HTTP/1.1 400" in asyncio.run(scenario())


def test_a_client_may_not_send_many_requests_ahead() -> None:
    async def scenario() -> bytes:
        async with serving() as (port, _):
            return await answer_to(port, POST * (MAX_PIPELINED + 2))

    got = asyncio.run(scenario())
    assert b"HTTP/1.1 400" in got and b"more than 64 requests wait" in got


def test_past_the_cap_only_probes_are_answered(start_server: Callable[..., ServerProcess]) -> None:
    server = start_server("--max-connections", "5")
    server.wait_until_ready()
    host, _, port = server.http_address.rpartition(":")
    held = [socket.create_connection((host, int(port))) for _ in range(5)]
    for _ in range(50):  # more than there are spare files
        with connect(server) as http:
            assert http.get("/health").headers["connection"] == "close"
    with connect(server) as http:
        refused = http.post("/generate", json=generate_body(5, max_new_tokens=1))
        assert refused.status_code == 503
        assert refused.headers["retry-after"] == "1"
        assert "--max-connections" in refused.text
        assert http.get("/metrics").status_code == 200
    silent = [socket.create_connection((host, int(port))) for _ in range(100)]
    with connect(server) as http:
        assert http.get("/health").status_code == 200
    for client in held + silent:
        client.close()
    with connect(server) as http:
        for _ in range(3):
            assert http.post("/generate", json=generate_body(5, max_new_tokens=1)).status_code in (200, 503)
    assert server.log.count("no room for more HTTP connections") == 1


def test_a_client_that_falls_silent_in_the_tls_handshake_loses_its_connection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(acceptor, "HANDSHAKE_S", LIMIT_S)
    certfile, keyfile = make_certificate(tmp_path)
    config = uvicorn.Config(new_app(), lifespan="off", log_config=None, ws="none")
    config.ssl_certfile, config.ssl_keyfile = certfile, keyfile
    config.load()

    async def scenario() -> None:
        connections: list[Connection] = []
        state = ServerState()

        def new_connection() -> Connection:
            connections.append(Hurried(config, state, app_state={}))
            return connections[-1]

        listening = socket.create_server(("127.0.0.1", 0))
        port = listening.getsockname()[1]
        server = acceptor.Acceptor(listening, config.ssl, new_connection, max_connections=4)
        hello = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"
        await asyncio.gather(*(answer_to(port, hello[:length]) for length in (0, 1, 5, len(hello))))
        context = ssl.create_default_context(cafile=certfile)
        async with httpx.AsyncClient(base_url=f"https://127.0.0.1:{port}", verify=context) as https:
            await until(lambda: len(connections) == 4)
            answers = [
                (await https.get("/unread", headers={"authorization": "Bearer k"})).status_code for _ in range(3)
            ]
            assert answers == [200] * 3, "the four that have ended don't count"
        server.close()

    asyncio.run(scenario())


def test_an_answer_is_owed_until_its_client_has_read_it(caplog: pytest.LogCaptureFixture) -> None:
    get = b"GET /large HTTP/1.1\r\nhost: x\r\nauthorization: Bearer k\r\n\r\n"

    async def scenario() -> None:
        server = HttpServer(new_app(), ServerConfig(port=0), None)
        host, _, port = (await server.start()).rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port), limit=1 << 16)
        assert not server.is_answering
        writer.write(get)
        await reader.read(1)
        assert server.is_answering
        got = 0
        while got < 16 << 20:
            got += len(await reader.read(1 << 20))
        await until(lambda: not server.is_answering)
        writer.write(get)
        await reader.read(1)
        await server.stop()
        writer.close()

    asyncio.run(scenario())
    assert [record.levelname for record in caplog.records if record.levelno >= logging.WARNING] == ["WARNING"]
    assert "cutting 1 HTTP connections" in caplog.text


def test_a_lost_connection_is_not_left_to_the_garbage_collector() -> None:
    def num_left() -> int:  # by type, since isinstance runs properties of other libraries' objects
        return sum(issubclass(type(known), Connection) for known in gc.get_objects())

    async def scenario() -> None:
        async with serving() as (port, connections):
            gc.collect()
            gc.disable()
            before = num_left()
            for _ in range(5):
                await answer_to(port, POST.replace(b"host: x", b"host: x\r\nconnection: close"))
            await until(lambda: not connections)
            await until(lambda: num_left() == before)

    try:
        asyncio.run(scenario())
    finally:
        gc.enable()


def test_a_connection_between_requests_outlasts_what_clients_keep() -> None:
    """Else a request may meet the moment in which the server closes it, and is lost."""

    async def kept_s() -> float:
        server = HttpServer(FastAPI(), ServerConfig(port=0), None)
        return server._server.config.timeout_keep_alive

    of_clients = [httpx.Limits().keepalive_expiry, openai.DEFAULT_CONNECTION_LIMITS.keepalive_expiry, 60.0]  # AWS
    assert asyncio.run(kept_s()) > max(filter(None, of_clients))
