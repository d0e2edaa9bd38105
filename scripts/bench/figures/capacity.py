"""Measure how many chunks per second one process of the load generator can receive.

    python scripts/bench capacity

The generator reads streams of tokens from the real front end around a fake engine. All processes share the machine, so
the figure comes from the generator's processor time per chunk.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench.frontend.plan import Plan
from bench.frontend.running import server
from bench.output import command_parser
from jaxsgl.bench.http_backends import DIALECTS
from jaxsgl.bench.load import GRPC, DatasetConfig, ServingConfig, load
from jaxsgl.bench.metrics import failures, summary


def measure(backend: str, streams: int, rate: float, tokens: int) -> dict[str, Any]:
    """Figures of one run of `streams` streams of `tokens` tokens each, at `rate` tokens per second in all."""
    dataset = DatasetConfig(num_prompts=streams, random_input_len=8, random_output_len=tokens, random_range_ratio=1.0)
    with (
        tempfile.TemporaryDirectory(prefix="capacity-") as folder,
        server(Plan.make(streams, tokens, rate, Path(folder))) as running,
    ):
        address = running.grpc_address if backend == GRPC else f"http://{running.http_address}"
        config = ServingConfig(backend, base_url=address, dataset=dataset, warmup_requests=0)
        outcome = asyncio.run(load(config, dataset.asks()))
    if failed := failures(outcome.answers):
        raise SystemExit(f"{backend}: requests failed:\n{failed}")
    return summary(outcome, {})


def main(arguments: list[str]) -> None:
    """Runs each protocol once and prints a line for it."""
    parser = command_parser(__doc__, __name__)
    parser.add_argument("--streams", type=int, default=256, help="open at once (default 256)")
    parser.add_argument("--rate", type=float, default=20_000, help="tokens/s of the engine (default 20000)")
    parser.add_argument("--seconds", type=float, default=10, help="length of a run (default 10)")
    parser.add_argument("--backends", nargs="+", default=[*DIALECTS, GRPC])
    args = parser.parse_args(arguments)
    tokens = max(1, round(args.seconds * args.rate / args.streams))
    for backend in args.backends:
        found = measure(backend, args.streams, args.rate, tokens)
        cpu_s = found["load_cpu"] * found["duration"]
        chunks = found["total_output_tokens"] / found["tokens_per_chunk"]
        print(
            f"{backend}: {found['output_throughput']:,.0f} tokens/s with {found['load_cpu']:.0%} of a core, "
            f"{found['tokens_per_chunk']:.2f} tokens a chunk, {1e6 * cpu_s / chunks:.1f} us a chunk: "
            f"{chunks / cpu_s:,.0f} chunks/s would fill the core",
            file=sys.stderr,
        )
