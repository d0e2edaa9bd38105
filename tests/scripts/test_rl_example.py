"""The example for trainers samples with weights that it has learned."""

import json
from pathlib import Path

import pytest

from tests.grids import NIGHTLY
from tests.scripts.running import run_script

STEPS = 12


@pytest.mark.skipif(not NIGHTLY, reason="by day tests/engine/test_weight_store.py updates weights between answers")
def test_the_example_samples_updates_and_samples(tmp_path: Path) -> None:
    done = run_script("rl_example.py", "--steps", STEPS, "--samples", 4, "--json", tmp_path / "out.json")
    versions = [line.split()[1].rstrip(":") for line in done.stdout.splitlines()]
    assert versions == ["default", *map(str, range(1, STEPS + 1))]
    rewards = json.loads((tmp_path / "out.json").read_text())["rewards"]
    assert len(rewards) == STEPS + 1 and all(0 < reward < 1 for reward in rewards)
    assert sum(rewards[-3:]) > sum(rewards[:3]) + 0.1
