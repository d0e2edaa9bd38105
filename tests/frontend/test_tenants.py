"""What clients with different keys may do, and that their cached prefixes are kept apart."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from fake_engine_process import Script
from http_calls import connect, error_of, generate_body
from server_process import ServerProcess, ids_request, wait_for
from sglang_calls import ask
from smg_grpc_proto import sglang_scheduler_pb2 as sglang_pb
from smg_grpc_proto import sglang_scheduler_pb2_grpc as sglang_grpc
from smg_grpc_proto.generated import common_pb2

from jaxsgl.config.server import ADMIN_API_KEY_VARIABLE, ServerConfig
from jaxsgl.errors import Forbidden, StartupError, Unauthenticated
from jaxsgl.frontend.access import Access, Caller, cache_namespace, enter
from jaxsgl.frontend.grpc.interceptors import ORDERS
from jaxsgl.frontend.http.middleware import ORDER_PATHS
from jaxsgl.frontend.proto import jaxsgl_pb2 as pb
from jaxsgl.frontend.proto import jaxsgl_pb2_grpc as pb_grpc

COMMON, ANNA, BERT, ADMIN = "sk-common", "sk-anna", "sk-bert", "sk-admin"
CLIENT_CALLS = {
    "Embed", "Generate", "GetLoads", "GetModelInfo", "GetTokenizer", "HealthCheck", "ListLoadedLoRAAdapters",
}  # fmt: skip
CLIENT_POSTS = {
    "/api/chat", "/api/embed", "/api/embeddings", "/api/generate", "/api/show", "/classify", "/detokenize", "/encode",
    "/generate", "/rerank", "/score", "/tokenize", "/v1/audio/transcriptions", "/v1/audio/translations",
    "/v1/chat/completions", "/v1/classify", "/v1/completions", "/v1/detokenize", "/v1/embeddings", "/v1/messages",
    "/v1/messages/count_tokens", "/v1/rerank", "/v1/responses", "/v1/responses/input_tokens", "/v1/score",
    "/v1/tokenize", "/v2/rerank",
}  # fmt: skip


def bearer(key: str | None) -> dict[str, str]:
    return {} if key is None else {"authorization": f"Bearer {key}"}


@pytest.fixture(scope="module")
def tenanted(model_folder: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server with a common key, two tenants' keys, and an administrator's key."""
    folder = tmp_path_factory.mktemp("tenanted")
    (folder / "keys").write_text(f"# tenants\n{ANNA}\n\n  {BERT}\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(ADMIN_API_KEY_VARIABLE, ADMIN)
        server = ServerProcess(folder, model_folder, "--api-key", COMMON, "--api-key-file", str(folder / "keys"))
    server.wait_until_ready()
    yield server
    server.end()


@pytest.fixture(scope="module")
def http(tenanted: ServerProcess) -> Iterator[httpx.Client]:
    with connect(tenanted) as http:
        yield http


def test_orders_and_the_state_of_the_server_need_the_administrators_key(http: httpx.Client) -> None:
    orders = (
        ("GET", "/internal_state"), ("GET", "/server_info"), ("GET", "/get_server_info"), ("POST", "/flush_cache"),
        ("POST", "/abort_request"), ("POST", "/pause_generation"), ("POST", "/continue_generation"),
        ("POST", "/release_memory_occupation"), ("POST", "/resume_memory_occupation"), ("POST", "/reset_prefix_cache"),
        ("POST", "/sleep"), ("POST", "/wake_up"),
    )  # fmt: skip
    for method, path in orders:
        assert http.request(method, path).status_code == 401
        for key in (COMMON, ANNA, BERT):
            refused = http.request(method, path, headers=bearer(key))
            assert refused.status_code == 403, path
            assert "--admin-api-key" in error_of(refused)["message"]
    for method, path in orders:
        body = {"abort_all": True} if path == "/abort_request" else None
        assert http.request(method, path, headers=bearer(ADMIN), json=body).status_code == 200, path


def test_all_keys_generate(http: httpx.Client) -> None:
    for key in (COMMON, ANNA, BERT, ADMIN):
        answer = http.post("/generate", json=generate_body(5, max_new_tokens=1), headers=bearer(key))
        assert answer.status_code == 200
    for wrong in (None, "sk-ann", "sk-annaa"):
        assert http.post("/generate", json=generate_body(5), headers=bearer(wrong)).status_code == 401


def test_every_call_is_for_clients_or_for_the_administrator(http: httpx.Client) -> None:
    paths = http.get("/openapi.json", headers=bearer(ADMIN)).json()["paths"]
    posts = {path for path, methods in paths.items() if "post" in methods}
    assert posts <= ORDER_PATHS | CLIENT_POSTS
    for service in (pb.DESCRIPTOR.services_by_name["Jaxsgl"], sglang_pb.DESCRIPTOR.services_by_name["SglangScheduler"]):
        for method in service.methods:
            assert (f"/{service.full_name}/{method.name}" in ORDERS) != (method.name in CLIENT_CALLS), method.name


def status_of(call: Callable[[], object]) -> grpc.StatusCode:
    try:
        call()
    except grpc.RpcError as error:
        return error.code()
    return grpc.StatusCode.OK


def test_orders_and_cache_events_need_the_administrators_key_over_grpc(tenanted: ServerProcess) -> None:
    with grpc.insecure_channel(tenanted.address) as channel:
        ours, sglang = pb_grpc.JaxsglStub(channel), sglang_grpc.SglangSchedulerStub(channel)

        def statuses(key: str | None) -> set[grpc.StatusCode]:
            metadata = list(bearer(key).items())
            events = sglang.SubscribeKvEvents(common_pb2.SubscribeKvEventsRequest(), metadata=metadata)
            calls: list[Callable[[], object]] = [
                lambda: next(events),
                lambda: sglang.FlushCache(common_pb2.FlushCacheRequest(), metadata=metadata),
                lambda: sglang.Abort(sglang_pb.AbortRequest(request_id="x"), metadata=metadata),
                lambda: sglang.GetServerInfo(sglang_pb.GetServerInfoRequest(), metadata=metadata),
                lambda: sglang.StopProfile(common_pb2.StopProfileRequest(), metadata=metadata),
                lambda: ours.Abort(pb.AbortRequest(request_id="x"), metadata=metadata),
            ]
            found = {status_of(call) for call in calls}
            events.cancel()
            return found

        assert statuses(None) == {grpc.StatusCode.UNAUTHENTICATED}
        assert statuses(ANNA) == statuses(COMMON) == {grpc.StatusCode.PERMISSION_DENIED}
        assert statuses(ADMIN) == {grpc.StatusCode.OK}
        metadata = list(bearer(ANNA).items())
        assert list(ours.Generate(ids_request(5, max_tokens=1), metadata=metadata))
        assert list(sglang.Generate(ask(5, max_new_tokens=1), metadata=metadata))
        assert sglang.GetLoads(sglang_pb.GetLoadsRequest(), metadata=metadata)


def test_an_administrators_key_alone_leaves_other_calls_open() -> None:
    access = Access(ServerConfig(admin_api_key=ADMIN))
    for sent in (b"", b"Bearer none"):
        assert access.check(sent, is_order=False) == Caller()
        with pytest.raises(Unauthenticated):
            access.check(sent, is_order=True)
    assert access.check(f"Bearer {ADMIN}".encode(), is_order=True).is_admin


def test_without_an_administrators_key_a_clients_key_grants_all() -> None:
    access = Access(ServerConfig(api_key=COMMON))
    for scheme in ("Bearer", "bearer", "BEARER"):
        assert access.check(f"{scheme} {COMMON}".encode(), is_order=True) == Caller()
    assert not Access(ServerConfig()).guards
    with pytest.raises(StartupError, match="choose another"):
        Access(ServerConfig(api_key=COMMON, admin_api_key=COMMON))
    with pytest.raises(Forbidden):
        Access(ServerConfig(api_key=COMMON, admin_api_key=ADMIN)).check(f"Bearer {COMMON}".encode(), is_order=True)


@pytest.mark.parametrize(
    ("content", "words"), [(None, "can't be read"), ("# no\n\n", "no key"), ("good\nb ad\n", "line 2"), ("é", "line 1")]
)
def test_a_file_of_keys_that_cannot_be_used_is_refused(tmp_path: Path, content: str | None, words: str) -> None:
    path = tmp_path / "keys"
    if content is not None:
        path.write_text(content)
    with pytest.raises(StartupError, match=words) as caught:
        Access(ServerConfig(api_key_file=str(path)))
    assert "good" not in str(caught.value)


def test_logs_show_no_key_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text(f"{BERT}\n{ANNA}\n")
    server = ServerProcess(tmp_path, f"/nowhere/{ANNA}", "--api-key-file", str(tmp_path / "keys"))
    assert server.wait_for_exit() == 1
    assert "/nowhere/***" in server.log and ANNA not in server.log
    server.end()


def test_a_salt_keeps_a_requests_prefixes_apart_and_a_key_a_tenants(
    tenanted: ServerProcess, http: httpx.Client
) -> None:
    """All protocols: the same key and salt give the same name to the engine, others another one."""
    chat = {"messages": [{"role": "user", "content": "hi"}]}
    hang = {"prompt": [Script.HANG], "max_tokens": 3}
    generate = generate_body(Script.HANG)
    with ThreadPoolExecutor(12) as threads, tenanted.stub() as stub:

        def salt_of(key: str, path: str, body: dict[str, Any]) -> str:
            """The salt that reaches the engine; the request is aborted."""
            answer = threads.submit(http.post, path, json=body, headers=bearer(key))
            return the_only_salt(lambda: answer.done())

        def the_only_salt(is_over: Callable[[], bool]) -> str:
            def look() -> list[str]:
                found: list[str] = http.get("/internal_state", headers=bearer(ADMIN)).json()["cache_salts"]
                return found

            (salt,) = wait_for(look, "the request")
            http.post("/abort_request", json={"abort_all": True}, headers=bearer(ADMIN))
            wait_for(lambda: is_over() and not look(), "its end")
            return salt

        assert salt_of(COMMON, "/generate", generate) == salt_of(ADMIN, "/v1/completions", hang) == ""
        anna, bert = (salt_of(key, "/generate", generate) for key in (ANNA, BERT))
        assert anna == salt_of(ANNA, "/v1/completions", hang)
        salted = salt_of(COMMON, "/generate", generate | {"extra_key": "s"})
        assert salted == salt_of(COMMON, "/v1/completions", hang | {"cache_salt": "s"})
        others = [
            salt_of(COMMON, "/generate", generate | {"cache_salt": "t"}),
            salt_of(ANNA, "/generate", generate | {"extra_key": "s"}),
            salt_of(BERT, "/v1/completions", hang | {"extra_key": "s"}),
        ]
        assert len({"", anna, bert, salted, *others}) == 7
        # Chat prompts run through, unless generation is paused.
        http.post("/pause_generation", headers=bearer(ADMIN))
        assert salt_of(COMMON, "/v1/chat/completions", chat | {"cache_salt": "s"}) == salted
        http.post("/continue_generation", headers=bearer(ADMIN))
        request = ids_request(Script.HANG)
        for key, salt, known in ((COMMON, "s", salted), (ANNA, "", anna), (ANNA, "s", others[1])):
            request.cache_salt = salt
            call = stub.Generate(request, metadata=list(bearer(key).items()))
            assert the_only_salt(call.cancel) == known


@pytest.mark.parametrize(
    "body",
    [{"cache_salt": ""}, {"cache_salt": 5}, {"cache_salt": "x" * 257}, {"cache_salt": "a", "extra_key": "b"}],
)
def test_a_salt_is_a_short_text(http: httpx.Client, body: dict[str, Any]) -> None:
    for path, rest in (("/generate", generate_body(5)), ("/v1/completions", {"prompt": [5]})):
        refused = http.post(path, json=rest | body, headers=bearer(COMMON))
        assert refused.status_code == 400
        assert "cache_salt" in error_of(refused)["message"]


def test_a_salt_that_is_too_long_is_refused_over_grpc(tenanted: ServerProcess) -> None:
    request = ids_request(5, stream=False)
    request.cache_salt = "x" * 257
    with tenanted.stub() as stub, pytest.raises(grpc.RpcError) as refused:
        next(stub.Generate(request, metadata=list(bearer(COMMON).items())))
    assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert "the length of cache_salt is 257" in refused.value.details()


def test_no_salt_reaches_into_a_tenants_cache() -> None:
    enter(Caller(tenant="0123"))
    anna = {cache_namespace(""), cache_namespace("s")}
    enter(Caller())
    assert cache_namespace("") == ""
    guesses = {cache_namespace(salt) for salt in ("0123", "t0123", "t0123s", "0123s", *anna)}
    assert not anna & guesses


def test_keys_and_salts_are_never_shown(tenanted: ServerProcess, http: httpx.Client) -> None:
    http.post("/generate", json=generate_body(5, max_new_tokens=1) | {"extra_key": "a-secret"}, headers=bearer(ANNA))
    told = http.get("/server_info", headers=bearer(ADMIN)).text + tenanted.log
    for secret in (COMMON, ANNA, BERT, ADMIN, "a-secret"):
        assert secret not in told
