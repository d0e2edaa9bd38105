"""Measure how many chunks per second one process of the load generator can receive.

    cd scripts && python -m bench.serving.capacity

The generator reads streams of tokens from the real front end around a fake engine. All processes share the machine, so
the figure comes from the generator's processor time per chunk.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import bench_serving
from bench_frontend import server

from bench.frontend.plan import Plan
from bench.output import command_parser
from bench.serving.http_backends import DIALECTS


def measure(backend: str, streams: int, rate: float, tokens: int) -> dict[str, Any]:
    """Figures of one run of `streams` streams of `tokens` tokens each, at `rate` tokens per second in all."""
    with tempfile.TemporaryDirectory(prefix="capacity-") as folder:
        out = Path(folder) / "out.jsonl"
        with server(Plan.make(streams, tokens, rate, Path(folder))) as running:
            address = running.grpc_address if backend == bench_serving.GRPC else f"http://{running.http_address}"
            flags = {
                "--backend": backend, "--base-url": address, "--num-prompts": streams, "--warmup-requests": 0,
                "--random-input-len": 8, "--random-output-len": tokens, "--random-range-ratio": 1, "--output-file": out,
            }  # fmt: skip
            if bench_serving.main([str(part) for flag in flags.items() for part in flag]):
                raise SystemExit(f"{backend}: requests failed, see above")
        figures: dict[str, Any] = json.loads(out.read_text())
    return figures


def main() -> None:
    """Runs each protocol once and prints a line for it."""
    parser = command_parser(__doc__)
    parser.add_argument("--streams", type=int, default=256, help="open at once (default 256)")
    parser.add_argument("--rate", type=float, default=20_000, help="tokens/s of the engine (default 20000)")
    parser.add_argument("--seconds", type=float, default=10, help="length of a run (default 10)")
    parser.add_argument("--backends", nargs="+", default=[*DIALECTS, bench_serving.GRPC])
    args = parser.parse_args()
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


if __name__ == "__main__":
    main()
