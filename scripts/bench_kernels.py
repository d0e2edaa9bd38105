"""Time the kernels on this machine's device against other libraries, on the same inputs.

    python scripts/bench_kernels.py --json kernels.json --plot kernels.png
    python scripts/bench_kernels.py --quick

Contenders: each backend of pallas_kernels that the platform can run, XLA's gather + einsum, JAX's own paged_attention
and cuDNN on GPUs, and torch where it is installed. Each line has the time of a call, useful bytes/s and
FLOP/s (scripts/bench/kernels/cases.py defines them), the share of the roofline, whose two ceilings are measured in
the same run, and the error against float64. Wrong results are marked. Unpaged contenders need no page table.

On an accelerator, a program makes one call per layer over several KV caches, together larger than any L2; many programs
are enqueued and awaited once; the median of the repeats counts. On a CPU, contenders take turns, other memory is
written between them, and the fastest repeat counts.
"""

from __future__ import annotations

import dataclasses
import datetime
import platform as host
import time
from pathlib import Path

import jax
from bench.kernels.cases import FUNCTIONS, cases_for
from bench.kernels.contenders import backends_for
from bench.kernels.measure import BASELINES, Row, measure_case
from bench.output import command_line, command_parser, write_json
from bench.plots import plot_kernels
from bench.roofline import Roofline, measure_roofline

from pallas_kernels import tuning
from pallas_kernels.target import target_device

HEADER = f"{'case':<38}{'contender':<30}{'time us':>11}{'GB/s':>8}{'TFLOP/s':>9}{'roof':>7}{'error':>9}"


def line(row: Row) -> str:
    """A row as text, as wide as the header."""
    start = f"{row.case:<38}{row.contender:<30}"
    if row.seconds is None or row.error is None:
        return f"{start}  {row.note}"
    wrong = "" if row.is_right else "  WRONG"
    return (
        f"{start}{row.seconds * 1e6:>11.1f}{row.num_bytes / row.seconds / 1e9:>8.4g}"
        f"{row.flops / row.seconds / 1e12:>9.3g}{row.floor_s / row.seconds:>7.1%}{row.error:>9.1e}{wrong}"
    )


def roofline_line(roofline: Roofline) -> str:
    """The ceilings as text."""
    return (
        f"measured here: copy {roofline.bytes_per_s / 1e9:.1f} GB/s (read plus written), "
        f"matrix product {roofline.flops_per_s / 1e12:.3f} TFLOP/s"
    )


def main() -> None:
    """Measures case by case, prints each row at once, and writes the JSON file after each case."""
    parser = command_parser(__doc__)
    parser.add_argument("--quick", action="store_true", help="a few cases in the default pages")
    parser.add_argument("--cases", metavar="TEXT", default="", help="only cases whose name contains this")
    parser.add_argument("--page-sizes", type=int, nargs="+", metavar="N", help="only cases of these page sizes")
    parser.add_argument("--contenders", nargs="+", metavar="NAME", help=f"backends, or {BASELINES!r} (default: all)")
    parser.add_argument("--repeats", type=int, default=7, help="repeats of each measurement (default: 7)")
    parser.add_argument("--budget-s", type=float, default=float("inf"), help="start no case after this many seconds")
    parser.add_argument("--skip", nargs="+", metavar="CASE", default=[], help="not these: they are done, or hang")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures here")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="also draw them here; needs matplotlib")
    options = parser.parse_args()

    begin = time.monotonic()
    device = target_device()
    roofline = measure_roofline(device.platform)
    environment = {
        "device": dataclasses.asdict(device),
        "jax": jax.__version__,
        "python": host.python_version(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="minutes"),
        "command": command_line(),
        "roofline": dataclasses.asdict(roofline),
        "preferred": {op: tuning.preferred_backends(op) for op in FUNCTIONS},
    }
    print(f"{device.kind}, JAX {jax.__version__}\n{roofline_line(roofline)}\n\n{HEADER}", flush=True)
    wanted = options.contenders or [*backends_for(device.platform), BASELINES]
    rows: list[Row] = []
    left_out: list[str] = []
    done: list[str] = []

    def write(**running: str) -> None:
        if options.json:
            write_json(options.json, {**environment, "rows": [row.as_json() for row in rows], "done": done, **running})

    for case in cases_for(device.platform, quick=options.quick):
        if options.cases not in case.name or (options.page_sizes and case.page_size not in options.page_sizes):
            continue
        if case.label in options.skip:
            continue
        if time.monotonic() - begin > options.budget_s:
            left_out.append(case.label)
            continue
        write(running=case.label)  # whoever ends a case that hangs finds its name
        same_batch = {row.contender: row for row in rows if row.case.startswith(f"{case.name}, page ")}
        for row in measure_case(case, device.platform, wanted, roofline, options.repeats, same_batch):
            rows.append(row)
            print(line(row), flush=True)
        done.append(case.label)
        write()
    if left_out:
        print(f"no time left for: {'; '.join(left_out)}")
    if options.plot:
        plot_kernels(
            [row.as_json() for row in rows],
            dataclasses.asdict(roofline),
            f"{device.kind}, JAX {jax.__version__}",
            options.plot,
        )


if __name__ == "__main__":
    main()
