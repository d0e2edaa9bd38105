"""What takes minutes in other environments: it runs beside the tests of kernels, which leave a core idle.

Compiling needs installations of gigabytes, and lowering Python that is slow; either keeps one core busy.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
from bench.targets.targets import TARGETS, Target, find_python, missing_for  # noqa: E402

ENVIRONMENTS = ROOT / ".venv-targets"
# The ends of what pyproject.toml allows, and the oldest Python that each runs on.
VERSIONS = {"oldest": ("jax==0.10.0", (3, 11)), "newest": ("jax>=0.12,<0.13", (3, 12))}
FORGOTTEN = "absl-py"  # JAX 0.10 imports it with Mosaic GPU, without requiring it

Results = list[dict[str, Any]] | str  # or why there are none


class Elsewhere:
    """Two queues of work in processes; `lowered` by version and `compiled` by target are to come."""

    def __init__(self, folder: Path, *, lower: bool, compile: bool) -> None:
        self._folder = folder
        self._processes: list[subprocess.Popen[str]] = []
        self._queues = (ThreadPoolExecutor(1), ThreadPoolExecutor(1))
        self.lowered: dict[str, Future[Results]] = {}
        self.compiled: dict[str, Future[Results]] = {}
        if lower:
            self.lowered = {version: self._queues[0].submit(self._lower, version) for version in VERSIONS}
        if compile:
            ENVIRONMENTS.mkdir(exist_ok=True)
            for name, target in TARGETS.items():  # one queue per platform: its environment is made once
                queue = self._queues[target.platform == "cuda"]
                self.compiled[name] = queue.submit(self._compile, target)

    def close(self) -> None:
        """Ends what nobody waited for."""
        for queue in self._queues:
            queue.shutdown(wait=False, cancel_futures=True)
        for process in self._processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)

    def _lower(self, version: str) -> Results:
        """A line for each kernel, from a new environment with one JAX and nothing else."""
        requirement, minimum = VERSIONS[version]
        python = find_python(minimum)
        if python is None:
            return f"{requirement} needs Python {'.'.join(map(str, minimum))} or newer, and this machine has none"
        home = self._folder / version
        mine = str(home / "bin/python")
        self._run([python, "-m", "venv", home])
        self._run([mine, "-m", "pip", "install", "-q", "--no-compile", requirement, FORGOTTEN])
        done = self._run([mine, "-m", "tests.pallas_kernels.lower_everything"])
        return [json.loads(line) for line in done.stdout.splitlines()]

    def _compile(self, target: Target) -> Results:
        """What the script says of the shapes that most models serve with."""
        if reason := missing_for(target.extra, ENVIRONMENTS):
            return f"{target.name} isn't compiled for: {reason}"
        file = self._folder / f"{target.name}.json"
        script = [sys.executable, "scripts/compile_targets.py", target.name, "--jobs", "1"]
        done = self._run([*script, "--grid", "common", "--json", file], right=(0, 1))
        assert file.exists(), done.stdout + done.stderr
        results: list[dict[str, Any]] = json.loads(file.read_text())["results"]
        assert done.returncode == int(any(result["problems"] for result in results))
        return results

    def _run(self, command: Sequence[str | Path], right: Sequence[int] = (0,)) -> subprocess.CompletedProcess[str]:
        """What it printed; an AssertionError with all of it if its status isn't among the `right` ones."""
        process = subprocess.Popen(
            command, cwd=ROOT, env={**os.environ, "JAX_PLATFORMS": "cpu"}, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
        )  # fmt: skip
        self._processes.append(process)
        out, error = process.communicate()
        assert process.returncode in right, f"{command} ended with {process.returncode}\n{out}\n{error}"
        return subprocess.CompletedProcess(process.args, process.returncode, out, error)
