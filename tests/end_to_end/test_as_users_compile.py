"""Tests whose own process compiles, by day too, as users' processes do: they run in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.compiling import AS_USERS, as_users
from tests.grids import NIGHTLY

ROOT = Path(__file__).parents[2]
FILES = {
    "models": ("end_to_end/test_parity.py", "end_to_end/test_same_bits.py"),
    "kernels": ("pallas_kernels/test_cost.py", "pallas_kernels/test_store_kv.py", "pallas_kernels/test_sums.py"),
}

pytestmark = [pytest.mark.foreign, pytest.mark.skipif(NIGHTLY, reason="by night all tests compile as users do")]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", FILES)
def test_files_pass_as_users_compile(name: str) -> None:
    paths = [f"tests/{file}" for file in FILES[name]]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "-p", "no:cacheprovider", *paths]
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    run = subprocess.run(
        command, cwd=ROOT, env=env | as_users() | {AS_USERS: "1"}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert run.returncode == 0 and " passed" in run.stdout.splitlines()[-1], run.stdout
