"""Simulate what a scheduling policy does to throughput and latency, without a GPU.

The real scheduler, cache and serving loop run against a model of the device on a simulated clock:

    python scripts/simulate.py --trace shared-prefix --num-prompts 1024 --request-rate 40
    python scripts/simulate.py --trace mooncake --trace-file conversation.jsonl --json run.json --plot run.png
    python scripts/simulate.py --model qwen3-0.6b --trace bursts --chunked-prefill-size 4096

Flags of the engine mean what they mean to `jaxsgl.serve`. --model is qwen3-8b (the default), qwen3-0.6b, or a folder
with a config.json, of which only the shape is used. Step times follow from data sheets and are assumptions until they
are measured: --record FILE measures steps of the real engine on this machine (with a real --model, by default the
bundled one), and --fit FILE fits the model of the device to such lines: {"kind": "decode" or "extend", "tokens":
padded, "seqs", "kv_tokens", "seconds"}. Figures are those of SGLang's bench_serving.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from bench.output import command_parser, write_json
from bench.plots import plot_simulation
from bench.simulation.cost import HARDWARE, Costs, arch_of, data_sheet_costs, read_steps
from bench.simulation.engine import capacity_on
from bench.simulation.fit import fit, record
from bench.simulation.run import simulate

from jaxsgl.bench.requests import Ask
from jaxsgl.bench.traces import FORMATS, TraceConfig, made_up, replayed
from jaxsgl.config.engine import BUNDLED_MODEL, EngineConfig
from jaxsgl.config.flags import add_flags, flag, from_flags
from jaxsgl.engine.engine import Engine
from jaxsgl.errors import JaxsglError
from jaxsgl.models import ModelArch


@dataclass(frozen=True)
class SimulationConfig:
    """Settings of one run."""

    engine: EngineConfig = field(default_factory=EngineConfig)
    trace: TraceConfig = field(default_factory=TraceConfig)
    max_concurrency: int | None = flag(None, "largest number of requests that clients keep open (default: no limit)")
    hardware: str = flag("h200", "step times and memory follow from its data sheet", choices=tuple(HARDWARE))
    host_us: float = flag(50.0, "microseconds of the host for a step")
    host_us_per_seq: float = flag(1.0, "microseconds of the host for each sequence of a step, on top")
    fit: str | None = flag(None, "fit the device model to the measured steps in this file, instead of the data sheet")
    record: str | None = flag(None, "measure steps of the real engine, write them to this file, and exit")
    json: str | None = flag(None, "write flags and figures to this file")
    plot: str | None = flag(None, "draw the run into this file (needs matplotlib)")
    plans: str | None = flag(None, "write the scheduler's plan of each step to this file, a line each")


def main(arguments: list[str] | None = None) -> int:
    """Records steps, or simulates and prints the figures."""
    parser = command_parser(__doc__)
    add_flags(parser, SimulationConfig)
    parser.set_defaults(model=None)
    options = parser.parse_args(arguments)
    options.model = options.model or (BUNDLED_MODEL if options.record else "qwen3-8b")
    try:
        config = from_flags(SimulationConfig, options)
        if config.record:
            return write_steps(config, Path(config.record))
        return run(config)
    except (JaxsglError, ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def run(config: SimulationConfig) -> int:
    """Runs one simulation and prints its figures."""
    hardware, arch = HARDWARE[config.hardware], arch_of(config.engine.model)
    capacity = capacity_on(hardware, arch, config.engine)
    costs, source = costs_of(config, arch)
    with nullcontext() if config.plans is None else Path(config.plans).open("w") as plans:
        figures, summary = simulate(
            config.engine, arch, capacity, costs, trace_of(config), max_concurrency=config.max_concurrency,
            host_step_s=1e-6 * config.host_us, host_seq_s=1e-6 * config.host_us_per_seq, plans=plans,
        )  # fmt: skip
    print(f"{config.trace.trace} on {config.engine.model}, {capacity.pool_tokens:,} tokens of KV; {source}")
    print(table(summary))
    if config.json:
        report = {"flags": asdict(config), "costs": {kind: asdict(c) for kind, c in costs.items()}, "figures": summary}
        write_json(config.json, report)
    if config.plot:
        plot_simulation(figures, f"{config.trace.trace}, {config.engine.model}", Path(config.plot))
    return 0


def trace_of(config: SimulationConfig) -> Iterable[Ask]:
    """The requests in order of arrival. Raises `ValueError` if a file is needed and is missing or can't be read."""
    trace = config.trace
    if trace.trace not in FORMATS:
        return made_up(trace, config.engine.made_up_seed)
    if trace.trace_file is None:
        raise ValueError(f"--trace {trace.trace} replays a file: name it with --trace-file")
    return replayed(Path(trace.trace_file), trace.trace, trace.num_prompts, trace.slowdown)


def costs_of(config: SimulationConfig, arch: ModelArch) -> tuple[Costs, str]:
    """Coefficients of step times, and a text that says where they come from."""
    if config.fit is None:
        return data_sheet_costs(HARDWARE[config.hardware], arch), "step times ASSUMED from the data sheet, not measured"
    costs, errors = fit(read_steps(Path(config.fit)))
    return costs, f"step times fitted to {config.fit}; " + ", ".join(f"{k}: {e:.1%} off" for k, e in errors.items())


def write_steps(config: SimulationConfig, path: Path) -> int:
    """Measures steps, writes each one at once, and prints how well the formula fits."""
    steps, engine = [], Engine(config.engine)
    with path.open("w") as file:
        for step in record(engine):
            steps.append(step)
            file.write(json.dumps(step) + "\n")
            file.flush()
    engine.close()
    costs, errors = fit(steps)
    for kind, cost in costs.items():
        print(f"{kind}: fit is {errors[kind]:.1%} off on average; {asdict(cost)}")
    return 0


ROWS = (("TTFT", "ttft_s"), ("TPOT", "tpot_s"), ("ITL", "itl_s"), ("of steps", "step_itl_s"), ("E2E", "e2e_s"))


def table(summary: dict[str, Any]) -> str:
    """The figures as text."""
    rates = (f"{summary[f'{name}_tokens_per_s']:,.0f} {name}" for name in ("input", "output", "total"))
    waiting, speed = summary["waiting"], summary["speed"]
    lines = [
        f"completed {summary['completed']:,}, refused {summary['refused']:,}, in {summary['duration_s']:,.1f} s",
        f"{summary['requests_per_s']:.2f} requests/s; tokens/s: {', '.join(rates)}",
        f"{'ms':8}" + "".join(f"{name:>10}" for name in summary["ttft_s"]),
        *(f"{title:8}" + "".join(f"{1000 * value:10,.1f}" for value in summary[name].values()) for title, name in ROWS),
        f"cache hit rate {summary['cache_hit_rate']:.1%}, retractions {summary['retractions']}",
        f"waiting {waiting['mean']:,.1f} on average, {waiting['max']:,} at most; "
        f"running {summary['running_mean']:,.1f}; concurrency {summary['concurrency']:,.1f}; "
        f"device busy {summary['device_busy']:.1%}",
        *(
            f"{kind} steps: {steps['count']:,} of {1000 * steps['seconds'] / steps['count']:.2f} ms, padded to "
            f"{steps['waste']:.3f} of their real size"
            for kind, steps in summary["steps"].items()
        ),
        f"{speed['simulated_s_per_cpu_s']:,.0f} simulated seconds per second of CPU, "
        f"{1e6 * speed['cpu_s_per_step']:,.0f} us a step",
    ]
    return "\n".join("  " + line for line in lines)


if __name__ == "__main__":
    sys.exit(main())
