"""Which clients may talk to the server, and what the rest can see of it."""

from __future__ import annotations

import asyncio
import json
import ssl
import stat
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from http_calls import connect, error_of, events, generate_body
from server_process import ServerProcess, ids_request, wait_for
from starlette.types import Message

from jaxsgl.client import main as run_client
from jaxsgl.config.server import API_KEY_VARIABLE, ServerConfig
from jaxsgl.frontend.grpc.interceptors import answers_errors
from jaxsgl.frontend.http.errors import answer_to
from jaxsgl.frontend.proto import jaxsgl_pb2 as pb
from jaxsgl.frontend.proto import jaxsgl_pb2_grpc as pb_grpc

KEY = "sk-it-is-me"
WRONG = (None, "Bearer", f"Bearer {KEY}x", f"Bearer {KEY[:-1]}", KEY, f"Basic {KEY}", f"Bearer{KEY}", "Bearer \xfc")


@pytest.fixture(scope="module")
def guarded(ids_folder: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server with a key, given in its environment."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(API_KEY_VARIABLE, KEY)
        server = ServerProcess(tmp_path_factory.mktemp("guarded"), ids_folder)
    server.wait_until_ready()
    yield server
    server.end()


def test_http_asks_for_the_key(guarded: ServerProcess) -> None:
    with connect(guarded) as http:
        for given in WRONG:
            headers: dict[str, Any] = {} if given is None else {"authorization": given.encode("latin-1")}
            for path in ("/generate", "/nowhere"):
                refused = http.post(path, json=generate_body(5), headers=headers)
                assert refused.status_code == 401
                assert refused.headers["www-authenticate"] == "Bearer"
                assert error_of(refused)["code"] == "invalid_api_key"
            for path in ("/version", "/server_info", "/openapi.json", "/engine_events", "/flush_cache"):
                assert http.get(path, headers=headers).status_code == 401
        answer = http.post("/generate", json=generate_body(5), headers={"authorization": f"Bearer {KEY}"})
        assert answer.status_code == 200


def test_probes_and_scrapers_need_no_key(guarded: ServerProcess) -> None:
    with connect(guarded) as http:
        for path in ("/health", "/health_generate", "/load", "/metrics", "/ping"):
            assert http.get(path).status_code == 200


def test_grpc_asks_for_the_key(guarded: ServerProcess) -> None:
    with guarded.stub() as stub:
        for given in WRONG:
            metadata = [] if given is None or not given.isascii() else [("authorization", given)]
            with pytest.raises(grpc.RpcError) as unary:
                stub.GetModelInfo(pb.GetModelInfoRequest(), metadata=metadata)
            with pytest.raises(grpc.RpcError) as stream:
                list(stub.Generate(ids_request(5), metadata=metadata))
            for caught in (unary, stream):
                assert caught.value.code() == grpc.StatusCode.UNAUTHENTICATED
        with_key = [("authorization", f"Bearer {KEY}")]
        assert list(stub.Generate(ids_request(5, max_tokens=1), metadata=with_key))


def test_grpc_shows_only_its_health_without_the_key(guarded: ServerProcess) -> None:
    with grpc.insecure_channel(guarded.address) as channel:
        health = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
        assert health.status == health_pb2.HealthCheckResponse.SERVING
        with pytest.raises(grpc.RpcError) as caught:
            ProtoReflectionDescriptorDatabase(channel).get_services()
        assert caught.value.code() == grpc.StatusCode.UNAUTHENTICATED


def test_the_key_is_never_shown(guarded: ServerProcess) -> None:
    with connect(guarded, headers={"authorization": f"Bearer {KEY}"}) as http:
        told = [http.get(path).text for path in ("/get_server_info", "/get_model_info", "/openapi.json", "/metrics")]
    assert not any(KEY in text for text in told)
    assert KEY not in guarded.log
    engine = Path(f"/proc/{guarded.engine_pid}")
    assert KEY.encode() not in (engine / "cmdline").read_bytes() + (engine / "environ").read_bytes()
    assert KEY not in repr(ServerConfig(api_key=KEY))


def test_the_client_sends_the_key(
    guarded: ServerProcess, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ask = ["--addr", guarded.address, "--token-ids", "5", "--max-tokens", "1", "--json"]
    monkeypatch.delenv(API_KEY_VARIABLE, raising=False)
    assert run_client(ask) == 1
    assert "UNAUTHENTICATED" in capsys.readouterr().err
    assert run_client([*ask, "--api-key", KEY]) == 0
    monkeypatch.setenv(API_KEY_VARIABLE, KEY)
    assert run_client(ask) == 0


def test_both_ports_speak_tls(
    start_server: Callable[..., ServerProcess], certificate: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    certfile, keyfile = certificate
    server = start_server("--ssl-certfile", certfile, "--ssl-keyfile", keyfile, "--api-key", KEY)
    server.wait_until_ready()
    headers = {"authorization": f"Bearer {KEY}"}
    trusting = ssl.create_default_context(cafile=certfile)
    with httpx.Client(base_url=f"https://{server.http_address}", verify=trusting, headers=headers) as https:
        assert https.post("/generate", json=generate_body(5, max_new_tokens=1)).status_code == 200
        streamed = https.post("/generate", json=generate_body(5, stream=True, max_new_tokens=9)).text
        assert events(streamed)[-1]["output_ids"] == [5] * 9
    with connect(server) as http, pytest.raises(httpx.HTTPError):
        http.get("/health")
    credentials = grpc.ssl_channel_credentials(Path(certfile).read_bytes())
    with grpc.secure_channel(server.address, credentials) as channel:
        metadata = [("authorization", f"Bearer {KEY}")]
        assert list(pb_grpc.JaxsglStub(channel).Generate(ids_request(5, max_tokens=1), metadata=metadata))
    ask = ["--addr", server.address, "--token-ids", "5", "--max-tokens", "1", "--json", "--api-key", KEY]
    assert run_client([*ask, "--tls", "--ca", certfile]) == 0
    assert json.loads(capsys.readouterr().out)["token_ids"] == [5]
    assert run_client([*ask, "--wait-s", "0.5"]) == 1
    assert run_client([*ask, "--tls", "--ca", f"{certfile}.not"]) == 1


def test_files_that_are_no_certificate_are_one_clear_line(
    start_server: Callable[..., ServerProcess], certificate: tuple[str, str], tmp_path: Path
) -> None:
    certfile, keyfile = certificate
    broken, encrypted = tmp_path / "broken.pem", tmp_path / "encrypted.pem"
    broken.write_text("no certificate")
    locked = ["openssl", "pkey", "-in", keyfile, "-aes256", "-passout", "pass:x", "-out", str(encrypted)]
    subprocess.run(locked, check=True, capture_output=True)
    for cert, key, words in (
        (certfile, str(tmp_path / "none.pem"), "none.pem can't be read"),
        (str(broken), keyfile, "are no certificate and its key"),
        (certfile, str(broken), "are no certificate and its key"),
        (certfile, str(encrypted), "encrypted"),
    ):
        server = start_server("--ssl-certfile", cert, "--ssl-keyfile", key)
        assert server.wait_for_exit() == 1
        (line,) = (line for line in server.log.splitlines() if " DEBUG " not in line)
        assert line.startswith("error: ")
        assert words in line


def test_a_port_reachable_from_outside_without_a_key_causes_a_warning(
    start_server: Callable[..., ServerProcess],
) -> None:
    alone, open_to_all, guarded = (
        start_server(),
        start_server("--host", "0.0.0.0"),
        start_server("--host", "0.0.0.0", "--api-key", KEY),
    )
    for server in (alone, open_to_all, guarded):
        server.wait_until_ready()
    assert "can be reached from other machines" in open_to_all.log
    assert "can be reached from other machines" not in alone.log + guarded.log
    assert alone.address.startswith("127.0.0.1:")
    assert alone.http_address.startswith("127.0.0.1:")


def test_the_sockets_to_the_engine_are_for_the_servers_user_only(server: ServerProcess) -> None:
    (folder,) = wait_for(lambda: list(server.temporary.glob("jaxsgl-*")), "folder of sockets")
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    files = {path.name: path.stat().st_mode for path in folder.iterdir()}
    assert files.keys() == {"to_engine", "from_engine", "lock", "mask_mark"}
    assert stat.S_IMODE(files["mask_mark"]) == 0o600
    assert stat.S_ISSOCK(files["to_engine"]) and stat.S_ISSOCK(files["from_engine"])


class Failing:
    """A servicer with a bug, and the context of its call."""

    @answers_errors
    async def Generate(self, request: bytes, context: Any) -> None:
        raise RuntimeError("a secret of /etc/passwd")

    async def abort(self, code: grpc.StatusCode, details: str) -> None:
        self.answer = code, details


async def no_body() -> Message:
    raise AssertionError("a refusal reads no body")


def test_a_bug_is_answered_by_its_class_alone(caplog: pytest.LogCaptureFixture) -> None:
    failing = Failing()
    asyncio.run(failing.Generate(b"", failing))
    words = "internal error: RuntimeError; the server's log says more"
    assert failing.answer == (grpc.StatusCode.INTERNAL, words)
    over_http = answer_to(RuntimeError("a secret of /etc/passwd"))
    assert over_http.status_code == 500
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    asyncio.run(over_http({"type": "http", "path": "/generate"}, no_body, send))
    body = sent[-1]["body"].decode()
    assert words in body and "secret" not in body
    assert over_http.headers["x-should-retry"] == "false"
    assert caplog.text.count("RuntimeError: a secret") == 2, "the log says it"
