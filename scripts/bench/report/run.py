"""Runs sections within the time that is left, and keeps the result folder up to date.

Knows no kernels and imports no JAX: the device belongs to the sections' processes.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from bench.kernels.plot import plot
from bench.report.plan import BUDGET, SCRIPTS, Phase, Section
from bench.report.summary import best_roofline, summary

_GRACE_S = 15  # between asking a section to end by itself and ending it
_DESCRIBE = """
import json, jax, importlib.metadata as m
from pallas_kernels.target import target_device
d = target_device()
names = ("jax", "jaxlib", "jax-cuda13-plugin", "jax-cuda12-plugin", "numpy", "torch", "triton", "flax",
         "transformers", "msgspec")
def version(name):
    try: return m.version(name)
    except m.PackageNotFoundError: return None
print(json.dumps({"platform": d.platform, "kind": d.kind, "num_cores": d.num_cores,
                  "packages": {name: version(name) for name in names}}))
"""


def describe_machine() -> dict[str, Any]:
    """Device, driver, packages and commit; what can't be found out is left out."""
    machine: dict[str, Any] = {"python": sys.version.split()[0]}
    described = _output([sys.executable, "-c", _DESCRIBE])
    if described:
        machine |= json.loads(described.splitlines()[-1])
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total,clocks.sm,clocks.mem", "--format=csv,noheader"]
    machine["nvidia_smi"] = _output(query)
    machine["commit"] = _output(["git", "-C", str(SCRIPTS), "rev-parse", "HEAD"])
    return machine


class Report:
    """The growing result of one call."""

    def __init__(self, out: Path, work: Path, budget_s: float) -> None:
        self.machine: dict[str, Any] = {}
        self.found_wrong = False
        self._out, self._work = out, work
        self._deadline = time.monotonic() + budget_s
        self._results: dict[str, Any] = {"sections": [], "check": [], "bench": [], "rooflines": [], "engine": {}}
        self._results["offline"] = {}
        self._log = out / "log.txt"
        self._log.write_text("")

    def run(self, phase: Phase, weight_left: float) -> None:
        """Runs the phase's sections side by side and takes in what they wrote, even if they were ended."""
        left_s = self._deadline - time.monotonic()
        limit_s = max(1.0, left_s * phase.weight / weight_left)
        begin = time.monotonic()
        here = [section for section in phase.sections if not self._pass_over(section)]
        running = [(section, self._start(section, limit_s, len(here))) for section in here]
        for section, process in running:
            timed_out = _wait(process, begin + limit_s)
            self._take_in(section, process.returncode, time.monotonic() - begin, timed_out)
        self._write()

    def _pass_over(self, section: Section) -> bool:
        """Whether a package is missing; says so."""
        packages = self.machine.get("packages")
        missing = [name for name in section.needs if packages is not None and packages.get(name) is None]
        if missing:
            note = f"not run: no {' and no '.join(missing)} here"
            print(f"{section.name}: {note}", flush=True)
            told = {"name": section.name, "status": 0, "seconds": 0.0, "timed_out": False, "note": note}
            self._results["sections"].append(told)
        return bool(missing)

    def _start(self, section: Section, limit_s: float, num_beside: int) -> subprocess.Popen[bytes]:
        budget_s = str(max(1, round(limit_s - _GRACE_S)))
        command = [part.replace(BUDGET, budget_s) for part in section.command]
        paths = [str(SCRIPTS.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}
        # Sections of equal shapes share what they compile; a driver's or a user's own cache stays untouched.
        env |= {"JAX_COMPILATION_CACHE_DIR": str(self._work / "xla"), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
        if num_beside > 1:
            env.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", f"{0.75 / num_beside:.2f}")
        with self._section_log(section).open("wb") as log:
            return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=env, start_new_session=True)

    def _take_in(self, section: Section, status: int | None, seconds: float, timed_out: bool) -> None:
        told = {"name": section.name, "status": status, "seconds": round(seconds, 1), "timed_out": timed_out}
        text = self._section_log(section).read_text(errors="replace")
        if status:
            told["last_words"] = text[-600:]
        self._results["sections"].append(told)
        print(f"{section.name}: status {status}, {seconds:.0f} s{', timed out' if timed_out else ''}", flush=True)
        with self._log.open("a") as log:
            log.write(f"===== {section.name}: status {status}, {seconds:.1f} s\n{text[-1_000_000:]}\n")
        if not section.result.exists():
            return
        result = json.loads(section.result.read_text())
        match section.kind:
            case "check":
                self._results["check"] += result["checks"]
                told["left_out"] = result["left_out"]
            case "bench":
                self._results["bench"] += result["rows"]
                self._results["rooflines"].append(result["roofline"])
            case "tune":
                (self._out / "table.json").write_text(section.result.read_text())
            case "offline":
                self._results["offline"][section.name.removeprefix("offline ")] = result
            case kind:
                self._results[kind] = result

    def _write(self) -> None:
        text, self.found_wrong = summary(self.machine, self._results)
        (self._out / "summary.md").write_text(text)
        everything = {"machine": self.machine, **self._results}
        (self._out / "report.json").write_text(json.dumps(everything, indent=1) + "\n")
        if self._results["bench"]:
            title = f"{self.machine.get('kind')}, JAX {self.machine.get('packages', {}).get('jax')}"
            with contextlib.suppress(ImportError):  # no matplotlib: no picture
                plot(
                    self._results["bench"], best_roofline(self._results["rooflines"]), title, self._out / "kernels.png"
                )

    def _section_log(self, section: Section) -> Path:
        return self._work / f"{section.name.replace(' ', '-')}.log"


def _wait(process: subprocess.Popen[bytes], until: float) -> bool:
    """Waits, then ends the process with all that it started. True if it had to."""
    try:
        process.wait(max(0.1, until - time.monotonic()))
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return True
    return False


def _output(command: list[str]) -> str | None:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(SCRIPTS.parent), os.environ.get("PYTHONPATH", "")])}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=90, env=env, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
