from __future__ import annotations

import asyncio
import itertools
import random
import urllib.request
from collections.abc import Callable
from typing import Any

import grpc
import httpx
import msgspec
import prometheus_client
import pytest
from fake_engine_process import LIMITS, Script
from prometheus_client.parser import text_string_to_metric_families as parse_text
from server_process import ROOT, ServerProcess, ids_request, wait_for

from jaxsgl.frontend.metrics.exposition import registry_of
from jaxsgl.frontend.metrics.measurements import Histogram, Metrics, Timing, one_two_five
from jaxsgl.frontend.metrics.rows import ROWS
from jaxsgl.frontend.proto import jaxsgl_pb2 as pb
from jaxsgl.messages.replies import BucketTimes, Load, SpeculationTotals, StageTimes, Totals, TransferLoad, pack_times
from jaxsgl.requests.request import FinishReason
from jaxsgl.text.sample import End

OPENMETRICS = "application/openmetrics-text; version=1.0.0"
TTFT = "sglang:time_to_first_token_seconds"
ITL = "sglang:inter_token_latency_seconds"
E2E = "sglang:e2e_request_latency_seconds"

Start = Callable[..., ServerProcess]


class Clock:
    """A clock that stands still until the test moves it on."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def metrics_of(load: Load = Load(), clock: Clock | None = None) -> Metrics:
    clock = clock or Clock()
    return Metrics(lambda: load, clock)


def samples_of(metrics: Metrics) -> dict[str, float]:
    """Each sample of a scrape, by its name and its last label, as `name` or `name.label`."""
    return by_name(prometheus_client.generate_latest(registry_of(metrics, "m")).decode())


def by_name(text: str) -> dict[str, float]:
    samples = {}
    for family in parse_text(text):
        for sample in family.samples:
            labels = {name: value for name, value in sample.labels.items() if name != "model_name"}
            samples[".".join([sample.name, *labels.values()])] = sample.value
    return samples


def scrape(server: ServerProcess, accept: str = "text/plain") -> tuple[str, str]:
    """Content type and text of GET /metrics."""
    request = urllib.request.Request(f"http://{server.http_address}/metrics", headers={"accept": accept})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return answer.headers["content-type"], answer.read().decode()


def test_served_requests_are_counted(start_server: Start) -> None:
    server = start_server()
    server.wait_until_ready()
    first_pieces = tokens = 0
    with server.stub() as stub:
        for length, num_samples in [(1, 1), (7, 1), (30, 2)]:
            seen: set[int] = set()
            request = ids_request(Script.FOREVER, 6, max_tokens=length, n=num_samples)
            for reply in stub.Generate(request):
                tokens += len(reply.token_ids)
                if reply.index not in seen:
                    first_pieces += len(reply.token_ids)
                    seen.add(reply.index)
        samples = by_name(scrape(server)[1])
    assert samples["sglang:num_requests_total"] == samples["vllm:request_success_total.length"] == 4
    assert samples[f"{TTFT}_count"] == samples[f"{E2E}_count"] == samples[f"{E2E}_bucket.+Inf"] == 4
    assert samples[f"{ITL}_count"] == tokens - first_pieces
    stages = "sglang:per_stage_req_latency_seconds_count"
    assert samples[f"{stages}.prefill_waiting"] == samples[f"{stages}.prefill_forward"] == 4
    assert samples[f"{stages}.request_process"] == 3
    assert samples[f"{E2E}_sum"] == pytest.approx(samples[f"{TTFT}_sum"] + samples[f"{ITL}_sum"], rel=0.2)
    assert samples["sglang:generation_tokens_total"] == samples["vllm:request_generation_tokens_sum"] == tokens
    assert samples["sglang:prompt_tokens_total"] == samples["vllm:request_prompt_tokens_sum"] == 4 * 2
    assert samples["vllm:prefix_cache_hits_total"] == 4 * 1
    assert samples["sglang:max_total_num_tokens"] == LIMITS.pool_tokens
    assert samples["sglang:num_running_reqs"] == samples["sglang:num_aborted_requests_total"] == 0


def test_requests_that_were_not_served_are_counted_by_reason(start_server: Start) -> None:
    server = start_server()
    server.wait_until_ready()
    with server.stub() as stub:
        for prompt in [(Script.REFUSE,), (Script.REFUSE, 1), (Script.REFUSE, 1), (LIMITS.vocab_size,)]:
            with pytest.raises(grpc.RpcError):
                stub.Generate(ids_request(*prompt, stream=False)).next()
        call = stub.Generate(ids_request(Script.HANG, n=2))
        wait_for(lambda: by_name(scrape(server)[1])["vllm:num_requests_running"] in (0, 2), "a scrape")
        stream = stub.Generate(ids_request(Script.FOREVER, max_tokens=100))
        next(stream)
        running = by_name(scrape(server)[1])
        call.cancel()
        stream.cancel()

        def aborted() -> dict[str, float] | None:
            samples = by_name(scrape(server)[1])
            return samples if samples["sglang:num_aborted_requests_total"] == 3 else None

        samples = wait_for(aborted, "three aborted samples")
    assert running["vllm:num_requests_running"] == 3
    assert 0 < running["sglang:token_usage"] <= 1
    assert samples["vllm:request_success_total.abort"] == samples["sglang:num_requests_total"] == 3
    assert samples["jaxsgl:request_errors_total.Overloaded"] == 2
    assert samples["jaxsgl:request_errors_total.InvalidRequest"] == 2
    assert samples[f"{E2E}_count"] == 0
    assert samples[f"{TTFT}_count"] == 1


def test_refusals_of_what_is_no_request_yet_are_counted_and_logged(start_server: Start) -> None:
    server = start_server()
    server.wait_until_ready()
    with httpx.Client(base_url=f"http://{server.http_address}") as http, server.stub() as stub:
        for body in ({"temperature": -1}, {"regex": "a", "ebnf": "b"}, {"regex": ""}, {"model": "another"}):
            assert http.post("/v1/completions", json={"prompt": [5], "max_tokens": 1, **body}).is_client_error
        for broken in (b'{"prompt": ', b"[" * 300):
            assert http.post("/v1/completions", content=broken).is_client_error
        http.get("/v1/responses/none")
        http.post("/start_profile", json={"num_steps": -1})
        for request in (pb.GenerateRequest(), pb.GenerateRequest(sampling=pb.SamplingParams(temperature=-1))):
            with pytest.raises(grpc.RpcError):
                stub.Generate(request).next()
        with pytest.raises(grpc.RpcError):
            stub.Embed(pb.EmbedRequest())
    samples = by_name(scrape(server)[1])
    assert samples["jaxsgl:request_errors_total.InvalidRequest"] == 8
    assert samples["jaxsgl:request_errors_total.NotFound"] == 1
    log = server.log
    assert "JaxsglService.Generate: INVALID_ARGUMENT, 'the request has no input" in log
    assert "POST /v1/completions: 400, 'regex and ebnf each" in log


def test_what_the_start_found_of_kernels_is_told(server: ServerProcess) -> None:
    (family,) = (each for each in parse_text(scrape(server)[1]) if each.name == "jaxsgl:kernel_backend")
    found = [{**sample.labels, "value": sample.value} for sample in family.samples]
    assert [(each["op"], each["backend"], each["verdict"], each["value"]) for each in found] == [
        ("store_kv", "triton", "hung", 1.0),
        ("store_kv", "xla", "untested", 1.0),
    ]


@pytest.mark.parametrize("accept", ["*/*", "text/plain", OPENMETRICS])
def test_names_arrive_with_their_colons(server: ServerProcess, accept: str) -> None:
    kind, text = scrape(server, accept)
    assert kind == "text/plain; version=0.0.4; charset=utf-8"
    families = {family.name for family in parse_text(text)}
    assert {name.removesuffix("_total") for row in ROWS for name in row.names} <= families


def test_every_name_stands_for_one_metric() -> None:
    names = [name for row in ROWS for name in row.names]
    assert len(names) == len(set(names))
    assert {name.partition(":")[0] for name in names} == {"sglang", "vllm", "jaxsgl"}


def test_every_metric_is_documented() -> None:
    documented = (ROOT / "docs" / "operations.md").read_text()
    assert not [name for row in ROWS for name in row.names if f"`{name}`" not in documented]


def test_the_engines_numbers_come_from_its_latest_load() -> None:
    values: Any = iter(range(1, 100))
    totals = Totals(*itertools.islice(values, len(Totals.__struct_fields__)))
    names = set(Load.__struct_fields__) - {"totals", "step_times", "host", "transfer", "speculation", "ranks"}
    steps = [BucketTimes("decode", "32", [1] * 15, 2.5), BucketTimes("extend", "512x8", [0] * 14 + [2], 30.0)]
    load = Load(**{name: next(values) for name in sorted(names)}, totals=totals, step_times=pack_times(steps))
    load = msgspec.structs.replace(load, speculation=SpeculationTotals(5, 20, 9, (5, 3, 1), {"penalties": 4}))
    samples = samples_of(metrics_of(load))
    assert samples["sglang:num_running_reqs"] == samples["vllm:num_requests_running"] == load.num_running
    spec = "vllm:spec_decode_num"
    assert [samples[f"{spec}_{what}_total"] for what in ("drafts", "draft_tokens", "accepted_tokens")] == [5, 20, 9]
    assert [samples[f"{spec}_accepted_tokens_per_pos_total.{place}"] for place in range(3)] == [5, 3, 1]
    assert samples["jaxsgl:spec_plain_decodes_total.penalties"] == 4
    assert samples["sglang:num_queue_reqs"] == samples["vllm:num_requests_waiting"] == load.num_waiting
    assert samples["sglang:num_used_tokens"] == load.used_tokens
    assert samples["vllm:num_preemptions_total"] == load.totals.retractions
    assert samples["jaxsgl:recompiles_total"] == load.totals.recompiles
    assert samples["jaxsgl:leaks_total"] == load.totals.leaks
    assert samples["sglang:num_retracted_reqs"] == load.num_retracted
    assert samples["sglang:num_paused_reqs"] == load.num_running
    assert samples["jaxsgl:step_seconds_count.32.decode"] == 15
    assert samples["jaxsgl:step_seconds_bucket.32.decode.0.002"] == 3
    assert samples["jaxsgl:step_seconds_bucket.512x8.extend.10.0"] == 0
    assert samples["jaxsgl:step_seconds_sum.512x8.extend"] == 30.0
    assert samples["sglang:forward_execution_seconds_total.decode"] == 2.5
    for reason in ("tokens", "rows", "chunk", "adapters"):
        assert samples[f"jaxsgl:admission_stopped_total.{reason}"] == getattr(load.totals, f"short_of_{reason}")
    for name in ("decode_rows", "decode_rows_padded", "extend_tokens", "extend_tokens_padded"):
        assert samples[f"jaxsgl:{name}_total"] == getattr(load.totals, name)


@pytest.mark.parametrize(
    ("mode", "queues"), [("prefill", ("prealloc", "inflight")), ("decode", ("prealloc", "transfer"))]
)
def test_requests_and_bytes_between_prefill_and_decode_are_told(mode: str, queues: tuple[str, str]) -> None:
    samples = samples_of(metrics_of(Load(transfer=TransferLoad(mode, 3, 2, 1 << 20, 5 << 30, 1 << 30))))
    shown = [samples[f"sglang:num_{mode}_{queue}_queue_reqs"] for queue in queues]
    assert shown == [3, 2]
    assert (samples["jaxsgl:kv_staged_bytes"], samples["jaxsgl:kv_moved_bytes_total"]) == (1 << 20, 5 << 30)
    assert samples["jaxsgl:kv_hidden_bytes_total"] == (1 << 30 if mode == "prefill" else 0)
    other = "decode" if mode == "prefill" else "prefill"
    assert samples[f"sglang:num_{other}_prealloc_queue_reqs"] == 0


def test_only_a_pause_pauses_requests() -> None:
    for paused in (False, True):
        samples = samples_of(metrics_of(Load(num_running=3, paused=paused)))
        assert (samples["jaxsgl:paused"], samples["sglang:num_paused_reqs"]) == ((1, 3) if paused else (0, 0))


def test_two_servers_in_one_process_count_apart() -> None:
    one, other = metrics_of(), metrics_of()
    with Timing(one, 1) as timing:
        timing.sample_ended(0, End(FinishReason.STOP, None, 5, 0, 2))
    assert samples_of(one)["sglang:num_requests_total"] == 1
    assert samples_of(other)["sglang:num_requests_total"] == 0


def test_tokens_of_one_reply_share_its_interval() -> None:
    clock = Clock()
    metrics = metrics_of(clock=clock)
    with Timing(metrics, 2) as timing:
        clock.now_s += 0.3
        timing.tokens(0, 1)
        clock.now_s += 0.1
        timing.tokens(1, 3)  # its first tokens: the intervals between the three are unknown
        clock.now_s += 0.3
        timing.tokens(0, 4)
        assert timing.first_token_s == pytest.approx(0.3)
    samples = samples_of(metrics)
    assert (samples[f"{TTFT}_count"], samples[f"{TTFT}_sum"]) == pytest.approx((2, 0.3 + 0.4))
    assert (samples[f"{ITL}_count"], samples[f"{ITL}_sum"]) == pytest.approx((4, 0.4))
    assert (samples[f"{ITL}_bucket.0.05"], samples[f"{ITL}_bucket.0.2"]) == (0, 4)


def test_a_samples_time_is_split_into_stages() -> None:
    clock = Clock()
    metrics = metrics_of(clock=clock)
    with Timing(metrics, 1) as timing:
        clock.now_s += 1.0
        timing.engine_times(0, StageTimes(0.25, 0.5))
        timing.tokens(0, 1)
        clock.now_s += 3.0
        timing.tokens(0, 2)
        timing.sample_ended(0, End(FinishReason.LENGTH, None, 5, 0, 3))
    samples = samples_of(metrics)
    assert samples["sglang:queue_time_seconds_sum"] == samples["vllm:request_queue_time_seconds_sum"] == 0.25
    assert samples["vllm:request_prefill_time_seconds_sum"] == 0.5
    assert samples["vllm:request_decode_time_seconds_sum"] == 3.0
    assert samples["vllm:request_inference_time_seconds_sum"] == 3.5
    stages = "sglang:per_stage_req_latency_seconds"
    for stage, seconds in {"prefill_waiting": 0.25, "prefill_forward": 0.5, "decode_forward": 3.0}.items():
        assert (samples[f"{stages}_count.{stage}"], samples[f"{stages}_sum.{stage}"]) == (1, seconds)
    assert samples[f"{stages}_count.request_process"] == 0


def test_only_requests_that_clients_left_count_as_aborted() -> None:
    metrics = metrics_of()
    with Timing(metrics, 3) as timing:
        timing.sample_ended(0, End(FinishReason.LENGTH, None, 5, 0, 2))
        timing.sample_ended(1, End(FinishReason.ABORT, None, 5, 0, 0))
    with pytest.raises(ValueError, match="odd"), Timing(metrics, 2):
        raise ValueError("odd")
    with pytest.raises(asyncio.CancelledError), Timing(metrics, 2):
        raise asyncio.CancelledError
    assert metrics.finished == {"stop": 0, "length": 1, "abort": 1 + 1 + 2}
    assert metrics.errors == {"ValueError": 1}
    samples = samples_of(metrics)
    lengths = "vllm:request_generation_tokens_sum"
    assert (samples[f"{E2E}_count"], samples[lengths]) == (1, 2), "aborted samples have no latency and no length"


def test_an_error_of_one_request_of_a_call_is_counted_once_and_aborts_the_others() -> None:
    metrics = metrics_of()
    with (
        pytest.raises(ValueError, match="odd"),
        Timing(metrics, 2) as ended,
        Timing(metrics, 1) as odd,
        Timing(metrics, 2),
    ):
        for index in range(2):
            ended.sample_ended(index, End(FinishReason.LENGTH, None, 5, 0, 2))
        error = ValueError("odd")
        odd.failed(error)
        raise error
    assert metrics.errors == {"ValueError": 1}
    assert metrics.finished == {"stop": 0, "length": 2, "abort": 2}


def test_a_histogram_agrees_with_prometheus_clients_own() -> None:
    bounds = one_two_five(1e-3, 10)
    ours = Histogram(bounds)
    registry = prometheus_client.CollectorRegistry()
    theirs = prometheus_client.Histogram("h", "", buckets=bounds, registry=registry)
    values = [*bounds, 0.0, 11.0, *(10 ** random.Random(0).uniform(-4, 2) for _ in range(200))]
    for value in values:
        ours.observe(value, 2)
        theirs.observe(value)
        theirs.observe(value)
    (family,) = registry.collect()
    expected = [(s.labels["le"], s.value) for s in family.samples if s.name == "h_bucket"]
    assert ours.buckets() == expected
    assert ours.sum == pytest.approx(registry.get_sample_value("h_sum"))


def test_bounds_are_round_numbers() -> None:
    assert one_two_five(0.005, 2) == (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0)


def test_a_metric_can_be_scraped_before_the_engine_is_ready(start_server: Start) -> None:
    server = start_server("--random-seed", str(Script.START_HANGS))
    assert by_name(scrape(server)[1])["sglang:token_usage"] == 0
    with server.stub() as stub, pytest.raises(grpc.RpcError):
        stub.Generate(pb.GenerateRequest(text="a")).next()
    assert by_name(scrape(server)[1])["jaxsgl:request_errors_total.EngineUnavailable"] == 1
