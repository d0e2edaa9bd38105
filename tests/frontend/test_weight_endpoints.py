"""What trainers order over HTTP, and where answers of all protocols name the version of the weights."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import grpc
import httpx
import pytest
from fake_engine_process import Script
from fastapi import FastAPI
from http_calls import connect, error_of, events, generate_body, post
from server_process import ServerProcess, ids_request
from sglang_calls import sglang_stub
from smg_grpc_proto import sglang_scheduler_pb2 as sglang_pb

from jaxsgl.config.server import ServerConfig
from jaxsgl.frontend.http import errors
from jaxsgl.frontend.http.sglang import admin
from jaxsgl.frontend.proto import jaxsgl_pb2 as pb
from jaxsgl.frontend.proto import jaxsgl_pb2_grpc as pb_grpc


@pytest.fixture
def http(server: ServerProcess) -> Iterator[httpx.Client]:
    with connect(server) as http:
        yield http
        http.post("/resume_memory_occupation")
        http.post("/update_weight_version", json={"new_version": "default"})


def update(http: httpx.Client, status: int = 200, **body: Any) -> Any:
    answer = http.post("/update_weights_from_disk", json={"model_path": "/weights"} | body)
    assert answer.status_code == status, answer.text
    return answer.json()


def test_an_update_is_answered_as_by_sglang(http: httpx.Client) -> None:
    done = update(http, weight_version="v2", abort_all_requests=False, flush_cache=True, is_async=False)
    assert done == {
        "success": True,
        "message": "the weights of /weights are served as version v2",
        "num_paused_requests": 0,
    }
    assert update(http)["message"].endswith("version 1")
    for mode in ("wait", "retract", "abort", "in_place", None):
        assert update(http, mode=mode)["success"]


def test_what_cant_be_loaded_is_told_with_status_400(http: httpx.Client) -> None:
    failed = update(http, 400, model_path="/nothing")
    assert failed == {"success": False, "message": "no weights in /nothing", "num_paused_requests": 0}


@pytest.mark.parametrize(
    ("body", "word"),
    [
        ({"mode": "now"}, "mode"),
        ({"mode": "retract", "abort_all_requests": True}, "abort_all_requests"),
        ({"load_format": "gguf"}, "load_format"),
        ({"weight_version": ""}, "weight_version"),
        ({"model_path": None}, "model_path"),
    ],
)
def test_a_wrong_body_is_refused(http: httpx.Client, body: dict[str, Any], word: str) -> None:
    answer = http.post("/update_weights_from_disk", json={"model_path": "/weights"} | body)
    assert answer.status_code == 400
    assert word in error_of(answer)["message"]


def test_every_answer_names_the_version_of_its_weights(server: ServerProcess, http: httpx.Client) -> None:
    update(http, weight_version="v7")
    for path in ("/get_weight_version", "/weight_version", "/model_info", "/get_model_info"):
        assert http.get(path).json()["weight_version"] == "v7"
    body = generate_body(7, 8, max_new_tokens=3)
    assert post(http, "/generate", **body)["meta_info"]["weight_version"] == "v7"
    streamed = events(http.post("/generate", json=body | {"stream": True}).text)
    assert {event["meta_info"]["weight_version"] for event in streamed} == {"v7"}
    chat = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2}
    for path, asked in (("/v1/completions", {"prompt": "abc", "max_tokens": 2}), ("/v1/chat/completions", chat)):
        assert post(http, path, **asked)["metadata"] == {"weight_version": "v7"}
        *others, last = events(http.post(path, json=asked | {"stream": True}).text)
        assert last["metadata"] == {"weight_version": "v7"} and not any("metadata" in chunk for chunk in others)
    with grpc.insecure_channel(server.address) as channel:
        stub = pb_grpc.JaxsglStub(channel)
        *_, reply = stub.Generate(ids_request(5, max_tokens=2))
        assert reply.weight_version == stub.GetModelInfo(pb.GetModelInfoRequest()).weight_version == "v7"
    with sglang_stub(server) as sglang:
        assert sglang.GetModelInfo(sglang_pb.GetModelInfoRequest()).weight_version == "v7"


def test_the_version_can_be_set_alone(http: httpx.Client) -> None:
    done = post(http, "/update_weight_version", new_version="mine", abort_all_requests=False)
    assert done == {"success": True, "message": "the weights are called mine now", "new_version": "mine"}
    assert http.get("/weight_version").json() == {"weight_version": "mine"}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/update_weight_version", {"new_version": "mine"}),
        ("/release_memory_occupation", {}),
        ("/resume_memory_occupation", {}),
    ],
)
def test_an_order_that_waits_is_given_up_when_its_client_leaves(path: str, body: dict[str, Any]) -> None:
    arrived, given_up, statuses = asyncio.Event(), list[bool](), list[int]()

    async def ask(*_: Any) -> None:
        arrived.set()
        try:
            await asyncio.Event().wait()
        finally:
            given_up.append(True)

    async def abort_prefix(_: str) -> int:
        return 0

    async def call() -> None:
        engine = SimpleNamespace(ask=ask, abort_prefix=abort_prefix)
        front_end: Any = SimpleNamespace(engine=engine, config=ServerConfig())
        app = FastAPI()
        errors.add_handlers(app)
        app.include_router(admin.router(front_end))
        messages = [{"type": "http.request", "body": json.dumps(body).encode()}]

        async def receive() -> Any:
            if messages:
                return messages.pop()
            await arrived.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            statuses.append(message.get("status", 0))

        headers = [(b"content-type", b"application/json")]
        scope = {"type": "http", "method": "POST", "path": path, "query_string": b"", "headers": headers}
        async with asyncio.timeout(10):
            await app(scope, receive, send)

    asyncio.run(call())
    assert given_up and statuses[0] == errors.CLIENT_CLOSED_REQUEST


def test_a_server_sleeps_and_wakes_by_vllms_names(http: httpx.Client) -> None:
    assert http.get("/is_sleeping").json() == {"is_sleeping": False}
    for asked in ({}, {"level": "2", "mode": "wait"}):
        assert http.post("/sleep", params=asked).json() == {"success": True}
        assert http.get("/is_sleeping").json() == {"is_sleeping": True}
        assert http.post("/wake_up", params={"tags": ["weights", "kv_cache"]}).json() == {"success": True}
        assert http.get("/is_sleeping").json() == {"is_sleeping": False}
    for path, wrong in (("/sleep", {"level": "3"}), ("/sleep", {"mode": "keep"}), ("/wake_up", {"tags": "pages"})):
        refused = http.post(path, params=wrong)
        assert refused.status_code == 400 and next(iter(wrong)) in error_of(refused)["message"]


def test_requests_that_have_begun_end_before_a_server_sleeps(http: httpx.Client) -> None:
    body = generate_body(Script.FOREVER, max_new_tokens=150) | {"stream": True}
    with http.stream("POST", "/generate", json=body) as answer:
        lines = answer.iter_lines()
        next(lines)
        assert "requests wait or run" in error_of(http.post("/reset_prefix_cache"))["message"]
        assert http.post("/sleep").json() == {"success": True}
        last = events("\n".join(lines))[-1]
    assert last["meta_info"]["finish_reason"]["type"] == "abort"
    assert http.post("/wake_up").json() == {"success": True}
    assert http.post("/reset_prefix_cache").json() == {"success": True}


def test_memory_is_released_and_resumed_by_tags(http: httpx.Client) -> None:
    all_of_sglang = {"tags": ["kv_cache", "weights", "cuda_graph"]}
    for body in (None, {}, {"tags": None}, {"tags": ["weights"]}, {"tags": ["kv_cache", "weights"]}, all_of_sglang):
        released = http.post("/release_memory_occupation", json=body)
        assert released.json().get("success"), released.text
        assert http.get("/server_info").json()["internal_states"][0]["paused"]
        assert http.post("/resume_memory_occupation", json=body).json()["message"] == "generation goes on"
    for path in ("/release_memory_occupation", "/resume_memory_occupation"):
        assert http.post(path, json={"tags": ["cuda_graph"]}).json()["success"]
    assert not http.get("/server_info").json()["internal_states"][0]["paused"]
    refused = http.post("/release_memory_occupation", json={"tags": ["pages"]})
    assert refused.status_code == 400 and "tags" in error_of(refused)["message"]
