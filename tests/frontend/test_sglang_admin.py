"""Calls of gateways and operators besides requests: health, model and server info, load, cache, profiles."""

from __future__ import annotations

import functools
import hashlib
import io
import json
import threading
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import grpc
import pytest
from fake_engine_process import EOS_ID, LIMITS, VOCAB_SIZE, Script
from google.protobuf.json_format import MessageToDict
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from server_process import ServerProcess, wait_for
from sglang_calls import ask, sglang_stub
from smg_grpc_proto import sglang_scheduler_pb2 as pb
from smg_grpc_proto import sglang_scheduler_pb2_grpc as pb_grpc
from smg_grpc_proto.generated import common_pb2

from jaxsgl.config.engine import EngineConfig
from jaxsgl.config.server import ServerConfig
from jaxsgl.errors import InvalidRequest, NotFound
from jaxsgl.frontend.generation import ServedModel
from jaxsgl.frontend.grpc.sglang.info import CHUNK_BYTES, chunks, model_info, server_info, zip_tokenizer
from jaxsgl.frontend.grpc.sglang.loads import SECTIONS, Busy, check_loads_request, load_record, loads_response
from jaxsgl.frontend.metrics.measurements import Rates
from jaxsgl.messages.replies import EngineInfo, Load
from jaxsgl.text.tokenizer import Tokenizer, load_tokenizer

Stub: TypeAlias = pb_grpc.SglangSchedulerStub
SERVICE = "sglang.grpc.scheduler.SglangScheduler"
HEALTH = pb.HealthCheckRequest()


def status_of(call: Callable[[], object]) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.RpcError) as caught:
        call()
    return caught.value.code(), str(caught.value.details())


def test_reflection_lists_the_service_with_its_methods(server: ServerProcess) -> None:
    with grpc.insecure_channel(server.address) as channel:
        database = ProtoReflectionDescriptorDatabase(channel)
        assert SERVICE in database.get_services()
        described = database.FindFileContainingSymbol(SERVICE)
    (service,) = described.service
    methods = {method.name for method in service.method}
    assert {"Generate", "HealthCheck", "GetLoads", "SubscribeKvEvents", "GetTokenizer"} <= methods
    assert len(methods) == 15


def test_grpc_health_knows_the_service(server: ServerProcess) -> None:
    with grpc.insecure_channel(server.address) as channel:
        answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=SERVICE))
    assert answer.status == health_pb2.HealthCheckResponse.SERVING


def test_a_worker_whose_engine_turns_is_healthy(sglang: Stub) -> None:
    answer = sglang.HealthCheck(HEALTH)
    assert (answer.healthy, answer.message) == (True, "")


def test_a_worker_whose_engine_stands_still_answers_that_it_is_unhealthy(
    start_server: Callable[..., ServerProcess],
) -> None:
    server = start_server()
    server.wait_until_ready()
    with sglang_stub(server) as sglang:
        call = sglang.Generate(ask(Script.STICK))
        answer = wait_for(lambda: (found := sglang.HealthCheck(HEALTH)) and not found.healthy and found, "its illness")
        assert "sign of life" in answer.message
        call.cancel()


def test_a_worker_that_starts_or_stops_takes_no_requests(start_server: Callable[..., ServerProcess]) -> None:
    starting = start_server("--random-seed", str(Script.START_HANGS))
    with sglang_stub(starting) as sglang:
        for call in (
            lambda: sglang.HealthCheck(HEALTH),
            lambda: sglang.GetModelInfo(pb.GetModelInfoRequest()),
            lambda: sglang.GetServerInfo(pb.GetServerInfoRequest()),
            lambda: sglang.GetLoads(pb.GetLoadsRequest()),
            lambda: list(sglang.GetTokenizer(common_pb2.GetTokenizerRequest())),
            lambda: list(sglang.SubscribeKvEvents(common_pb2.SubscribeKvEventsRequest())),
            lambda: list(sglang.Generate(ask(1))),
        ):
            code, words = status_of(call)
            assert (code, "starting" in words) == (grpc.StatusCode.UNAVAILABLE, True)
    stopping = start_server()
    stopping.wait_until_ready()
    with sglang_stub(stopping) as sglang:
        running = sglang.Generate(ask(Script.FOREVER))
        next(running)
        stopping.interrupt()
        answer = wait_for(lambda: (found := sglang.HealthCheck(HEALTH)) and not found.healthy and found, "the drain")
        assert "shutting down" in answer.message
        running.cancel()


def test_model_info_holds_what_a_gateway_needs(sglang: Stub, model_folder: str) -> None:
    info = sglang.GetModelInfo(pb.GetModelInfoRequest())
    assert (info.model_path, info.tokenizer_path) == (model_folder,) * 2
    assert info.served_model_name == Path(model_folder).name
    assert (info.max_context_length, info.vocab_size) == (LIMITS.context_length, VOCAB_SIZE)
    assert info.max_req_input_len == LIMITS.pool_tokens - 1
    assert list(info.eos_token_ids) == [EOS_ID]
    assert list(info.architectures) == ["FakeForCausalLM"]
    assert info.is_generation
    assert not info.supports_vision
    assert info.default_sampling_params_json == ""


def test_server_info_holds_the_workers_flags(sglang: Stub, model_folder: str) -> None:
    before_s = time.time()
    info = sglang.GetServerInfo(pb.GetServerInfoRequest())
    args = MessageToDict(info.server_args)
    assert (args["dp_size"], args["tp_size"], args["page_size"], args["max_running_requests"]) == (1, 1, 16, 8)
    assert (args["model_path"], args["served_model_name"]) == (model_folder, Path(model_folder).name)
    assert info.max_total_num_tokens == LIMITS.pool_tokens == MessageToDict(info.scheduler_info)["max_total_num_tokens"]
    assert info.server_type == "grpc"
    assert info.start_time.seconds <= before_s
    assert 0 < info.uptime_seconds <= time.time() - info.start_time.seconds
    assert info.last_receive_timestamp <= time.time()


def test_server_info_counts_open_requests(sglang: Stub) -> None:
    calls = [sglang.Generate(ask(Script.HANG)) for _ in range(3)]
    wait_for(lambda: sglang.GetServerInfo(pb.GetServerInfoRequest()).active_requests == 3, "three requests")
    for call in calls:
        call.cancel()
    wait_for(lambda: sglang.GetServerInfo(pb.GetServerInfoRequest()).active_requests == 0, "their end")


@pytest.fixture
def served(tmp_path: Path) -> ServedModel:
    info = EngineInfo(
        model_path=str(tmp_path), architecture="FakeForCausalLM", dtype="float32", limits=LIMITS, eos_token_ids=(1, 2),
        page_size=16, max_running_requests=8, attention_backend="xla", platform="cpu", kv_bytes=1, weight_bytes=1,
        warmup_s=0.1,
    )  # fmt: skip
    return ServedModel(info, Tokenizer(None))


def test_infos_hold_no_secret(served: ServedModel) -> None:
    config = ServerConfig(api_key="hush", ssl_certfile="cert-file", ssl_keyfile="key-file")
    told = str(server_info(served, config, 0.0, 0, 0.0)) + str(model_info(served, config, "default"))
    for secret in ("hush", "cert-file", "key-file"):
        assert secret not in told


def test_server_info_can_hold_every_flag_of_the_engine(served: ServedModel) -> None:
    config = ServerConfig(EngineConfig(decode_buckets=(1, 8), chunked_prefill_size=-1))
    args = MessageToDict(server_info(served, config, 0.0, 0, 0.0).server_args)
    assert (args["decode_buckets"], args["chunked_prefill_size"], args["max_total_tokens"]) == ([1, 8], -1, 160)


def test_model_info_reads_the_model_folder(served: ServedModel, tmp_path: Path) -> None:
    of_model = {"model_type": "qwen3", "architectures": ["A"], "pad_token_id": [7, 8], "bos_token_id": None}
    (tmp_path / "config.json").write_text(json.dumps(of_model))
    defaults = {"temperature": 0.5, "top_k": 20, "max_new_tokens": 5, "do_sample": True}
    (tmp_path / "generation_config.json").write_text(json.dumps(defaults))
    info = model_info(served, ServerConfig(served_model_name="mine"), "third")
    assert info.weight_version == "third"
    assert (info.served_model_name, info.model_type, list(info.architectures)) == ("mine", "qwen3", ["A"])
    assert (info.pad_token_id, info.bos_token_id) == (7, 0)
    assert json.loads(info.default_sampling_params_json) == {"temperature": 0.5, "top_k": 20}
    assert info.tokenizer_path == ""


def test_the_tokenizer_comes_as_a_zip_that_works(
    sglang: Stub, tokenizer: Tokenizer, tmp_path: Path, model_folder: str
) -> None:
    *first, last = sglang.GetTokenizer(common_pb2.GetTokenizerRequest())
    archive = b"".join(chunk.data for chunk in [*first, last])
    assert last.sha256 == hashlib.sha256(archive).hexdigest()
    assert not any(chunk.sha256 for chunk in first)
    with zipfile.ZipFile(io.BytesIO(archive)) as files:
        assert {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"} <= set(files.namelist())
        files.extractall(tmp_path)
    text = "hello world, naïve café"
    assert load_tokenizer(str(tmp_path)).encode(text) == tokenizer.encode(text)
    assert zip_tokenizer(Path(model_folder)) == archive, "the same files give the same bytes"


def test_a_large_tokenizer_comes_in_chunks() -> None:
    archive = bytes(range(256)) * 700
    *first, last = chunks(archive)
    assert {len(chunk.data) for chunk in first} == {CHUNK_BYTES}
    assert b"".join(chunk.data for chunk in [*first, last]) == archive
    assert last.sha256 == hashlib.sha256(archive).hexdigest()


def test_a_worker_without_a_tokenizer_refuses_calls_that_need_it(
    start_server: Callable[..., ServerProcess], tmp_path: Path
) -> None:
    with pytest.raises(NotFound):
        zip_tokenizer(tmp_path)
    server = start_server()
    server.wait_until_ready()
    with sglang_stub(server) as sglang:
        code, words = status_of(lambda: list(sglang.GetTokenizer(common_pb2.GetTokenizerRequest())))
        assert (code, "has no tokenizer" in words) == (grpc.StatusCode.NOT_FOUND, True)
        code, words = status_of(lambda: list(sglang.Generate(ask(5, 6, stop=["a"]))))
        assert (code, "stop strings" in words) == (grpc.StatusCode.INVALID_ARGUMENT, True)


def test_gateways_get_the_speed_of_busy_times(served: ServedModel) -> None:
    """A worker that has been idle would look slow otherwise, and the next burst of requests would avoid it."""
    busy = Busy(served.info, Load(), Rates(output_tokens_per_s=1.0, busy_tokens_per_s=500.0))
    assert loads_response([busy], ()).loads[0].gen_throughput == 500.0
    assert load_record(busy, 1, None, False).gen_throughput == 500.0


def test_loads_count_running_requests(sglang: Stub) -> None:
    calls = [sglang.Generate(ask(Script.FOREVER, 5, 5, 5, 5, 5, 5, 5)) for _ in range(2)]
    load = wait_for(
        lambda: (found := sglang.GetLoads(pb.GetLoadsRequest())).loads[0].num_running_reqs == 2 and found,
        "two requests",
    )
    (core,) = load.loads
    assert (core.num_total_reqs, core.num_used_tokens, core.max_running_requests) == (2, 16, 8)
    assert core.token_usage == pytest.approx(16 / LIMITS.pool_tokens)
    assert core.utilization == pytest.approx(2 / 8)
    assert core.max_total_num_tokens == core.memory.token_capacity == LIMITS.pool_tokens
    assert core.memory.kv_cache_gb == pytest.approx(12345 / 2**30)
    assert core.memory.weight_gb == pytest.approx(54321 / 2**30)
    assert core.disaggregation.mode == "null"
    assert core.HasField("queues")
    assert not core.HasField("lora")
    assert not core.HasField("speculative")
    assert (load.dp_rank_count, load.aggregate.total_running_reqs) == (1, 2)
    assert load.aggregate.avg_throughput == core.gen_throughput
    assert load.timestamp
    for call in calls:
        call.cancel()


@pytest.mark.parametrize(
    ("include", "sections"),
    [
        ([], {"memory", "disaggregation", "queues"}),
        (["all"], {"memory", "disaggregation", "queues"}),
        (["core"], set()),
        (["core", "queues"], {"queues"}),
        (["memory", "spec", "lora"], {"memory"}),
        (["disagg"], {"disaggregation"}),
    ],
)
def test_loads_hold_the_sections_asked_for(sglang: Stub, include: list[str], sections: set[str]) -> None:
    (load,) = sglang.GetLoads(pb.GetLoadsRequest(include=include)).loads
    optional = ("memory", "speculative", "lora", "disaggregation", "queues")
    assert {name for name in optional if load.HasField(name)} == sections


def test_loads_of_unknown_sections_and_ranks_are_refused() -> None:
    check_loads_request(pb.GetLoadsRequest(dp_rank=0, include=SECTIONS), 1)
    for request, word in (
        (pb.GetLoadsRequest(include=["speed"]), "'speed'"),
        (pb.GetLoadsRequest(dp_rank=1), "dp_rank"),
    ):
        with pytest.raises(InvalidRequest, match=word):
            check_loads_request(request, 1)


def test_the_cache_is_flushed_when_nothing_runs(sglang: Stub) -> None:
    def flush(timeout_s: float) -> common_pb2.FlushCacheResponse:
        return sglang.FlushCache(common_pb2.FlushCacheRequest(timeout_s=timeout_s))

    call = sglang.Generate(ask(Script.FOREVER))
    next(call)
    refused = flush(0.0)
    assert not refused.success
    assert "run" in refused.message
    waiting: list[common_pb2.FlushCacheResponse] = []
    waiter = threading.Thread(target=lambda: waiting.append(flush(100.0)))
    waiter.start()
    call.cancel()
    waiter.join()
    assert waiting[0].success
    for timeout_s in (-1.0, float("nan"), 1e9):
        assert status_of(functools.partial(flush, timeout_s))[0] is grpc.StatusCode.INVALID_ARGUMENT
