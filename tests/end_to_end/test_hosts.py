"""Hosts that share a model answer as one host does; they end together, whichever dies or is asked to stop.

They share each layer (`--tp`) or have pipeline stages (`--pp-size`).
"""

from __future__ import annotations

import contextlib
import re
import signal
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import numpy as np
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
ROUNDS = count(1, 150)
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
        ([4, 3], {**GREEDY, "regex": "[0-9]{30}"}, {"return_logprob": True, "top_logprobs_num": 3}),
    ]
    return [{"input_ids": ids, "sampling_params": params, **more} for ids, params, more in asked]


class Alone(NamedTuple):
    """What one host answers.

    Attributes:
      flags: with which it was started.
      tokens: of `bodies`, in so many rounds.
      scores: of `scored`.
      read_mb: MB of weights that it has read.
    """

    flags: list[str]
    tokens: list[list[int]]
    scores: list[float]
    read_mb: float


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Alone:
    folder = tmp_path_factory.mktemp("alone")
    sizes = {**MODEL, "intermediate_size": 8192, "vocab_size": 416, "num_hidden_layers": count(2, 4)}
    model = make_checkpoint("qwen3", folder / "model", **sizes)
    save(byte_level(), model)
    flags = ["--model", str(model), *FLAGS, "--tp", "2"]
    with running_server(folder, flags) as server:
        url = f"http://{server.http_address}"
        return Alone(flags, tokens(url, ROUNDS), scored(url), weight_mb(server.log.read_text()))


def scored(url: str) -> list[float]:
    """Log-probabilities of the tokens of prompt and answer, longer than several chunks."""
    body = {"input_ids": list(range(3, 60)), "sampling_params": GREEDY, "return_logprob": True, "logprob_start_len": 0}
    told = httpx.post(f"{url}/generate", json=body, timeout=300).raise_for_status().json()["meta_info"]
    return [each[0] for name in ("input_token_logprobs", "output_token_logprobs") for each in told[name] if each[0]]


def tokens(url: str, rounds: int, asked: Sequence[dict[str, Any]] | None = None) -> list[list[int]]:
    def ask(body: dict[str, Any]) -> list[int]:
        answer = httpx.post(f"{url}/generate", json=body, timeout=300)
        return list(answer.raise_for_status().json()["output_ids"])

    asked = bodies() if asked is None else asked
    with ThreadPoolExecutor(len(asked)) as threads:
        return list(threads.map(ask, list(asked) * rounds))


def weight_mb(log: str) -> float:
    """MB of weights that a host has read, those of all its stages."""
    found = re.findall(r"weights: ([\d.]+) MB read", log)
    assert found
    return sum(map(float, found))


@pytest.mark.timeout(900)
def test_two_hosts_give_the_tokens_of_one_and_a_host_that_is_asked_to_stop_drains_all(
    alone: Alone, tmp_path: Path
) -> None:
    with running_hosts(tmp_path, 2, [*alone.flags, "--drain-s", "120"]) as hosts, ThreadPoolExecutor(2) as threads:
        assert httpx.get(f"{hosts.hosts[1].url}/health").json() == {"status": "ok"}
        leaving = threads.submit(leave_early, hosts.url)
        assert tokens(hosts.url, ROUNDS) == alone.tokens
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
    assert read[0] == read[1] <= 1.01 * alone.read_mb / 2 + 0.1, (read, alone)  # MB are shown with one decimal
    assert "host 1 (127.0.0.1) was asked to stop" in logs[0]
    assert not any("ERROR" in log for log in logs), logs
    told = [re.findall(r"(\d+) calls \w+, checksum (\w+)", log) for log in logs]
    assert told[0] == told[1] and int(told[0][0][0]) > 300


def leave_early(url: str, num_parts: int = 1) -> None:
    """A client that goes away after so many parts of its answer, so that its request is aborted."""
    body = {"input_ids": [8, 9], "sampling_params": {**GREEDY, "max_new_tokens": 400}, "stream": True}
    with httpx.stream("POST", f"{url}/generate", json=body, timeout=300) as answer:
        for _ in zip(range(num_parts), answer.iter_bytes(), strict=False):
            pass


STAGES = [
    (2, ["--tp", "2", "--pp-size", "2"]),
    (2, ["--tp", "1", "--pp-size", "2", "--pp-async-batch-depth", "1"]),
    (2, ["--tp", "2", "--pp-size", "4"]),
    (3, ["--tp", "1", "--pp-size", "3"]),
]


@pytest.mark.skipif(not NIGHTLY, reason="two servers more; by day test_stages.py has stages of one host")
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("number", "stages"), STAGES)
def test_hosts_with_stages_of_their_own_give_the_tokens_of_one(
    number: int, stages: list[str], alone: Alone, tmp_path: Path
) -> None:
    """With chunks, edits, scores and masks, greedy and seeded, while clients leave; each reads its own layers alone."""
    flags = [*alone.flags, *stages, "--check-every-step"]
    with running_hosts(tmp_path, number, flags) as hosts, ThreadPoolExecutor(4) as threads:
        leaving = [threads.submit(leave_early, hosts.url, num_parts) for num_parts in range(1, 5)]
        rounds = min(ROUNDS, 10)
        assert tokens(hosts.url, rounds) == alone.tokens[: rounds * len(bodies())]
        for each in leaving:
            each.result()
        np.testing.assert_allclose(scored(hosts.url), alone.scores, rtol=0, atol=2e-4)
        read = [weight_mb(host.log) for host in hosts.hosts]
        assert set(hosts.metric("jaxsgl:host_up").values()) == {1}
        hosts.hosts[1].send(signal.SIGTERM, to_engine=False)
        assert hosts.statuses(GONE_S + SLACK_S) == [0] * number
        logs = [host.log for host in hosts.hosts]
    assert alone.read_mb <= sum(read) + 0.1 < 1.2 * alone.read_mb, (read, alone)  # the embedding twice, if it is tied
    assert max(read) < 1.2 * alone.read_mb / min(number, 2), (read, alone)
    assert not any("ERROR" in log for log in logs), logs


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
@pytest.mark.parametrize("shared", ["--tp", "--pp-size"])
@pytest.mark.parametrize("number,rank,to_engine", DEATHS)
def test_a_host_that_dies_or_stands_still_ends_all_and_open_requests_get_its_name(
    number: signal.Signals, rank: int, to_engine: bool, shared: str, tmp_path: Path
) -> None:
    with running_hosts(tmp_path, 2, [*FLAGS, shared, "2"]) as hosts, ThreadPoolExecutor(1) as threads:
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
@pytest.mark.timeout(1200)
def test_idle_hosts_live_on_until_one_dies_or_stands_still(tmp_path: Path) -> None:
    """Pairs idle at the same time; then of each the engine of one host gets a signal."""
    cases = [(number, rank) for number in (signal.SIGKILL, signal.SIGSTOP) for rank in (0, 1)]
    with contextlib.ExitStack() as stack:
        pairs = []
        for case in range(len(cases)):
            (tmp_path / str(case)).mkdir()
            pairs.append(stack.enter_context(running_hosts(tmp_path / str(case), 2, [*FLAGS, "--tp", "2"])))
        time.sleep(IDLE_S)
        for hosts, (number, rank) in zip(pairs, cases, strict=True):
            assert hosts.ask(input_ids=[1, 2], sampling_params=GREEDY).status_code == 200
            hosts.hosts[rank].send(number, to_engine=True)
        for hosts in pairs:
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
@pytest.mark.parametrize("shared", ["--tp", "--pp-size"])
def test_a_host_that_dies_while_all_load_ends_all(
    shared: str, rank: int, number: signal.Signals, tmp_path: Path
) -> None:
    with running_hosts(tmp_path, 2, [*FLAGS, shared, "2"], "weights: ") as hosts, ThreadPoolExecutor(1) as threads:
        asked = threads.submit(asked_until_gone, hosts)
        sent_s = time.monotonic()
        hosts.hosts[rank].send(number, to_engine=number != signal.SIGTERM)
        statuses = hosts.statuses(GONE_S + SLACK_S)
        assert statuses[1 - rank] == 1 or number == signal.SIGTERM, statuses
        answers, gone_s = asked.result()
        assert {status for status, _ in answers} <= {503} and (answers or number != signal.SIGSTOP), answers
        if number != signal.SIGTERM:
            assert gone_s - sent_s < (DEAD_S if number == signal.SIGKILL else SILENT_S) + SLACK_S
            assert ("host 1 (127.0.0.1)" if rank else "the engine process") in hosts.hosts[0].log


def asked_until_gone(hosts: Hosts) -> tuple[list[tuple[int, str]], float]:
    """Statuses and texts of all answers until host 0 takes no more connections, and when that was."""
    answers = list[tuple[int, str]]()
    while True:
        try:
            answer = httpx.post(f"{hosts.url}/generate", json={"input_ids": [1, 2]}, timeout=60)
        except httpx.TransportError:
            return answers, time.monotonic()
        answers.append((answer.status_code, answer.text))
        time.sleep(0.05)


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
