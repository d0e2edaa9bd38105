"""Which processes a report starts, and which share of the time each phase may take.

Knows the command lines of the other scripts, and nothing of their figures.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

SCRIPTS = Path(__file__).resolve().parents[2]
BUDGET = "{budget}"
BUNDLED_MODEL = SCRIPTS.parent / "jaxsgl" / "bundled_model"
PARTS = ("check", "kernels", "engine", "offline", "sampling", "peers", "tune")
TINY = (
    "--max-running-requests",
    "4",
    "--decode-buckets",
    "4",
    "--extend-buckets",
    "32",
    "--chunked-prefill-size",
    "32",
)
OURS = {"cpu": ["xla"], "gpu": ["triton", "mosaic_gpu", "xla"], "tpu": ["mosaic_tpu", "xla"]}


@dataclasses.dataclass(frozen=True)
class Section:
    """One process. `BUDGET` in the command becomes the seconds after which it should start nothing new."""

    name: str
    kind: str
    """"check", "bench", "engine", "offline", "sampling", "peers" or "tune": how its result is read."""
    command: tuple[str, ...]
    result: Path
    needs: tuple[str, ...] = ()
    """Packages without which it isn't started."""


@dataclasses.dataclass(frozen=True)
class Phase:
    """Sections that run side by side, and their weight against the other phases when the time is divided."""

    sections: tuple[Section, ...]
    weight: float
    part: str = ""
    """One of PARTS: what can be chosen."""


def phases(machine: Mapping[str, Any], work: Path, *, parts: Collection[str], smoke: bool) -> list[Phase]:
    """The phases of `parts` in order. Correctness first: a fast wrong kernel is nothing."""
    platform = machine.get("platform", "cpu")
    backends = OURS.get(platform, ["xla"])

    def section(name: str, kind: str, script: str, *flags: str, needs: tuple[str, ...] = ()) -> Section:
        result = work / f"{name.replace(' ', '-')}.json"
        command = (sys.executable, str(SCRIPTS / script), "--json", str(result), *flags)
        return Section(name, kind, command, result, needs)

    budget = ("--budget-s", BUDGET)
    grid = ("--small", "--specs", "page_size_64", "--runs", "2") if smoke else budget
    checked = ["xla", "triton"] if smoke else backends
    checks = [section(f"check {b}", "check", "check_kernels.py", "--backends", b, *grid) for b in checked]
    plan = [Phase(tuple(checks), 3, "check")]
    cases = ("--quick", "--cases", "store", "--repeats", "2") if smoke else budget
    for name, weight in [*((b, 0.4 if b == "xla" else 1.2) for b in backends), ("baselines", 1.5)]:
        bench = section(f"bench {name}", "bench", "bench_kernels.py", "--contenders", name, *cases)
        plan.append(Phase((bench,), weight, "kernels"))
    engine = ("--backends", "auto") if smoke else budget
    plan.append(Phase((section("engine", "engine", "check_engine.py", *engine),), 1, "engine"))
    plan += _speed(section, platform, smoke)
    table = work / "table.json"
    few = ("--quick", "--cases", "store") if smoke else ()
    command = (sys.executable, str(SCRIPTS / "tune_kernels.py"), "--out", str(table), *few, *budget)
    plan.append(Phase((Section("tune", "tune", command, table),), 3, "tune"))
    chosen = [phase for phase in plan if phase.part in parts]
    return [dataclasses.replace(phase, weight=1) for phase in chosen] if smoke else chosen


def _speed(section: Callable[..., Section], platform: str, smoke: bool) -> list[Phase]:
    """The engine's speed: offline, of the sampling program, and beside transformers."""
    plan = []
    for shape, weight, flags in _offline_runs(smoke):
        offline = section(f"offline {shape}", "offline", "bench_offline.py", *flags, needs=("msgspec",))
        plan.append(Phase((offline,), weight, "offline"))
    rows = "4x1024" if smoke else "256x151936"
    sampling = section("sampling", "sampling", "bench_sampler.py", "--shapes", rows, needs=("msgspec",))
    plan.append(Phase((sampling,), 0.5, "sampling"))
    needs = ("msgspec", "torch", "transformers")
    peers = section("peers", "peers", "bench_peers.py", *_peers_flags(platform, smoke), needs=needs)
    return [*plan, Phase((peers,), 2, "peers")]


def _offline_runs(smoke: bool) -> list[tuple[str, float, tuple[str, ...]]]:
    """Name, weight and flags of each. The weights are random; the context is the next that holds what is asked for."""
    if smoke:
        return [("bundled", 1, ("--num", "6", "--input", "8:24", "--output", "4:12", *TINY))]
    weights = {"qwen3-0.6b": 1.5, "qwen3-8b": 2.5}
    flags = ("--dtype", "bfloat16", "--context-length", "2048")
    return [(shape, weight, ("--shape", shape, *flags)) for shape, weight in weights.items()]


def _peers_flags(platform: str, smoke: bool) -> tuple[str, ...]:
    """The same work for all, of which transformers' slowest way takes less than a minute."""
    if smoke:
        few = ("--num", "2", "--input", "4:8", "--output", "2:4", "--repeats", "1")
        ours = f"--jaxsgl={' '.join(('--dtype', 'float32', *TINY))}"
        return ("--model", str(BUNDLED_MODEL), *few, ours, "--contenders", "transformers-static8-float32")
    transformers = ("transformers-static32-bfloat16", "transformers-continuous-bfloat16")
    work = ("--model", "qwen3-0.6b", "--num", "128", "--input", "100:1024", "--output", "100:256", "--repeats", "2")
    device = "gpu" if platform == "gpu" else "cpu"
    return (*work, "--device", device, "--contenders", "jaxsgl-bfloat16", *transformers)
