"""Starts a script as a user does, in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run_script(name: str, *flags: object) -> subprocess.CompletedProcess[str]:
    """Runs "bench_peers.py", or a tool that a folder's command names, as "bench step"."""
    script, *names = name.split()
    command = [sys.executable, f"scripts/{script}", *names, *map(str, flags)]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=True)


def run_command(name: str, *flags: object) -> subprocess.CompletedProcess[str]:
    """Runs "jaxsgl convert", or another command of the package."""
    command = [sys.executable, "-m", "jaxsgl", name, *map(str, flags)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
