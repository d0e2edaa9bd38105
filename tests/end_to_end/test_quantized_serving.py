"""Servers of quantized weights, a format each: answers, prefix cache, and updates to other weights of the format."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import jax.numpy as jnp
import numpy as np
import pytest

from jaxsgl.models import arch_from_folder
from jaxsgl.models.quantization import FORMATS_AT_LOAD
from jaxsgl.weights import load_params
from tests.checkpoints import make_checkpoint
from tests.end_to_end.precision import EXACT_FLAGS
from tests.end_to_end.servers import check_log, running_server
from tests.grids import NIGHTLY
from tests.plain_model import mesh_of, plain_logits
from tests.weights.stored_weights import FORMATS, deepseek_v4_as_published, quantize_folder
from tests.weights.test_experts import pack

FLAGS = (
    *EXACT_FLAGS, "--max-running-requests", "4", "--decode-buckets", "4", "--extend-buckets", "128",
    "--chunked-prefill-size", "128", "--max-total-tokens", "1024", "--context-length", "256", "--weight-only",
)  # fmt: skip
PROMPT = [5 + 7 * i % 190 for i in range(100)]  # the smallest vocabulary has 200 tokens
NUM_TOKENS = 16
MXFP4 = "mxfp4"
DEEPSEEK_V4 = "deepseek v4"
NAMES = ["awq", *FORMATS_AT_LOAD, *(name for name in FORMATS if name != "awq"), MXFP4, DEEPSEEK_V4]


def checkpoint(name: str, folder: Path, seed: int) -> Path:
    """A random checkpoint in a format, or one for a flag of `FORMATS_AT_LOAD`, which is not quantized."""
    if name == MXFP4:
        made = make_checkpoint("gpt_oss", folder, seed=seed, intermediate_size=64)
        pack(made, seed=seed)
        return made
    if name == DEEPSEEK_V4:
        return deepseek_v4_as_published(folder, seed=seed)
    plain = make_checkpoint("qwen3", folder / "plain", seed=seed)
    return plain if name in FORMATS_AT_LOAD else quantize_folder(plain, folder / "stored", name)


def logits(name: str, folder: Path, ids: list[int]) -> np.ndarray:
    """By the dequantized weights, one sequence at a time."""
    meant = folder / "meant" if name in (*FORMATS, DEEPSEEK_V4) else folder
    arch = replace(arch_from_folder(meant), weight_format=FORMATS_AT_LOAD.get(name))
    return plain_logits(arch, load_params(meant, arch, jnp.dtype("float32"), mesh_of()), ids)


def generate(http: httpx.Client) -> tuple[list[int], int, str]:
    """The tokens after `PROMPT`, how many of the prompt's were cached, and the version of the weights."""
    params = {"max_new_tokens": NUM_TOKENS, "temperature": 0.0, "ignore_eos": True}
    answer = http.post("/generate", json={"input_ids": PROMPT, "sampling_params": params}).json()
    return answer["output_ids"], answer["meta_info"]["cached_tokens"], answer["meta_info"]["weight_version"]


def update(http: httpx.Client, folder: Path) -> dict[str, Any]:
    answer: dict[str, Any] = http.post("/update_weights_from_disk", json={"model_path": str(folder)}).json()
    return answer


@pytest.mark.skipif(not NIGHTLY, reason="by day tests/weights/test_quantized.py has these weights without a server")
@pytest.mark.parametrize("name", NAMES)
def test_a_server_answers_by_its_quantized_weights_and_by_those_of_an_update(name: str, tmp_path: Path) -> None:
    folders = [checkpoint(name, tmp_path / f"{seed}", seed) for seed in (1, 2)]
    other_format = checkpoint("fp8 per tensor" if name == "awq" else "awq", tmp_path / "other", seed=1)
    flags = (
        "--model",
        str(folders[0]),
        "--weights-root",
        "*",
        *FLAGS,
        *(("--quantization", name) if name in FORMATS_AT_LOAD else ()),
    )
    with running_server(tmp_path, flags) as server:
        with httpx.Client(base_url=f"http://{server.http_address}", timeout=120) as http:
            answers = []
            for version, folder in enumerate(folders):
                if version > 0:
                    assert update(http, folder)["success"]
                first, again = generate(http), generate(http)
                assert first[1:] == (0, "default" if version == 0 else "1"), "the cache holds nothing of other weights"
                assert again[0] == first[0] and again[1] > 0
                of_steps = logits(name, folder, PROMPT + first[0])[len(PROMPT) - 1 : -1]
                chosen = np.take_along_axis(of_steps, np.array(first[0])[:, None], 1)[:, 0]
                assert (of_steps.max(1) - chosen < 0.01 * of_steps.std()).all()
                answers.append(first[0])
            refused = update(http, other_format)
            reason = "--quantization is" if name in FORMATS_AT_LOAD else "is another model"
            assert not refused["success"] and reason in refused["message"], refused
            assert answers[0] != answers[1] == generate(http)[0]
            assert http.get("/server_info").json()["internal_states"][0]["recompiles_total"] == 0
            assert http.get("/internal_state", params={"check": True}).json()["leaks"] == []
        server.stop()
        check_log(server)
