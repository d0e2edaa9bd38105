"""The parent's end of a contender's process. Knows no engine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec

from bench.peers.contender import CannotRun, Kind, Setup
from bench.workloads.jobs import Job

ROOT = Path(__file__).resolve().parents[3]
CLOSE_S = 20.0
LAST_WORDS = 600  # characters of the log that are told if it died


class Process:
    """A contender in a process of its own.

    Args:
      kind: which.
      log: file for what it prints.
      device: "cpu" hides all GPUs from it.
    """

    def __init__(self, kind: Kind, log: Path, device: str) -> None:
        self._log = log
        command = [sys.executable, "-m", "bench.peers.child", kind.where, msgspec.json.encode(kind.options).decode()]
        with log.open("wb") as file:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=file, env=_environment(device)
            )

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    def start(self, setup: Setup) -> dict[str, str]:
        """Loads; returns the versions. Raises `CannotRun`."""
        versions: dict[str, str] = self._ask(do="start", setup=setup)["versions"]
        return versions

    def run(self, jobs: list[Job]) -> tuple[float, list[list[int]]]:
        """One run from a clean start: seconds, and the outputs. Raises `CannotRun`."""
        told = self._ask(do="run", jobs=jobs)
        return told["seconds"], told["outputs"]

    def close(self) -> None:
        """Asks it to end, and makes it end."""
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.close()
            self._process.wait(CLOSE_S)
        except (BrokenPipeError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()

    def _ask(self, **command: Any) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(msgspec.json.encode(command) + b"\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = b""
        if not line:
            status = self._process.wait()
            raise CannotRun(f"its process ended with status {status}: {self._log.read_text()[-LAST_WORDS:]}")
        told: dict[str, Any] = msgspec.json.decode(line)
        if "cannot" in told:
            raise CannotRun(told["cannot"])
        return told


def _environment(device: str) -> dict[str, str]:
    """Processes find the project and this package; their threads don't spin while others are measured."""
    path = os.pathsep.join(filter(None, (str(ROOT), str(ROOT / "scripts"), os.environ.get("PYTHONPATH"))))
    spinning = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
    kept = {name: value for name, value in os.environ.items() if name not in spinning}
    hidden = {"JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {}
    grown = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}  # a GPU's memory is shared by all contenders
    quiet = {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    return kept | {"PYTHONPATH": path} | hidden | grown | quiet
