"""The benchmark of ranks counts what steps are padded to, and compares them with replicas."""

from __future__ import annotations

import json
from pathlib import Path

from tests.scripts.running import run_script


def test_the_script_compares_ranks_with_one(tmp_path: Path) -> None:
    file = tmp_path / "ranks.json"
    flags = ["--ranks", 4, "--trace", "chat", "--num-prompts", 40, "--json", file]
    shown = run_script("bench ranks", *flags).stdout
    found = json.loads(file.read_text())
    for name in ("one_rank", "4_ranks", "4_replicas"):
        assert found[name]["padded_per_real_token"] >= 1 and 0 < found[name]["cached_share"] < 1
        assert name.replace("_", " ") in shown
    ranks, replicas = found["4_ranks"], found["4_replicas"]
    assert ranks["padded_per_real_token"] < 1.25 < ranks["attention_per_real_token"]
    assert ranks["itl_p99_ms"] < 1.1 * replicas["itl_p99_ms"]
    assert abs(ranks["cached_share"] - replicas["cached_share"]) < 0.02
