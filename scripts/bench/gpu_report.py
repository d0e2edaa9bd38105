"""The sections of a GPU report: which processes run, for how long, and the folder that collects their results.

Knows the command lines of the other scripts and the shape of their JSON files, but none of their figures. Knows no
kernels and imports no JAX: the device belongs to the sections' processes. Called by `scripts/gpu_report.py`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from bench.gpu_summary import best_roofline, summary
from bench.output import write_json
from bench.plots import plot_kernels
from bench.processes import ROOT, SCRIPTS, python_path

BUDGET = "{budget}"
BUNDLED_MODEL = ROOT / "jaxsgl" / "bundled_model"
PARTS = ("check", "kernels", "engine", "offline", "sampling", "peers", "tune")
TINY_FLAGS = "--max-running-requests 4 --decode-buckets 4 --extend-buckets 32 --chunked-prefill-size 32"
TINY = tuple(TINY_FLAGS.split())
OURS = {"cpu": ["xla"], "gpu": ["triton", "mosaic_gpu", "xla"], "tpu": ["mosaic_tpu", "xla"]}


@dataclasses.dataclass(frozen=True)
class Section:
    """A process. `BUDGET` in its command becomes the seconds after which it should start nothing new."""

    name: str
    kind: str
    """"check", "bench", "engine", "offline", "sampling", "peers" or "tune": how its result is read."""
    command: tuple[str, ...]
    result: Path
    needs: tuple[str, ...] = ()
    """Packages without which it is not started."""


@dataclasses.dataclass(frozen=True)
class Phase:
    """Sections that run side by side, and their weight when the time is divided among phases."""

    sections: tuple[Section, ...]
    weight: float
    part: str = ""
    """One of PARTS, which the command line can choose."""


def phases(machine: Mapping[str, Any], work: Path, *, parts: Collection[str], smoke: bool) -> list[Phase]:
    """The phases of `parts` in order. Correctness comes first: the speed of a wrong kernel means nothing."""
    platform = machine.get("platform", "cpu")
    backends = OURS.get(platform, ["xla"])

    def section(name: str, kind: str, command: str, *flags: str, needs: tuple[str, ...] = ()) -> Section:
        result = work / f"{name.replace(' ', '-')}.json"
        script, *names = command.split()
        words = (sys.executable, str(SCRIPTS / script), *names, "--json", str(result), *flags)
        return Section(name, kind, words, result, needs)

    budget = ("--budget-s", BUDGET)
    grid = ("--small", "--specs", "page_size_64", "--runs", "2") if smoke else budget
    checked = ["triton"] if smoke else backends  # which is compared with xla
    checks = [section(f"check {b}", "check", "check kernels", "--backends", b, *grid) for b in checked]
    plan = [Phase(tuple(checks), 3, "check")]
    cases = ("--quick", "--cases", "store", "--repeats", "2") if smoke else budget
    for name, weight in [*((b, 0.4 if b == "xla" else 1.2) for b in backends), ("baselines", 1.5)]:
        bench = section(f"bench {name}", "bench", "bench_kernels.py", "--contenders", name, *cases)
        plan.append(Phase((bench,), weight, "kernels"))
    engine = ("--backends", "auto") if smoke else budget
    plan.append(Phase((section("engine", "engine", "check engine", *engine),), 1, "engine"))
    plan += _speed(section, platform, smoke)
    table = work / "table.json"
    few = ("--quick", "--cases", "store") if smoke else ()
    command = (sys.executable, str(SCRIPTS / "tune_kernels.py"), "--out", str(table), *few, *budget)
    plan.append(Phase((Section("tune", "tune", command, table),), 3, "tune"))
    chosen = [phase for phase in plan if phase.part in parts]
    return [dataclasses.replace(phase, weight=1) for phase in chosen] if smoke else chosen


def _speed(section: Callable[..., Section], platform: str, smoke: bool) -> list[Phase]:
    """Phases for the engine's speed: offline, of the sampling program, and against transformers."""
    plan = []
    for shape, weight, flags in _offline_runs(smoke):
        offline = section(f"offline {shape}", "offline", "bench_offline.py", *flags, needs=("msgspec",))
        plan.append(Phase((offline,), weight, "offline"))
    rows = "4x1024" if smoke else "256x151936"
    sampling = section("sampling", "sampling", "bench sampler", "--shapes", rows, needs=("msgspec",))
    plan.append(Phase((sampling,), 0.5, "sampling"))
    needs = ("msgspec", "torch", "transformers")
    peers = section("peers", "peers", "bench_peers.py", *_peers_flags(platform, smoke), needs=needs)
    return [*plan, Phase((peers,), 2, "peers")]


def _offline_runs(smoke: bool) -> list[tuple[str, float, tuple[str, ...]]]:
    """Name, weight and flags of each offline run. Weights are random; the context just holds the longest request."""
    if smoke:
        return [("bundled", 1, ("--num", "6", "--input", "8:24", "--output", "4:12", *TINY))]
    weights = {"qwen3-0.6b": 1.5, "qwen3-8b": 2.5}
    flags = ("--dtype", "bfloat16", "--context-length", "2048")
    return [(shape, weight, ("--shape", shape, *flags)) for shape, weight in weights.items()]


def _peers_flags(platform: str, smoke: bool) -> tuple[str, ...]:
    """Flags of the comparison with transformers, whose slowest way takes less than a minute for this work."""
    if smoke:
        few = ("--num", "2", "--input", "4:8", "--output", "2:4", "--repeats", "1")
        ours = f"--jaxsgl={' '.join(('--dtype', 'float32', *TINY))}"
        return ("--model", str(BUNDLED_MODEL), *few, ours, "--contenders", "transformers-static8-float32")
    transformers = ("transformers-static32-bfloat16", "transformers-continuous-bfloat16")
    work = ("--model", "qwen3-0.6b", "--num", "128", "--input", "100:1024", "--output", "100:256", "--repeats", "2")
    device = "gpu" if platform == "gpu" else "cpu"
    return (*work, "--device", device, "--contenders", "jaxsgl-bfloat16", *transformers)


_GRACE_S = 15  # seconds between the end of a section's budget and its end by force
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
    """Device, driver, packages and commit; what is not known is left out."""
    machine: dict[str, Any] = {"python": sys.version.split()[0]}
    described = _output([sys.executable, "-c", _DESCRIBE])
    if described:
        machine |= json.loads(described.splitlines()[-1])
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total,clocks.sm,clocks.mem", "--format=csv,noheader"]
    machine["nvidia_smi"] = _output(query)
    machine["commit"] = _output(["git", "-C", str(SCRIPTS), "rev-parse", "HEAD"])
    return machine


class Report:
    """The results of one call, written into the folder after each phase."""

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
        """Runs the sections of a phase side by side and reads what they wrote, even if they ran out of time."""
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
        """Whether a package is missing for the section; notes it in the results."""
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
        env = {**_environment(), "PYTHONUNBUFFERED": "1"}
        # Sections with equal shapes share compiled programs; the user's own cache stays untouched.
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
        write_json(self._out / "report.json", everything)
        if self._results["bench"]:
            title = f"{self.machine.get('kind')}, JAX {self.machine.get('packages', {}).get('jax')}"
            with contextlib.suppress(ImportError):  # without matplotlib there is no picture
                plot_kernels(
                    self._results["bench"], best_roofline(self._results["rooflines"]), title, self._out / "kernels.png"
                )

    def _section_log(self, section: Section) -> Path:
        return self._work / f"{section.name.replace(' ', '-')}.log"


def _environment() -> dict[str, str]:
    """This process's, with the project on the path."""
    return {**os.environ, "PYTHONPATH": python_path(os.environ.get("PYTHONPATH"))}


def _wait(process: subprocess.Popen[bytes], until: float) -> bool:
    """Waits for the process, and kills it with its children when time is up. Returns whether it had to."""
    try:
        process.wait(max(0.1, until - time.monotonic()))
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return True
    return False


def _output(command: list[str]) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=90, env=_environment(), check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
