"""Traces: one OpenTelemetry span a request, `llm_request`, under vLLM's names of spans and attributes.

    a call arrives     `Tracer.enter` notes the `traceparent` that its client sent, over HTTP or gRPC
    Generator.start    wraps each request in `Tracer.request`, which ends its span with the request
    the SDK's thread   sends finished spans to the collector (OTLP), in batches; a request never waits for it

`NO_TRACER` stands there without `--otlp-traces-endpoint`. The SDK is imported with the flag alone. How it sends is read
from OpenTelemetry's variables: `OTEL_EXPORTER_OTLP_TRACES_PROTOCOL` (grpc, the default, or http/protobuf),
`OTEL_EXPORTER_OTLP_TRACES_HEADERS`, `OTEL_SERVICE_NAME`, `OTEL_TRACES_SAMPLER`, ...
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any, Protocol
from urllib.parse import urlsplit

from jaxsgl.errors import StartupError
from jaxsgl.frontend.metrics.measurements import Timing
from jaxsgl.requests.request import Request
from jaxsgl.text.sample import End

FLAG = "--otlp-traces-endpoint"
SPAN_NAME = "llm_request"
SERVICE_NAME = "jaxsgl"  # unless OTEL_SERVICE_NAME or OTEL_RESOURCE_ATTRIBUTES name another
PARENT_HEADERS = ("traceparent", "tracestate")  # https://www.w3.org/TR/trace-context/
PROTOCOL_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
PROTOCOLS = ("grpc", "http/protobuf")
HTTP_SCHEMES = ("http", "https")
GRPC_SCHEMES = (*HTTP_SCHEMES, "grpc")  # as in vLLM's examples
FLUSH_MS = 2000  # for the last spans to reach the collector at the end

_parent: ContextVar[Mapping[str, str]] = ContextVar("trace parent")


class Output(Protocol):
    """What a request has yielded so far."""

    ends: list[End]

    @property
    def num_tokens(self) -> int:
        """Output tokens of all samples."""
        ...


class Tracer(Protocol):
    """What makes spans of requests."""

    def enter(self, headers: Mapping[str, str]) -> None:
        """Notes the trace that the call of this task belongs to, by its headers or metadata, in lower case."""
        ...

    def request(self, request: Request, output: Output, timing: Timing) -> AbstractContextManager[None]:
        """Wraps the life of a request, which has just been submitted."""
        ...

    def flush(self) -> None:
        """Sends what has ended; waits for `FLUSH_MS` milliseconds at most."""
        ...


class NoTracer:
    """Traces nothing."""

    def enter(self, headers: Mapping[str, str]) -> None:
        """See `Tracer`."""

    def request(self, request: Request, output: Output, timing: Timing) -> AbstractContextManager[None]:
        """See `Tracer`."""
        return _NOTHING

    def flush(self) -> None:
        """See `Tracer`."""


_NOTHING = nullcontext()
NO_TRACER = NoTracer()


class OtlpTracer:
    """Sends spans to a collector at `endpoint`; `model_name` is the model's name in the APIs.

    Raises `StartupError` if the SDK is not installed, or the protocol is none that it has.
    """

    def __init__(self, endpoint: str, model_name: str) -> None:
        try:
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.trace import SpanKind, Status, StatusCode
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

            exporter = _exporter(endpoint)
        except ModuleNotFoundError as error:
            raise StartupError(f"{FLAG} needs the package {error.name}: pip install 'jaxsgl[otel]'") from None
        named = {} if os.environ.get("OTEL_SERVICE_NAME") else {"service.name": SERVICE_NAME}
        self._provider = TracerProvider(resource=Resource.create(named))
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("jaxsgl")
        self._propagator = TraceContextTextMapPropagator()
        self._kind, self._status, self._error = SpanKind.SERVER, Status, StatusCode.ERROR
        self._model_name = model_name

    def enter(self, headers: Mapping[str, str]) -> None:
        """See `Tracer`."""
        _parent.set({name: headers[name] for name in PARENT_HEADERS if name in headers})

    @contextmanager
    def request(self, request: Request, output: Output, timing: Timing) -> Iterator[None]:
        """See `Tracer`."""
        start_ns = time.time_ns() - round(timing.total_s * 1e9)
        span = self._tracer.start_span(
            SPAN_NAME, self._propagator.extract(_parent.get({})), self._kind, start_time=start_ns
        )
        try:
            yield
        except Exception as error:
            span.set_status(self._status(self._error, str(error)))
            raise
        finally:
            total_s = timing.total_s
            span.set_attributes(attributes_of(request, output, timing, self._model_name, total_s))
            span.end(start_ns + round(total_s * 1e9))

    def flush(self) -> None:
        """See `Tracer`."""
        # The SDK takes no heed of the time, if a collector takes the connection and doesn't answer.
        flushing = threading.Thread(target=self._provider.force_flush, args=(FLUSH_MS,), daemon=True)
        flushing.start()
        flushing.join(FLUSH_MS / 1000)


def attributes_of(
    request: Request, output: Output, timing: Timing, model_name: str, total_s: float
) -> dict[str, str | int | float]:
    """The attributes of a request's span, as vLLM names them; times in seconds. What never came is left out."""
    sampling, stages, first_token_s = request.sampling, timing.stages, timing.first_token_s
    attributes: dict[str, str | int | float | None] = {
        "gen_ai.response.model": request.adapter or model_name,
        "gen_ai.request.id": request.request_id,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.max_tokens": sampling.max_tokens,
        "gen_ai.request.n": sampling.n,
        "gen_ai.usage.prompt_tokens": len(request.prompt_ids),
        "gen_ai.usage.completion_tokens": output.num_tokens,
        "gen_ai.response.finish_reasons": ",".join(end.reason.value for end in output.ends) or "unfinished",
        "gen_ai.latency.e2e": total_s,
        "gen_ai.latency.time_to_first_token": first_token_s,
        "gen_ai.latency.time_in_queue": None if stages is None else stages.queue_s,
        "gen_ai.latency.time_in_model_prefill": None if stages is None else stages.prefill_s,
        "gen_ai.latency.time_in_model_decode": None if first_token_s is None else total_s - first_token_s,
    }
    return {name: value for name, value in attributes.items() if value is not None}


def tracer_of(endpoint: str | None, model_name: str) -> Tracer:
    """What traces with the flag's value. Raises as `OtlpTracer`."""
    return NO_TRACER if endpoint is None else OtlpTracer(endpoint, model_name)


def _exporter(endpoint: str) -> Any:
    protocol = next(filter(None, map(os.environ.get, PROTOCOL_VARIABLES)), PROTOCOLS[0])
    if protocol not in PROTOCOLS:
        raise StartupError(f"{PROTOCOL_VARIABLES[0]} is {protocol!r}, but must be one of {', '.join(PROTOCOLS)}")
    _check_endpoint(endpoint, protocol)
    if protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter

        return GrpcExporter(endpoint=endpoint, insecure=None if "://" in endpoint else True)
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter

    return HttpExporter(endpoint=endpoint)


def _check_endpoint(endpoint: str, protocol: str) -> None:
    """Raises `StartupError` for what can't be an address; the SDK would only log, at the first span."""
    schemes = GRPC_SCHEMES if protocol == "grpc" else HTTP_SCHEMES
    bare = protocol == "grpc" and "://" not in endpoint  # HOST:PORT
    try:
        parts = urlsplit(f"//{endpoint}" if bare else endpoint)
        is_whole = parts.port is not None if bare else parts.scheme in schemes and (parts.port or 1) > 0
    except ValueError:  # of a port that is none, or of brackets
        is_whole = False
    if not is_whole or parts.hostname is None or re.search(r"\s", endpoint):
        form = "http://HOST:4317 or HOST:4317" if protocol == "grpc" else "http://HOST:4318/v1/traces"
        raise StartupError(f"{FLAG} is {endpoint!r}, but must be an address such as {form} ({protocol})")
