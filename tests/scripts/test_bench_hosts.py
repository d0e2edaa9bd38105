"""The figure of the stream of calls: every call reaches every host."""

from __future__ import annotations

import json
from pathlib import Path

from tests.scripts.running import run_script


def test_calls_of_each_size_are_timed(tmp_path: Path) -> None:
    json_file = tmp_path / "hosts.json"
    printed = run_script("bench hosts", "--calls", 15, "--kib", 1, 100, "--hosts", 3, "--json", json_file).stdout
    rows = json.loads(json_file.read_text())["rows"]
    assert [(row["kib"], row["hosts"]) for row in rows] == [(1, 3), (100, 3)]
    assert all(row["send_us"] > 0 and row["send_us"] + row["submit_us"] > 0 for row in rows), "no host submits unsent"
    assert "to submit p50" in printed
