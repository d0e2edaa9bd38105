"""The tables of docs/recipes are what the engine's sizing says."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from bench.models import COMPILED_SHAPES, QUANTIZED
from bench.output import write_json

from tests.grids import daily

ROOT = Path(__file__).parents[2]


def test_recipes_have_the_memory_that_the_sizing_computes() -> None:
    command = [sys.executable, "scripts/check", "memory", "--recipes"]
    printed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    tables = dict(part.split(":\n", 1) for part in printed.strip().split("\n\n"))
    pages = {path.stem: path.read_text() for path in (ROOT / "docs" / "recipes").glob("*.md")}
    assert tables.keys() == pages.keys()
    for name, table in tables.items():
        assert table in pages[name], f"docs/recipes/{name}.md lacks:\n{table}"
        assert " -" not in table.replace(" --", ""), "a model that doesn't fit"


QWEN3_235B, DEEPSEEK_V3 = COMPILED_SHAPES["qwen3-235b-a22b"], COMPILED_SHAPES["deepseek-v3"]
FP8 = {"quantization_config": QUANTIZED["fp8"]}


def figures(folder: Path, *flags: str) -> dict[str, Any]:
    """The figures of H200s."""
    command = [sys.executable, "scripts/check", "memory", "--model", str(folder), "--device-gib", "140", *flags]
    subprocess.run([*command, "--json", str(folder / "found.json")], cwd=ROOT, check=True, capture_output=True)
    found: dict[str, Any] = json.loads((folder / "found.json").read_text())
    return found


def pool_tokens(folder: Path, *flags: str) -> int:
    """Tokens of KV on H200s."""
    return int(figures(folder, *flags)["pool_tokens"])


def test_states_of_a_hybrid_take_of_what_kv_may_have(tmp_path: Path) -> None:
    write_json(tmp_path / "config.json", COMPILED_SHAPES["granite-4.0-h-small"])
    found = figures(tmp_path)
    left = 0.85 * 140 * 2**30 - found["weight_bytes"]
    assert 0.2 * left < found["pool_tokens"] * found["kv_bytes_per_token"] < 0.5 * left


def test_a_model_that_does_not_fit_is_told_in_a_line(tmp_path: Path) -> None:
    write_json(tmp_path / "config.json", QWEN3_235B)
    command = [sys.executable, "scripts/check", "memory", "--model", str(tmp_path)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 1 and ended.stderr.count("\n") == 1
    assert ended.stderr.startswith("error: ") and "weights take 437" in ended.stderr and "of 79 GiB" in ended.stderr


@pytest.mark.parametrize(
    ("config", "tp", "ranks", "least", "flags"),
    daily(
        [
            (QWEN3_235B | FP8, 8, 2, 1.9, ()),
            (DEEPSEEK_V3, 8, 8, 4.8, ("--quantization", "fp8")),
            (QWEN3_235B, 16, 4, 3.7, ()),
        ],
        every=3,
    ),
)
def test_ranks_hold_the_kv_that_devices_would_hold_copies_of(
    config: dict[str, Any], tp: int, ranks: int, least: float, flags: tuple[str, ...], tmp_path: Path
) -> None:
    """Of four kv heads 8 devices that share each layer hold each number twice, 16 four times; of a latent all do."""
    write_json(tmp_path / "config.json", config)
    shared = pool_tokens(tmp_path, "--tp", str(tp), *flags)
    assert shared > 0 and pool_tokens(tmp_path, "--tp", str(tp), "--dp-size", str(ranks), *flags) >= least * shared
