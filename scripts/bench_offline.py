"""Run the offline benchmark: many requests at once, of random lengths, through the real scheduler and engine.

    python scripts/bench_offline.py --shape mid --num 32 --output 64:128
    python scripts/bench_offline.py --shape qwen3-0.6b --dtype bfloat16 --context-length 4096 --json run.json
    python scripts/bench_offline.py --model FOLDER --disable-overlap-schedule --decode-buckets 1,8,32

By default, 256 requests of 100 to 1024 prompt tokens generate 100 to 1024 tokens each, greedy, ignoring EOS, without
shared prefixes. --shape uses random weights; flags of the engine mean what they mean to `jaxsgl.serve`. Prints tokens
per second, the split of time (device busy; idle, and the part of it that is host exposed), the host's time per decode
step, padding waste, the share of the roofline that is measured before and after, and step times by bucket.
docs/performance.md defines them.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
from bench.models import SHAPES, write_config
from bench.offline.figures import ModelWork, figures
from bench.offline.run import record_run, seen_late
from bench.output import command_parser, write_json
from bench.roofline import best, ceilings

from jaxsgl.bench.requests import Lengths, greedy_requests, random_jobs
from jaxsgl.config.engine import EngineConfig
from jaxsgl.config.flags import add_flags, flag, from_flags
from jaxsgl.engine.start.memory import start_jax
from jaxsgl.errors import ConfigError, JaxsglError
from jaxsgl.requests.request import check_request
from jaxsgl.wiring import build, build_scheduler, whole
from pallas_kernels.target import target_device

WARM_UP = (8, Lengths(8, 8), Lengths(8, 8))


@dataclass(frozen=True)
class OfflineConfig:
    """Settings of one run."""

    engine: EngineConfig = field(default_factory=EngineConfig)
    shape: str | None = flag(None, "a shape with random weights, instead of --model", choices=tuple(SHAPES))
    num: int = flag(256, "requests")
    input: str = flag("100:1024", "tokens of prompts, least:most")
    output: str = flag("100:1024", "tokens to generate, least:most")
    at_running: int | None = flag(
        None, "report the host's time of decode steps of this many requests (default: of all decode steps)"
    )
    json: str | None = flag(None, "write flags and figures to this file")
    profile: str | None = flag(None, "write a trace of 50 steps in the middle to this folder; figures suffer from it")

    def __post_init__(self) -> None:
        if self.num < 1:
            raise ConfigError(f"--num is {self.num}, but must be 1 and more")


def main(arguments: list[str] | None = None) -> int:
    """Runs once, prints the figures and writes them."""
    parser = command_parser(__doc__)
    add_flags(parser, OfflineConfig)
    try:
        config = from_flags(OfflineConfig, parser.parse_args(arguments))
        with tempfile.TemporaryDirectory(prefix="offline-bench-") as folder:
            report = run(config, Path(folder))
    except (JaxsglError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(table(report))
    if config.json:
        write_json(config.json, report)
    return 0


def run(config: OfflineConfig, folder: Path) -> dict[str, Any]:
    """Starts the engine, warms it up, and runs, between two measurements of the ceilings. Returns flags and figures."""
    inputs, outputs = lengths("--input", config.input), lengths("--output", config.output)
    if config.shape:
        model = str(write_config(config.shape, folder))
        config = replace(config, engine=replace(config.engine, model=model, load_format="dummy"))
    start_jax()  # with the share of memory that a server's engine takes
    device = target_device()
    before = ceilings(device.platform)  # before the engine takes the memory
    engine, scheduler = build(config.engine, limited=False)
    vocab_size, limits = engine.arch.vocab_size, engine.capacity.limits
    if inputs.most + outputs.most > limits.context_length:
        raise ConfigError(
            f"--input and --output reach {inputs.most} + {outputs.most} tokens, but the context holds "
            f"{limits.context_length}: lower them"
        )
    requests = greedy_requests(random_jobs(config.num, inputs, outputs, vocab_size, config.engine.made_up_seed))
    for request in requests:
        check_request(request, limits)
    depth = config.engine.unread_steps
    warm_up = random_jobs(*WARM_UP, vocab_size, config.engine.made_up_seed + 1)
    record_run(scheduler, engine, greedy_requests(warm_up), depth)
    scheduler = build_scheduler(config.engine, engine, limited=False)
    recording, replies = record_run(scheduler, engine, requests, depth, config.profile)
    engine.close()
    roofline = best(before, ceilings(device.platform))
    done = figures(recording, ModelWork.of(whole(engine)), roofline, requests, replies, config.at_running)
    wanted, got = sum(request.sampling.max_tokens or 0 for request in requests), done["requests"]["output_tokens"]
    if got != wanted:
        raise JaxsglError(f"{got} tokens came, but {wanted} were asked for: no figure of this run means anything")
    report = {
        "flags": asdict(config),
        "device": asdict(device),
        "model": msgspec.to_builtins(engine.info),
        **done,
    }
    report["recording"] |= seen_late()
    return report


def lengths(name: str, text: str) -> Lengths:
    """Reads the flag's LEAST:MOST. Raises `ConfigError`."""
    least, _, most = text.partition(":")
    if not (least.isdecimal() and most.isdecimal() and 1 <= int(least) <= int(most)):
        raise ConfigError(f"{name} is {text!r}, but must be least:most tokens, as 100:1024")
    return Lengths(int(least), int(most))


Figures = Mapping[str, Any]


def table(report: Figures) -> str:
    """The figures as text."""
    split, waste, model, load = report["time_split"], report["waste"], report["model"], report["requests"]
    lines = [
        f"{model['model_path']}, {model['dtype']}, on {report['device']['kind']}: {load['count']} requests of "
        f"{load['prompt_tokens']:,} tokens got {load['output_tokens']:,} in {report['duration_s']:.1f} s",
        f"tokens/s: {report['output_tokens_per_s']:,.1f} output, {report['total_tokens_per_s']:,.1f} total",
        f"time: device busy {split['busy']:.1%}, idle {split['idle']:.1%}; host exposed {split['host_exposed']:.1%}",
        *(_kind(kind, told, report["duration_s"]) for kind, told in report["steps"].items()),
        "padding: " + ", ".join(f"{name} {share:.1%}" for name, share in waste.items() if share is not None),
        *_roofline(report["roofline"]),
        *_host(report["host"]),
        "host by decode bucket, ms: "
        + ", ".join(f"{size}: {told['wall_ms']:.2f}" for size, told in report["host_by_rows"].items()),
        f"recording took {report['recording']['loop_us']:.0f} us of the loop and "
        f"{report['recording']['watching_us']:.0f} us of another thread a step; stamps are "
        f"{report['recording']['seen_late_us']:.0f} us late ({report['recording']['seen_late_p99_us']:.0f} at p99)",
        *_buckets(report["step_ms"]),
    ]
    return "\n".join(lines)


def _kind(kind: str, told: Figures, duration_s: float) -> str:
    each_ms, share = 1e3 * told["device_s"] / told["count"], told["device_s"] / duration_s
    return f"  {kind}: {told['count']:,} steps of {each_ms:.2f} ms, {share:.1%} of the time"


def _roofline(told: Figures) -> list[str]:
    return [
        f"roofline: {told['fraction']:.1%} ({told['fraction_of_busy']:.1%} while busy), measured here: "
        f"{told['bytes_per_s'] / 1e9:.1f} GB/s, {told['flops_per_s'] / 1e12:.3f} TFLOP/s",
        *(
            f"  {kind}: {shares['fraction']:.1%}; {shares['of_bytes_per_s']:.1%} of the bytes/s, "
            f"{shares['of_flops_per_s']:.1%} of the FLOP/s"
            for kind, shares in told["by_kind"].items()
        ),
    ]


def _host(told: Figures) -> list[str]:
    which = "" if told["at_running"] is None else f" of {told['at_running']} rows"
    if not told["turns"]:
        return [f"host: no decode step{which}"]
    wall, cpu, phases = told["wall_ms"], told["cpu_ms"], told["phases_ms"].items()
    return [
        f"host per decode step{which}: {wall['median']:.2f} ms ({wall['p99']:.2f} at p99), of which CPU "
        f"{cpu['median']:.2f} ({cpu['p99']:.2f}); {told['turns']:,} turns",
        "  " + ", ".join(f"{name} {each['median']:.3f} ({each['p99']:.3f})" for name, each in phases),
    ]


def _buckets(by_bucket: Figures) -> list[str]:
    columns = ("count", "tokens", "mean", "median", "p90", "p99", "max")
    return [
        f"{'step, ms':40}" + "".join(f"{name:>10}" for name in columns),
        *(
            f"{bucket:40}{told['count']:10,}" + "".join(f"{told[name]:10,.2f}" for name in columns[1:])
            for bucket, told in by_bucket.items()
        ),
    ]


if __name__ == "__main__":
    sys.exit(main())
