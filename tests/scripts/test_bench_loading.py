"""Loading needs hardly more memory than the parameters, and the benchmark of it says how much and how fast."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from bench.load_child import evict, write_random
from bench.models import SHAPES, tensor_shapes

from jaxsgl.models import arch_from_folder
from jaxsgl.weights.tensor_files import TensorFiles
from tests.grids import NIGHTLY
from tests.scripts.running import run_script


def figures(tmp_path: Path, *flags: object) -> dict[str, dict[str, float]]:
    run_script("bench loading", "--rounds", 1, "--warm", "--json", tmp_path / "out.json", *flags)
    return json.loads((tmp_path / "out.json").read_text())["figures"]


def test_the_most_memory_resident_while_loading_is_that_of_the_parameters(tmp_path: Path) -> None:
    """Beside them there are a few blocks of the mapped files: 32 MB of 91 would be 1.35."""
    found = figures(tmp_path, "--shape", "mid", "--layers", 1, "--kinds", "safetensors")["safetensors"]
    assert 0.08 < found["gb"] < 0.1
    assert 1.0 <= found["of_size"] < 1.35
    assert found["gb_per_s"] > 0


@pytest.mark.skipif(not NIGHTLY, reason="converts a checkpoint, and loads it in four ways")
def test_every_kind_is_measured_in_one_run(tmp_path: Path) -> None:
    found = figures(tmp_path, "--shape", "mid", "--layers", 4)
    assert list(found) == ["plain", "safetensors", "plain-orbax", "orbax"]
    assert found["safetensors"]["of_size"] < 1.15
    assert len({round(row["gb"], 2) for row in found.values()}) == 1


def test_the_random_checkpoint_is_one_of_several_files_of_that_shape(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bench.load_child.FILE_BYTES", 30_000_000)
    assert write_random(tmp_path, "mid", 1) == 2 * sum(
        a * b for a, b in ((*dims, 1)[:2] for dims in tensor_shapes({**SHAPES["mid"], "num_hidden_layers": 1}).values())
    )
    assert len(list(tmp_path.glob("*.safetensors"))) == 2
    evict(tmp_path)
    arch_from_folder(tmp_path)
    assert set(TensorFiles(tmp_path).names()) == set(tensor_shapes({**SHAPES["mid"], "num_hidden_layers": 1}))
