"""Compare loading a checkpoint, from safetensors files and from Orbax, with reading the files: in turns, in one run.

    python scripts/bench loading --shape qwen3-8b --layers 16 --folder /path/with/room --json loading.json
    python scripts/bench loading --shape mid --layers 8 --warm

Writes a random bfloat16 checkpoint (the first line's has 8 GiB) and converts it, loads both as a server does, and
removes them. Each load has a process of its own. Files are read from the disk, with --warm from the system's cache,
which needs room for both checkpoints. "plain" reads the safetensors files by 8 threads into small buffers,
"plain-orbax" those of Orbax.

Prints GB/s, CPU seconds, and the most memory resident while loading: of the whole process, and without what Python and
JAX took before, in parts of the parameters' size. Medians of the rounds.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.load_child import evict, read_plainly, write_random
from bench.models import SHAPES
from bench.output import figure_parser, write_figures
from bench.processes import python_path

KINDS = {"plain": "original", "safetensors": "original", "plain-orbax": "converted", "orbax": "converted"}
HEAD = f"{'':<12}{'GB':>8}{'GB/s':>8}{'CPU s':>8}{'resident GiB':>14}{'of the size':>13}"


def load(kind: str, folder: Path, *, warm: bool) -> dict[str, Any]:
    """One load of a kind in a process of its own. Raises `CalledProcessError` if it fails."""
    read_plainly(folder) if warm else evict(folder)
    command = [sys.executable, "-m", "bench.load_child", kind.partition("-")[0], str(folder)]
    done = subprocess.run(command, env=environment(), check=True, stdout=subprocess.PIPE, text=True)
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def environment() -> dict[str, str]:
    """This process's for one that loads or converts on the CPU."""
    path = python_path(os.environ.get("PYTHONPATH"))
    return {**os.environ, "PYTHONPATH": path, "JAX_PLATFORMS": "cpu"}


def summary(rounds: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Medians of one kind."""

    def median(of: Any) -> float:
        return statistics.median(of(each) for each in rounds)

    return {
        "gb": rounds[0]["bytes"] / 1e9,
        "gb_per_s": median(lambda each: each["bytes"] / 1e9 / each["seconds"]),
        "cpu_s": median(lambda each: each["cpu_seconds"]),
        "resident_gib": max(each["resident_most"] for each in rounds) / 2**30,
        "of_size": max((each["resident_most"] - each["resident_before"]) / each["bytes"] for each in rounds),
    }


def main(arguments: list[str]) -> int:
    """Writes, converts, measures, prints."""
    parser = figure_parser(__doc__, __name__)
    parser.add_argument("--shape", default="mid", choices=sorted(SHAPES))
    parser.add_argument("--layers", type=int, default=8, help="layers of the model (default: 8)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--warm", action="store_true", help="read from the system's cache")
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=KINDS, help="what to measure")
    parser.add_argument("--folder", type=Path, help="where checkpoints are written (default: a temporary folder)")
    options = parser.parse_args(arguments)
    results: dict[str, list[dict[str, Any]]] = {kind: [] for kind in options.kinds}
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="bench-loading-") as name:
        folder = Path(name)
        write_random(folder / "original", options.shape, options.layers)
        if "converted" in {KINDS[kind] for kind in options.kinds}:
            convert: list[str | Path] = [
                sys.executable,
                "-m",
                "jaxsgl.convert",
                "--model",
                folder / "original",
            ]
            subprocess.run([*convert, "--output", folder / "converted"], check=True, env=environment())
            os.sync()
        for _ in range(options.rounds):
            for kind in options.kinds:
                results[kind].append(load(kind, folder / KINDS[kind], warm=options.warm))
    print(HEAD)
    figures = {kind: summary(rounds) for kind, rounds in results.items()}
    for kind, row in figures.items():
        told = f"{row['gb']:>8.2f}{row['gb_per_s']:>8.2f}{row['cpu_s']:>8.1f}{row['resident_gib']:>14.2f}"
        print(f"{kind:<12}{told}{row['of_size']:>13.2f}")
    write_figures(options.json, figures=figures, rounds=results)
    return 0
