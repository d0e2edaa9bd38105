"""Everything that only a GPU can settle, in one call of at most 9 minutes, into one small folder.

    python scripts/gpu_report.py --out report            # on a machine with a GPU
    python scripts/gpu_report.py --out report --tune     # block sizes too, with what time is left
    python scripts/gpu_report.py --out report --smoke    # tiny, anywhere: does this script itself work?

Sections, each in processes of its own with a time limit, so that a hang or a crash of one kernel costs no other: the
correctness grid (a process per backend, side by side), the kernel benchmark (a process per backend and one for
the baselines, one after the other), the engine, and the search for block sizes. Unused time goes to later sections.
The folder holds summary.md (each criterion passed or failed), report.json (all figures), log.txt (all output),
kernels.png (where matplotlib is) and a table of block sizes (with --tune), rewritten after each section. Leaves with
status 1 if something was found wrong. Needs only what the kernels need; the engine needs msgspec too.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from kernel_report.plan import phases
from kernel_report.run import Report, describe_machine


def main() -> int:
    """Runs phase by phase, and writes the folder after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="where the results go")
    parser.add_argument("--budget-s", type=float, default=520, help="seconds for everything (520)")
    parser.add_argument("--tune", action="store_true", help="search for block sizes too")
    parser.add_argument("--smoke", action="store_true", help="a tiny run that shows that every section works")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="kernel-report-") as work:
        report = Report(options.out, Path(work), options.budget_s)
        report.machine = describe_machine()
        plan = phases(report.machine, Path(work), tune=options.tune, smoke=options.smoke)
        for i, phase in enumerate(plan):
            report.run(phase, weight_left=sum(later.weight for later in plan[i:]))
    return int(report.found_wrong)


if __name__ == "__main__":
    sys.exit(main())
