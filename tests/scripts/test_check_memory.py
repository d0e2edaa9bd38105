"""The tables of docs/recipes are what the engine's sizing says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

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
