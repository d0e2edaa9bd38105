"""Measure what compiled shapes cost, how much of them is padding, and which list of shapes would cost least.

    python scripts/bench_buckets.py --shape mid --json buckets.json
    python scripts/bench_buckets.py --model my-model --input-lens 10,200 --output-lens 50,100 --max-programs 24
    python scripts/bench_buckets.py --shape qwen3-8b --padding-only h200
    python -m jaxsgl.serve --model my-model --auto-buckets buckets.json

Flags of the engine mean what they mean to `jaxsgl.serve`. The engine starts twice, on an empty compilation cache and on
the full one. The workload is --num-prompts requests that are all there at the start and share no prefix (the defaults
are those of SGLang's offline benchmark), or the steps that another run wrote (--steps FILE, its --json). Waste is
(padded - real) / real, in rows of decode steps and in tokens of extend steps. The suggestion minimises the time of all
steps, measured or interpolated, plus --compile-weight times the seconds that a start spends compiling.

--json FILE holds "programs" (a row per program: bytes, and seconds to lower, to compile and to take from the cache),
"steps" (a row per shape that runs), "trace" ([kind, tokens, sequences, number of steps]), "present" and "suggested",
each with decode_buckets, extend_buckets, programs, waste, and the seconds of all steps and of compiling.
`--auto-buckets` reads the lists of "suggested".
"""

from __future__ import annotations

import dataclasses
import json
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
from bench import bucket_times
from bench.buckets import Costs, Steps, padding, steps_of, suggested, unpadded
from bench.models import SHAPES, write_config
from bench.output import command_parser, write_json
from bench.plots import plot_buckets
from bench.processes import num_cores
from bench.simulation.cost import HARDWARE
from bench.simulation.engine import capacity_on

from jaxsgl.batch.buckets import BucketSet, Capacity, buckets_of
from jaxsgl.bench.requests import Job, Lengths, random_jobs
from jaxsgl.config.engine import EngineConfig
from jaxsgl.config.flags import add_flags, flag, from_flags
from jaxsgl.engine.engine import Engine
from jaxsgl.engine.step_programs import all_keys
from jaxsgl.errors import JaxsglError
from jaxsgl.models import ModelArch, arch_from_folder


@dataclass(frozen=True)
class BenchConfig:
    """Settings of one run."""

    engine: EngineConfig = field(default_factory=EngineConfig)
    shape: str | None = flag(None, "random weights of this shape, instead of --model", choices=tuple(SHAPES))
    num_prompts: int = flag(256, "requests")
    input_lens: tuple[int, ...] = flag((100, 1024), "least and most tokens of a prompt, uniform (default: 100,1024)")
    output_lens: tuple[int, ...] = flag((100, 1024), "least and most tokens of an output (default: 100,1024)")
    steps: str | None = flag(None, "take the steps from this file, which --json wrote, instead of a workload")
    repeats: int = flag(5, "runs of each step")
    compile_weight: float = flag(
        0.02, "seconds of steps that are worth a second of compiling: runs like this per start"
    )
    max_programs: int | None = flag(None, "programs that the suggestion may have (default: no bound)")
    padding_only: str | None = flag(
        None, "count padding with the defaults of this hardware, and measure nothing", choices=tuple(HARDWARE)
    )
    json: str | None = flag(None, "write everything to this file")
    plot: str | None = flag(None, "draw times by size into this file (needs matplotlib)")

    def __post_init__(self) -> None:
        for name in ("input_lens", "output_lens"):
            lens = getattr(self, name)
            if len(lens) != 2 or not 1 <= lens[0] <= lens[1]:
                raise ValueError(f"--{name.replace('_', '-')} must be two numbers of 1 and more, the least first")


def main(arguments: list[str] | None = None) -> int:
    """Measures, or only counts padding, and prints."""
    parser = command_parser(__doc__)
    add_flags(parser, BenchConfig)
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="bench-buckets-") as folder:
        if options.shape:
            options.model, options.load_format = str(write_config(options.shape, Path(folder) / "model")), "dummy"
        options.compilation_cache_dir = str(Path(folder) / "xla")
        try:
            config = from_flags(BenchConfig, options)
            arch = arch_from_folder(Path(config.engine.model))
            report = counted(config, arch) if config.padding_only else measured(config)
        except (JaxsglError, ValueError, OSError) as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
    report = {"model": options.shape or options.model} | report
    print(table(report))
    if config.json:
        write_json(config.json, report)
    if config.plot and not config.padding_only:
        plot_buckets(report, Path(config.plot))
    return 0


def counted(config: BenchConfig, arch: ModelArch) -> dict[str, Any]:
    """The padding on a hardware that this machine need not have."""
    capacity = capacity_on(HARDWARE[str(config.padding_only)], arch, config.engine)
    buckets = buckets_of(config.engine, capacity)
    steps = steps_of(jobs_of(config, capacity), config.engine, capacity, buckets)
    return {"platform": config.padding_only, "present": figures(steps, buckets)}


def measured(config: BenchConfig) -> dict[str, Any]:
    """All figures of this machine."""
    cold = Engine(config.engine)
    cold.close()
    jax.clear_caches()  # else the second start would find programs in memory that another process would have to read
    engine = Engine(config.engine)
    capacity, buckets = engine.capacity, engine.buckets
    jobs = jobs_of(config, capacity)
    step_rows = list(bucket_times.steps(engine, jobs, config.repeats, config.engine.made_up_seed))
    engine.close()
    program_rows = bucket_times.programs(engine.buckets, cold.compiled, engine.compiled)
    costs = Costs(step_rows, program_rows, buckets, threads=num_cores())
    if config.steps:
        wanted = present = read_steps(Path(config.steps))
    else:
        wanted = steps_of(jobs, config.engine, capacity, unpadded(capacity))
        present = steps_of(jobs, config.engine, capacity, buckets)
    better = suggested(wanted, costs, capacity, config.compile_weight, config.max_programs)
    after = wanted if config.steps else steps_of(jobs, config.engine, capacity, better)
    return {
        "platform": jax.default_backend(),
        "settings": {
            spec.name: getattr(config, spec.name) for spec in dataclasses.fields(config) if spec.name != "engine"
        },
        "capacity": dataclasses.asdict(capacity),
        "start_s": {"cold": cold.info.warmup_s, "cached": engine.info.warmup_s},
        "programs": program_rows,
        "steps": step_rows,
        "trace": [[*step, count] for step, count in sorted(wanted.items())],
        "present": figures(present, buckets, costs),
        "suggested": figures(after, better, costs),
    }


def jobs_of(config: BenchConfig, capacity: Capacity) -> list[Job]:
    """The workload. Raises `ValueError` if the context does not hold its longest request."""
    inputs, outputs = Lengths(*config.input_lens), Lengths(*config.output_lens)
    longest = inputs.most + outputs.most
    if longest > min(capacity.context_length, capacity.pool_tokens):
        raise ValueError(
            f"a request may have {longest} tokens, but the context holds {capacity.context_length} and the pool "
            f"{capacity.pool_tokens}: use smaller --input-lens and --output-lens"
        )
    return random_jobs(config.num_prompts, inputs, outputs, capacity.vocab_size, config.engine.made_up_seed)


def read_steps(path: Path) -> Steps:
    """Reads the steps from the --json of another run."""
    return Counter({(kind, tokens, seqs): count for kind, tokens, seqs, count in json.loads(path.read_text())["trace"]})


def figures(steps: Steps, buckets: BucketSet, costs: Costs | None = None) -> dict[str, Any]:
    """The costs of `steps` with programs of `buckets`."""
    seconds = {} if costs is None else {"step_s": costs.seconds(steps, buckets), "compile_s": costs.start_s(buckets)}
    return {
        "decode_buckets": buckets.decode_sizes,
        "extend_buckets": buckets.extend_sizes,
        "programs": len(all_keys(buckets)),
        "padding": padding(steps, buckets),
        **seconds,
    }


def table(report: dict[str, Any]) -> str:
    """The figures as text."""
    lines = [f"{report['model']} on {report['platform']}"]
    if "start_s" in report:
        lines += [f"start: {report['start_s']['cold']:.1f} s, from the cache {report['start_s']['cached']:.1f} s", ""]
        lines += [f"{'program':24}{'lower s':>9}{'compile s':>10}{'cached s':>9}{'temp MB':>9}{'code KB':>9}"]
        for row in report["programs"]:
            memory = (f"{(row[name] or 0) / scale:9.1f}" for name, scale in (("temp_bytes", 1e6), (CODE, 1e3)))
            lines.append(
                f"{shape_of(row):24}{row['lower_s']:9.2f}{row['compile_s']:10.2f}{row['cached_s']:9.2f}"
                + "".join(memory)
            )
        lines += ["", f"{'step':24}{'sampling':>9}{'median ms':>10}{'min ms':>9}{'launch us':>10}"]
        lines += [
            f"{shape_of(row):24}{row['sampling']:>9}{row['median_ms']:10.2f}{row['min_ms']:9.2f}{row['launch_us']:10.0f}"
            for row in report["steps"]
        ]
    for name in ("present", "suggested"):
        if name in report:
            lines += ["", *list_lines(name, report[name])]
    return "\n".join(lines)


CODE = "generated_code_bytes"


def shape_of(row: dict[str, Any]) -> str:
    """A program as text."""
    kind = str(row["kind"])
    return kind if kind.startswith("set_") else f"{kind} T={row['tokens']} S={row['seqs']}"


def list_lines(name: str, of: dict[str, Any]) -> list[str]:
    """A list of sizes and its costs as text."""
    lines = [f"{name}: {of['programs']} programs"]
    lines += [f"  --{kind}-buckets {','.join(map(str, of[f'{kind}_buckets']))}" for kind in ("decode", "extend")]
    lines += [f"  {n['steps']:,} {kind} steps, waste {n['waste']:.1%}" for kind, n in of["padding"].items()]
    if "step_s" in of:
        lines.append(f"  steps {of['step_s']:,.1f} s, compiling {of['compile_s']:,.1f} s")
    return lines


if __name__ == "__main__":
    sys.exit(main())
