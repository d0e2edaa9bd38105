"""Spans of requests, as a collector on this machine receives them: over OTLP with protobuf in HTTP, and over gRPC."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import grpc
import pytest
from http_calls import connect
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as trace_pb
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as trace_grpc
from server_process import ServerProcess, ids_request, wait_for

from jaxsgl.errors import StartupError
from jaxsgl.frontend import tracing

TRACE_ID, PARENT_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
PARENT = f"00-{TRACE_ID}-{PARENT_ID}-01"
TIMES = ("time_in_queue", "time_to_first_token", "e2e", "time_in_model_prefill", "time_in_model_decode")


class Collector:
    """Keeps the spans that it receives: protobuf over HTTP at `http`, gRPC at `grpc`."""

    def __init__(self) -> None:
        self.spans: list[Any] = []
        self.services: set[str] = set()
        take = self.take

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                take(
                    trace_pb.ExportTraceServiceRequest.FromString(self.rfile.read(int(self.headers["content-length"])))
                )
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: object) -> None: ...

        class Service(trace_grpc.TraceServiceServicer):
            def Export(self, request: Any, context: object) -> Any:
                take(request)
                return trace_pb.ExportTraceServiceResponse()

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._grpc = grpc.server(ThreadPoolExecutor(2))
        trace_grpc.add_TraceServiceServicer_to_server(Service(), self._grpc)
        self.http = f"http://127.0.0.1:{self._http.server_address[1]}/v1/traces"
        self.grpc = f"http://127.0.0.1:{self._grpc.add_insecure_port('127.0.0.1:0')}"
        self._thread = threading.Thread(target=self._http.serve_forever)
        self._thread.start()
        self._grpc.start()

    def take(self, request: Any) -> None:
        for resource in request.resource_spans:
            self.services |= {a.value.string_value for a in resource.resource.attributes if a.key == "service.name"}
            for scope in resource.scope_spans:
                self.spans += scope.spans

    def wait_for(self, request_id: str) -> tuple[Any, dict[str, Any]]:
        """The span of a request, and its attributes."""
        found: dict[str, tuple[Any, dict[str, Any]]] = {}

        def look() -> bool:
            for span in list(self.spans):
                attributes = {a.key: getattr(a.value, str(a.value.WhichOneof("value"))) for a in span.attributes}
                found[str(attributes["gen_ai.request.id"])] = span, attributes
            return request_id in found

        wait_for(look, f"span of {request_id}")
        return found[request_id]

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()
        self._grpc.stop(None)


@pytest.fixture
def collector() -> Iterator[Collector]:
    collector = Collector()
    yield collector
    collector.close()


@pytest.fixture(params=["grpc", "http/protobuf"])
def traced(
    request: pytest.FixtureRequest,
    collector: Collector,
    start_server: Callable[..., ServerProcess],
    monkeypatch: pytest.MonkeyPatch,
) -> ServerProcess:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", request.param)
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")  # milliseconds
    endpoint = collector.grpc if request.param == "grpc" else collector.http
    server = start_server("--otlp-traces-endpoint", endpoint, "--served-model-name", "small")
    server.wait_until_ready()
    return server


def test_a_request_has_a_span_with_its_sizes_and_times_below_its_clients(
    traced: ServerProcess, collector: Collector
) -> None:
    before_ns = time.time_ns()
    sampling = {"max_new_tokens": 5, "temperature": 0.5, "top_p": 0.9}
    with connect(traced) as http:
        body = {"input_ids": [5, 6, 7], "sampling_params": sampling, "rid": "with parent"}
        assert http.post("/generate", json=body, headers={"traceparent": PARENT}).status_code == 200
        assert http.post("/generate", json=body | {"rid": "alone"}).status_code == 200
    span, attributes = collector.wait_for("with parent")
    assert span.name == "llm_request" and span.kind == span.SPAN_KIND_SERVER
    assert (span.trace_id.hex(), span.parent_span_id.hex()) == (TRACE_ID, PARENT_ID)
    assert before_ns <= span.start_time_unix_nano < span.end_time_unix_nano <= time.time_ns()
    times = {name: attributes.pop(f"gen_ai.latency.{name}") for name in TIMES}
    assert attributes == {
        "gen_ai.response.model": "small",
        "gen_ai.request.id": "with parent",
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.9,
        "gen_ai.request.max_tokens": 5,
        "gen_ai.request.n": 1,
        "gen_ai.usage.prompt_tokens": 3,
        "gen_ai.usage.completion_tokens": 5,
        "gen_ai.response.finish_reasons": "length",
    }
    assert times["time_in_queue"] == 0.001  # as the engine says, which is scripted
    assert 0 < times["time_to_first_token"] <= times["e2e"]
    assert times["time_in_model_prefill"] > 0
    assert times["e2e"] == pytest.approx(times["time_to_first_token"] + times["time_in_model_decode"])
    assert times["e2e"] == pytest.approx((span.end_time_unix_nano - span.start_time_unix_nano) / 1e9, abs=1e-6)
    alone, _ = collector.wait_for("alone")
    assert not alone.parent_span_id and alone.trace_id.hex() != TRACE_ID
    assert collector.services == {"jaxsgl"}

    with traced.stub() as stub:  # over gRPC the parent is in the metadata
        call = stub.Generate(ids_request(5, request_id="grpc", max_tokens=3), metadata=[("traceparent", PARENT)])
        assert sum(len(reply.token_ids) for reply in call) == 3
        refused = stub.Generate(ids_request(5, request_id="refused", max_tokens=-1))
        with pytest.raises(grpc.RpcError):
            list(refused)
    span, attributes = collector.wait_for("grpc")
    assert span.parent_span_id.hex() == PARENT_ID and attributes["gen_ai.usage.completion_tokens"] == 3

    with connect(traced) as http, http.stream("POST", "/generate", json=body | {"rid": "left", "stream": True}) as left:
        left.read()
    traced.interrupt()  # what has ended is sent before the server ends
    assert traced.wait_for_exit() == 0
    assert collector.wait_for("left")
    assert not [span for span in collector.spans for each in span.attributes if each.value.string_value == "refused"]


def test_a_start_without_the_packages_names_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.resources", None)
    with pytest.raises(StartupError, match=r"needs the package opentelemetry.*: pip install 'jaxsgl\[otel\]'"):
        tracing.tracer_of("http://localhost:4317", "small")
    assert tracing.tracer_of(None, "small") is tracing.NO_TRACER


@pytest.mark.parametrize(
    ("protocol", "good", "bad"),
    [
        ("grpc", ["http://a:4317", "https://[::1]:4317", "grpc://a:4317", "a:4317"], ["a", "ftp://a:1", "a:99999"]),
        ("http/protobuf", ["http://a:4318/v1/traces", "https://a"], ["a:4317", "ftp://a:1", "grpc://a:4317"]),
    ],
)
def test_an_endpoint_that_is_no_address_ends_the_start(
    monkeypatch: pytest.MonkeyPatch, protocol: str, good: list[str], bad: list[str]
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", protocol)
    for endpoint in good:
        tracing._exporter(endpoint).shutdown()
    for endpoint in [*bad, "", "http://", "http://a:99999", "a b c", "http://a b:1", "http://[::1"]:
        with pytest.raises(StartupError, match=r"--otlp-traces-endpoint is '.*', but must be an address such as"):
            tracing._exporter(endpoint)


def test_a_collector_that_does_not_answer_does_not_hold_up_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "FLUSH_MS", 50)
    tracer = tracing.OtlpTracer("http://localhost:4317", "small")
    answers = threading.Event()
    monkeypatch.setattr(tracer._provider, "force_flush", lambda _: answers.wait(60))
    start_s = time.monotonic()
    tracer.flush()
    assert 0.05 <= time.monotonic() - start_s < 30
    answers.set()


def test_a_protocol_that_nobody_speaks_ends_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "http/json")
    with pytest.raises(StartupError, match="is 'http/json', but must be one of grpc, http/protobuf"):
        tracing.tracer_of("http://localhost:4317", "small")
