"""Predict how long the engine's steps take on an H200 that is not there, from their compiled programs.

    python scripts/compile_targets.py h200 --grid steps --json steps.json     # what is launched; needs no GPU
    python scripts/predict_gpu.py steps.json                                  # microseconds, a line per step
    python scripts/predict_gpu.py --json predicted.json                       # of the results kept in benchmarks/

Prints each step's floor (weights, KV and logits once at the ceilings), its parts, the sum, and by how much the sum
exceeds the floor, after the constants of the model with their sources. Nothing of it is measured.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

from bench.output import command_parser, write_json
from bench.targets.prediction import ASSUMED, SOURCES, Predicted, predict

ROOT = Path(__file__).parents[1]
KEPT = ROOT / "benchmarks/h200/compiled_steps.json"
PARTS = {"attention": 9, "products": 8, "small": 8, "links": 7, "sampling": 8, "launch": 7}  # and their widths
HEAD = f"{'step':<44} {'floor':>8} {' '.join(f'{name:>{width}}' for name, width in PARTS.items())} {'sum':>9}"


def line(each: Predicted) -> str:
    """The line of one step, in microseconds."""
    shown = " ".join(f"{getattr(each, f'{name}_us'):>{width}.0f}" for name, width in PARTS.items())
    return (
        f"{each.step:<44} {each.floor_us:>8.0f} {shown} {each.step_us:>9.0f} {each.over_floor:>+7.0%}  "
        f"{each.small_per_layer} small kernels per layer, {each.num_kernels} in all"
    )


def main() -> int:
    """Prints the predictions."""
    parser = command_parser(__doc__)
    parser.add_argument("results", nargs="?", type=Path, default=KEPT, help="of compile_targets.py --json")
    parser.add_argument("--context", type=int, default=1024, help="KV tokens of each row of a decode step")
    parser.add_argument("--match", default="", help="only steps whose names contain this")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the predictions here")
    options = parser.parse_args()
    results = json.loads(options.results.read_text())["results"]
    for name, value in dataclasses.asdict(ASSUMED).items():
        print(f"{name} = {value}: {SOURCES[name]}")
    print(HEAD)
    predicted = [each for each in predict(results, options.context) if options.match in each.step]
    for each in predicted:
        print(line(each))
    if options.json:
        lines = [
            {**dataclasses.asdict(each), "step_us": each.step_us, "over_floor": each.over_floor} for each in predicted
        ]
        write_json(options.json, {"context": options.context, "assumed": dataclasses.asdict(ASSUMED), "steps": lines})
    return 0


if __name__ == "__main__":
    sys.exit(main())
