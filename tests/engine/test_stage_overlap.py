"""Pipeline stages work at the same time: on each a step sleeps, so that busy processors hide nothing.

In one process, and in two servers, where the stream goes from one to the other and a client measures the times.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.end_to_end import serve_sleeping
from tests.end_to_end.hosts import running_hosts
from tests.engine.stage_times import CHUNK, NUM_CHUNKS, NUM_TOKENS, ROWS, STAGE_S
from tests.grids import NIGHTLY

ROOT = Path(__file__).parents[2]
MODEL = {
    "architectures": ["Qwen3ForCausalLM"], "vocab_size": 101, "hidden_size": 32, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 48,
    "max_position_embeddings": 512, "tie_word_embeddings": True, "dtype": "float32", "eos_token_id": 1,
}  # fmt: skip
TRIES = 4  # other programs take the processors, too


def times_of(folder: Path, num_stages: int) -> dict[str, float]:
    """Stages that each takes, of `STAGE_S`."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.engine.stage_times", str(folder), str(num_stages)],
        capture_output=True, text=True, cwd=ROOT,
        env={**os.environ, "JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return {name: seconds / STAGE_S for name, seconds in json.loads(done.stdout.splitlines()[-1]).items()}


@pytest.mark.skipif(not NIGHTLY, reason="sleeps; tests/scheduler/test_turns.py counts the same by day")
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("num_stages", "most"), [(2, 1.15), (4, 1.25)])
def test_a_step_takes_about_as_long_as_a_stage_and_chunks_follow_each_other_through_them(
    num_stages: int, most: float, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    found = []
    for _ in range(TRIES):
        times = times_of(tmp_path, num_stages)
        found.append(times)
        if (
            times["decode step"] <= most
            and times["one chunk"] <= 1.1 * num_stages
            and times["all chunks"] <= 1.15 * (NUM_CHUNKS + num_stages - 1)
        ):
            return
    raise AssertionError(f"none of {TRIES} tries was fast enough: {found}")


NUM_HOSTS = 2
HOST_FLAGS = (
    "--load-format", "dummy", "--pp-size", str(NUM_HOSTS), "--page-size", "4", "--chunked-prefill-size", str(CHUNK),
    "--context-length", str(2 * CHUNK * NUM_CHUNKS), "--max-running-requests", str(ROWS), "--max-total-tokens", "2000",
    "--decode-buckets", str(ROWS), "--extend-buckets", str(CHUNK), "--grammar-backend", "none", "--disable-radix-cache",
    "--compilation-cache-dir", "",
)  # fmt: skip


def parts_came(url: str, length: int, num_tokens: int) -> list[float]:
    """When the parts of a streamed answer came, in stages after the question."""
    params = {"temperature": 0, "max_new_tokens": num_tokens, "ignore_eos": True}
    body = {"input_ids": [3] * length, "sampling_params": params, "stream": True}
    begun_s = time.perf_counter()
    with httpx.stream("POST", f"{url}/generate", json=body, timeout=120) as answer:
        lines = [(line, time.perf_counter()) for line in answer.iter_lines()]
    return [(came_s - begun_s) / serve_sleeping.STAGE_S for line, came_s in lines if line.startswith("data: {")]


def decode_step(url: str) -> float:
    """Stages that a step takes, of requests that decode in turns: one in each of the steps that are on their way."""
    with ThreadPoolExecutor(ROWS) as threads:
        came = list(threads.map(lambda _: parts_came(url, 1, NUM_TOKENS), range(ROWS)))
    return sum((each[-1] - each[1]) / (len(each) - 2) / NUM_HOSTS for each in came) / len(came)


def first_token(url: str, num_chunks: int) -> float:
    """Stages until the first token of a prompt."""
    (came,) = parts_came(url, CHUNK * num_chunks, 1)
    return came


@pytest.mark.skipif(not NIGHTLY, reason="servers that sleep")
@pytest.mark.timeout(900)
def test_stages_of_two_hosts_work_at_the_same_time(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    flags: list[Any] = ["--model", str(tmp_path), *HOST_FLAGS]
    with running_hosts(tmp_path, NUM_HOSTS, flags, module=serve_sleeping.NAME) as hosts:
        parts_came(hosts.url, CHUNK, 1)  # what happens at the first time alone
        for measure, most in (
            (decode_step, 1.15),
            (partial(first_token, num_chunks=1), 1.1 * NUM_HOSTS),
            (partial(first_token, num_chunks=NUM_CHUNKS), 1.15 * (NUM_CHUNKS + NUM_HOSTS - 1)),
        ):
            found: list[float] = []
            while not found or min(found) > most:
                assert len(found) < TRIES, f"{measure} took {found} stages, more than {most} each time"
                found.append(measure(hosts.url))
