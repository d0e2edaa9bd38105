"""The load: a process that opens all streams of a plan, keeps what comes, checks it, and prints figures as JSON.

python -m bench.frontend.load PLAN PROTOCOL ADDRESS SERVER_PID
"""

from __future__ import annotations

import asyncio
import functools
import gc
import itertools
import json
import os
import statistics
import sys
from collections.abc import Sequence
from typing import Any

from bench.frontend import grpc_load, http_load
from bench.frontend.plan import Plan, written
from bench.frontend.processes import children, cpu_s
from bench.frontend.received import Expected, Received

PROTOCOLS = {
    "http": (http_load.run, http_load.parse),
    "grpc": (functools.partial(grpc_load.run, grpc_load.OWN), grpc_load.parse_own),
    "sglang": (functools.partial(grpc_load.run, grpc_load.SGLANG), grpc_load.parse_sglang),
}


class CpuWatch:
    """Processor seconds of the server, the engine and this process from the first token on."""

    def __init__(self, server_pid: int) -> None:
        (engine_pid,) = children(server_pid)
        self._pids = {"server": server_pid, "engine": engine_pid, "load": os.getpid()}
        self._start: dict[str, float] = {}

    def start(self) -> None:
        """The first call counts."""
        if not self._start:
            self._start = self._now()

    def used(self) -> dict[str, float]:
        """Seconds by process, none if no token came."""
        return {name: seconds - self._start[name] for name, seconds in self._now().items() if self._start}

    def _now(self) -> dict[str, float]:
        return {name: cpu_s(pid) for name, pid in self._pids.items()}


def measure(plan: Plan, protocol: str, address: str, server_pid: int) -> dict[str, Any]:
    """Runs the plan once; returns the figures. Raises `WrongStream`."""
    run, parse = PROTOCOLS[protocol]
    received = [Received() for _ in range(plan.num_streams)]
    cpu = CpuWatch(server_pid)
    gc.disable()  # it would walk through all that was kept, again and again
    asyncio.run(run(plan, address, received, cpu.start))
    used = cpu.used()
    gc.enable()
    expected = Expected(plan)
    streams = [expected.check(number, parse(of_stream)) for number, of_stream in enumerate(received)]
    return figures(plan, streams) | {f"{name}_cpu_s": seconds for name, seconds in used.items()}


def figures(plan: Plan, streams: Sequence[Sequence[tuple[float, int]]]) -> dict[str, Any]:
    """From (seconds, tokens until then) of each chunk of each stream."""
    sent_s: list[float] = json.loads(written(plan.steps_path).read_text())
    end_s = max(stream[-1][0] for stream in streams)
    delays_ms, gaps_ms = [], []
    for stream in streams:
        count = 0
        for time_s, until in stream:
            delays_ms += [1e3 * (time_s - sent_s[step]) for step in range(count, until)]
            count = until
        times = [time_s for time_s, _ in stream]
        gaps_ms += [1e3 * (later - earlier) for earlier, later in itertools.pairwise(times)]
    num_tokens = plan.num_streams * plan.num_tokens
    return {
        "tokens": num_tokens,
        "seconds": end_s - sent_s[0],
        "engine_tokens_per_s": num_tokens / max(sent_s[-1] - sent_s[0] + plan.step_s, 1e-6),
        "tokens_per_s": num_tokens / (end_s - sent_s[0]),
        "chunks": sum(map(len, streams)),
        "delay_ms_p50": statistics.median(delays_ms),
        "delay_ms_p99": statistics.quantiles(delays_ms, n=100)[98],
        "gap_ms_p50": statistics.median(gaps_ms),
        "gap_ms_p99": statistics.quantiles(gaps_ms, n=100)[98],
    }


def main() -> None:
    """The load process."""
    plan_path, protocol, address, server_pid = sys.argv[1:]
    print(json.dumps(measure(Plan.load(plan_path), protocol, address, int(server_pid))))


if __name__ == "__main__":
    main()
