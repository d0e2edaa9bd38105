"""The benchmark of speculation: a larger model that answers like the bundled one, and a line for each text."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from bench.inflated import WIDER, write_inflated
from bench.models import tensor_shapes
from safetensors.numpy import load_file

from jaxsgl.config.engine import BUNDLED_MODEL
from tests.grids import NIGHTLY
from tests.scripts.running import run_script


def test_a_larger_model_holds_the_bundled_one_and_zeros(tmp_path: Path) -> None:
    folder = write_inflated(tmp_path / "model", layers=6, ffn=600)
    config = json.loads((folder / "config.json").read_text())
    small, large = load_file(f"{BUNDLED_MODEL}/model.safetensors"), load_file(folder / "model.safetensors")
    assert {name: values.shape for name, values in large.items()} == tensor_shapes(config)
    assert config["hidden_size"] == WIDER * 192 and config["num_hidden_layers"] == 6
    for name, values in small.items():
        scale = 2.0 if "layernorm" in name or name == "model.norm.weight" else 1.0
        part = large[name][tuple(slice(size) for size in values.shape)].astype(np.float32)
        np.testing.assert_array_equal(part * scale, values.astype(np.float32))
        assert np.count_nonzero(large[name]) == np.count_nonzero(values)
    for name in ("self_attn.o_proj.weight", "mlp.down_proj.weight"):
        assert not large[f"model.layers.5.{name}"].any()


@pytest.mark.skipif(not NIGHTLY, reason="compiles an engine; by night")
def test_a_line_for_each_text_and_number_of_requests(tmp_path: Path) -> None:
    file = tmp_path / "speculation.json"
    flags = ["--layers", 5, "--ffn", 512, "--rows", 1, 2, "--tokens", 40, "--rounds", 1, "--json", file]
    shown = run_script("bench speculation", *flags, "--texts", "repeated", "wrong").stdout
    rows = json.loads(file.read_text())["rows"]
    assert [(row["text"], row["rows"]) for row in rows] == [(text, n) for text in ("repeated", "wrong") for n in (1, 2)]
    for row in rows:
        assert row["same"] and f"{row['times_cpu']:6.2f}" in shown
        assert (row["accept_length"] > 3) == (row["text"] == "repeated")
