"""Find block sizes and the order of the backends for this machine's device, and write them into its table.

    python scripts/tune_kernels.py                                  # writes pallas_kernels/tables/<device>.json
    python scripts/tune_kernels.py --backends xla --budget-s 300 --cases decode

For each case and backend, the search starts at the sizes of the present table and moves to the fastest of those with
one size halved or doubled, as long as that is 2% faster. Every candidate is first compared with float64. On
accelerators the XLA backend is timed but not tuned. The most common cases come first, and the table is rewritten after
each case, so that a search that ends early keeps its results. Each entry names the command, the date and the time it
measured.
"""

from __future__ import annotations

import datetime
import json
import time
from pathlib import Path

import jax
from bench.kernels.cases import FUNCTIONS, KernelCase, cases_for
from bench.kernels.contenders import Unsupported, backends_for
from bench.kernels.inputs import layers_for, make_inputs
from bench.kernels.search import Found, search, shape_asked, table_path, updated_table, write_table
from bench.output import command_line, command_parser

import pallas_kernels
from pallas_kernels import tuning
from pallas_kernels.target import target_device

TABLES = Path(pallas_kernels.__file__).parent / "tables"


def main() -> None:
    """Searches case by case until the time budget is spent."""
    device = target_device()
    parser = command_parser(__doc__)
    parser.add_argument(
        "--backends", nargs="+", metavar="NAME", default=backends_for(device.platform), help="only these"
    )
    parser.add_argument("--ops", nargs="+", metavar="OP", default=list(FUNCTIONS), help="only these")
    parser.add_argument("--cases", metavar="TEXT", default="", help="only cases whose name contains this")
    parser.add_argument("--page-sizes", type=int, nargs="+", metavar="N", help="only cases of these page sizes")
    parser.add_argument("--quick", action="store_true", help="a few cases in the default pages")
    parser.add_argument("--repeats", type=int, default=9, help="repeats of each measurement (9)")
    parser.add_argument("--budget-s", type=float, default=1800, help="stop after about this many seconds (1800)")
    parser.add_argument("--out", type=Path, metavar="FILE", help=f"the table (default: {table_path(TABLES, device)})")
    options = parser.parse_args()

    path = options.out or table_path(TABLES, device)
    old = json.loads(path.read_text()) if path.exists() else {}
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    command = command_line()
    source = f"measured {date} on {device.kind}, JAX {jax.__version__}, by {command}"
    deadline = time.monotonic() + options.budget_s
    quick = cases_for(device.platform, quick=True)
    cases = quick if options.quick else sorted(cases_for(device.platform), key=lambda case: case not in quick)
    found: list[Found] = []
    for case in cases:
        if case.op not in options.ops or options.cases not in case.name:
            continue
        if options.page_sizes and case.page_size not in options.page_sizes:
            continue
        if time.monotonic() > deadline:
            print(f"no time left for {case.label}")
            continue
        found += tune_case(case, options.backends, device.platform, deadline, options.repeats, found)
        if found:
            write_table(path, updated_table(old, found, device, source))


def tune_case(
    case: KernelCase, backends: list[str], platform: str, deadline: float, repeats: int, before: list[Found]
) -> list[Found]:
    """Searches a case with each backend and prints the results. A shape class searched `before` is only timed."""
    inputs = make_inputs(case, layers_for(case, platform))
    found = []
    for backend in backends:
        print(f"{case.label}: {backend}", flush=True)
        try:
            shape = shape_asked(backend, inputs)
            same = [one.best for one in before if (one.op, one.backend, one.shape) == (case.op, backend, shape)]
            if backend == "xla" and platform != "cpu" and shape is not None:  # only the fall-back on that platform
                same = [tuning.blocks(case.op, backend, shape)]
            known = same[0] if same else None
            one = search(backend, inputs, platform, deadline, print, known=known, repeats=repeats)
        except Unsupported as error:
            print(f"    {error}")
            continue
        if one is None:
            print("    fails with the sizes of the table", flush=True)
            continue
        print(f"    {one.usual} {one.usual_s * 1e6:.1f} us -> {one.best} {one.best_s * 1e6:.1f} us", flush=True)
        found.append(one)
    return found


if __name__ == "__main__":
    main()
