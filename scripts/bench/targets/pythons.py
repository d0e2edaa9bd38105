"""Finding another Python on this machine, for a JAX that the running one is too old for."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

NEWEST = 13  # of the minor versions that JAX's wheels are made for and this project supports


def find_python(minimum: tuple[int, int]) -> str | None:
    """An interpreter of that version up to 3.13: this one, one on the PATH, or one that pyenv made; None if none."""
    if minimum <= sys.version_info[:2] <= (3, NEWEST):
        return sys.executable
    names = [f"python3.{minor}" for minor in range(minimum[1], NEWEST + 1)]
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    made = [str(path) for name in names for path in sorted(pyenv.glob(f"*/bin/{name}"))]
    return next((candidate for candidate in (*names, *made) if _works(candidate)), None)


def _works(python: str) -> bool:
    # A shim of pyenv's may stand on the PATH and refuse to run.
    try:
        done = subprocess.run([python, "-c", "import venv, ensurepip"], capture_output=True, check=False)
    except OSError:
        return False
    return done.returncode == 0
