from __future__ import annotations

import re
import subprocess
import sys
import tokenize
import tomllib
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


@pytest.mark.parametrize(("package", "most"), [("jaxsgl", 10_000), ("pallas_kernels", 3_500), ("scripts", 8_500)])
def test_everything_but_the_tests_stays_small(package: str, most: int) -> None:
    files = [path for path in (ROOT / package).rglob("*.py") if "_pb2" not in path.name]
    assert sum(map(lines_of_code, files)) < most
    longest = max(files, key=lambda path: len(path.read_text().splitlines()))
    assert len(longest.read_text().splitlines()) <= 400, longest


def test_files_of_other_languages_stay_as_small() -> None:
    files = [path for suffix in ("cc", "h") for path in (ROOT / "pallas_kernels").rglob(f"*.{suffix}")]
    longest = max(files, key=lambda path: len(path.read_text().splitlines()))
    assert len(longest.read_text().splitlines()) <= 400, longest


@pytest.mark.parametrize("package", ["jaxsgl", "pallas_kernels"])
def test_a_wheel_holds_all_that_is_not_python(package: str) -> None:
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"][package]
    packed = {path for pattern in patterns for path in (ROOT / package).glob(pattern)}
    files = {path for path in (ROOT / package).rglob("*") if path.is_file() and "__pycache__" not in path.parts}
    assert {path for path in files if path.suffix not in (".py", ".pyi")} == packed


def lines_of_code(path: Path) -> int:
    """Lines that hold code: neither blank, nor comment, nor docstring."""
    silent = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    lines: set[int] = set()
    starts_statement = True
    with path.open("rb") as file:
        for token in tokenize.tokenize(file.readline):
            docstring = token.type == tokenize.STRING and starts_statement
            if token.type not in (*silent, tokenize.ENCODING) and not docstring:
                lines |= set(range(token.start[0], token.end[0] + 1))
            if token.type not in (tokenize.COMMENT, tokenize.NL):
                starts_statement = token.type in (*silent, tokenize.ENCODING)
    return len(lines)
