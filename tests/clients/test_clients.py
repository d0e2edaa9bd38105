"""Client libraries, as they are published, get what they ask for from a server of the bundled model."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.clients.run import HERE, NAMES
from tests.grids import NIGHTLY


@pytest.mark.timeout(3600)  # installs them, the first time
@pytest.mark.skipif(not NIGHTLY, reason="their packages are installed by night")
def test_every_case_of_every_client_passes() -> None:
    done = subprocess.run([sys.executable, str(HERE / "run.py")], capture_output=True, text=True)
    rows = done.stdout.splitlines()
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr[-5000:]}"
    assert [row.split()[0] for row in rows] == list(NAMES)
