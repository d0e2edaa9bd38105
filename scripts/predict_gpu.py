"""Predict how long the engine's steps take on a chip that is not there, from their compiled programs.

    python scripts/compile_targets.py h200 --grid steps --json steps.json     # what is launched; needs no GPU
    python scripts/predict_gpu.py steps.json                                  # microseconds, a line per step
    python scripts/predict_gpu.py --chip v6e                                  # or h200 (default), h100, a100, v5e, v7x
    python scripts/predict_gpu.py --json predicted.json                       # of all chips

Prints each step's floor (weights, KV, states and logits once at the ceilings), its parts, the sum, by how much the sum
exceeds the floor, and the forecast, after the constants with their sources, and what others report of the chip. The
floor and the sum are bounds: the best measured engines stand 30 to 34% above such floors. The forecast takes the shares
of the ceilings that others' kernels reach. Programs are the H200's on all chips, and those of benchmarks/ by default.
Nothing of it is measured.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

from bench.output import command_parser, write_json
from bench.targets.chips import CHIPS, PUBLIC, steps_on
from bench.targets.prediction import FORECAST, FORECAST_SOURCES, SOURCES

ROOT = Path(__file__).parents[1]
KEPT = ROOT / "benchmarks/h200/compiled_steps.json"
# Names of a step's parts, and their widths.
PARTS = {"attention": 9, "states": 7, "products": 8, "small": 8, "links": 7, "sampling": 8, "launch": 7}
HEAD = f"{'step':<44} {'floor':>8} {' '.join(f'{name:>{width}}' for name, width in PARTS.items())} {'sum':>9}"


def line(of: dict[str, Any]) -> str:
    """The line of one step, in microseconds."""
    start = f"{of['step']:<44} {of['floor_us']:>8.0f}"
    if "step_us" not in of:
        return f"{start} {of['forecast_us']:>9.0f}"
    shown = " ".join(f"{of[f'{name}_us']:>{width}.0f}" for name, width in PARTS.items())
    return (
        f"{start} {shown} {of['step_us']:>9.0f} {of['over_floor']:>+7.0%} {of['forecast_us']:>9.0f}  "
        f"{of['small_per_layer']} small kernels per layer, {of['num_kernels']} in all"
    )


def main() -> int:
    """Prints the predictions."""
    parser = command_parser(__doc__)
    parser.add_argument("results", nargs="?", type=Path, default=KEPT, help="of compile_targets.py --json")
    parser.add_argument("--chip", choices=tuple(CHIPS), default="h200", help="to print (h200); the file has all")
    parser.add_argument("--context", type=int, default=1024, help="KV tokens of each row of a decode step")
    parser.add_argument("--match", default="", help="only steps whose names contain this")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the predictions here")
    options = parser.parse_args()
    results = json.loads(options.results.read_text())["results"]
    chip = CHIPS[options.chip]
    print(f"{chip.name}: {chip.source}")
    for name, value in dataclasses.asdict(chip.assumed).items():
        print(f"{name} = {value}: {SOURCES[name]}")
    for name, value in FORECAST.items():
        print(f"forecast, {name} = {value}: {FORECAST_SOURCES[name]}")
    for _, what, figure, source in (each for each in PUBLIC if each[0] == chip.name):
        print(f"others: {what}: {figure} ({source})")
    lines = [
        each
        for one in CHIPS.values()
        for each in steps_on(one, results, options.context)
        if options.match in each["step"]
    ]
    print(f"{HEAD}    over  forecast" if chip.attention_share is None else f"{'step':<44} {'floor':>8}  forecast")
    for each in lines:
        if each["chip"] == chip.name:
            print(line(each))
    if options.json:
        told = {one.name: {"source": one.source, "assumed": dataclasses.asdict(one.assumed)} for one in CHIPS.values()}
        sources = {"assumed": SOURCES, "forecast": FORECAST_SOURCES}
        public = [dict(zip(("chip", "what", "figure", "source"), each, strict=True)) for each in PUBLIC]
        write_json(
            options.json,
            {"context": options.context, "chips": told, "forecast": FORECAST, "sources": sources, "others": public,
             "steps": lines},
        )  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
