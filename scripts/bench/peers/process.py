"""A contender's process, and this process's end of it: a JSON line for each command, and one for each answer.

    python -m bench.peers.process MODULE:CLASS OPTIONS

What libraries print in the contender's process goes to a log file, so that the answers stay readable. Neither end knows
an engine.
"""

from __future__ import annotations

import importlib
import os
import sys
import time
import traceback
from pathlib import Path
from typing import IO, Any

import msgspec

from bench.peers.contender import CannotRun, Contender, Kind, Setup
from bench.peers.environments import interpreter
from bench.processes import LineChild, answers_only, python_path
from jaxsgl.bench.requests import Job

CLOSE_S = 20.0
LOG_TAIL = 600  # characters of the log that an error quotes if the process died


class Run(msgspec.Struct, frozen=True):
    """What a contender took for all jobs, once it was reset.

    Attributes:
      seconds: by the clock.
      cpu_seconds: processor time of its process, all threads.
      outputs: output ids in the order of the jobs.
    """

    seconds: float
    cpu_seconds: float
    outputs: list[list[int]]


class Process:
    """A contender in a process of its own.

    Args:
      kind: which contender.
      log: file for what it prints.
      device: "cpu" hides all GPUs from it.

    Raises:
      CannotRun: its environment isn't installed.
    """

    def __init__(self, kind: Kind, log: Path, device: str) -> None:
        self._log = log
        options = msgspec.json.encode(kind.options).decode()
        with log.open("wb") as file:
            command = [interpreter(kind.environment), "-m", "bench.peers.process", kind.where, options]
            self._child = LineChild(command, _environment(device), file)

    @property
    def pid(self) -> int:
        """Id of the process."""
        return self._child.pid

    def start(self, setup: Setup) -> dict[str, str]:
        """Loads the model; returns the versions. Raises `CannotRun`."""
        versions: dict[str, str] = self._ask(do="start", setup=setup)["versions"]
        return versions

    def run(self, jobs: list[Job]) -> Run:
        """Runs all jobs from a clean start. Raises `CannotRun`."""
        return msgspec.convert(self._ask(do="run", jobs=jobs), Run)

    def close(self) -> None:
        """Asks the process to end, and kills it if it doesn't."""
        self._child.close(CLOSE_S)

    def _ask(self, **command: Any) -> dict[str, Any]:
        line = self._child.ask(msgspec.json.encode(command))
        if not line:
            raise CannotRun(f"its process ended with status {self._child.wait()}: {self._log.read_text()[-LOG_TAIL:]}")
        told: dict[str, Any] = msgspec.json.decode(line)
        if "cannot" in told:
            raise CannotRun(told["cannot"])
        return told


def _environment(device: str) -> dict[str, str]:
    """The project is importable, and threads don't spin while another contender is measured."""
    spinning = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
    kept = {name: value for name, value in os.environ.items() if name not in spinning}
    path = {"PYTHONPATH": python_path(os.environ.get("PYTHONPATH"))}
    hidden = {"JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {}
    grown = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}  # a GPU's memory is shared by all contenders
    quiet = {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    return kept | path | hidden | grown | quiet


def serve(where: str, options: dict[str, Any], commands: IO[str], answers: IO[str]) -> None:
    """Obeys until the commands end; the first one imports and makes the contender, module:class with `options`."""
    contender: Contender | None = None

    def answer(**told: Any) -> None:
        answers.write(msgspec.json.encode(told).decode() + "\n")
        answers.flush()

    for line in commands:
        command = msgspec.json.decode(line)
        try:
            match command["do"]:
                case "start":
                    module, _, name = where.partition(":")
                    contender = getattr(importlib.import_module(module), name)(**options)
                    contender.start(msgspec.convert(command["setup"], Setup))
                    answer(versions=contender.versions())
                case "run":
                    assert contender is not None, "it runs once it was started"
                    jobs = msgspec.convert(command["jobs"], list[Job])
                    contender.reset()
                    begin_s, cpu_begin_s = time.perf_counter(), time.process_time()
                    outputs = contender.run(jobs)
                    cpu_seconds = time.process_time() - cpu_begin_s
                    answer(seconds=time.perf_counter() - begin_s, cpu_seconds=cpu_seconds, outputs=outputs)
        except (CannotRun, ImportError) as reason:
            answer(cannot=str(reason))
        except Exception as error:  # one engine's failure must not end the runs of the other contenders
            traceback.print_exc()
            answer(cannot=f"{type(error).__name__}: {error}")
    if contender is not None:
        contender.close()


if __name__ == "__main__":
    serve(sys.argv[1], msgspec.json.decode(sys.argv[2]), sys.stdin, answers_only())
