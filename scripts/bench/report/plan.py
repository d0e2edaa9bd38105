"""The sections of a GPU report after its ladder: command lines, limits and what they need, as data.

All command lines of other scripts stand in `COMMANDS`. Knows none of their figures. Imports no JAX. Called by
`scripts/gpu_report.py`.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Collection
from pathlib import Path

from bench.processes import ROOT

BUDGET = "{budget}"
BUNDLED_MODEL = ROOT / "jaxsgl" / "bundled_model"
COMMANDS: dict[str, tuple[str, ...]] = {
    "preflight": ("-m", "bench.report.preflight"),
    "rung": ("-m", "bench.report.rung"),
    "check": ("scripts/check", "kernels"),
    "bench": ("scripts/bench_kernels.py",),
    "products": ("-m", "bench.report.products"),
    "steps": ("scripts/bench", "step"),
    "engine": ("scripts/check", "engine"),
    "offline": ("scripts/bench_offline.py",),
    "sampling": ("scripts/bench", "sampler"),
    "peers": ("scripts/bench_peers.py",),
    "tune": ("scripts/tune_kernels.py",),
    "sizes": ("scripts/tune_products.py",),
}
# In the order in which they run: what is right before what is fast, and single kernels before whole runs.
PARTS = ("ladder", "check", "kernels", "products", "steps", "engine", "offline", "sampling", "peers", "tune")
OURS = {"cpu": ["xla"], "gpu": ["triton", "mosaic_gpu", "xla"], "tpu": ["mosaic_tpu", "xla"]}
# Steps whose times are predicted, and the prediction's names for them.
STEPS = {
    "1x1+1023": "decode 1",
    "32x1+1023": "decode 32",
    "256x1+1023": "decode 256",
    "4x1024": "extend 4096",
}
SHAPES = (
    "qwen3-0.6b", "qwen3-8b", "qwen3-30b-a3b", "qwen3-8b-fp8", "qwen3-8b-awq", "qwen3-30b-a3b-fp8", "gpt-oss-20b",
)  # fmt: skip
# Few programs: a start compiles 74 with the default buckets, which takes 100 s and more.
FEW_BUCKETS = ("--decode-buckets", "1,32,256", "--extend-buckets", "2048", "--chunked-prefill-size", "2048")
TINY = (
    *("--max-running-requests", "4", "--decode-buckets", "4", "--extend-buckets", "32"),
    *("--chunked-prefill-size", "32"),
)


def command(kind: str, *flags: str) -> tuple[str, ...]:
    """The command line of a kind of section, to be run in the project's root."""
    return (sys.executable, *COMMANDS[kind], *flags)


@dataclasses.dataclass(frozen=True)
class Section:
    """A process.

    Attributes:
      name: unique.
      part: one of PARTS.
      kind: how its result is read.
      command: `BUDGET` in it becomes the seconds after which it should start nothing new.
      result: the JSON file that it writes, again after each item if it has several.
      needs: what `preflight` must have found: packages, or "engine".
      least_s: it is not started with less time left.
      most_s: it is ended then.
      quiet_s: it is ended when it has printed and written nothing for so long.
      skips: whether it can begin again without an item that hung: `--skip` and its name.
    """

    name: str
    part: str
    kind: str
    command: tuple[str, ...]
    result: Path
    needs: tuple[str, ...] = ()
    least_s: float = 10
    most_s: float = 120
    quiet_s: float = 1e9
    skips: bool = False


def sections(platform: str, work: Path, *, parts: Collection[str], dry: bool) -> list[Section]:
    """The sections of `parts`, in order; tiny ones for `dry`."""
    every = _dry(work) if dry else _real(platform, work)
    return [section for part in PARTS for section in every if section.part == part and part in parts]


def _section(
    work: Path, name: str, part: str, kind: str, *flags: str,
    needs: tuple[str, ...] = (), least_s: float = 10, most_s: float = 120, quiet_s: float = 1e9, skips: bool = False,
) -> Section:  # fmt: skip
    result = work / f"{name.replace(' ', '-')}.json"
    to = "--out" if kind == "tune" else "--json"
    line = command(kind, to, str(result), *flags)
    return Section(name, part, kind, line, result, needs, least_s, most_s, quiet_s, skips)


def _real(platform: str, work: Path) -> list[Section]:
    backends, budget = OURS.get(platform, ["xla"]), ("--budget-s", BUDGET)
    peers = ("transformers-static32-bfloat16", "transformers-continuous-bfloat16")
    work_of_peers = ("--model", "qwen3-0.6b", "--num", "128", "--input", "100:1024", "--output", "100:256")
    device = ("--device", "gpu" if platform == "gpu" else "cpu", "--repeats", "2")
    short = ("--dtype", "bfloat16", "--context-length", "2048")
    kernels = [*((name, 90.0) for name in backends), ("baselines", 120.0)]
    return [
        *(
            _section(work, f"check {name}", "check", "check", "--backends", name, *budget,
                     most_s=150, quiet_s=90, skips=True)
            for name in backends
        ),
        *(
            _section(work, f"bench {name}", "kernels", "bench", "--contenders", name, *budget,
                     most_s=most_s, quiet_s=90, skips=True)
            for name, most_s in kernels
        ),
        _section(work, "products", "products", "products", most_s=120, quiet_s=90),
        *(
            _section(work, f"steps {shape}", "steps", "steps", "--shape", shape, *short, "--steps", *STEPS,
                     "--rounds", "3", "--runs", "10", "--traces", str(work / "traces" / shape), needs=("engine",),
                     least_s=60, most_s=240)
            for shape in SHAPES
        ),
        _section(work, "engine", "engine", "engine", *budget, needs=("engine",), least_s=60, most_s=300),
        *(
            _section(work, f"offline {shape}", "offline", "offline", "--shape", shape, *short, *FEW_BUCKETS,
                     needs=("engine",), least_s=least_s, most_s=480)
            for shape, least_s in (("qwen3-0.6b", 150), ("qwen3-8b", 210))
        ),
        _section(work, "sampling", "sampling", "sampling", "--shapes", "256x151936", needs=("engine",), most_s=90),
        _section(work, "peers", "peers", "peers", *work_of_peers, *device, "--contenders", "jaxsgl-bfloat16", *peers,
                 needs=("engine", "torch", "transformers"), least_s=200, most_s=480),
        _section(work, "tune products", "tune", "sizes", *budget, least_s=60, most_s=180),
        _section(work, "tune", "tune", "tune", "--quick", *budget, least_s=60, most_s=480, quiet_s=90),
    ]  # fmt: skip


def _dry(work: Path) -> list[Section]:
    """A tiny section of each part, on any machine; Pallas's kernels are interpreted."""
    engine = ("engine",)
    few = ("--num", "6", "--input", "8:24", "--output", "4:12", *TINY)
    ours = f"--jaxsgl={' '.join(('--dtype', 'float32', *TINY))}"
    two = ("--num", "2", "--input", "4:8", "--output", "2:4", "--repeats", "1")
    peer = ("--model", str(BUNDLED_MODEL), *two, ours, "--contenders", "transformers-static8-float32")
    return [
        _section(work, "check triton", "check", "check", "--backends", "triton", "--small", "--specs", "page_size_64",
                 "--runs", "2", skips=True),
        _section(work, "bench xla", "kernels", "bench", "--contenders", "xla", "--quick", "--cases", "store",
                 "--repeats", "2", skips=True),
        _section(work, "products", "products", "products", "--tiny"),
        *(
            _section(work, f"steps {shape}", "steps", "steps", "--shape", shape, "--steps", "2x1+7", "1x16",
                     "--context-length", "64", "--rounds", "1", "--runs", "2", "--traces", str(work / "traces" / shape),
                     needs=engine)
            for shape in ("tiny", "tiny-moe", "tiny-fp8")
        ),
        _section(work, "engine", "engine", "engine", "--backends", "auto", needs=engine),
        _section(work, "offline bundled", "offline", "offline", *few, needs=engine),
        _section(work, "sampling", "sampling", "sampling", "--shapes", "4x1024", needs=engine),
        _section(work, "peers", "peers", "peers", *peer, needs=("engine", "torch", "transformers"), most_s=240),
        _section(work, "tune", "tune", "tune", "--quick", "--cases", "store", "--budget-s", "20"),
    ]  # fmt: skip
