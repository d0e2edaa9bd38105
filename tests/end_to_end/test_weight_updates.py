"""Updates of the weights of a real server under load: each answer is of one version, and nothing is left behind."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.checkpoints import make_checkpoint
from tests.end_to_end.servers import COMMON_FLAGS, RunningServer, check_log, running_server
from tests.grids import count

NUM_STREAMS = count(24, 64)
NUM_PROMPTS = count(8, 16)
PARAMS = {"max_new_tokens": 16, "temperature": 0.0, "ignore_eos": True}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A model, the same with other weights, and with weights that end in the middle."""
    root = tmp_path_factory.mktemp("folders")
    first, second = (make_checkpoint("qwen3", root / name, seed=seed) for seed, name in enumerate(("first", "second")))
    broken = shutil.copytree(first, root / "broken")
    weights = (broken / "model.safetensors").read_bytes()
    (broken / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    return [first, second, broken]


@pytest.fixture(scope="module")
def server(folders: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    flags = ("--model", str(folders[0]), "--weights-root", str(folders[0].parent), *COMMON_FLAGS)
    with running_server(tmp_path_factory.mktemp("server"), flags) as server:
        yield server
        server.stop()
        check_log(server)


@pytest.fixture(scope="module")
def http(server: RunningServer) -> Iterator[httpx.Client]:
    limits = httpx.Limits(max_connections=NUM_STREAMS + 8)
    with httpx.Client(base_url=f"http://{server.http_address}", timeout=120, limits=limits) as http:
        yield http


def prompt(number: int) -> list[int]:
    """Pairs of prompts have their first half in common."""
    return [*range(number // 2, number // 2 + 32), *range(100 + number, 132 + number)]


def generate(http: httpx.Client, number: int) -> tuple[str, list[int], int]:
    """The version of the weights, which every event names, the tokens, and how many of the prompt's were cached."""
    body = {"input_ids": prompt(number), "sampling_params": PARAMS, "stream": True}
    with http.stream("POST", "/generate", json=body) as answer:
        assert answer.status_code == 200, answer.read()
        lines = [line for line in answer.iter_lines() if line.startswith("data: {")]
    told = [json.loads(line.removeprefix("data: ")) for line in lines]
    (version,) = {event["meta_info"]["weight_version"] for event in told}
    return version, told[-1]["output_ids"], told[-1]["meta_info"]["cached_tokens"]


def update(http: httpx.Client, folder: Path, version: str, **more: Any) -> httpx.Response:
    body = {"model_path": str(folder), "weight_version": version, **more}
    return http.post("/update_weights_from_disk", json=body)


def resident_mb(pid: int) -> float:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1000 for line in lines if line.startswith("VmRSS"))


def test_updates_under_load(server: RunningServer, http: httpx.Client, folders: list[Path]) -> None:
    expected: dict[str, list[list[int]]] = {}
    for name in ("second", "first"):
        assert update(http, folders[0].parent / name, name).json()["success"]
        answers = [generate(http, number) for number in range(NUM_PROMPTS)]
        assert answers[0][2] == 0 and answers[1][2] == 32, "no prefix of older weights is found, one of the same is"
        assert {version for version, _, _ in answers} == {name}
        expected[name] = [ids for _, ids, _ in answers]
    num_different = sum(first != second for first, second in zip(*expected.values(), strict=True))
    assert num_different > NUM_PROMPTS / 2

    done = threading.Event()
    num_answers = dict.fromkeys(expected, 0)

    def stream(number: int) -> None:
        while not done.is_set():
            version, ids, _ = generate(http, number % NUM_PROMPTS)
            name = version.partition("-")[0]
            assert ids == expected[name][number % NUM_PROMPTS], f"prompt {number} of {version}"
            num_answers[name] += 1

    resident = []
    with ThreadPoolExecutor(NUM_STREAMS) as threads:
        streams = [threads.submit(stream, number) for number in range(NUM_STREAMS)]
        try:
            for step in range(count(4, 12)):
                name = ("second", "first")[step % 2]
                if step % 4 == 1:
                    failed = update(http, folders[2], "broken")
                    assert failed.status_code == 400 and not failed.json()["success"]
                answer = update(http, folders[0].parent / name, f"{name}-{step}")
                assert answer.json()["success"], answer.text
                assert http.get("/weight_version").json() == {"weight_version": f"{name}-{step}"}
                resident.append(resident_mb(server.engine_pid))
        finally:
            done.set()
        for running in streams:
            running.result()
    assert min(num_answers.values()) > 0
    assert max(resident[3:]) < resident[2] + 30, resident
    state = http.get("/internal_state", params={"check": True}).json()
    assert state["leaks"] == [] and state["leaks_total"] == 0
    assert http.get("/server_info").json()["internal_states"][0]["recompiles_total"] == 0


def test_a_retracted_request_goes_on_as_the_new_weights_would(http: httpx.Client, folders: list[Path]) -> None:
    num_tokens = 1000
    assert update(http, folders[0], "first").json()["success"]
    body = {"input_ids": prompt(5), "stream": True, "sampling_params": {**PARAMS, "max_new_tokens": num_tokens}}
    told: list[tuple[str, list[int]]] = []  # version and all tokens so far, by event
    with ThreadPoolExecutor(1) as thread, http.stream("POST", "/generate", json=body) as stream:
        updating = None
        for line in stream.iter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            told.append((event["meta_info"]["weight_version"], event["output_ids"]))
            if len(told) == 8:
                updating = thread.submit(update, http, folders[1], "second", mode="retract")
    assert updating is not None and updating.result().json()["num_paused_requests"] == 1
    ids, num_old = told[-1][1], max(len(ids) for version, ids in told if version == "first")
    num_news = min(len(ids) for version, ids in told if version == "second")
    assert told[-1][0] == "second" and 0 < num_old < num_news <= len(ids) == num_tokens

    def anew(num_first: int) -> list[int]:
        params = {**PARAMS, "max_new_tokens": num_tokens - num_first}
        body = {"input_ids": [*prompt(5), *ids[:num_first]], "sampling_params": params}
        return http.post("/generate", json=body).json()["output_ids"]

    # An event has the version of its last token: the first one of the new weights may begin with tokens of the old.
    assert any(anew(num_first) == ids[num_first:] for num_first in range(num_old, num_news)), (num_old, num_news)


def test_memory_is_released_while_a_request_waits(http: httpx.Client, folders: list[Path]) -> None:
    before = generate(http, 3)
    assert http.post("/release_memory_occupation").json()["success"]
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(generate, http, 3)
        for tag in ("weights", "kv_cache"):
            assert http.get("/server_info").json()["internal_states"][0]["paused"]
            assert http.post("/resume_memory_occupation", json={"tags": [tag]}).json()["success"]
        version, ids, cached = waiting.result()
    assert (version, ids, cached) == (before[0], before[1], 0)
