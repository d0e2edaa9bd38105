"""Virtual environments with the plug-ins that compile for hardware, and running `compile_for` in them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from bench.targets.pythons import find_python
from bench.targets.targets import JAX_VERSION, Target

ROOT = Path(__file__).parents[3]
# With room for the wheels while they are unpacked; seen: 4.8 GB and 1.6 GB installed.
DISK_GB = {"cuda13": 11, "tpu": 4}
OLDEST_PYTHON = (3, 12)  # of JAX_VERSION


def missing_for(extra: str, folder: Path) -> str | None:
    """Why the environment for `extra` can't be made in `folder`, or None when it can or is there."""
    if _marker(folder, extra).exists():
        return None
    free = shutil.disk_usage(folder if folder.exists() else folder.parent).free / 1e9
    if free < DISK_GB[extra]:
        return f"jax[{extra}] needs {DISK_GB[extra]} GB of disk, {free:.1f} GB are free"
    if find_python(OLDEST_PYTHON) is None:
        return f"JAX {JAX_VERSION} needs Python {'.'.join(map(str, OLDEST_PYTHON))} or newer, and none was found"
    return None


def make(extra: str, folder: Path) -> Path:
    """The environment's python, with `jax[extra]` and this project; made unless it is there. Minutes, gigabytes."""
    home = folder / extra
    python = home / "bin/python"
    if not _marker(folder, extra).exists():
        interpreter = find_python(OLDEST_PYTHON)
        assert interpreter is not None, "missing_for says so first"
        subprocess.run([interpreter, "-m", "venv", "--clear", str(home)], check=True)
        install = [str(python), "-m", "pip", "install", "-q", "--no-compile", "-e", str(ROOT)]
        subprocess.run([*install, f"jax[{extra}]=={JAX_VERSION}"], check=True)
        _marker(folder, extra).touch()
    return python


def _marker(folder: Path, extra: str) -> Path:
    return folder / extra / f"installed-{JAX_VERSION}"


def compile_in(python: Path, target: Target, grid: str, jobs: int) -> Iterator[dict[str, Any]]:
    """Results of all of the target's programs, compiled by `jobs` processes side by side."""
    ptxas = next(iter(sorted(python.parents[1].glob("lib/python*/site-packages/nvidia/*/bin/ptxas"))), Path("ptxas"))
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'scripts'}"}

    def share(index: int) -> list[dict[str, Any]]:
        command = [str(python), "-m", "bench.targets.compile_for", target.name, grid, str(index), str(jobs), str(ptxas)]
        done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
        results = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"target"')]
        if done.returncode:
            problem = f"process {index} of {jobs} ended with {done.returncode}: {done.stderr[-3000:]}"
            results.append({"target": target.name, "program": "", "backend": "", "problems": [problem]})
        return results

    with ThreadPoolExecutor(jobs) as pool:
        for results in pool.map(share, range(jobs)):
            yield from results
