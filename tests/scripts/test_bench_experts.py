"""The benchmark of experts times layers that compute the same, and prints how they compare."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.scripts.running import run_script


def test_the_script_compares_grouped_with_dense_layers(tmp_path: Path) -> None:
    file = tmp_path / "experts.json"
    flags = ["--tokens", 3, "--experts", 4, "--top", 2, "--hidden", 64, "--ffn", 32, "--repeats", 1, "--json", file]
    shown = run_script("bench experts", *flags).stdout
    rows = {row["contender"]: row for row in json.loads(file.read_text())["rows"]}
    assert len(rows) == 6
    for dtype in ("float32", "bfloat16"):
        mine, other = rows[f"grouped, {dtype}"], rows[f"dense, {dtype}"]
        assert other["times_as_fast"] == pytest.approx(other["seconds"] / mine["seconds"])
        assert f"dense, {dtype}" in shown
