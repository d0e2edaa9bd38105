"""Measure what a step costs the serving loop on one device and on several: planning, launching, reading results.

    python scripts/bench launch
    python scripts/bench launch --devices 1 2 8 --rows 32 --steps 500 --json launch.json

Engines of a small random model with two layers, one for each number of devices, decode in turns in one process; a CPU
shows virtual devices. The wait for a step's tokens is left out. Prints medians of microseconds: "plan" is the
scheduler's part (launch, collect, replies, load), "submit" the engine's, and "sum" is compared with that of the first
number of devices. On several devices a thread launches beside the loop: "in the thread" is its CPU time.
"""

from __future__ import annotations

import statistics
import tempfile
import threading
import time
from argparse import Namespace
from dataclasses import dataclass, field
from pathlib import Path

from bench.models import SHAPES
from bench.output import figure_parser, write_figures, write_json
from jaxsgl import wiring
from jaxsgl.config.engine import EngineConfig
from jaxsgl.engine.engine import Engine
from jaxsgl.requests.request import Request, SamplingParams
from jaxsgl.scheduler.scheduler import Scheduler

SMALL = {"num_hidden_layers": 2, "hidden_size": 256, "intermediate_size": 512, "vocab_size": 2048}
HEAD = f"{'devices':>7}{'plan us':>10}{'submit us':>11}{'sum us':>9}{'times':>7}{'in the thread us':>18}"


@dataclass
class Loop:
    """One engine and its scheduler, with all rows decoding. Times are seconds of each step; `launcher`: its thread."""

    engine: Engine
    scheduler: Scheduler
    launcher: threading.Thread | None
    plan: list[float] = field(default_factory=list)
    submit: list[float] = field(default_factory=list)
    thread: list[float] = field(default_factory=list)

    def step(self) -> None:
        """One step, launched and read."""
        in_thread = self._in_thread()
        begin = time.perf_counter()
        inputs = self.scheduler.launch()
        planned = time.perf_counter()
        assert inputs is not None
        handle = self.engine.submit(inputs)
        submitted = time.perf_counter()
        tokens, outputs = handle.tokens(), handle.outputs()
        read = time.perf_counter()
        self.scheduler.collect(tokens, outputs)
        self.scheduler.take_replies()
        self.scheduler.load(0)
        self.plan.append(planned - begin + time.perf_counter() - read)
        self.submit.append(submitted - planned)
        self.thread.append(self._in_thread() - in_thread)

    def _in_thread(self) -> float:
        """CPU seconds of the launching thread so far."""
        if self.launcher is None or self.launcher.ident is None:
            return 0.0
        return time.clock_gettime(time.pthread_getcpuclockid(self.launcher.ident))


def main(arguments: list[str]) -> None:
    """Measures and prints."""
    parser = figure_parser(__doc__, __name__)
    parser.add_argument("--devices", type=int, nargs="+", default=[1, 8], help="numbers of devices (default 1 8)")
    parser.add_argument("--rows", type=int, default=8, help="sequences that decode (default 8)")
    parser.add_argument("--steps", type=int, default=300, help="steps of each (default 300)")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        write_json(Path(folder) / "config.json", SHAPES["mid"] | SMALL)
        # The most devices first: JAX shows so many from then on.
        loops = {n: start(Path(folder), n, options) for n in sorted(options.devices, reverse=True)}
    for _ in range(options.steps):
        for loop in loops.values():
            loop.step()
    first = None
    rows = []
    print(HEAD)
    for n in options.devices:
        loop = loops[n]
        plan, submit, thread = (1e6 * statistics.median(times[20:]) for times in (loop.plan, loop.submit, loop.thread))
        first = first or plan + submit
        rows.append({"devices": n, "plan_us": plan, "submit_us": submit, "thread_us": thread})
        print(f"{n:>7}{plan:>10.0f}{submit:>11.0f}{plan + submit:>9.0f}{(plan + submit) / first:>7.2f}{thread:>18.0f}")
    write_figures(options.json, rows=rows)


def start(folder: Path, num_devices: int, options: Namespace) -> Loop:
    """An engine on so many devices, its requests through their prompts."""
    context = options.steps + 40
    config = EngineConfig(
        model=str(folder), load_format="dummy", tp=num_devices, dtype="float32", context_length=context,
        max_running_requests=options.rows, decode_buckets=(options.rows,), extend_buckets=(16 * options.rows,),
        chunked_prefill_size=16 * options.rows, max_total_tokens=options.rows * (context + 32),
    )  # fmt: skip
    before = set(threading.enumerate())
    engine, built = wiring.build(config)
    (scheduler,) = built.ranks
    launcher = next((t for t in threading.enumerate() if t.name == "launcher" and t not in before), None)
    loop = Loop(wiring.whole(engine), scheduler, launcher)
    params = SamplingParams(temperature=0.0, max_tokens=options.steps + 20, ignore_eos=True)
    loop.scheduler.receive([Request(str(i), [3 + i] * 8, params) for i in range(options.rows)])
    loop.step()
    return loop
