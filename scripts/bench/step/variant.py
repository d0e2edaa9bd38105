"""The parent's end of a variant's process. Knows no engine. Called by `bench_step.py`."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jaxsgl.errors import JaxsglError

SCRIPTS = Path(__file__).parents[2]
STEPS = "BENCH_STEPS"  # in the process' environment: JSON


@dataclass(frozen=True)
class Timing:
    """Milliseconds of a step: from submission to tokens, and the CPU's over all threads; medians of some runs."""

    wall_ms: float
    cpu_ms: float


class Variant:
    """Starts an engine in a process of its own, or raises `JaxsglError` with what it said.

    Args:
      text: NAME=VALUE for the environment, then flags of the engine.
      common: flags that hold for all variants.
      steps: what it is to measure, as `parse_step` takes it.
    """

    def __init__(self, text: str, common: Sequence[str], steps: Sequence[str]) -> None:
        self.text = text
        words = shlex.split(text)
        settings = [word for word in words if "=" in word and not word.startswith("-")]
        flags = [word for word in words if word not in settings]
        env = os.environ | dict(setting.split("=", 1) for setting in settings)
        path = os.pathsep.join(filter(None, (env.get("PYTHONPATH"), str(SCRIPTS))))
        self._process = subprocess.Popen(
            # -P: else the folder it is started in would come before PYTHONPATH.
            [sys.executable, "-P", "-m", "bench.step.child", *common, *flags],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=env | {"PYTHONPATH": path, STEPS: json.dumps(list(steps))},
            text=True,
        )
        try:
            self._receive()
        except JaxsglError:
            self.close()
            raise

    def measure(self, runs: int) -> list[Timing]:
        """Each step `runs` times. Raises `JaxsglError` if the process ended."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # then nothing can be read, either
            print(runs, file=self._process.stdin, flush=True)
        return self._receive()

    def close(self) -> None:
        """Ends the process."""
        self._process.communicate()

    def _receive(self) -> list[Timing]:
        assert self._process.stdout is not None
        told = json.loads(self._process.stdout.readline() or '{"error": "its process ended; what it printed says why"}')
        if "error" in told:
            raise JaxsglError(f"variant {self.text!r}: {told['error']}")
        return [Timing(**timing) for timing in told["timings"]]
