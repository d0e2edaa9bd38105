"""Steps with adapters are timed beside the same steps without."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.engine.conftest import MODEL
from tests.grids import NIGHTLY
from tests.scripts.running import run_script


@pytest.mark.skipif(not NIGHTLY, reason="compiles an engine; by night")
def test_a_line_for_each_number_of_rows(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    file = tmp_path / "lora.json"
    flags = ["--model", tmp_path, "--load-format", "dummy", "--adapters", 3, "--rank", 2, "--rows", 2, 5]
    shown = run_script("bench lora", *flags, "--context", 20, "--rounds", 3, "--json", file).stdout
    rows = json.loads(file.read_text())["rows"]
    assert [row["rows"] for row in rows] == [2, 5]
    for row in rows:
        assert 0 < row["times"]["least"] <= row["times"]["median"] <= row["times"]["most"]
        assert f"{row['with_ms']:10.2f}" in shown
