"""Runs commands for kernel tests in other environments: another JAX, or plug-ins that compile for other chips.

The environments are kept between runs (see tests/kept.py).
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.targets.targets import Target, find_python, missing_for

from tests.compiling import as_users
from tests.kept import environment

ROOT = Path(__file__).parents[2]
ENVIRONMENTS = ROOT / ".venv-targets"
# The oldest and newest JAX that pyproject.toml allows, and the oldest Python that each runs on.
VERSIONS = {"oldest": ("jax==0.10.0", (3, 11)), "newest": ("jax>=0.12,<0.13", (3, 12))}
TEST_PACKAGES = ("pytest", "pytest-timeout", "pytest-xdist", "hypothesis")
BEGINS = {"oldest": 0, "newest": 1}  # first of the shapes that a version lowers: an even one and an odd one
ENVIRONMENT = {"JAX_PLATFORMS": "cpu", **as_users()}  # code for other chips is looked at
FORGOTTEN = "absl-py"  # JAX 0.10 imports it with Mosaic GPU, without requiring it

Results = list[dict[str, Any]] | str  # or the reason why there are none


def lower(version: str) -> Results:
    """A result for each kernel, from an environment with one JAX."""
    done = run_with_jax(version, "-m", "tests.pallas_kernels.lower_everything", str(BEGINS[version]))
    return done if isinstance(done, str) else [json.loads(line) for line in done.stdout.splitlines()]


def run_with_jax(version: str, *command: str, **variables: str) -> subprocess.CompletedProcess[str] | str:
    """Runs Python with one of `VERSIONS` and what kernel tests need; the reason if this machine can't."""
    requirement, minimum = VERSIONS[version]
    python = find_python(minimum)
    if python is None:
        return f"{requirement} needs Python {'.'.join(map(str, minimum))} or newer, and this machine has none"
    mine = environment(python, requirement, FORGOTTEN, *TEST_PACKAGES)
    return run([mine, *command], (0,), **variables)


def compile_for(target: Target, folder: Path, *flags: str) -> Results:
    """The script's results for the programs that `flags` name."""
    ENVIRONMENTS.mkdir(exist_ok=True)
    if reason := missing_for(target.extra, ENVIRONMENTS):
        return f"{target.name} isn't compiled for: {reason}"
    file = folder / f"{target.name}.json"
    script = [sys.executable, "scripts/compile_targets.py", target.name, "--jobs", "1"]
    done = run([*script, *flags, "--json", file], right=(0, 1))
    assert file.exists(), done.stdout + done.stderr
    results: list[dict[str, Any]] = json.loads(file.read_text())["results"]
    assert done.returncode == int(any(result["problems"] for result in results))
    return results


def run(
    command: Sequence[str | Path], right: Sequence[int] = (0,), **variables: str
) -> subprocess.CompletedProcess[str]:
    """The command's output; an AssertionError with all of it if its status isn't among the `right` ones.

    However the test ends, no process of the command is left.
    """
    process = subprocess.Popen(
        command, cwd=ROOT, env={**os.environ, **ENVIRONMENT, **variables}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    try:
        out, error = process.communicate()
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    assert process.returncode in right, f"{command} ended with {process.returncode}\n{out}\n{error}"
    return subprocess.CompletedProcess(process.args, process.returncode, out, error)
