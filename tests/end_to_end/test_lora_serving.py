"""Adapters on several devices, and adapters that come and go under load."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from tests.checkpoint_kinds.sizes import VOCAB_SIZE
from tests.checkpoints import make_checkpoint
from tests.end_to_end.lora_answers import ALLOWED
from tests.end_to_end.servers import RunningServer, check_log, running_server
from tests.grids import NIGHTLY, count
from tests.weights.peft_adapters import ATTENTION, MLP, make_adapter

ROOT = Path(__file__).parents[2]
STREAMS = 32
PROMPTS = np.random.default_rng(5).integers(3, VOCAB_SIZE, (STREAMS, 24)).tolist()
FLAGS = (
    "--page-size", "4", "--context-length", "128", "--max-running-requests", "8", "--max-total-tokens", "1024",
    "--chunked-prefill-size", "64", "--decode-buckets", "8", "--extend-buckets", "64", "--dtype", "float32",
    "--enable-lora", "--max-loras-per-batch", "2", "--max-lora-rank", "8", "--check-every-step",
    "--compilation-cache-dir", "",
)  # fmt: skip


def test_devices_that_share_a_model_and_its_adapters_give_the_answers_of_one(tmp_path: Path) -> None:
    """By night four, too, which have copies of two kv heads; and weights in int8."""
    model = make_checkpoint("qwen3", tmp_path / "model", num_attention_heads=8, num_hidden_layers=count(1, 2))
    adapters = {
        "all": str(make_adapter(model, tmp_path / "all", modules=ATTENTION + MLP, r=8)),
        "kv": str(make_adapter(model, tmp_path / "kv", modules=["k_proj", "v_proj", "down_proj"], seed=1)),
    }
    flags: list[dict[str, Any]] = [{"tp": 1}, {"tp": 2}]
    if NIGHTLY:
        weights = {"quantization": "int8", "weight_only": True}  # of activations, each device would round its part
        flags += [{"tp": 4}, weights, {**weights, "tp": 2}]
    cases = [{"folder": str(model), "adapters": adapters, "prompts": PROMPTS[:2], "flags": each} for each in flags]
    done = subprocess.run(
        [sys.executable, "-m", "tests.end_to_end.lora_answers"],
        input=json.dumps(cases), capture_output=True, text=True, cwd=ROOT, env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    one, *others = [json.loads(line) for line in done.stdout.splitlines()]
    free = [json.dumps(scores) for scores in one["scores"][::2]]  # those of a held answer may be equal
    assert len(set(free)) == len(free), "adapters change nothing"
    assert all(set(tokens) <= set(ALLOWED) for tokens in one["tokens"][1::2])
    for answer, given in zip(others, flags[1:], strict=True):
        assert answer["sums"] == answer["sums_with_adapters"] and answer["recompiles"] == 0
        if "quantization" not in given:
            assert answer["tokens"] == one["tokens"], given
            np.testing.assert_allclose(answer["scores"], one["scores"], atol=1e-4)
    if NIGHTLY:
        quantized, shared = others[-2:]
        np.testing.assert_allclose(shared["scores"], quantized["scores"], atol=3e-3)


@pytest.mark.skipif(not NIGHTLY, reason="minutes of load on a server; by night")
def test_loading_the_same_name_again_and_again_under_32_streams(tmp_path: Path) -> None:
    """No stream gets a token of the other adapter, nothing is compiled, and the engine's memory stays."""
    model = make_checkpoint("qwen3", tmp_path / "model")
    folders = [
        str(make_adapter(model, tmp_path / str(seed), modules=ATTENTION + MLP, r=r, seed=seed))
        for seed, r in ((0, 8), (1, 5))
    ]
    named = [f"{name}={folder}" for name, folder in zip(("first", "second"), folders, strict=True)]
    with (
        running_server(tmp_path, ["--model", str(model), *FLAGS, "--lora-root", "*", "--lora-paths", *named]) as server,
        ThreadPoolExecutor(STREAMS + 1) as threads,
        httpx.Client(base_url=f"http://{server.http_address}", timeout=300) as http,
    ):
        expected = [[tokens(http, prompt, name) for prompt in PROMPTS] for name in ("first", "second")]
        assert None not in expected[0] and expected[0] != expected[1]
        assert [model["id"] for model in http.get("/v1/models").json()["data"]] == [model.name, "first", "second"]
        for name in ("first", "second"):
            order(http, "unload", lora_name=name)
        memory = []
        for turn in range(12):
            which = turn % 2
            order(http, "load", lora_name="it", lora_path=folders[which])
            streams = [threads.submit(tokens, http, prompt, "it", stream=True) for prompt in PROMPTS]
            base = [tokens(http, PROMPTS[0], None) for _ in range(2)]
            while http.get("/get_load").json()[0]["num_reqs"] == 0 and not all(each.done() for each in streams):
                pass
            unloading = threads.submit(order, http, "unload", lora_name="it")
            answers = [each.result() for each in streams]
            assert unloading.result()["loaded_adapters"] == {}
            refused = [answer for answer in answers if answer is None]
            assert len(refused) < STREAMS, "none had begun"
            for answer, right in zip(answers, expected[which], strict=True):
                assert answer in (None, right), f"turn {turn}"
            assert base[0] == base[1]
            memory.append(resident_mib(server))
        order(http, "load", lora_name="pinned", lora_path=folders[1], pinned=True)
        state = http.get("/internal_state", params={"check": True}).json()
        assert [(each["name"], each["rank"], each["pinned"]) for each in state["adapters"]] == [("pinned", 5, True)]
        told = http.get("/get_server_info").json()["internal_states"][0]
        assert told["recompiles_total"] == told["leaks_total"] == told["failed_requests_total"] == 0
        assert state["leaks"] == []
        assert memory[-1] < memory[3] + 8, memory
        check_log(server)


def order(http: httpx.Client, what: str, **body: Any) -> Any:
    answer = http.post(f"/{what}_lora_adapter", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def tokens(http: httpx.Client, prompt: list[int], adapter: str | None, stream: bool = False) -> list[int] | None:
    """The tokens of an answer; None if the adapter is not loaded (any more)."""
    sampling = {"temperature": 0, "max_new_tokens": 40, "ignore_eos": True}
    body = {"input_ids": prompt, "sampling_params": sampling, "lora_path": adapter, "stream": stream}
    answer = http.post("/generate", json=body)
    if answer.status_code == 400:
        assert "loaded" in answer.text
        return None
    assert answer.status_code == 200, answer.text
    if not stream:
        return list(answer.json()["output_ids"])
    events = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: {")]
    last = json.loads(events[-1])
    if "error" in last:
        assert "loaded" in str(last)
        return None
    return list(last["output_ids"])


def resident_mib(server: RunningServer) -> float:
    status = Path(f"/proc/{server.engine_pid}/status").read_text()
    (line,) = (line for line in status.splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) / 1024
