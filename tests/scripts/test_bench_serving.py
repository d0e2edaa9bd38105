"""Figures follow SGLang's definitions, and the script runs every dataset over every protocol."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from bench.figures import capacity
from server_process import ServerProcess
from tls_files import make_certificate

from jaxsgl.bench import __main__ as script
from jaxsgl.bench.backend import Answer, Turn
from jaxsgl.bench.http_backends import DIALECTS, HttpBackend
from jaxsgl.bench.http_stream import HttpServer
from jaxsgl.bench.load import DatasetConfig
from jaxsgl.bench.metrics import details, failures, parse_goodput, summary
from jaxsgl.bench.run import Outcome
from tests.grids import daily
from tests.text.small_tokenizers import byte_level, save


def answer_of(events: list[tuple[float, str, int]], *, sent_s: float, input_len: int, error: str = "") -> Answer:
    """An answer as a backend fills it, from (time, text, tokens so far)."""
    answer = Answer(sent_s=sent_s, error=error)
    for now_s, text, count in events:
        answer.add(now_s, text, count)
    answer.count(input_len, events[-1][2], 1)
    answer.finish(complete=True)
    return answer


LONG = answer_of([(1.0, "a", 2), (1.5, "b", 3), (2.5, "cdef", 7), (2.75, "", 7)], sent_s=0.5, input_len=10)
SHORT = answer_of([(3.0, "a", 1)], sent_s=2.0, input_len=20)
FAILED = answer_of([(9.0, "a", 5)], sent_s=0.0, input_len=40, error="out of luck")


def test_figures_are_those_that_a_calculation_by_hand_gives() -> None:
    found = summary(Outcome([LONG, FAILED, SHORT], duration_s=4.0, cpu_s=1.0), {})
    expected = {
        "completed": 2, "failed": 1, "total_input_tokens": 30, "total_output_tokens": 8, "total_cached_tokens": 2,
        "request_throughput": 0.5, "input_throughput": 7.5, "output_throughput": 2.0, "total_throughput": 9.5,
        "request_goodput": None, "accept_length": None, "load_cpu": 0.25, "tokens_per_chunk": 2.0,
        "concurrency": (2.25 + 1.0) / 4.0,
        "mean_e2e_latency_ms": 1625.0, "median_ttft_ms": 750.0, "std_ttft_ms": 250.0, "p90_ttft_ms": 950.0,
        "mean_tpot_ms": 1e3 * (2.25 - 0.5) / 6, "p99_tpot_ms": 1e3 * (2.25 - 0.5) / 6,
        "mean_itl_ms": (500.0 + 4 * 250.0) / 5, "median_itl_ms": 250.0, "max_itl_ms": 500.0,
        "p95_itl_ms": np.percentile([500.0, 250.0, 250.0, 250.0, 250.0], 95),
    }  # fmt: skip
    assert {name: found[name] for name in expected} == pytest.approx(expected)


def test_chunks_without_a_token_count_are_one_gap_each() -> None:
    answer = answer_of([(1.0, "ab", 0), (1.5, "c", 0), (3.0, "", 4)], sent_s=0.0, input_len=1)
    assert (answer.itls_s, answer.ttft_s, answer.tpot_s, answer.e2e_s) == ([0.5], 1.0, 2.0 / 3, 3.0)


def test_a_count_at_the_end_alone_leaves_the_chunk_before_it_one_gap() -> None:
    answer = answer_of([(1.0, "a", 0), (1.5, "b", 0), (3.0, "c", 9)], sent_s=0.0, input_len=1)
    assert answer.itls_s == [0.5, 1.5]


def test_half_characters_count_with_the_text_that_completes_them() -> None:
    answer = answer_of([(1.0, "", 1), (2.0, "a", 2), (2.5, "", 3), (4.0, "é", 4)], sent_s=0.0, input_len=1)
    assert (answer.ttft_s, answer.itls_s) == (2.0, [1.0, 1.0])


def test_a_stream_without_text_is_timed_by_its_tokens() -> None:
    answer = answer_of([(1.0, "", 1), (2.0, "", 3), (9.0, "", 3)], sent_s=0.5, input_len=1)  # the last one is the usage
    assert (answer.ttft_s, answer.itls_s) == (0.5, [0.5, 0.5])


def test_without_answers_all_figures_are_zero() -> None:
    found = summary(Outcome([FAILED], duration_s=0.0, cpu_s=0.0), {"ttft": 1.0})
    assert {value for name, value in found.items() if name not in ("failed", "accept_length")} == {0}


@pytest.mark.parametrize(
    ("limits", "kept"),
    [("ttft:500 tpot:292", 1), ("ttft:1000", 2), ("tpot:291", 1), ("e2el:2250 ttft:1000 tpot:300", 2), ("e2el:999", 0)],
)
def test_goodput_counts_answers_that_keep_every_limit(limits: str, kept: int) -> None:
    found = summary(Outcome([LONG, SHORT, FAILED], duration_s=2.0, cpu_s=0.0), parse_goodput(limits))
    assert found["request_goodput"] == kept / 2


@pytest.mark.parametrize("limit", ["itl:5", "ttft:abc", "ttft:", "ttft", "tpot:nan", "e2el:-1"])
def test_what_is_no_limit_on_a_known_figure_is_refused(limit: str) -> None:
    with pytest.raises(ValueError, match=f"--goodput has '{limit}', but must be of ttft:MS, "):
        parse_goodput(f"ttft:1 {limit}")


def test_details_are_by_request_and_failures_are_listed_by_error() -> None:
    found = details([LONG, FAILED])
    assert found["input_lens"] == [10, 40] and found["output_lens"] == [7, 0] and found["ttfts"] == [0.5, 0.0]
    assert found["itls"] == [[0.5, 0.25, 0.25, 0.25, 0.25], []] and found["errors"] == ["", "out of luck"]
    assert found["generated_texts"][0] == "abcdef"
    assert failures([LONG, FAILED, FAILED]) == "2 x out of luck"


def test_defaults_equal_sglangs() -> None:
    random, shared = DatasetConfig(), DatasetConfig(dataset_name="generated-shared-prefix")
    lengths = [sum(ask.lengths) for ask in random.asks()]
    assert len(lengths) == 1000 and 1 <= min(lengths) < 20 and 1000 < max(lengths) <= 1024
    asks = shared.asks()
    assert len(asks) == 64 * 16 and {(*ask.lengths, ask.output_len) for ask in asks} == {(2048, 128, 256)}
    assert len({ask.seeds[0] for ask in asks}) == 64 and len({ask.seeds[1] for ask in asks}) == 1024


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """The fake engine echoes prompts, 200 tokens of context at most."""
    model = save(byte_level(), tmp_path_factory.mktemp("model"))
    server = ServerProcess(tmp_path_factory.mktemp("server"), model)
    server.wait_until_ready()
    yield server
    server.end()


@pytest.fixture(scope="module")
def server_with_tls(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ServerProcess, str]]:
    """A server with a key, and its certificate."""
    certificate, key = make_certificate(tmp_path_factory.mktemp("tls"))
    model = save(byte_level(), tmp_path_factory.mktemp("model"))
    flags = ("--ssl-certfile", certificate, "--ssl-keyfile", key, "--api-key", "a-key")
    server = ServerProcess(tmp_path_factory.mktemp("server"), model, *flags)
    server.wait_until_ready()
    yield server, certificate
    server.end()


BACKENDS = ("openai", "openai-chat", "sglang", "jaxsgl-grpc")
SMALL = {
    "random": ("--random-input-len", 20, "--random-output-len", 9, "--num-prompts", 8),
    "generated-shared-prefix": (
        "--gsp-num-groups", 2, "--gsp-prompts-per-group", 4, "--gsp-system-prompt-len", 12, "--gsp-question-len", 5,
        "--gsp-output-len", 6,
    ),
    "multi-turn": (
        "--turns", 3, "--turn-input-len", 5, "--turn-output-len", 4, "--turn-system-len", 4, "--num-prompts", 8,
    ),
    "mooncake": ("--request-rate", 1, "--mooncake-slowdown-factor", 0.01),
}  # fmt: skip
TRACE = '{"timestamp": %d, "input_length": 12, "output_length": 5, "hash_ids": [7]}\n'
KEYS = {
    "backend", "dataset_name", "request_rate", "max_concurrency", "duration", "completed", "total_input_tokens",
    "total_output_tokens", "request_throughput", "input_throughput", "output_throughput", "total_throughput",
    "max_itl_ms", "concurrency", "accept_length", "random_input_len", "random_output_len", "random_range_ratio",
    *(f"{statistic}_{name}_ms" for statistic in ("mean", "median", "std", "p90", "p95", "p99")
      for name in ("ttft", "tpot", "itl", "e2e_latency")),
}  # fmt: skip
DETAILS = {"input_lens", "output_lens", "ttfts", "itls", "errors", "generated_texts"}


def bench(server: ServerProcess, backend: str, *flags: object) -> int:
    address = server.address if backend == "jaxsgl-grpc" else f"http://{server.http_address}"
    return script.main(["--backend", backend, "--base-url", address, "--vocab-size", "390", *map(str, flags)])


@pytest.mark.parametrize("dataset", SMALL)
@pytest.mark.parametrize("backend", BACKENDS)
def test_every_dataset_runs_over_every_protocol(
    server: ServerProcess, backend: str, dataset: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace, out = tmp_path / "trace.jsonl", tmp_path / "out.jsonl"
    trace.write_text("".join(TRACE % (10 * number) for number in range(8)))
    flags = ("--dataset-name", dataset, *SMALL[dataset], "--dataset-path", trace, "--max-concurrency", 4)
    assert bench(server, backend, *flags, "--flush-cache", "--output-file", out, "--output-details") == 0
    assert bench(server, backend, *flags, "--output-file", out) == 0
    with_details, plain = map(json.loads, out.read_text().splitlines())
    assert set(plain) >= KEYS and not set(plain) & DETAILS and set(with_details) == set(plain) | DETAILS
    assert (plain["completed"], plain["failed"], plain["max_concurrency"]) == (8, 0, 4)
    assert sum(with_details["output_lens"]) == plain["total_output_tokens"] == with_details["total_output_tokens"]
    assert 0 < plain["median_ttft_ms"] <= plain["p99_ttft_ms"] and 0 < plain["concurrency"] <= 4
    if backend in ("sglang", "jaxsgl-grpc"):
        asks = DatasetConfig(dataset_name="random", num_prompts=8, random_input_len=20, random_output_len=9)
        if dataset == "random":
            assert sorted(with_details["input_lens"]) == sorted(sum(ask.lengths) for ask in asks.asks())
        if dataset == "mooncake":
            assert with_details["input_lens"] == [12] * 8 and with_details["output_lens"] == [5] * 8
    assert f"Backend:                                 {backend}" in capsys.readouterr().out


@pytest.mark.parametrize("dialect", ["openai", "openai-chat"])
def test_chunks_of_the_server_say_how_many_tokens_they_bring(server: ServerProcess, dialect: str) -> None:
    async def ask() -> Answer:
        backend = HttpBackend(HttpServer(f"http://{server.http_address}", None), DIALECTS[dialect], "default", True)
        answer = Answer()
        await backend.generate(Turn([[70, 71, 72]], [], 9), answer)
        return answer

    answer = asyncio.run(ask())
    counts = [count for _, count in answer.chunks]
    assert (answer.error, answer.output_len) == ("", 9)
    assert counts == sorted(set(counts)) and counts[0] > 0 and counts[-1] <= 9


@pytest.mark.parametrize("backend", BACKENDS)
def test_requests_that_fail_are_listed_and_end_the_script_with_status_1(
    server: ServerProcess, backend: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One of the two prompts is longer than the context."""
    trace, out = tmp_path / "trace.jsonl", tmp_path / "out.jsonl"
    trace.write_text(TRACE % 0 + TRACE.replace("12", "500") % 1)
    flags = ("--dataset-name", "mooncake", "--dataset-path", trace, "--output-details", "--output-file", out)
    assert bench(server, backend, *flags) == 1
    printed = capsys.readouterr()
    assert "Failed requests:                         1" in printed.out and "failed:\n1 x " in printed.err
    line = json.loads(out.read_text())
    assert line["completed"] == 1 and line["errors"][0] == "" and "context" in line["errors"][1]


@pytest.mark.parametrize("backend", ["openai", "jaxsgl-grpc"])
def test_a_server_with_a_key_and_a_certificate_is_loaded(
    server_with_tls: tuple[ServerProcess, str], backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, certificate = server_with_tls
    host, port = (server.address if backend == "jaxsgl-grpc" else server.http_address).rsplit(":", 1)
    flags = ["--backend", backend, "--host", host, "--port", port, *map(str, SMALL["random"])]
    assert script.main([*flags, "--tls", "--ca", certificate, "--api-key", "a-key"]) == 0
    monkeypatch.delenv("SSL_CERT_FILE", raising=False)
    assert script.main([*flags, "--tls", "--api-key", "a-key"]) == 1  # of no authority that the system knows


def test_without_a_server_the_script_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert script.main(["--port", "1", "--num-prompts", "1"]) == 1
    assert "is the server up?" in capsys.readouterr().err
    assert script.main(["--port", "1", "--num-prompts", "1", "--backend", "jaxsgl-grpc"]) == 1
    assert "UNAVAILABLE" in capsys.readouterr().err


@pytest.mark.parametrize(
    "flags",
    [
        ("--max-concurrency", "0"), ("--vocab-size", "1"), ("--gsp-num-groups", "0"), ("--request-rate", "0"),
        ("--random-range-ratio", "1.5"), ("--think-s", "-1"), ("--goodput", "itl:5"), ("--base-url", "127.0.0.1:1"),
        ("--warmup-requests", "-1"), ("--output-details",),
        ("--base-url", "http://127.0.0.1:1", "--backend", "jaxsgl-grpc"), ("--base-url", "http://127.0.0.1:1", "--tls"),
        ("--ca", "nowhere.pem"), ("--ca", "nowhere.pem", "--tls"),
    ],
    ids=lambda flags: flags[0],
)  # fmt: skip
def test_values_out_of_range_are_refused_by_name(flags: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert script.main(list(flags)) == 1
    told = capsys.readouterr().err
    assert flags[0] in told or "http://HOST:PORT" in told


def test_a_trace_without_a_file_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert script.main(["--dataset-name", "mooncake"]) == 1
    assert "--dataset-path" in capsys.readouterr().err


def test_ctrl_c_ends_the_script_with_a_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(script, "load", interrupted)
    assert script.main(["--num-prompts", "1"]) == 130
    assert capsys.readouterr().err.startswith("stopped: ")


def test_a_file_that_can_not_be_written_ends_the_script_before_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert script.main(["--port", "1", "--output-file", str(tmp_path / "none" / "out.jsonl")]) == 1
    assert str(tmp_path / "none" / "out.jsonl") in capsys.readouterr().err


@pytest.mark.parametrize("backend", daily(["openai", "jaxsgl-grpc"], every=2))
def test_a_paced_engine_shows_its_pace(backend: str) -> None:
    """A token each 20 ms for each of 4 streams, and little work for the generator."""
    found = capacity.measure(backend, streams=4, rate=200.0, tokens=30)
    assert found["completed"] == 4 and found["total_output_tokens"] == 120
    assert 5 < found["median_tpot_ms"] < 200 and 0.2 < found["duration"] < 30
    assert 0 < found["load_cpu"] < 1
