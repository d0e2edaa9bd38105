"""Check every op and backend on this machine's device, on real arrays of the shapes that models serve with.

    python scripts/check kernels --json checks.json
    python scripts/check kernels --backends triton --budget-s 120

Each spec of `GRID_SPECS` and `LATENT_SPECS` (`pallas_kernels.specs`) gets a ragged batch (padding rows and tokens, one
token, full pages, shared and permuted pages, NaN in every place that no sequence owns). Each result is compared with
float64, with the XLA backend, and with itself over many runs. Exits with status 1 if anything failed.
"""

from __future__ import annotations

import collections
import dataclasses
import time
from pathlib import Path

from bench.kernels.check import CRASHED, FAILED, Check, check_spec
from bench.kernels.check_latents import check_latents
from bench.kernels.check_layer import check_layer
from bench.kernels.contenders import backends_for
from bench.output import command_parser, write_json

from pallas_kernels.specs import GRID_SPECS, LATENT_SPECS, SMALL_SPECS
from pallas_kernels.target import target_device


def main(arguments: list[str]) -> int:
    """Checks spec by spec until all are done or the time budget is spent."""
    platform = target_device().platform
    parser = command_parser(__doc__, __name__)
    parser.add_argument("--backends", nargs="+", metavar="NAME", default=backends_for(platform), help="only these")
    parser.add_argument("--specs", metavar="TEXT", default="", help="only specs whose name contains this")
    parser.add_argument("--small", action="store_true", help="the interpreters' small specs; Pallas is interpreted")
    parser.add_argument("--runs", type=int, default=20, help="runs on the same inputs that must agree (20)")
    parser.add_argument("--budget-s", type=float, default=float("inf"), help="start no spec after this many seconds")
    parser.add_argument("--skip", nargs="+", metavar="SPEC", default=[], help="not these: they are done, or hang")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all outcomes here, after each spec")
    options = parser.parse_args(arguments)

    begin = time.monotonic()
    checks: list[Check] = []
    left_out: list[str] = []
    done: list[str] = []

    def write(**running: str) -> None:
        if options.json:
            result = {"checks": [dataclasses.asdict(check) for check in checks], "left_out": left_out, "done": done}
            write_json(options.json, result | running)

    for spec in SMALL_SPECS if options.small else (*GRID_SPECS, *LATENT_SPECS):
        if options.specs not in spec.name or spec.name in options.skip:
            continue
        if time.monotonic() - begin > options.budget_s:
            left_out.append(spec.name)
            continue
        for backend in options.backends:
            print(f"{spec.name} on {backend} ...", flush=True)
            write(running=spec.name)  # whoever ends a check that hangs finds its name
            interpret = options.small and backend != "xla"
            new = check_spec(spec, backend, runs=options.runs, interpret=interpret)
            check_others = check_layer if spec.value_dim is None else check_latents
            new += check_others(spec, backend, runs=options.runs, interpret=interpret)
            checks += new
            for check in new:
                print(f"{check.op:<24}{backend:<12}{spec.name:<28}{check.verdict} {check.note}", flush=True)
        done.append(spec.name)
        write()
    write()
    counts = collections.Counter(check.verdict for check in checks)
    print(", ".join(f"{count} {verdict}" for verdict, count in counts.items()))
    if left_out:
        print(f"no time left for: {', '.join(left_out)}")
    return int(counts[FAILED] + counts[CRASHED] > 0)
