"""Quantized weights of the bundled model are hardly less sure of documents that it has not seen."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.grids import NIGHTLY
from tests.scripts.running import run_script


@pytest.mark.skipif(not NIGHTLY, reason="scores 64 documents in three formats")
def test_perplexity_is_worse_by_less_than_a_percent_or_two(tmp_path: Path) -> None:
    run_script("check quantization", "--json", tmp_path / "out.json")
    formats = json.loads((tmp_path / "out.json").read_text())["formats"]
    for name, limit in {"int8": 0.01, "fp8": 0.02}.items():
        assert formats[name]["answers_worse"] < limit and formats[name]["all_worse"] < limit
    assert 1 < formats["none"]["answers"] < 1.01, "the documents are what the model was made for"
