"""Two hosts that share a model answer as one does, and end together, whoever dies and whoever is asked to stop."""

from __future__ import annotations

import contextlib
import re
import signal
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.checkpoints import make_checkpoint
from tests.end_to_end.hosts import GONE_S, Hosts, running_hosts
from tests.end_to_end.precision import EXACT_FLAGS
from tests.end_to_end.servers import running_server
from tests.grids import NIGHTLY, count
from tests.text.small_tokenizers import byte_level, save

MODEL: dict[str, Any] = {"num_attention_heads": 8, "num_key_value_heads": 4, "intermediate_size": 65536}
FLAGS = (
    *EXACT_FLAGS, "--page-size", "4", "--chunked-prefill-size", "16", "--context-length", "512",
    "--max-running-requests", "4", "--max-total-tokens", "1200", "--decode-buckets", "4", "--extend-buckets", "20",
)  # fmt: skip
GREEDY = {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True}
DEAD_S, SILENT_S, IDLE_S = 2.0, 10.0, 120.0
SLACK_S = 8.0  # of this machine, whose processors others use


def bodies() -> list[dict[str, Any]]:
    """Chunks, more requests than rows, seeds, filters, edits, scores, grammars."""
    sampled = {"temperature": 1.2, "sampling_seed": 3, "max_new_tokens": 10, "ignore_eos": True}
    asked: list[tuple[list[int], dict[str, Any], dict[str, Any]]] = [
        (list(range(3, 40)), GREEDY, {}),
        ([9] * 7, GREEDY, {}),
        ([50, 51, 52], sampled, {}),
        ([7, 5, 3], {**sampled, "top_k": 20, "top_p": 0.9}, {}),
        ([11, 12, 13, 14], {**sampled, "frequency_penalty": 0.7}, {"return_logprob": True}),
        ([5, 6], {**GREEDY, "logit_bias": {"17": 4.0, "60": 5.0}}, {}),
        ([3, 4], {**GREEDY, "regex": "[0-9]{30}"}, {}),
    ]
    return [{"input_ids": ids, "sampling_params": params, **more} for ids, params, more in asked]


def tokens(url: str, rounds: int, asked: Sequence[dict[str, Any]] | None = None) -> list[list[int]]:
    def ask(body: dict[str, Any]) -> list[int]:
        answer = httpx.post(f"{url}/generate", json=body, timeout=300)
        return list(answer.raise_for_status().json()["output_ids"])

    asked = bodies() if asked is None else asked
    with ThreadPoolExecutor(len(asked)) as threads:
        return list(threads.map(ask, list(asked) * rounds))


def weight_mb(log: str) -> float:
    """MB of weights that a host has read."""
    (found,) = re.findall(r"weights: ([\d.]+) MB read", log)
    return float(found)


@pytest.mark.timeout(900)
def test_two_hosts_give_the_tokens_of_one_and_a_host_that_is_asked_to_stop_drains_all(tmp_path: Path) -> None:
    model = make_checkpoint("qwen3", tmp_path / "model", **{**MODEL, "intermediate_size": 8192, "vocab_size": 416})
    save(byte_level(), model)
    flags = ["--model", str(model), *FLAGS, "--tp", "2"]
    rounds = count(1, 150)
    with running_server(tmp_path, flags) as server:
        alone = tokens(f"http://{server.http_address}", rounds)
        read_alone = weight_mb(server.log.read_text())
    with running_hosts(tmp_path, 2, [*flags, "--drain-s", "120"]) as hosts, ThreadPoolExecutor(2) as threads:
        assert httpx.get(f"{hosts.hosts[1].url}/health").json() == {"status": "ok"}
        leaving = threads.submit(leave_early, hosts.url)
        assert tokens(hosts.url, rounds) == alone
        leaving.result()
        assert hosts.metric("jaxsgl:host_up") == {"0": 1, "1": 1}
        assert max(hosts.metric("jaxsgl:host_silent_seconds").values()) < SILENT_S
        read = [weight_mb(host.log) for host in hosts.hosts]
        long = threads.submit(hosts.ask, input_ids=[1, 2, 3], sampling_params={**GREEDY, "max_new_tokens": 450})
        time.sleep(0.2)
        hosts.hosts[1].send(signal.SIGTERM, to_engine=False)
        assert len(long.result().raise_for_status().json()["output_ids"]) == 450
        assert hosts.statuses(GONE_S + SLACK_S) == [0, 0]
        logs = [host.log for host in hosts.hosts]
    assert read[0] == read[1] <= 1.01 * read_alone / 2 + 0.1, (read, read_alone)  # MB are shown with one decimal
    assert "host 1 (127.0.0.1) was asked to stop" in logs[0]
    assert not any("ERROR" in log for log in logs), logs
    told = [re.findall(r"(\d+) calls \w+, checksum (\w+)", log) for log in logs]
    assert told[0] == told[1] and int(told[0][0][0]) > 300


def leave_early(url: str) -> None:
    """A client that goes away, so that its request is aborted."""
    body = {"input_ids": [8, 9], "sampling_params": {**GREEDY, "max_new_tokens": 400}, "stream": True}
    with httpx.stream("POST", f"{url}/generate", json=body, timeout=300) as answer:
        next(answer.iter_bytes())


DEATHS = [
    (signal.SIGKILL, 0, True),
    (signal.SIGKILL, 0, False),
    (signal.SIGKILL, 1, True),
    (signal.SIGKILL, 1, False),
    (signal.SIGSTOP, 0, True),  # a front end that stands still is its supervisor's affair
    (signal.SIGSTOP, 1, True),
]


@pytest.mark.skipif(not NIGHTLY, reason="two servers for each; by day tests/hosts/ has both ends without servers")
@pytest.mark.timeout(900)
@pytest.mark.parametrize("number,rank,to_engine", DEATHS)
def test_a_host_that_dies_or_stands_still_ends_all_and_open_requests_get_its_name(
    number: signal.Signals, rank: int, to_engine: bool, tmp_path: Path
) -> None:
    with running_hosts(tmp_path, 2, [*FLAGS, "--tp", "2"]) as hosts, ThreadPoolExecutor(1) as threads:
        long = threads.submit(asked_long, hosts)
        wait_until_it_runs(hosts)
        sent_s = time.monotonic()
        hosts.hosts[rank].send(number, to_engine)
        status, text, answered_s = long.result()
        limit_s = (DEAD_S if number == signal.SIGKILL else SILENT_S) + SLACK_S
        if rank or to_engine:  # else the address itself is gone
            named = "host 1 (127.0.0.1)" if rank else "the engine process"
            assert status == 503 and named in text, (status, text)
        assert answered_s - sent_s < limit_s
        statuses = hosts.statuses(limit_s + GONE_S)
        assert 0 not in statuses, statuses


@pytest.mark.skipif(not NIGHTLY, reason="minutes; by night")
@pytest.mark.timeout(900)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_idle_hosts_live_on_until_one_dies_or_stands_still(number: signal.Signals, tmp_path: Path) -> None:
    """Two pairs idle at the same time; of one the first host's engine gets the signal, of the other the second's."""
    with contextlib.ExitStack() as stack:
        pairs = []
        for rank in (0, 1):
            (tmp_path / str(rank)).mkdir()
            pairs.append(stack.enter_context(running_hosts(tmp_path / str(rank), 2, [*FLAGS, "--tp", "2"])))
        time.sleep(IDLE_S)
        for rank, hosts in enumerate(pairs):
            assert hosts.ask(input_ids=[1, 2], sampling_params=GREEDY).status_code == 200
            hosts.hosts[rank].send(number, to_engine=True)
            assert 0 not in hosts.statuses(SILENT_S + SLACK_S + GONE_S)


def wait_until_it_runs(hosts: Hosts) -> None:
    deadline_s = time.monotonic() + 60
    while "sglang:num_running_reqs{" not in (text := httpx.get(f"{hosts.url}/metrics", timeout=60).text) or re.search(
        r"^sglang:num_running_reqs\{.*\} 0", text, re.MULTILINE
    ):
        assert time.monotonic() < deadline_s


def asked_long(hosts: Hosts) -> tuple[int, str, float]:
    """Status and text of an answer that takes long, and when it came."""
    try:
        answer = hosts.ask(120, input_ids=[1, 2], sampling_params={**GREEDY, "max_new_tokens": 500})
        return answer.status_code, answer.text, time.monotonic()
    except httpx.HTTPError as error:
        return 0, str(error), time.monotonic()


@pytest.mark.skipif(not NIGHTLY, reason="by night")
@pytest.mark.timeout(900)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_host_that_dies_while_all_load_ends_all(number: signal.Signals, rank: int, tmp_path: Path) -> None:
    with running_hosts(tmp_path, 2, [*FLAGS, "--tp", "2"], until="weights: ") as hosts:
        hosts.hosts[rank].send(number, to_engine=number != signal.SIGTERM)
        statuses = hosts.statuses(GONE_S + SLACK_S)
        assert statuses[1 - rank] == 1 or number == signal.SIGTERM, statuses


@pytest.mark.skipif(not NIGHTLY, reason="four servers; by night")
@pytest.mark.timeout(1800)
def test_four_hosts_give_the_tokens_of_one_and_read_their_own_parts_alone(tmp_path: Path) -> None:
    model = make_checkpoint("llama_untied_llama3_rope", tmp_path / "model", **MODEL)
    flags = ["--model", str(model), *FLAGS, "--tp", "4"]
    plain = [body for body in bodies() if "regex" not in body["sampling_params"]]  # this model has no tokenizer
    with running_server(tmp_path, flags) as server:
        alone = tokens(f"http://{server.http_address}", 3, plain)
        read_alone = weight_mb(server.log.read_text())
    with running_hosts(tmp_path, 4, flags) as hosts:
        assert tokens(hosts.url, 3, plain) == alone
        for host in hosts.hosts:
            assert weight_mb(host.log) <= 1.01 * read_alone / 4, (host.log, read_alone)
        hosts.hosts[0].send(signal.SIGTERM, to_engine=False)
        assert hosts.statuses(GONE_S + SLACK_S) == [0] * 4
