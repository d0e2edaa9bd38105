"""The example for trainers samples with weights that it has learned."""

import json
from pathlib import Path

from tests.grids import NIGHTLY
from tests.scripts.running import run_script


def test_the_example_samples_updates_and_samples(tmp_path: Path) -> None:
    steps = 12 if NIGHTLY else 1
    done = run_script("rl_example.py", "--steps", steps, "--samples", 4, "--json", tmp_path / "out.json")
    versions = [line.split()[1].rstrip(":") for line in done.stdout.splitlines()]
    assert versions == ["default", *map(str, range(1, steps + 1))]
    rewards = json.loads((tmp_path / "out.json").read_text())["rewards"]
    assert len(rewards) == steps + 1 and all(0 < reward < 1 for reward in rewards)
    assert not NIGHTLY or sum(rewards[-3:]) > sum(rewards[:3]) + 0.1
