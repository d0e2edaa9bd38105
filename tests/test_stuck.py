"""A test that waits in native code fails after its timeout, and the others run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
STUCK = """
import ctypes
import pytest

@pytest.mark.timeout(1)
def test_that_waits_for_a_lock_of_its_own():
    lock = ctypes.create_string_buffer(64)
    ctypes.CDLL(None).pthread_mutex_lock(lock)
    ctypes.CDLL(None).pthread_mutex_lock(lock)

def test_after_it():
    pass
"""

pytestmark = pytest.mark.server


def test_a_stuck_test_fails_and_the_others_run(tmp_path: Path) -> None:
    file = tmp_path / "test_locks.py"
    file.write_text(STUCK)
    command = [sys.executable, "-m", "pytest", "-p", "tests.stuck", "-p", "no:cacheprovider", "-n", "1", str(file)]
    run = subprocess.run(command, cwd=tmp_path, env={"PYTHONPATH": str(ROOT)}, text=True, stdout=subprocess.PIPE)
    assert "crashed while running 'test_locks.py::test_that_waits_for_a_lock_of_its_own'" in run.stdout, run.stdout
    assert "1 failed, 1 passed" in run.stdout
