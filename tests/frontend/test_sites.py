"""Web pages must not operate a server through the browser of a user who can reach it."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from http_calls import connect, error_of, generate_body
from server_process import ServerProcess
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp

from jaxsgl.config.server import ServerConfig
from jaxsgl.errors import ConfigError
from jaxsgl.frontend.http.sites import PageGuard

STATE_AND_SECRETS = (
    ("POST", "/flush_cache"), ("POST", "/pause_generation"), ("POST", "/continue_generation"),
    ("POST", "/abort_request"), ("POST", "/generate"), ("POST", "/v1/completions"), ("POST", "/v1/chat/completions"),
    ("GET", "/internal_state"), ("GET", "/server_info"), ("GET", "/v1/models"), ("GET", "/metrics"),
    ("GET", "/health_generate"), ("GET", "/openapi.json"), ("OPTIONS", "/generate"),
)  # fmt: skip


@pytest.fixture(scope="module")
def http(server: ServerProcess) -> Iterator[httpx.Client]:
    with connect(server) as http:
        yield http


def status(headers: list[tuple[str, str]], path: str = "/flush_cache", **flags: Any) -> int:
    """The status of a request with exactly these headers to a server with these flags; 200: it passes."""
    app: ASGIApp = PageGuard(PlainTextResponse("passed"), ServerConfig(**flags))
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        raise AssertionError("nothing is to be read")

    raw = [(name.encode(), value.encode("latin-1")) for name, value in headers]
    scope = {"type": "http", "method": "POST", "path": path, "headers": raw}
    asyncio.run(app(scope, receive, send))  # type: ignore[arg-type]
    return int(sent[0]["status"])


def test_a_page_of_another_site_reaches_nothing(http: httpx.Client) -> None:
    for origin in ("http://evil.example", "https://evil.example:30000", "null"):
        for method, path in STATE_AND_SECRETS:
            refused = http.request(method, path, headers={"origin": origin})
            assert refused.status_code == 403, (method, path, origin)
            assert "--allowed-origins" in error_of(refused)["message"]
    # What a page may send without a preflight: a form's or a text body.
    for kind in ("text/plain", "application/x-www-form-urlencoded"):
        headers = {"origin": "http://evil.example", "content-type": kind}
        assert http.post("/pause_generation", content=b"", headers=headers).status_code == 403
    assert http.get("/internal_state").json()["num_running"] == 0


def test_a_page_whose_name_resolves_to_this_machine_reaches_nothing(http: httpx.Client) -> None:
    for method, path in STATE_AND_SECRETS:
        for origin in ({}, {"origin": f"http://rebound.example:{http.base_url.port}"}):
            headers = {"host": f"rebound.example:{http.base_url.port}", **origin}
            refused = http.request(method, path, headers=headers)
            assert refused.status_code == 403, (method, path)
            assert "--allowed-hosts" in error_of(refused)["message"]


def test_no_state_changes_by_get(http: httpx.Client) -> None:
    refused = http.get("/flush_cache")
    assert refused.status_code == 405
    assert refused.headers["allow"] == http.put("/flush_cache").headers["allow"] == "POST"
    assert "send POST, or start the server with --allow-get-control" in error_of(refused)["message"]
    assert http.post("/flush_cache").json()["success"]


def test_sglangs_get_works_behind_its_flag(start_server: Callable[..., ServerProcess]) -> None:
    server = start_server("--allow-get-control")
    server.wait_until_ready()
    with connect(server) as http:
        assert http.get("/flush_cache").json()["success"]


def test_programs_and_the_servers_own_pages_pass(http: httpx.Client) -> None:
    port = http.base_url.port
    own = {"origin": f"http://127.0.0.1:{port}"}  # as /docs sends
    by_name = {"host": f"localhost:{port}", "origin": f"http://localhost:{port}"}
    for headers in ({}, own, by_name, {"host": "10.1.2.3:30000"}, {"host": "[::1]:30000"}):
        assert http.post("/generate", json=generate_body(5, max_new_tokens=1), headers=headers).status_code == 200


def test_health_is_told_under_every_name(http: httpx.Client) -> None:
    assert http.get("/health", headers={"host": "probe.example"}).status_code == 200


@pytest.mark.parametrize(
    ("host", "flags", "passes"),
    [
        ("127.0.0.1:30000", {}, True),
        ("[fe80::1]:30000", {}, True),
        ("192.0.2.7", {}, True),
        ("LOCALHOST:1", {}, True),
        ("app.localhost", {}, True),
        (socket.gethostname(), {}, True),
        ("localhost.evil.example", {}, False),
        ("127.0.0.1.evil.example", {}, False),
        ("evil.example", {}, False),
        ("llm", {}, False),
        ("x@localhost", {}, False),
        ("evil.example#localhost", {}, False),
        ("", {}, False),
        ("[::1", {}, False),
        ("evil.example", {"host": "0.0.0.0"}, False),
        ("llm", {"host": "0.0.0.0"}, True),
        ("llm.default.svc.cluster.local:80", {"host": "0.0.0.0"}, True),
        ("llm.example.org", {"host": "0.0.0.0", "allowed_hosts": ("LLM.example.org",)}, True),
        ("llm.example.org.", {"host": "llm.example.org"}, True),
        ("evil.example", {"allowed_hosts": ("*",)}, True),
        ("evil.example", {"api_key": "k"}, True),
        ("evil.example", {"api_key": "k", "allowed_hosts": ("llm.example.org",)}, False),
    ],
)
def test_a_server_answers_to_its_own_names(host: str, flags: dict[str, Any], passes: bool) -> None:
    assert status([("host", host)], **flags) == (200 if passes else 403)


@pytest.mark.parametrize(
    ("origin", "host", "flags", "passes"),
    [
        ("http://localhost:30000", "localhost:30000", {}, True),
        ("http://localhost:3000", "localhost:30000", {}, False),  # another server on this machine
        ("https://llm.example.org", "llm.example.org", {"api_key": "k"}, True),  # behind a proxy that ends TLS
        ("http://localhost", "localhost:80", {}, True),
        ("chrome-extension://abc", "localhost:30000", {}, False),
        ("null", "localhost:30000", {}, False),
        ("null", "localhost:30000", {"allowed_origins": ("null",)}, True),
        ("http://localhost:3000", "localhost:30000", {"allowed_origins": ("http://localhost:3000",)}, True),
        ("http://localhost:3001", "localhost:30000", {"allowed_origins": ("http://localhost:3000",)}, False),
        ("http://any.example", "localhost:30000", {"allowed_origins": ("*",)}, True),
    ],
)
def test_pages_call_only_from_the_server_itself_or_an_allowed_site(
    origin: str, host: str, flags: dict[str, Any], passes: bool
) -> None:
    assert status([("host", host), ("origin", origin)], **flags) == (200 if passes else 403)


def test_a_second_header_does_not_hide_the_first() -> None:
    assert status([("host", "localhost"), ("host", "evil.example")]) == 403
    assert status([("host", "localhost"), ("origin", "http://localhost"), ("origin", "http://evil.example")]) == 403


def test_a_request_without_a_host_comes_from_no_browser() -> None:
    assert status([]) == 200
    assert status([("origin", "http://localhost")]) == 403


def test_pages_of_an_allowed_site_may_read_the_answers(start_server: Callable[..., ServerProcess]) -> None:
    server = start_server("--allowed-origins", "https://chat.example.org", "--api-key", "k")
    server.wait_until_ready()
    asks = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,content-type"}
    with connect(server) as http:
        friend, foe = {"origin": "https://chat.example.org"}, {"origin": "https://evil.example"}
        preflight = http.options("/generate", headers=friend | asks)
        assert preflight.status_code == 200
        assert preflight.headers["access-control-allow-origin"] == "https://chat.example.org"
        deletes = friend | asks | {"access-control-request-method": "DELETE"}
        assert http.options("/v1/responses/resp_a", headers=deletes).status_code == 200
        body = generate_body(5, max_new_tokens=1)
        answer = http.post("/generate", json=body, headers=friend | {"authorization": "Bearer k"})
        assert answer.status_code == 200
        assert answer.headers["access-control-allow-origin"] == "https://chat.example.org"
        assert http.options("/generate", headers=foe | asks).status_code == 403


@pytest.mark.parametrize(
    "flags", [{"allowed_hosts": ("http://x",)}, {"allowed_hosts": ("x:80",)}, {"allowed_origins": ("x.example",)}]
)
def test_names_and_sites_that_no_header_can_hold_are_refused_at_the_start(flags: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="--allowed-"):
        ServerConfig(**flags)
