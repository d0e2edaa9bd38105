"""Runs the tests of NIXL in a process of their own, see over_nixl.py."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.server

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


def test_nixl_passes_its_tests_and_those_of_tcp() -> None:
    files = [str(HERE / "over_nixl.py"), str(HERE / "test_tcp.py")]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files, "-k", "over_nixl or nixl"]
    variables = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    run = subprocess.run(
        command, env=variables | {"JAXSGL_TEST_NIXL": "1"}, cwd=ROOT, text=True, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout
    assert " passed" in run.stdout
