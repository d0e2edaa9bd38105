from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("command", ["ruff check .", "ruff format --check .", "mypy"])
def test_the_code_passes(command: str) -> None:
    result = subprocess.run([sys.executable, "-m", *command.split()], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr


def test_ci_runs_the_readmes_test_command() -> None:
    (command,) = re.findall(r"^python3 -m venv .*pytest.*$", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert command in (ROOT / ".ci/run").read_text().splitlines()


def test_the_engine_stays_small() -> None:
    files = [path for package in ("jaxsgl", "pallas_kernels") for path in (ROOT / package).rglob("*.py")]
    texts = {path: path.read_text().splitlines() for path in files if "_pb2" not in path.name}
    assert sum(1 for lines in texts.values() for line in lines if line.strip()) < 6_000
    longest = max(texts, key=lambda path: len(texts[path]))
    assert len(texts[longest]) <= 400, longest
