"""The offline benchmark: many requests at once, random lengths, through the real scheduler and engine of this process.

    python scripts/bench_offline.py --shape mid --num 32 --output 64:128
    python scripts/bench_offline.py --shape qwen3-0.6b --dtype bfloat16 --context-length 4096 --json run.json
    python scripts/bench_offline.py --model FOLDER --disable-overlap-schedule --decode-buckets 1,8,32

If nothing else is said, 256 requests come with 100 to 1024 tokens and get 100 to 1024, greedy, EOS ignored, without
shared prefixes. --shape has random weights; flags of the engine mean what they mean to `jaxsgl.serve`. Prints tokens
per second, the split of time (device busy; idle, and of that host exposed), the host's time per decode step, padding
waste, the share of the roofline measured before and after, and step times by bucket; docs/performance.md defines them.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
from bench.offline.ceilings import best, ceilings
from bench.offline.figures import figures
from bench.offline.run import record_run, requests_of, seen_late
from bench.offline.show import table
from bench.offline.work import ModelWork
from bench.workloads.jobs import Lengths, random_jobs
from bench.workloads.models import SHAPES, write_config

from jaxsgl.config import EngineConfig, add_flags, flag, from_flags
from jaxsgl.errors import ConfigError, JaxsglError
from jaxsgl.request import check_request
from jaxsgl.wiring import build, build_scheduler
from pallas_kernels.target import target_device

WARM_UP = (8, Lengths(8, 8), Lengths(8, 8))


@dataclass(frozen=True)
class OfflineConfig:
    """One run."""

    engine: EngineConfig = field(default_factory=EngineConfig)
    shape: str | None = flag(None, "a shape with random weights, instead of --model", choices=tuple(SHAPES))
    num: int = flag(256, "requests")
    input: str = flag("100:1024", "tokens of prompts, least:most")
    output: str = flag("100:1024", "tokens to generate, least:most")
    seed: int = flag(0, "of lengths and prompts")
    at_running: int | None = flag(
        None, "tell the host's time of decode steps of so many requests (default: of all decode steps)"
    )
    json: str | None = flag(None, "write flags and figures to this file")
    profile: str | None = flag(None, "write a trace of 50 steps in the middle to this folder; figures suffer from it")

    def __post_init__(self) -> None:
        if self.num < 1:
            raise ConfigError(f"--num is {self.num}, but must be 1 and more")


def main(arguments: list[str] | None = None) -> int:
    """Runs once, prints, writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
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
        Path(config.json).write_text(json.dumps(report, indent=1) + "\n")
    return 0


def run(config: OfflineConfig, folder: Path) -> dict[str, Any]:
    """Starts the engine, warms it up, and runs, between two measurements of the ceilings; flags and figures."""
    inputs, outputs = lengths("--input", config.input), lengths("--output", config.output)
    if config.shape:
        model = str(write_config(config.shape, folder))
        config = replace(config, engine=replace(config.engine, model=model, load_format="dummy"))
    device = target_device()
    before = ceilings(device.platform)  # while the engine doesn't have the memory
    engine, scheduler = build(config.engine, limited=False)
    vocab_size, limits = engine.arch.vocab_size, engine.capacity.limits
    if inputs.most + outputs.most > limits.context_length:
        raise ConfigError(
            f"--input and --output reach {inputs.most} + {outputs.most} tokens, but the context holds "
            f"{limits.context_length}: lower them"
        )
    requests = requests_of(random_jobs(config.num, inputs, outputs, vocab_size, config.seed))
    for request in requests:
        check_request(request, limits)
    overlap = not config.engine.disable_overlap_schedule
    warm_up = random_jobs(*WARM_UP, vocab_size, config.seed + 1)
    record_run(scheduler, engine, requests_of(warm_up), overlap)
    scheduler = build_scheduler(config.engine, engine, limited=False)
    recording, replies = record_run(scheduler, engine, requests, overlap, config.profile)
    engine.close()
    roofline = best(before, ceilings(device.platform))
    done = figures(recording, ModelWork.of(engine), roofline, requests, replies, config.at_running)
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
    """The flag's LO:HI. Raises `ConfigError`."""
    least, _, most = text.partition(":")
    if not (least.isdecimal() and most.isdecimal() and 1 <= int(least) <= int(most)):
        raise ConfigError(f"{name} is {text!r}, but must be least:most tokens, as 100:1024")
    return Lengths(int(least), int(most))


if __name__ == "__main__":
    sys.exit(main())
