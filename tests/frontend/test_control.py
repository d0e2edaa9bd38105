"""What operators do to a running server over HTTP and gRPC: pause it, empty its cache, end requests, look inside."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import httpx
import pytest
from fake_engine_process import Script
from http_calls import connect, error_of, generate_body, report
from played_link import PlayedLink
from server_process import ServerProcess, ids_request, wait_for
from sglang_calls import sglang_stub
from smg_grpc_proto import sglang_scheduler_pb2 as pb

from jaxsgl.errors import EngineUnavailable, RequestFailed, TimedOut
from jaxsgl.frontend.generation import Generation
from jaxsgl.frontend.metrics.measurements import Metrics, Timing
from jaxsgl.frontend.proto import jaxsgl_pb2_grpc as pb_grpc
from jaxsgl.messages.orders import Abort
from jaxsgl.messages.replies import Load, Refusal, RefusalKind, Replies, Reply
from jaxsgl.requests.request import FinishReason, Request, SamplingParams
from jaxsgl.text.detokenizer import NoText

INFO, LOADS = pb.GetServerInfoRequest(), pb.GetLoadsRequest()


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as threads:
        yield threads


@pytest.fixture
def http(server: ServerProcess, threads: ThreadPoolExecutor) -> Iterator[httpx.Client]:
    with connect(server) as http:
        wait_for(lambda: report(http)[0] == 0, "an idle engine")
        yield http  # then ends requests that still hang in a thread
        http.post("/continue_generation")
        http.post("/abort_request", json={"abort_all": True})


def ok(answer: httpx.Response) -> Any:
    assert answer.status_code == 200, answer.text
    return answer.json()


def state(http: httpx.Client) -> Any:
    return ok(http.get("/internal_state"))


def test_requests_queue_up_while_generation_is_paused(http: httpx.Client, threads: ThreadPoolExecutor) -> None:
    assert ok(http.post("/pause_generation", json={"mode": "in_place"}))["status"] == "ok"
    answer = threads.submit(http.post, "/generate", json=generate_body(7, 8, max_new_tokens=2))
    wait_for(lambda: state(http)["num_running"] == 1, "the request")
    for path in ("/health", "/health_generate", "/get_server_info"):
        assert http.get(path).status_code == 200
    assert not answer.done()
    assert ok(http.post("/continue_generation"))["status"] == "ok"
    assert ok(answer.result())["output_ids"] == [7, 8]


def test_a_pause_aborts_requests_unless_its_mode_says_otherwise(
    http: httpx.Client, threads: ThreadPoolExecutor
) -> None:
    for body in (None, {}, {"mode": "abort"}):
        answer = threads.submit(http.post, "/generate", json=generate_body(Script.FOREVER, max_new_tokens=150))
        wait_for(lambda: state(http)["num_running"] == 1, "the request")
        ok(http.post("/pause_generation", json=body))
        assert ok(answer.result())["meta_info"]["finish_reason"]["type"] == "abort"
        ok(http.post("/continue_generation"))


def test_gateways_see_a_pause(server: ServerProcess, http: httpx.Client, threads: ThreadPoolExecutor) -> None:
    threads.submit(http.post, "/generate", json=generate_body(Script.FOREVER, max_new_tokens=150))
    wait_for(lambda: state(http)["num_running"] == 1, "the request")
    with sglang_stub(server) as sglang:
        assert not sglang.GetServerInfo(INFO).is_paused
        ok(http.post("/pause_generation", json={"mode": "retract"}))
        assert sglang.GetServerInfo(INFO).is_paused
        queues = sglang.GetLoads(LOADS).loads[0].queues
        assert (queues.paused, queues.retracted) == (1, 1)
        assert "jaxsgl:paused{" in http.get("/metrics").text
        assert ok(http.get("/get_server_info"))["internal_states"][0]["paused"] is True
        ok(http.post("/continue_generation"))
        assert not sglang.GetServerInfo(INFO).is_paused
        assert sglang.GetLoads(LOADS).loads[0].queues.paused == 0


@pytest.mark.parametrize("body", [{"mode": "soon"}, {"mode": 1}, []])
def test_an_unknown_mode_is_refused(http: httpx.Client, body: object) -> None:
    response = http.post("/pause_generation", json=body)
    assert response.status_code == 400
    error_of(response)


def test_requests_are_aborted_by_the_beginning_of_their_ids(http: httpx.Client, threads: ThreadPoolExecutor) -> None:
    names = ("job-1", "job-12", "other")
    answers = {
        name: threads.submit(http.post, "/generate", json=generate_body(Script.HANG) | {"rid": name}) for name in names
    }
    wait_for(lambda: state(http)["num_running"] == 3, "three requests")
    assert ok(http.post("/abort_request", json={"rid": "job-2", "prefix": True})) == {"num_aborted": 0}
    assert ok(http.post("/abort_request", json={"rid": "job-1", "prefix": True})) == {"num_aborted": 2}
    for name in names[:2]:
        assert ok(answers[name].result())["meta_info"]["finish_reason"]["type"] == "abort"
    assert state(http)["num_running"] == 1
    assert ok(http.post("/abort_request", json={"rid": "othe"})) == {"num_aborted": 0}, "a prefix only if it is said"
    assert ok(http.post("/abort_request", json={"rid": "other"})) == {"num_aborted": 1}


@pytest.mark.parametrize("path", ["/generate", "/v1/completions"])
def test_a_call_with_several_prompts_is_aborted_by_its_rid(
    http: httpx.Client, threads: ThreadPoolExecutor, path: str
) -> None:
    prompts = {"input_ids" if path == "/generate" else "prompt": [[Script.HANG], [Script.HANG]]}
    several = threads.submit(http.post, path, json=prompts | {"rid": "job"})
    other = threads.submit(http.post, "/generate", json=generate_body(Script.HANG) | {"rid": "job-x"})
    wait_for(lambda: state(http)["num_running"] == 3, "three requests")
    assert ok(http.post("/abort_request", json={"rid": "job"})) == {"num_aborted": 2}
    ok(several.result())
    assert ok(http.post("/abort_request", json={"rid": "job-x"})) == {"num_aborted": 1}
    ok(other.result())


def test_a_flush_waits_up_to_its_timeout(http: httpx.Client, threads: ThreadPoolExecutor) -> None:
    answer = threads.submit(http.post, "/generate", json=generate_body(Script.HANG) | {"rid": "a"})
    wait_for(lambda: state(http)["num_running"] == 1, "the request")
    assert http.post("/flush_cache").status_code == 400
    flushed = threads.submit(http.post, "/flush_cache", params={"timeout": 1000})
    http.post("/abort_request", json={"rid": "a"})
    assert ok(flushed.result())["success"] is True
    ok(answer.result())
    for timeout in ("-1", "nan", "1e9", "x"):
        assert http.post("/flush_cache", params={"timeout": timeout}).status_code == 400


def test_a_flush_whose_client_has_left_is_dropped(http: httpx.Client, threads: ThreadPoolExecutor) -> None:
    answer = threads.submit(http.post, "/generate", json=generate_body(Script.HANG) | {"rid": "a"})
    wait_for(lambda: state(http)["num_running"] == 1, "the request")
    with pytest.raises(httpx.ReadTimeout):
        http.post("/flush_cache", params={"timeout": 1000}, timeout=0.5)
    wait_for(lambda: state(http)["flushes"] == 0, "end of the order")
    http.post("/abort_request", json={"rid": "a"})
    ok(answer.result())


def test_the_internal_state_is_checked_if_asked(http: httpx.Client) -> None:
    assert "leaks" not in state(http)
    assert ok(http.get("/internal_state", params={"check": "true"}))["leaks"] == []


def test_priorities_reach_the_engine_by_all_protocols(
    server: ServerProcess, http: httpx.Client, stub: pb_grpc.JaxsglStub, threads: ThreadPoolExecutor
) -> None:
    ids = {"max_tokens": 9, "prompt": [Script.HANG]}
    bodies: list[tuple[str, dict[str, Any]]] = [
        ("/generate", generate_body(Script.HANG) | {"priority": -7}),
        ("/generate", generate_body(Script.HANG)),
        ("/v1/completions", ids | {"priority": 2**31 - 1}),
    ]
    for path, body in bodies:
        threads.submit(http.post, path, json=body)
    request = ids_request(Script.HANG)
    request.priority = -(2**31)
    call = stub.Generate(request)
    wait_for(lambda: state(http)["num_running"] == 4, "four requests")
    assert sorted(state(http)["priorities"]) == [-(2**31), -7, 0, 2**31 - 1]
    ok(http.post("/pause_generation"))  # chat prompts run through: catch one
    chat = {"messages": [{"role": "user", "content": "hi"}], "priority": 5}
    threads.submit(http.post, "/v1/chat/completions", json=chat)
    wait_for(lambda: state(http)["priorities"] == [5], "the conversation")
    call.cancel()


@pytest.mark.parametrize("priority", [2**31, -(2**31) - 1, 1.5, "1", True])
@pytest.mark.parametrize("path", ["/generate", "/v1/completions"])
def test_a_priority_is_an_integer_of_32_bits(http: httpx.Client, path: str, priority: object) -> None:
    body = generate_body(5) if path == "/generate" else {"prompt": [5]}
    response = http.post(path, json=body | {"priority": priority})
    assert response.status_code == 400
    assert "priority" in error_of(response)["message"]


@pytest.mark.parametrize(
    ("kind", "status", "code"),
    [
        (RefusalKind.WAITED, 503, grpc.StatusCode.UNAVAILABLE),
        (RefusalKind.RAN, 504, grpc.StatusCode.DEADLINE_EXCEEDED),
        (RefusalKind.FAILED, 422, grpc.StatusCode.FAILED_PRECONDITION),
    ],
)
def test_refusals_of_the_scheduler_have_a_status(
    http: httpx.Client, stub: pb_grpc.JaxsglStub, kind: RefusalKind, status: int, code: grpc.StatusCode
) -> None:
    prompt = (Script.REFUSE, list(RefusalKind).index(kind))
    response = http.post("/generate", json=generate_body(*prompt))
    assert response.status_code == status
    assert kind.value in error_of(response)["message"]
    assert ("retry-after" in response.headers) == (kind is RefusalKind.WAITED)
    with pytest.raises(grpc.RpcError) as caught:
        list(stub.Generate(ids_request(*prompt)))
    assert caught.value.code() is code


@pytest.mark.parametrize(
    ("kind", "error"),
    [(RefusalKind.WAITED, EngineUnavailable), (RefusalKind.RAN, TimedOut), (RefusalKind.FAILED, RequestFailed)],
)
def test_a_refusal_ends_what_is_left_of_a_request(kind: RefusalKind, error: type[Exception]) -> None:
    """This holds though the refusal names no sample, and sample 0 has ended."""
    engine = PlayedLink()
    engine.accept()
    request = Request("r", [5], SamplingParams(n=2))
    with engine.open(request) as stream:
        generation = Generation(request, stream, NoText, Timing(Metrics(Load), 2))
        engine.receive(Replies([Reply(stream.engine_id, (7,), FinishReason.LENGTH)]))
        assert asyncio.run(anext(generation)).token_ids == [7]
        engine.receive(Replies([Reply(stream.engine_id, refusal=Refusal(kind, "too late"))]))
        with pytest.raises(error, match="too late"):
            asyncio.run(anext(generation))
    assert len(engine.sent) == 1, "what was refused needs no abort"


def test_an_abort_by_prefix_matches_the_clients_ids_not_the_engines() -> None:
    """In the engine each request has another id, such as `a/0`, which a client's prefix must not match by chance."""
    engine = PlayedLink()
    engine.accept()
    begin: Callable[[str], Request] = lambda name: Request(name, [5], SamplingParams())  # noqa: E731
    with engine.open(begin("a")) as first, engine.open(begin("a/0/b")) as second, engine.open(begin("b")):
        assert asyncio.run(engine.abort_prefix("a/0")) == 1
        assert engine.sent[3:] == [Abort(second.engine_id)]
        assert asyncio.run(engine.abort_prefix("a")) == 2
        assert engine.sent[4:] == [Abort(first.engine_id), Abort(second.engine_id)]
        assert asyncio.run(engine.abort_prefix("")) == 3
