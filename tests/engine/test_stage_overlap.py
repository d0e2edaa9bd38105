"""Pipeline stages work at the same time: on each a step sleeps, so that busy processors hide nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.engine.stage_times import NUM_CHUNKS, STAGE_S
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
