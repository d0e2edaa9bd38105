"""Measure everything that needs a GPU, into one small folder, and survive what hangs or crashes meanwhile.

    python scripts/gpu_report.py --out report                            # on a machine with a GPU
    python scripts/gpu_report.py --out speed --sections steps,offline    # all of the time for some of it
    python scripts/gpu_report.py --out awq --sections steps --match awq  # the steps of one model
    python scripts/gpu_report.py --out report --dry-run                  # tiny, on any machine: does this script work?

Preflight says what this machine lacks. Then a ladder of canaries, from one product to a whole step, each in a process
of its own: its specification is printed before it runs, one that hangs or crashes is named, its stacks are kept, and
the rest runs. Then the sections: the correctness grid, the kernel benchmark, products of experts and of quantized
weights, steps of fixed shapes and their kernels beside the prediction, the bundled model's tokens, the offline
benchmark, the sampling program, transformers on the same work, and (only if named) the search for block sizes. A
section that the time left is too short for is left out, and said to be. docs/kernels/gpu-report.md says what to run in
half an hour, and how to bring what a machine without a package registry lacks.

The folder holds summary.md (each criterion passed or failed), report.json (all figures), log.txt (all output),
kernels.png (if matplotlib is installed) and a table of block sizes (of "tune"); all are written again after each
result. Exits with status 1 if a result was wrong, or something hung or crashed. A dry run interprets kernels, and has
two rungs more, which hang and crash on purpose.
"""

from __future__ import annotations

import argparse
import os
import re
import resource
import sys
import tempfile
from pathlib import Path

from bench.output import command_parser
from bench.processes import num_cores
from bench.report.ladder import ladder
from bench.report.plan import PARTS, sections
from bench.report.results import Report

BUDGET_S = {False: 540, True: 1500}
ATTENTION = {"gpu": ("mosaic_gpu", "triton")}
INTERPRETED = ("triton", "mosaic_gpu")
# Processes that check what is right, side by side; most of their time is Python's and compilers'.
AT_ONCE = max(1, min(12, num_cores() * 3 // 4))
STARTS_AT_ONCE = max(
    1, min(4, num_cores() // 4)
)  # an engine compiles in several threads: 12 starts took 50 to 100 s each


def main() -> int:
    """Runs part by part."""
    parser = command_parser(__doc__)
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="where the results go")
    parser.add_argument("--budget-s", type=float, help="seconds for everything (540)")
    parser.add_argument(
        "--sections", type=parts, default=PARTS[:-1], help=f"some of {','.join(PARTS)} (default: all but tune)"
    )
    parser.add_argument("--rungs", default="", metavar="REGEX", help="only rungs in whose names it is found (all)")
    parser.add_argument(
        "--match",
        default="",
        metavar="REGEX",
        help='only parts of sections in whose names it is found: "awq|fp8" (all)',
    )
    parser.add_argument("--dry-run", action="store_true", help="a tiny run that shows that every section works")
    options = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # what crashes leaves stacks, and no gigabytes
    options.out.mkdir(parents=True, exist_ok=True)
    budget_s, dry = options.budget_s or BUDGET_S[options.dry_run], options.dry_run
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jaxsgl" / "report"
    cache.mkdir(mode=0o700, parents=True, exist_ok=True)  # what is kept there runs
    with tempfile.TemporaryDirectory(prefix="gpu-report-") as folder:
        work = Path(folder)
        report = Report(options.out, work, budget_s, dry=dry, cache=cache)
        if not report.preflight():
            return 1
        platform = report.machine["platform"]
        attention = INTERPRETED if dry else ATTENTION.get(platform, ())
        if "ladder" in options.sections and attention:
            rungs = [rung for rung in ladder(attention, dry=dry) if re.search(options.rungs, rung.name)]
            for is_start, most in ((False, AT_ONCE), (True, STARTS_AT_ONCE)):
                some = [rung for rung in rungs if (rung.kind == "step") == is_start]
                report.climb(some, at_once=2 if dry else most)
        every = [
            each for each in sections(platform, work, parts=options.sections, dry=dry)
            if re.search(options.match, each.name)
        ]  # fmt: skip
        report.run((each for each in every if each.part == "check"), at_once=AT_ONCE)
        report.run(each for each in every if each.part != "check")
    return int(report.found_wrong)


def parts(text: str) -> tuple[str, ...]:
    """Reads names of PARTS with commas between them. Raises `ArgumentTypeError` for any other name."""
    names = tuple(text.split(","))
    if not set(names) <= set(PARTS):
        raise argparse.ArgumentTypeError(f"{text!r}: sections are {', '.join(PARTS)}")
    return names


if __name__ == "__main__":
    sys.exit(main())
