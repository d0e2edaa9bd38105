"""Measure everything that needs a GPU, in one call of at most 9 minutes, into one small folder.

    python scripts/gpu_report.py --out report            # on a machine with a GPU
    python scripts/gpu_report.py --out report --tune     # block sizes too, with what time is left
    python scripts/gpu_report.py --out report --smoke    # tiny, on any machine: does this script work?
    python scripts/gpu_report.py --out speed --sections offline,sampling,peers    # all of the time for some of it

Each section runs in processes of its own with a time limit, so that a hang or a crash of one kernel does not affect the
rest. The sections are the correctness grid (a process per backend, side by side), the kernel benchmark (a process per
backend and one for the baselines, one after the other), the engine, its speed on shapes of Qwen3 with random weights
(the offline benchmark), the sampling program, transformers on the same work, and the search for block sizes. Unused
time goes to later sections. A section is skipped if it needs a package that is missing, and the summary says so. The
time of one call is short for all sections: several calls with a few sections each, into a folder each, tell more.

The folder holds summary.md (each criterion passed or failed), report.json (all figures), log.txt (all output),
kernels.png (if matplotlib is installed) and a table of block sizes (with --tune); all are rewritten after each section.
Exits with status 1 if a result was wrong. Needs only what the kernels need; the engine also needs msgspec, and
transformers needs torch.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from bench.gpu_report import PARTS, Report, describe_machine, phases
from bench.output import command_parser


def main() -> int:
    """Runs phase by phase and writes the folder after each one."""
    parser = command_parser(__doc__)
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="where the results go")
    parser.add_argument("--budget-s", type=float, default=520, help="seconds for everything (520)")
    parser.add_argument("--tune", action="store_true", help="search for block sizes too")
    parser.add_argument(
        "--sections", type=parts, default=PARTS[:-1], help=f"some of {','.join(PARTS)} (default: all but tune)"
    )
    parser.add_argument("--smoke", action="store_true", help="a tiny run that shows that every section works")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="kernel-report-") as work:
        report = Report(options.out, Path(work), options.budget_s)
        report.machine = describe_machine()
        chosen = (*options.sections, *(("tune",) if options.tune else ()))
        plan = phases(report.machine, Path(work), parts=chosen, smoke=options.smoke)
        for i, phase in enumerate(plan):
            report.run(phase, weight_left=sum(later.weight for later in plan[i:]))
    return int(report.found_wrong)


def parts(text: str) -> tuple[str, ...]:
    """Reads names of PARTS with commas between them. Raises `ArgumentTypeError` for any other name."""
    names = tuple(text.split(","))
    if not set(names) <= set(PARTS):
        raise argparse.ArgumentTypeError(f"{text!r}: sections are {', '.join(PARTS)}")
    return names


if __name__ == "__main__":
    sys.exit(main())
