"""Compile every kernel and whole engine steps for GPUs and TPUs that this machine does not have, and check the code.

    python scripts/compile_targets.py                       # all targets, the full grid
    python scripts/compile_targets.py h200 --grid common    # one target, the shapes that most models serve with
    python scripts/compile_targets.py b200 rtx4090 rtxpro6000 --grid common    # Blackwell and Ada
    python scripts/compile_targets.py h200 --grid steps     # the engine's steps on Qwen3-0.6B and Qwen3-8B
    python scripts/compile_targets.py h200 --grid steps --match '0.6b decode 256 triton' --launches
    python scripts/compile_targets.py h200 --grid steps --match 'eagle3|nextn|standalone|stage'    # drafts, and stages
    python scripts/compile_targets.py h200 --grid steps-float8     # over a float8 KV cache
    python scripts/compile_targets.py h200 --grid steps-ordered    # of --enable-deterministic-inference
    python scripts/compile_targets.py h200 --grid families         # a decode and a prompt of each architecture
    python scripts/compile_targets.py h200 --grid families --json benchmarks/h200/compiled_families.json --brief
    python scripts/compile_targets.py v6e --grid steps --json FILE --missing    # goes on where another run was ended
    python scripts/compile_targets.py h200 v6e --grid steps --tp 8 # larger models, shared by 8 devices
    python scripts/compile_targets.py h200 --grid steps --tp 16 --ranks 4    # in ranks, here on two hosts of 8 GPUs

Makes a virtual environment per plug-in (2 GB each), compiles there, and prints for each kernel: registers,
spilled bytes, shared memory and the instructions found (wgmma, bulk copies); for the engine's steps: kernels per layer
by kind and in all, command buffers (CUDA graphs), and bytes read and written. Of a model, 4 layers are compiled; from
the second layer on all are alike, which is checked, so that one of them is multiplied. --launches lists them. Of a step
on several devices, also what they exchange.

Exits with status 1 if a kernel spills, lacks the instructions that it needs, or gets an advisory of ptxas (serialized
wgmma); if the KV cache is copied; if a step is not one command buffer, and one for the body of a loop; if a step seems
to read less than its weights, so that the count is wrong; if devices exchange more than tensor parallelism needs, or
hold more than their part; if a program does not compile. A target whose environment can't be made (disk, Python) is
reported and left out; --require makes that an error.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from bench.output import command_parser, write_json
from bench.targets.launch_report import KINDS
from bench.targets.targets import GRIDS, JAX_VERSION, TARGETS, compile_in, make_environment, missing_for

ROOT = Path(__file__).parents[1]


def describe(result: dict[str, Any]) -> str:
    """A line for the program, and one for each of its problems."""
    line = f"{result['target']:<5} {result['program']:<66}"
    if "refused" in result:
        line += "refused: " + result["refused"].split("impossible here: ")[-1].split(";")[0]
    elif "compile_s" in result:
        for kernel in result["kernels"] if not result["program"].startswith("step") else ():
            shared = "?" if kernel["shared_bytes"] is None else f"{kernel['shared_bytes'] / 1024:.0f}"
            line += f" {kernel['registers']:>3} regs {kernel['spill_bytes']} spilled {shared:>3} KiB "
            line += ",".join([*kernel["instructions"], *kernel["advisories"]]) + ";"
        aliased = "in place" if result["alias_bytes"] >= 2 * result["cache_bytes"] else "        "
        line += f" {aliased} temp {result['temp_bytes'] / 2**20:.1f} MiB"
    return "\n".join([line, *(f"      PROBLEM {problem}" for problem in result["problems"])])


def describe_launches(report: dict[str, Any]) -> str:
    """What the program launches: by layer, in all, in how many command buffers, and the bytes that move."""
    kinds = report["layer_kinds"]
    layer = ", ".join(f"{kinds[kind]} {kind}" for kind in KINDS if kind in kinds)
    alike = "layer" if report["recurring"] == 1 else f"{report['recurring']} layers"
    parts = [f"{sum(kinds.values())} kernels per {alike} ({layer}), of {report['num_layers']} layers"] if kinds else []
    branched = f", {report['num_branched']} of them on one side of conditions" if report["num_branched"] else ""
    parts.append(f"{report['num_launches']} kernels in all{branched}")
    if report["command_buffers"] is not None:
        parts.append(f"{report['command_buffers']} command buffers")
    parts += [
        f"{each['count']} {' '.join(filter(None, (each['by'], each['kind'])))} of {each['bytes'] / 1e6:.3f} MB over "
        f"{each['peers']}"
        for each in report["exchanged"]
    ]
    parts.append(
        f"{report['bytes_read'] / 1e6:.0f} MB read and {report['bytes_written'] / 1e6:.0f} written, KV not counted"
    )
    return "      " + "; ".join(parts)


def list_launches(report: dict[str, Any]) -> str:
    """A line for each launch of a layer, or of a program without layers."""
    return "\n".join(
        f"      {each['kind']:<9} {each['bytes_read'] / 1e6:>9.3f} MB {each['bytes_written'] / 1e6:>9.3f} MB "
        f"{each['flops'] / 1e9:>8.2f} GFLOP x {each['times']:<3} {each['name']:<32} {each['source'][-70:]}"
        for each in report["listed"]
    )


def read_results(file: Path) -> dict[tuple[str, str], dict[str, Any]]:
    """What an earlier run wrote, by target and program; programs with problems are left out, and count as missing."""
    results = json.loads(file.read_text())["results"] if file.exists() else []
    return {(each["target"], each["program"]): each for each in results if not each["problems"]}


def in_brief(result: dict[str, Any]) -> dict[str, Any]:
    """The result without its lists of launches, of which predictions are made."""
    if "launches" not in result:
        return result
    kept = {name: value for name, value in result["launches"].items() if name not in ("listed", "kernels")}
    return result | {"launches": kept}


def write_results(file: Path, results: dict[tuple[str, str], dict[str, Any]]) -> None:
    """Writes them sorted, so that files of two runs can be compared."""
    every = sorted(results.values(), key=lambda result: (result["target"], result["backend"], result["program"]))
    write_json(file, {"jax": JAX_VERSION, "results": every})


def main() -> int:
    """Compiles, prints the results and writes them; returns 0 if there is no problem."""
    parser = command_parser(__doc__)
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=f"of {', '.join(TARGETS)}; default all")
    parser.add_argument("--grid", choices=GRIDS, default="full", help="which programs; full is all kernels, and steps")
    parser.add_argument("--tp", type=int, default=1, help="devices that share a model, of --grid steps")
    parser.add_argument("--ranks", type=int, default=1, help="that they are divided into (--enable-dp-attention)")
    parser.add_argument("--match", default="", metavar="REGEX", help="only programs whose names match")
    parser.add_argument("--xla-flags", default="", metavar="FLAGS", help="given to XLA; write --xla-flags='--xla_...'")
    parser.add_argument("--launches", action="store_true", help="list the launches of a layer")
    parser.add_argument("--environments", type=Path, default=ROOT / ".venv-targets", help="where to make them")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes side by side")
    parser.add_argument("--require", action="store_true", help="fail if a target has to be left out")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results here")
    parser.add_argument("--brief", action="store_true", help="of --json: no lists of launches")
    parser.add_argument("--update", action="store_true", help="of --json: keep what FILE has of other programs")
    parser.add_argument("--missing", action="store_true", help="the same, and compile only what FILE lacks")
    options = parser.parse_args()
    if (options.update or options.missing) and options.json is None:
        parser.error("--update and --missing need the FILE of --json")
    if options.tp > 1 and not options.grid.startswith("steps"):
        parser.error("--tp is for the grids of steps: kernels are those of one device")
    if options.ranks > 1 and (options.grid != "steps" or options.tp % options.ranks):
        parser.error("--ranks are of --grid steps, and divide the devices of --tp")
    if unknown := set(options.targets) - set(TARGETS):
        parser.error(f"unknown target {', '.join(sorted(unknown))}; choose from {', '.join(TARGETS)}")

    kept = read_results(options.json) if options.update or options.missing else {}
    results: dict[tuple[str, str], dict[str, Any]] = {}
    left_out = 0
    options.environments.mkdir(parents=True, exist_ok=True)
    for name in options.targets or TARGETS:
        target = TARGETS[name]
        if reason := missing_for(target.extra, options.environments):
            print(f"{name} left out: {reason}", flush=True)
            left_out += 1
            continue
        python = make_environment(target.extra, options.environments)
        done = [program for of_target, program in kept if of_target == name] if options.missing else []
        which = options.grid, options.jobs, options.match, options.xla_flags, done, options.tp, options.ranks
        for result in compile_in(python, target, *which):
            results[name, result["program"]] = in_brief(result) if options.brief else result
            print(describe(result), flush=True)
            if "launches" in result:
                print(describe_launches(result["launches"]), flush=True)
                if options.launches:
                    print(list_launches(result["launches"]), flush=True)
            if options.json:  # what is there, in case the run is ended
                write_results(options.json, kept | results)
    wrong = sum(bool(result["problems"]) for result in results.values())
    refused = sum("refused" in result for result in results.values())
    print(f"{len(results)} programs, {refused} refused, {wrong} with problems, {left_out} targets left out")
    if options.json:
        write_results(options.json, kept | results)
    return int(wrong > 0 or (options.require and left_out > 0))


if __name__ == "__main__":
    sys.exit(main())
