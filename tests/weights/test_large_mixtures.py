"""What mixtures that are published small take in memory."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from pallas_kernels.native import library
from tests.grids import NIGHTLY
from tests.weights.large_mixtures import MIXTURES, make


@pytest.mark.skipif(not NIGHTLY, reason="writes and loads 250 MB; by day the bytes of small ones are compared")
@pytest.mark.parametrize("name", MIXTURES)
def test_a_mixture_takes_about_as_much_memory_as_its_files(name: str, tmp_path: Path) -> None:
    if (reason := library.load()) is not None:
        pytest.skip(reason)
    folder = make(name, tmp_path / "model")
    command = [sys.executable, "-m", "tests.weights.large_mixtures", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["held"] < 1.05 * found["files"] and found["grown"] < 1.15 * found["files"], found
