"""Starts a script as a user does, in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run_script(name: str, *flags: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, f"scripts/{name}", *map(str, flags)]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=True)
