"""A test that waits in native code fails after its timeout, once, and all others run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.grids import NIGHTLY

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
STUCK_AFTER_A_FAILURE = """
import threading
import pytest

@pytest.fixture
def waits():
    yield
    threading.Event().wait()

@pytest.mark.timeout(1)
def test_that_fails_and_waits_in_its_teardown(waits):
    assert False
"""

pytestmark = pytest.mark.server


@pytest.mark.parametrize("num_stuck", [2, *[1] * NIGHTLY])
def test_stuck_tests_fail_once_and_the_others_run(num_stuck: int, tmp_path: Path) -> None:
    """Also if both workers end at the same time, or the last one, with nothing left to do."""
    for number in range(4):
        (tmp_path / f"test_{number}.py").write_text(STUCK if number < num_stuck else "def test_other(): pass")
    plugins = ["-p", "tests.stuck", "-p", "tests.sharing", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", *plugins, "-n", "2", str(tmp_path)]
    run = subprocess.run(
        command, cwd=tmp_path, env={"PYTHONPATH": str(ROOT)}, text=True, stdout=subprocess.PIPE, timeout=120
    )
    for number in range(num_stuck):
        crashed = f"crashed while running 'test_{number}.py::test_that_waits_for_a_lock_of_its_own'"
        assert run.stdout.count(crashed) >= 1, run.stdout
    assert f"{num_stuck} failed, 4 passed" in run.stdout


def test_a_test_that_fails_and_then_waits_in_its_teardown_ends_too(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(STUCK_AFTER_A_FAILURE)
    command = [sys.executable, "-m", "pytest", "-p", "tests.stuck", "-p", "no:cacheprovider", str(tmp_path)]
    run = subprocess.run(
        command,
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT)},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=120,
    )
    assert run.returncode == 1 and "Timeout (0:00:02)" in run.stdout, run.stdout
