"""Runs a GPU report's preflight, ladder and sections, and writes the folder after each result.

Owns the folder: whatever ends this process, what was found before is on the disk. Knows the shape of the JSON files of
the sections, but none of their figures. Imports no JAX: the device belongs to the processes that it starts. Called by
`scripts/gpu_report.py`.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from bench.output import write_json
from bench.plots import plot_kernels
from bench.processes import ROOT, python_path
from bench.report.ladder import Rung
from bench.report.plan import BUDGET, Section, command
from bench.report.summary import best_roofline, no_results, summary
from bench.report.watched import Outcome, watch
from bench.targets.chips import CHIPS, steps_on
from bench.targets.thunks import SUFFIX as THUNKS
from bench.targets.thunks import read as read_thunks

PREDICTED_FROM = ROOT / "benchmarks/h200/compiled_steps.json"
PREFLIGHT_S = 180.0
MOST_RESTARTS = 3  # of a section whose items hang
LOG_CHARS = 1_000_000  # of one process in log.txt
_GRACE_S = 20  # seconds between the end of a section's budget and its end by force
# Processes side by side take of the device's memory what they need, and two cores for NumPy's products.
_SHARED = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "OMP_NUM_THREADS": "2", "OPENBLAS_NUM_THREADS": "2"}
# XLA's words on which ptxas it and Mosaic run.
_LOG_COMPILERS = {"TF_CPP_MIN_LOG_LEVEL": "0", "TF_CPP_VMODULE": "subprocess_compilation=2"}


class Report:
    """The results of one call.

    Args:
      out: the folder that they are written into.
      work: a folder for the files of the processes.
      budget_s: for everything.
      dry: no GPU is wanted.
      cache: where compiled programs are kept between calls; a folder for each set of compilers is made in it.
    """

    def __init__(self, out: Path, work: Path, budget_s: float, *, dry: bool = False, cache: Path | None = None) -> None:
        self.machine: dict[str, Any] = {}
        self.found_wrong = False
        self._out, self._work, self._dry = out, work, dry
        self._cache = cache or work / "xla"
        self._deadline = time.monotonic() + budget_s
        self._order: dict[str, int] = {}  # of the rungs
        self._lock = threading.RLock()  # rungs run side by side, and so do checks
        self._results = no_results()
        self._log = out / "log.txt"
        self._log.write_text("")

    def preflight(self) -> bool:
        """Looks at the machine; says each finding. Returns whether anything can run."""
        file = self._work / "preflight.json"
        outcome = self._watch(command("preflight", str(file)), "preflight", PREFLIGHT_S, PREFLIGHT_S, file, {})
        if not file.exists():
            last = outcome.log.strip().splitlines()[-1:] or ["it said nothing"]
            detail = f"JAX doesn't start here: {last[0]}"
            found: dict[str, Any] = {"machine": {}, "lines": [{"what": "JAX", "ok": False, "detail": detail}]}
        else:
            found = json.loads(file.read_text())
        self.machine = found["machine"]
        self._results["predicted_for"], self._results["predicted"] = _predicted(self.machine.get("kind", ""))
        self._results["preflight"] = found["lines"]
        for line in found["lines"]:
            _say(f"{'ok' if line['ok'] else '--'}  {line['what']}: {line['detail']}")
        self._write()
        return bool(self.machine)

    def climb(self, rungs: Sequence[Rung], at_once: int = 1) -> None:
        """Runs the ladder, rung by rung, or some side by side."""
        self._order |= {rung.name: len(self._order) + i for i, rung in enumerate(rungs)}
        with ThreadPoolExecutor(at_once) as pool:
            for _ in pool.map(self._rung, rungs):
                pass

    def run(self, sections: Iterable[Section], at_once: int = 1) -> None:
        """Runs the sections one after the other, or some side by side."""
        with ThreadPoolExecutor(at_once) as pool:
            for _ in pool.map(self._section, sections):
                pass

    def _left_s(self) -> float:
        return self._deadline - time.monotonic()

    def _rung(self, rung: Rung) -> None:
        told: dict[str, Any] = {"name": rung.name, "kind": rung.kind, "spec": dict(rung.spec)}
        limit_s = min(rung.limit_s, self._left_s())
        missing = self._missing(rung.needs)
        if missing or limit_s < 5:
            told |= {"verdict": "not run", "note": missing or "no time left"}
            self._took(told)
            return
        _say(f"{rung.name}: {rung.kind} {json.dumps(dict(rung.spec))}")
        file = self._file(rung.name)
        line = command("rung", rung.kind, json.dumps(dict(rung.spec)), str(file))
        dumps = file.with_suffix(".dumps")
        outcome = self._watch(line, rung.name, limit_s, limit_s, file, self._asked_of_xla(rung, dumps))
        found = json.loads(file.read_text()) if file.exists() else {}
        ended = "hung" if outcome.hung else "crashed"
        told |= {"verdict": ended, **found, "status": outcome.status, "seconds": outcome.seconds}
        if outcome.hung or outcome.status not in (0, 1) or not found:
            said = outcome.hung or _error_of(outcome)
            told |= {"verdict": ended, "note": said, "stacks": outcome.stacks, "last_words": outcome.log[-600:]}
        used = {word for text in outcome.log.split("Using ")[1:] if (word := text.split()[0]).endswith("/ptxas")}
        told |= {"ptxas": sorted(used)} if used else {}
        told |= {"command_buffers": buffers} if (buffers := _command_buffers(dumps)) else {}
        self._took(told)

    def _asked_of_xla(self, rung: Rung, dumps: Path) -> dict[str, str]:
        """Variables by which compilers log what they run, and XLA writes down how it launches the programs of steps."""
        if self.machine.get("platform") != "gpu":
            return {}
        if rung.kind != "step":
            return _SHARED | _LOG_COMPILERS
        flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_dump_to={dumps} --xla_dump_hlo_as_text"
        kept = {"XLA_FLAGS": flags, "JAX_ENABLE_COMPILATION_CACHE": "false"}  # what comes from a cache isn't dumped
        return _SHARED | _LOG_COMPILERS | kept

    def _took(self, told: dict[str, Any]) -> None:
        with self._lock:
            self._results["rungs"].append(told)
            self._results["rungs"].sort(key=lambda rung: self._order[rung["name"]])
            _say(f"{told['name']}: {told['verdict']} {told.get('note') or ''}")
            self._write()

    def _section(self, section: Section) -> None:
        told: dict[str, Any] = {"name": section.name, "status": 0, "seconds": 0.0, "hung": ""}
        missing = self._missing(section.needs)
        if not missing and self._left_s() < section.least_s:
            missing = f"it needs {section.least_s:.0f} s, and {max(0, self._left_s()):.0f} s are left"
        self._results["sections"].append(told)
        if missing:
            told["note"] = f"not run: {missing}"
            _say(f"{section.name}: {told['note']}")
            self._write()
            return
        results: list[dict[str, Any]] = []  # of each start
        told["hung_at"] = []
        for _ in range(1 + MOST_RESTARTS * section.skips):
            number = len(results)
            outcome = self._start(section, told, results)
            told |= {"status": outcome.status, "hung": outcome.hung, "seconds": told["seconds"] + outcome.seconds}
            if outcome.status and not outcome.ended_at_item:
                told["last_words"] = outcome.log[-600:]
            if not outcome.ended_at_item:
                break
            item = results[number].get("running") if len(results) > number else None
            told["hung_at"].append(item or "its start, or between items")
            told["stacks"] = outcome.stacks
            _say(f"{section.name}: {outcome.hung or 'crashed'} at {told['hung_at'][-1]}")
            if item is None or min(self._left_s(), section.most_s - told["seconds"]) < section.least_s:
                break
        _say(f"{section.name}: status {told['status']}, {told['seconds']:.0f} s {told['hung']}")
        self._write()
        self._plot()

    def _start(self, section: Section, told: dict[str, Any], results: list[dict[str, Any]]) -> Outcome:
        """Runs a section's process, without the items of the starts before; adds its results, while it runs, too."""
        limit_s = max(1.0, min(section.most_s - told["seconds"], self._left_s()))
        line = [part.replace(BUDGET, str(max(1, round(limit_s - _GRACE_S)))) for part in section.command]
        done = [name for result in results for name in (*result.get("done", ()), result.get("running")) if name]
        if done:
            line += ["--skip", *done]
        section.result.unlink(missing_ok=True)
        number = len(results)

        def take() -> None:
            with contextlib.suppress(FileNotFoundError, ValueError), self._lock:  # it is being written just now
                results[number:] = [json.loads(section.result.read_text())]
                self._merge(section, told, results)
                self._write()

        name = f"{section.name} {number + 1}" if number else section.name
        more = _SHARED if section.part == "check" else {}
        outcome = self._watch(line, name, limit_s, section.quiet_s, section.result, more, take)
        take()
        return outcome

    def _merge(self, section: Section, told: dict[str, Any], results: list[dict[str, Any]]) -> None:
        """Sets what the section has found so far, of all its starts, in the place of what it had."""
        whole, name = self._results, section.name
        last = results[-1]
        match section.kind:
            case "check":
                mine = [{**each, "section": name} for result in results for each in result["checks"]]
                whole["check"] = [each for each in whole["check"] if each["section"] != name] + mine
                told["left_out"] = last["left_out"]
            case "bench":
                mine = [{**each, "section": name} for result in results for each in result["rows"]]
                whole["bench"] = [each for each in whole["bench"] if each["section"] != name] + mine
                others = [each for each in whole["rooflines"] if each["section"] != name]
                whole["rooflines"] = [*others, {**last["roofline"], "section": name}]
            case "tune":
                write_json(self._out / "table.json", last)
            case "products":
                whole["products"] = last["rows"]
            case "steps":
                whole["steps"][name.removeprefix("steps ")] = last["rows"]
            case "offline":
                whole["offline"][name.removeprefix("offline ")] = last
            case kind:
                whole[kind] = last

    def _missing(self, needs: Sequence[str]) -> str:
        """Why something can't run, by what preflight found; empty if it can."""
        missing = [name for name in needs if name not in self.machine.get("found", ())]
        return f"no {' and no '.join(missing)} here" if missing else ""

    def _watch(
        self, line: Sequence[str], name: str, limit_s: float, quiet_s: float, result: Path, more: Mapping[str, str],
        progress: Callable[[], None] = lambda: None,
    ) -> Outcome:  # fmt: skip
        log = self._file(name).with_suffix(".log")
        env = {**os.environ, "PYTHONPATH": python_path(os.environ.get("PYTHONPATH")), **self._variables(), **more}
        outcome = watch(line, env, log, limit_s=limit_s, quiet_s=quiet_s, result=result, progress=progress)
        with self._lock, self._log.open("a") as whole:
            whole.write(f"===== {name}: status {outcome.status}, {outcome.seconds} s {outcome.hung}\n")
            whole.write(f"{outcome.log[-LOG_CHARS:]}\n")
        return outcome

    def _variables(self) -> dict[str, str]:
        """For all processes: the compilers that preflight chose, and a cache of programs that they share."""
        cache = self._cache / self.machine.get("compilers", "") if self.machine else self._work / "preflight"
        variables = {
            "JAX_COMPILATION_CACHE_DIR": str(cache),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        }
        return variables | ({"PATH": self.machine["path"]} if self.machine.get("path") else {})

    def _file(self, name: str) -> Path:
        return self._work / f"{''.join(c if c.isalnum() else '-' for c in name)}.json"

    def _write(self) -> None:
        with self._lock:
            text, self.found_wrong = summary(self.machine, self._results, dry=self._dry)
            (self._out / "summary.md").write_text(text)
            new = self._out / "report.json.new"
            write_json(new, {"machine": self.machine, **self._results})
            new.replace(self._out / "report.json")  # whoever ends us finds one of both, whole

    def _plot(self) -> None:
        if self._results["bench"]:
            title = f"{self.machine.get('kind')}, JAX {self.machine.get('packages', {}).get('jax')}"
            with contextlib.suppress(ImportError):  # without matplotlib there is no picture
                plot_kernels(
                    self._results["bench"], best_roofline(self._results["rooflines"]), title, self._out / "kernels.png"
                )


def _error_of(outcome: Outcome) -> str:
    """What a process that ended too early said: Python's last error, or its signal."""
    if outcome.status < 0:
        return f"signal {-outcome.status}"
    errors = [line for line in outcome.log.splitlines() if line.split(":")[0].endswith(("Error", "Exception"))]
    return errors[-1][:300] if errors else f"status {outcome.status}"


def _command_buffers(dumps: Path) -> list[dict[str, Any]]:
    """Of each forward program that XLA wrote down: how many command buffers it is, and how many launches are outside.

    Those on XLA's attention, with which a rung compares, have loops that the host steps, and so several.
    """
    found = sorted(dumps.glob(f"*forward*{THUNKS}"))
    read = [(path.name.removesuffix(f".{THUNKS}"), read_thunks(path.read_text())) for path in found]
    return [{"program": name, "count": each.count, "outside": len(each.outside)} for name, each in read]


def _predicted(kind: str) -> tuple[str, dict[str, dict[str, float]]]:
    """A GPU's name, an H200's where nothing is predicted for `kind`; floor, model and forecast of each of its steps."""
    name = next((name for name in CHIPS if name.upper() in kind), "h200")
    results = json.loads(PREDICTED_FROM.read_text())["results"]
    fields = ("floor_us", "step_us", "forecast_us")
    return name, {each["step"]: {f: each[f] for f in fields} for each in steps_on(CHIPS[name], results, 1024)}


def _say(text: str) -> None:
    print(text, flush=True)
