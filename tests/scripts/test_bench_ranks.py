"""The benchmark of ranks counts what steps are padded to."""

from __future__ import annotations

import json
from pathlib import Path

from tests.scripts.running import run_script


def test_the_script_compares_ranks_with_one(tmp_path: Path) -> None:
    file = tmp_path / "ranks.json"
    flags = ["--ranks", 4, "--trace", "chat", "--num-prompts", 40, "--json", file]
    shown = run_script("bench ranks", *flags).stdout
    found = json.loads(file.read_text())
    for name in ("one_rank", "4_ranks"):
        assert found[name]["padded_per_real_token"] >= 1 and 0 < found[name]["cached_share"] < 1
    assert found["4_ranks"]["padded_per_real_token"] > found["one_rank"]["padded_per_real_token"]
    assert "4 ranks" in shown
