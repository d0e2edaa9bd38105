"""Replicas on real servers: the tokens of one model, and each shared prefix computed on one of them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.checkpoint_kinds.sizes import OF_FAMILIES, VOCAB_SIZE
from tests.checkpoints import make_checkpoint
from tests.end_to_end.servers import check_log, running_server
from tests.end_to_end.test_families import logits_of
from tests.grids import NIGHTLY, count

VOCAB = min(VOCAB_SIZE, OF_FAMILIES["vocab_size"])
GROUPS, EACH = count(3, 8), 6
PREFIX, OWN = 48, 7  # tokens of a prompt that its group shares, and that it has alone
AT_ONCE = 6
FLAGS = (
    "--page-size", "4", "--chunked-prefill-size", "64", "--context-length", "96", "--max-running-requests", "8",
    "--decode-buckets", "8", "--extend-buckets", "64",
)  # fmt: skip


@pytest.fixture(scope="module", params=["gemma3", *["qwen3"] * NIGHTLY])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(request.param, tmp_path_factory.mktemp(request.param), seed=3)


def prompts() -> list[list[int]]:
    """Of all groups, in any order."""
    draw = random.Random(5)
    shared = [[draw.randrange(3, VOCAB) for _ in range(PREFIX)] for _ in range(GROUPS)]
    made = [prefix + [draw.randrange(3, VOCAB) for _ in range(OWN)] for prefix in shared for _ in range(EACH)]
    draw.shuffle(made)
    return made


def served(checkpoint: Path, folder: Path, flags: Sequence[str]) -> tuple[list[list[int]], float, list[int]]:
    """Returns the tokens of each prompt, the share of prompt tokens that were cached, and prompt tokens by replica."""
    folder.mkdir()
    with (
        running_server(folder, ["--model", str(checkpoint), *FLAGS, *flags]) as server,
        httpx.Client(base_url=f"http://{server.http_address}", timeout=120) as http,
        ThreadPoolExecutor(AT_ONCE) as threads,
    ):

        def ask(prompt: list[int]) -> Any:
            sampling = {"max_new_tokens": 5, "temperature": 0, "ignore_eos": True}
            answer = http.post("/generate", json={"input_ids": prompt, "sampling_params": sampling})
            assert answer.status_code == 200, answer.text
            return answer.json()

        answers = list(threads.map(ask, prompts()))
        states = http.get("/server_info").json()["internal_states"]
        server.stop()
        check_log(server)
    cached = sum(answer["meta_info"]["cached_tokens"] for answer in answers)
    of_replicas = [state["prompt_tokens_total"] for state in states]
    return [answer["output_ids"] for answer in answers], cached / sum(of_replicas), of_replicas


@pytest.fixture(scope="module")
def alone(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[list[int]], float, list[int]]:
    """What one replica with the pool of two makes of the prompts."""
    return served(checkpoint, tmp_path_factory.mktemp("alone") / "server", ["--max-total-tokens", "1600"])


@pytest.mark.skipif(not NIGHTLY, reason="starts two engines more; by night")
def test_replicas_compute_each_shared_prefix_once(
    checkpoint: Path, tmp_path: Path, alone: tuple[list[list[int]], float, list[int]]
) -> None:
    tokens, hit_rate, of_replicas = served(checkpoint, tmp_path / "dp", ["--dp-size", "2", "--max-total-tokens", "800"])
    expected, best_rate, _ = alone
    assert tokens == expected
    assert best_rate > 0.6
    assert hit_rate > 0.95 * best_rate
    assert min(of_replicas) > sum(of_replicas) / 4, "both replicas work"


def test_replicas_of_two_devices_each_give_the_tokens_of_transformers(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where requests are retracted and prompts are extended beside decodes."""
    monkeypatch.setenv("JAXSGL_TEST_RETRACT", "4")
    flags = ["--tp", "2", "--dp-size", "2", "--max-total-tokens", "800", "--enable-mixed-chunk"]
    tokens, _, of_replicas = served(checkpoint, tmp_path / "mesh", flags)
    asked = prompts()
    logits = logits_of(checkpoint, [[*prompt, *answer] for prompt, answer in zip(asked, tokens, strict=True)])
    greedy = [of_one[PREFIX + OWN - 1 : -1].argmax(axis=-1).tolist() for of_one in logits]
    assert tokens == greedy
    assert min(of_replicas) > 0
