"""Models in pipeline stages answer as on one device, and each stage reads its own layers alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.checkpoints import make_checkpoint
from tests.end_to_end.test_tensor_parallel import tokens_served
from tests.grids import NIGHTLY

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
SIZES = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 200, "num_hidden_layers": 4}
KINDS: dict[str, dict[str, Any]] = {
    "llama_untied_llama3_rope": SIZES,
    "qwen3": SIZES,
    "gemma3": {"num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2},
    "gemma4": {},
    "olmo2": {},
    "opt": {"num_hidden_layers": 4},
    "deepseek_v3": {},
    "gpt_oss": {},
    "qwen3_moe": {"num_experts": 16, "num_hidden_layers": 4},
    "deepseek_v32": {"num_hidden_layers": 4},
}
DAILY = {"qwen3": [{"pp_size": 2, "tp": 2, "pp_async_batch_depth": 1}]}
STAGES = [{"pp_size": stages, "tp": tp} for stages in (2, 4) for tp in (1, 2)]
DEEPER = [{"pp_size": 2, "pp_async_batch_depth": 2}, {"pp_size": 2, "disable_overlap_schedule": True}]


def answers_of(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.end_to_end.stage_answers"],
        input=json.dumps(cases), capture_output=True, text=True, env=ENVIRONMENT, cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.timeout(1800 if NIGHTLY else 300)
@pytest.mark.parametrize("kind", KINDS if NIGHTLY else DAILY)
def test_stages_give_the_answers_of_one_device(kind: str, tmp_path: Path) -> None:
    """With chunks, prefixes, retraction, aborts, mixed steps, edits, scores and masks; greedy and seeded."""
    sizes = KINDS[kind] if NIGHTLY else {**KINDS[kind], "num_hidden_layers": 2}
    folder = str(make_checkpoint(kind, tmp_path / kind, **sizes))
    cases: list[dict[str, Any]] = cases_of(kind) if NIGHTLY else DAILY[kind]
    alone, *staged = answers_of([{"folder": folder, "flags": flags, "retract_every": 7} for flags in ({}, *cases)])
    for flags, found in zip(cases, staged, strict=True):
        assert found["recompiles"] == 0, flags
        for steps in ("apart", "mixed"):
            check_equal(found[steps], alone[steps], flags)


def cases_of(kind: str) -> list[dict[str, Any]]:
    """All of one kind, and of each other one in turn."""
    every = [*STAGES, *DEEPER]
    return every if kind == "qwen3" else [every[list(KINDS).index(kind) % len(every)]]


def check_equal(found: dict[str, Any], alone: dict[str, Any], flags: dict[str, Any]) -> None:
    for name, expected in alone.items():
        answer = found[name]
        assert answer["refusals"] == expected["refusals"], (name, flags)
        if name.startswith("left"):  # at another token
            both = min(len(answer["token_ids"]), len(expected["token_ids"]))
            assert answer["token_ids"][:both] == expected["token_ids"][:both], (name, flags)
            continue
        assert answer["token_ids"] == expected["token_ids"], (name, flags)
        np.testing.assert_allclose(answer["scores"], expected["scores"], rtol=0, atol=2e-4)


@pytest.mark.skipif(not NIGHTLY, reason="two servers; by night")
def test_a_server_with_stages_gives_the_tokens_of_one_device(tmp_path: Path) -> None:
    """With overlap, mixed steps and chunks, several requests at once."""
    folder = make_checkpoint("qwen3", tmp_path / "model", **KINDS["qwen3"])
    alone = tokens_served(folder, tmp_path / "one", [])
    assert tokens_served(folder, tmp_path / "stages", ["--pp-size", "2", "--tp", "2"]) == alone
