"""Rules of every HTTP endpoint: shapes of errors, ids, limits of bodies."""

from __future__ import annotations

import asyncio
import gzip
import json
import logging
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fake_engine_process import Script
from fastapi import FastAPI
from http_calls import connect, error_of, generate_body, post
from server_process import PATIENCE_S, ServerProcess
from starlette.responses import PlainTextResponse
from starlette.testclient import TestClient

from jaxsgl.frontend.http import errors
from jaxsgl.frontend.http.compressed import PART_BYTES, Gunzip
from jaxsgl.frontend.http.middleware import BodyLimit, RequestIds

JSON = {"content-type": "application/json"}


@pytest.fixture(scope="module")
def http(server: ServerProcess) -> Iterator[httpx.Client]:
    with connect(server) as http:
        yield http


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b'{"text": "a"', "can't be read"),
        (b"", "no JSON object"),
        (b"[1]", "no JSON object"),
        (b"\xff\xfe", "can't be read"),
        (b'{"text": NaN}', "can't be read"),
        (b'{"text": "\\ud800"}', "can't be read"),
        (b'{"sampling_params": {"temperature": ' + b"9" * 5000 + b"}}", ""),
        (b'{"sampling_params": ' + b"[" * 5000 + b"]" * 5000 + b"}", ""),
        (b'{"text": 5}', "text"),
        (b'{"input_ids": ["a", "b", "c", "d", "e"]}', "input_ids"),
        (b'{"text": "a", "sampling_params": {"temperature": "hot"}}', "temperature"),
        (b'{"text": "a", "sampling_params": {"temperature": -1}}', "temperature"),
        (b'{"text": "a", "sampling_params": {"logit_bias": {"\\u00e9": 1}}}', "logit_bias"),
    ],
)
def test_a_malformed_body_is_a_bad_request(http: httpx.Client, body: bytes, words: str) -> None:
    response = http.post("/generate", content=body, headers=JSON)
    assert response.status_code == 400
    assert words in error_of(response)["message"]
    assert error_of(response)["type"] == "invalid_request_error"


GZIP = JSON | {"content-encoding": "gzip"}


def test_a_body_may_be_compressed(http: httpx.Client) -> None:
    body = json.dumps(generate_body(*range(2, 60), max_new_tokens=4) | {"rid": "r" * 200}).encode()
    plain = http.post("/generate", content=body, headers=JSON).json()
    squeezed = gzip.compress(body)
    parts = (squeezed[place : place + 7] for place in range(0, len(squeezed), 7))
    for content, name in ((squeezed, "gzip"), (parts, "gzip"), (squeezed, "GZIP")):
        answer = http.post("/generate", content=content, headers=JSON | {"content-encoding": name})
        assert answer.json()["output_ids"] == plain["output_ids"]
    refused = http.post("/generate", content=squeezed, headers=JSON | {"content-encoding": "br"})
    assert refused.status_code == 400
    assert "it is compressed (content-encoding: br): send it as it is, or in gzip" in error_of(refused)["message"]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"{}", "not what content-encoding says, gzip"),
        (b"", "cut after 0 bytes"),
        (gzip.compress(b'{"input_ids": [5, 6]}', mtime=0)[:-6], "cut after 21 bytes"),
        (gzip.compress(b"{}", mtime=0) + gzip.compress(b"{}", mtime=0), "goes on after the end of its gzip stream"),
        (gzip.compress(b'{"input_ids": 5', mtime=0), "can't be read"),
        (gzip.compress(b"{}", mtime=0), "either text or input_ids"),
    ],
)
def test_a_bad_compressed_body_is_a_bad_request(http: httpx.Client, content: bytes, words: str) -> None:
    response = http.post("/generate", content=content, headers=GZIP)
    assert (response.status_code, words in error_of(response)["message"]) == (400, True), response.text


def test_a_body_that_grows_too_large_is_refused_as_it_grows() -> None:
    read: list[int] = []

    async def whole(scope: Any, receive: Any, send: Any) -> None:
        message = {"more_body": True}
        while message["more_body"]:
            message = await receive()
            read.append(len(message["body"]))
        await PlainTextResponse("read")(scope, receive, send)

    app = FastAPI()
    errors.add_handlers(app)
    app.mount("/", whole)
    app.add_middleware(Gunzip)
    app.add_middleware(BodyLimit, max_bytes=4 * PART_BYTES, max_plain_bytes=100)
    with TestClient(app) as client:
        fits = client.post("/", content=gzip.compress(bytes(4 * PART_BYTES)), headers={"content-encoding": "gzip"})
        assert (fits.text, sum(read), max(read)) == ("read", 4 * PART_BYTES, PART_BYTES)
        read.clear()
        bomb = gzip.compress(bytes(400 * PART_BYTES))
        assert len(bomb) < 4 * PART_BYTES
        response = client.post("/", content=bomb, headers={"content-encoding": "gzip"})
        assert response.status_code == 413
        assert f"has more bytes than the {4 * PART_BYTES} that it may have" in response.json()["error"]["message"]
        assert sum(read) == 4 * PART_BYTES, "no more of it was inflated"


def test_health_answers_head(http: httpx.Client) -> None:
    for path in ("/health", "/ping"):
        response = http.head(path)
        assert (response.status_code, response.content) == (200, b"")
    assert http.get("/health").json() == {"status": "ok"}, "over the same connection"


def test_the_invalid_field_is_named(http: httpx.Client) -> None:
    response = http.post("/generate", json={"text": 5})
    assert str(error_of(response)["param"]).startswith("text")


def test_an_error_does_not_repeat_a_large_body(http: httpx.Client) -> None:
    response = http.post("/generate", json={"text": "a", "sampling_params": {"x" * 100_000: 1}})
    assert response.status_code == 400
    assert len(response.content) < 10_000


def test_errors_name_unknown_paths_and_methods(http: httpx.Client) -> None:
    missing = http.get("/v2/nothing")
    assert missing.status_code == 404
    assert "/v2/nothing" in error_of(missing)["message"]
    wrong = http.get("/generate")
    assert wrong.status_code == 405
    assert "the method GET: send POST" in error_of(wrong)["message"]
    assert wrong.headers["allow"] == "POST"


def test_a_refused_stream_has_the_status_of_its_refusal(http: httpx.Client) -> None:
    refused = http.post("/generate", json=generate_body(Script.REFUSE, stream=True))
    assert refused.status_code == 400
    assert "the scheduler refuses this" in error_of(refused)["message"]


def test_a_full_queue_is_answered_with_the_time_to_wait(http: httpx.Client) -> None:
    for stream in (False, True):
        response = http.post("/generate", json=generate_body(Script.REFUSE, 1, stream=stream))
        assert response.status_code == 429
        assert response.headers["retry-after"] == "1"
        assert error_of(response)["type"] == "rate_limit_error"


def test_an_engine_that_dies_ends_a_stream_with_an_error_event(start_server: Callable[..., ServerProcess]) -> None:
    server = start_server()
    server.wait_until_ready()
    with connect(server) as http:
        body = http.post("/generate", json=generate_body(Script.DIE, 5, stream=True)).text
    *_, last = [line.removeprefix("data: ") for line in body.splitlines() if line]
    assert json.loads(last)["error"]["type"] == "server_error"
    assert server.wait_for_exit() == 1


def test_a_request_keeps_its_id(http: httpx.Client) -> None:
    assert http.get("/health", headers={"x-request-id": "mine-7"}).headers["x-request-id"] == "mine-7"
    assert http.get("/nix", headers={"x-request-id": "mine-8"}).headers["x-request-id"] == "mine-8"


@pytest.mark.parametrize("given", [None, "", "x" * 257, "\xfcber"])
def test_a_request_without_a_good_id_gets_one(http: httpx.Client, given: str | None) -> None:
    headers: dict[str, Any] = {} if given is None else {"x-request-id": given.encode("latin-1")}
    ids = [http.get("/health", headers=headers).headers["x-request-id"] for _ in range(2)]
    assert all(len(id) == 32 for id in ids)
    assert ids[0] != ids[1]


def test_a_large_body_is_refused_by_its_length_or_while_it_comes(
    start_server: Callable[..., ServerProcess],
) -> None:
    server = start_server("--max-request-bytes", "2000")
    server.wait_until_ready()
    with connect(server) as http:
        large = json.dumps(generate_body(*range(600))).encode()
        fits = json.dumps(generate_body(7, max_new_tokens=1)).encode()

        def in_pieces(body: bytes) -> Iterator[bytes]:
            yield from (body[i : i + 100] for i in range(0, len(body), 100))

        for content in (large, in_pieces(large)):
            response = http.post("/generate", content=content, headers=JSON)
            assert response.status_code == 413
            assert "--max-request-bytes" in error_of(response)["message"]
        for content in (fits, in_pieces(fits)):
            assert http.post("/generate", content=content, headers=JSON).status_code == 200


def test_a_body_may_hold_a_photo_but_not_as_much_of_anything_else(server: ServerProcess) -> None:
    url = "data:image/jpeg;base64," + "QUJD" * (6 << 18)
    with connect(server) as http:
        for content, words in (
            ([{"type": "image_url", "image_url": {"url": url}}], "the model takes text alone"),
            ("some words " * (5 << 17), "bytes besides files of 64 KiB and more in base64, but may have 4194304"),
        ):
            answer = http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": content}]})
            assert answer.status_code == 400
            assert words in error_of(answer)["message"]


def test_refusals_leave_a_line_in_the_log(start_server: Callable[..., ServerProcess]) -> None:
    server = start_server()  # lines are bounded, and refusals of other tests may have used them up
    server.wait_until_ready()
    with connect(server) as http:
        http.get("/no/such/path")
        http.get("/forged%0A2026-01-01 ERROR server: on fire%1b[2J" + "/x" * 9999)
        http.post("/v1/completions", json={"prompt": "a", "n": -1})
        http.post("/v1/completions", json={"prompt": "a", "model": "none\nsuch"})
    for words in ("GET /no/such/path: 404, ", "POST /v1/completions: 400, 'n: ", r"404, .*none\\nsuch does not exist"):
        server.wait_for_log(f"INFO +server: .*{words}")
    forged = server.wait_for_log(r"GET /forged\\n2026-01-01 ERROR server: on fire\\x1b\[2J.*")
    assert len(forged.group()) < 1000


def test_a_client_that_leaves_while_its_body_comes_is_no_fault_of_ours(
    start_server: Callable[..., ServerProcess], tmp_path: Path
) -> None:
    server = start_server("--batch-dir", str(tmp_path / "batches"), "--access-log")
    server.wait_until_ready()
    host, port = server.http_address.split(":")
    for path, kind in (("/v1/files", "multipart/form-data; boundary=x"), ("/generate", "application/json")):
        with socket.create_connection((host, int(port))) as client:
            head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: {kind}\r\ncontent-length: 1000\r\n\r\n"
            client.sendall(head.encode() + b"abc")
        server.wait_for_log(f"POST '{path}' 499")
    assert "fault" not in server.log and "Traceback" not in server.log and ": 400" not in server.log


def test_requests_leave_a_line_if_a_flag_asks_for_it(
    start_server: Callable[..., ServerProcess], server: ServerProcess
) -> None:
    logging = start_server("--access-log", "--log-requests")
    logging.wait_until_ready()
    for each in (server, logging):
        with connect(each) as http:
            http.get("/v1/models")
            http.get("/accessed")
    logging.wait_for_log(r"127\.0\.0\.1 GET '/v1/models' 200, \d+\.\d{3} s")
    logging.wait_for_log(r"127\.0\.0\.1 GET '/accessed' 404, ")
    with connect(logging) as http:
        post(http, "/v1/completions", prompt=[50], max_tokens=1)
    logging.wait_for_log(r"INFO +server: request '.*': 1 prompt tokens, 0 cached, 1 new, length")
    assert "GET '/v1/models' 200" not in server.log


def test_a_body_that_stops_coming_is_refused() -> None:
    app = FastAPI(responses=errors.RESPONSES)
    errors.add_handlers(app)
    app.add_middleware(BodyLimit, max_bytes=10_000, max_plain_bytes=10_000, stall_s=0.2)

    @app.post("/echo")
    async def echo(body: dict[str, int]) -> dict[str, int]:
        return body

    async def send(pause_s: float) -> httpx.Response:
        async def parts() -> AsyncIterator[bytes]:
            for part in (b'{"a"' + 8192 * b" ", b": 5}"):  # enough for 8 seconds
                yield part
                await asyncio.sleep(pause_s)

        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
            return await client.post("/echo", content=parts(), headers=JSON)

    assert asyncio.run(send(0.0)).json() == {"a": 5}
    refused = asyncio.run(send(PATIENCE_S))
    assert refused.status_code == 408
    assert error_of(refused)["message"].startswith("the body stops after 8196 bytes, nothing more has come for 0.2 s")


def test_internal_errors_are_logged_and_not_shown_to_the_client(caplog: pytest.LogCaptureFixture) -> None:
    app = FastAPI(responses=errors.RESPONSES)
    errors.add_handlers(app)
    app.add_middleware(RequestIds)

    @app.get("/broken")
    async def broken() -> None:
        raise KeyError("a secret")

    with caplog.at_level(logging.ERROR), TestClient(app, raise_server_exceptions=False) as http:
        response: Any = http.get("/broken", headers={"x-request-id": "r"})
    assert response.status_code == 500
    assert error_of(response)["type"] == "server_error"
    assert "secret" not in response.text
    assert response.headers["x-request-id"] == "r"
    assert "a secret" in caplog.text


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("/v1/v1/chat/completions", "/v1/chat/completions"), ("/chat/completions", "/v1/chat/completions"),
        ("/completions/", "/v1/completions"), ("/openai/v1/models", "/v1/models"), ("/nowhere", ""), ("/v1", ""),
    ],
)  # fmt: skip
def test_a_path_with_another_beginning_is_answered_with_the_one_that_is_meant(
    http: httpx.Client, path: str, meant: str
) -> None:
    refused = http.post(path, json={})
    assert refused.status_code == 404
    message = error_of(refused)["message"]
    assert message == f"no such path: POST {path}" + (f": send it to {meant}" if meant else "")


def test_the_description_says_400_where_fastapi_would_say_422(http: httpx.Client) -> None:
    description = http.get("/openapi.json").json()
    paths = description["paths"].items()
    operations = [(path, operation) for path, methods in paths for operation in methods.values()]
    assert operations
    for path, operation in operations:
        assert "422" not in operation["responses"]
        (schema,) = operation["responses"]["4XX"]["content"].values()
        shape = "OllamaError" if path.startswith("/api/") else "ErrorBody"
        assert schema["schema"]["$ref"].endswith(f"/{shape}")
