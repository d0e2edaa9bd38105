"""Measure how many tokens one front-end process can stream over HTTP and gRPC, from a fake engine that never waits.

There are three processes: the fake engine, which gives each stream a token per step; the real front end; and the load,
which checks every token of every stream. The front end's processor time per token says most, since it hardly depends on
what else the machine does. With `--workers N` there are N front-end processes and their parent. Reproduce the figures
of docs/performance.md with:

    python scripts/bench_frontend.py
    python scripts/bench_frontend.py --rate 8000 --connections 64 --workers 2
"""

from __future__ import annotations

import json
import operator
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench.frontend.plan import Plan, written
from bench.frontend.running import Server, environment, server
from bench.frontend.server import START, STOP
from bench.output import command_parser, write_json
from bench.processes import ROOT, cpu_s_of_threads

PROTOCOLS = {"http": "OpenAI completions, HTTP", "grpc": "jaxsgl Generate, gRPC", "sglang": "SGLang Generate, gRPC"}
NUM_LINES = 25  # lines of a profile that are printed


def measure(plan: Plan, running: Server, protocol: str) -> dict[str, Any]:
    """Runs the load once and returns its figures. Ends the script if a stream was wrong."""
    address = running.http_address if protocol == "http" else running.grpc_address
    plan.steps_path.unlink(missing_ok=True)
    command = [sys.executable, "-m", "bench.frontend.load", f"{plan.folder}/plan.json", protocol, address]
    load = subprocess.run(
        [*command, str(running.process.pid)],
        cwd=ROOT,
        env=environment(),
        stdout=subprocess.PIPE,
        check=False,
    )
    if load.returncode:
        log = (Path(plan.folder) / "server.log").read_text()
        raise SystemExit(f"{PROTOCOLS[protocol]}: the load failed, see above; the server's log ends:\n{log[-2000:]}")
    found: dict[str, Any] = json.loads(load.stdout)
    return found


def profile(plan: Plan, running: Server, protocol: str) -> None:
    """Runs the load once more, and prints where the front end's main thread spent its time."""
    before = cpu_s_of_threads(running.process.pid)
    plan.profile_path.unlink(missing_ok=True)
    running.process.send_signal(START)
    measure(plan, running, protocol)
    running.process.send_signal(STOP)
    found = json.loads(written(plan.profile_path).read_text())
    print(f"\n{PROTOCOLS[protocol]}: profile of the front end, start of the streams included")
    main_s, others_s = map(operator.sub, cpu_s_of_threads(running.process.pid), before)
    print(f"  processor time: main thread {main_s:.2f} s, all others {others_s:.2f} s")
    num_samples = max(found["samples"], 1)
    for title, counts in (("own", found["own"]), ("with all they call", found["total"]), ("lines", found["lines"])):
        print(f"  share of {num_samples} samples, {title}")
        for name, count in sorted(counts.items(), key=lambda entry: -entry[1])[:NUM_LINES]:
            print(f"    {100 * count / num_samples:5.1f}%  {name}")


def table(results: dict[str, dict[str, Any]]) -> str:
    """The figures as text."""
    columns = ("tokens/s", "of engine's", "tokens/chunk", "us CPU/token", "CPU: server", "engine", "load", "delay p50")
    lines = [f"{'':26}" + "".join(f"{column:>14}" for column in (*columns, "p99, ms", "gap p50", "p99, ms"))]
    for protocol, of in results.items():
        cells = [
            f"{of['tokens_per_s']:,.0f}",
            f"{of['tokens_per_s'] / of['engine_tokens_per_s']:.0%}",
            f"{of['tokens'] / of['chunks']:.2f}",
            f"{1e6 * of['server_cpu_s'] / of['tokens']:.1f}",
            *(f"{of[f'{name}_cpu_s'] / of['seconds']:.0%}" for name in ("server", "engine", "load")),
            *(f"{of[name]:.1f}" for name in ("delay_ms_p50", "delay_ms_p99", "gap_ms_p50", "gap_ms_p99")),
        ]
        lines.append(f"{PROTOCOLS[protocol]:26}" + "".join(f"{cell:>14}" for cell in cells))
        for number, worker in enumerate(of["workers"], 1):
            share, cost_us = worker["tokens"] / of["tokens"], 1e6 * worker["cpu_s"] / max(worker["tokens"], 1)
            lines.append(f"  worker {number}: {share:.0%} of the tokens, {cost_us:.1f} us CPU/token")
    return "\n".join(lines)


def main() -> None:
    """Runs the protocols one after another on one server and prints a table."""
    parser = command_parser(__doc__)
    parser.add_argument("--streams", type=int, default=256, help="requests at the same time (default 256)")
    parser.add_argument(
        "--rate", type=float, default=20_000, help="tokens/s of the engine; 0: no pauses (default 20000)"
    )
    parser.add_argument("--seconds", type=float, default=10, help="length of a run at that rate (default 10)")
    parser.add_argument("--tokens", type=int, help="tokens of each stream, instead of --seconds")
    parser.add_argument("--protocols", nargs="+", choices=PROTOCOLS, default=list(PROTOCOLS), help="default: all")
    parser.add_argument("--workers", type=int, default=1, help="front-end processes (default 1)")
    parser.add_argument(
        "--connections",
        type=int,
        default=8,
        help="that all streams share over gRPC (default 8); chance spreads them over front-end processes",
    )
    parser.add_argument("--profile", action="store_true", help="run everything again under a sampling profile")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    args = parser.parse_args()
    if args.profile and args.workers > 1:
        parser.error("--profile is of one front-end process: leave out --workers")
    if not args.rate and not args.tokens:
        parser.error("--rate 0 has no length in seconds: give --tokens too")
    num_tokens = args.tokens or max(1, round(args.seconds * args.rate / args.streams))
    with tempfile.TemporaryDirectory(prefix="bench-frontend-") as folder:
        plan = Plan.make(
            args.streams,
            num_tokens,
            args.rate,
            Path(folder),
            num_workers=args.workers,
            num_connections=args.connections,
        )
        with server(plan) as running:
            results = {protocol: measure(plan, running, protocol) for protocol in args.protocols}
            pace = f"{args.rate:,.0f} tokens/s" if args.rate else "full speed"
            print(f"{args.streams} streams of {num_tokens} tokens, engine at {pace}")
            print(table(results))
            for protocol in args.protocols if args.profile else ():
                profile(plan, running, protocol)
    if args.json:
        settings = {
            "streams": args.streams,
            "rate": args.rate,
            "tokens": num_tokens,
            "workers": args.workers,
            "connections": args.connections,
        }
        write_json(args.json, {"settings": settings, "figures": results})


if __name__ == "__main__":
    main()
