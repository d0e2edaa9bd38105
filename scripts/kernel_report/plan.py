"""Which processes a report starts, and which share of the time each phase may take.

Knows the command lines of the other scripts, and nothing of their figures.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

SCRIPTS = Path(__file__).resolve().parent.parent
BUDGET = "{budget}"
OURS = {"cpu": ["xla"], "gpu": ["triton", "mosaic_gpu", "xla"], "tpu": ["mosaic_tpu", "xla"]}


@dataclasses.dataclass(frozen=True)
class Section:
    """One process. `BUDGET` in the command becomes the seconds after which it should start nothing new."""

    name: str
    kind: str
    """"check", "bench", "engine", "offline" or "tune": how its result is read."""
    command: tuple[str, ...]
    result: Path


@dataclasses.dataclass(frozen=True)
class Phase:
    """Sections that run side by side, and their weight against the other phases when the time is divided."""

    sections: tuple[Section, ...]
    weight: float


def phases(machine: Mapping[str, Any], work: Path, *, tune: bool, smoke: bool) -> list[Phase]:
    """The phases in order. Correctness first: a fast wrong kernel is nothing."""
    platform = machine.get("platform", "cpu")
    backends = OURS.get(platform, ["xla"])

    def section(name: str, kind: str, script: str, *flags: str) -> Section:
        result = work / f"{name.replace(' ', '-')}.json"
        command = (sys.executable, str(SCRIPTS / script), "--json", str(result), *flags)
        return Section(name, kind, command, result)

    budget = ("--budget-s", BUDGET)
    grid = ("--small", "--specs", "page_size_64", "--runs", "2") if smoke else budget
    checked = ["xla", "triton"] if smoke else backends
    checks = [section(f"check {b}", "check", "check_kernels.py", "--backends", b, *grid) for b in checked]
    plan = [Phase(tuple(checks), weight=3)]
    cases = ("--quick", "--cases", "store", "--repeats", "2") if smoke else budget
    for name, weight in [*((b, 0.4 if b == "xla" else 1.2) for b in backends), ("baselines", 1.5)]:
        bench = section(f"bench {name}", "bench", "bench_kernels.py", "--contenders", name, *cases)
        plan.append(Phase((bench,), weight))
    engine = ("--backends", "auto") if smoke else budget
    plan.append(Phase((section("engine", "engine", "check_engine.py", *engine),), weight=1))
    if (SCRIPTS / "bench_offline.py").exists() and not smoke:
        plan.append(Phase((section("offline benchmark", "offline", "bench_offline.py"),), weight=1))
    if tune:
        table = work / "table.json"
        few = ("--quick", "--cases", "store") if smoke else ()
        command = (sys.executable, str(SCRIPTS / "tune_kernels.py"), "--out", str(table), *few, *budget)
        plan.append(Phase((Section("tune", "tune", command, table),), weight=3))
    return plan
