"""Compare single steps of the engine: the same step under different flags, in turns.

    python scripts/bench step --shape mid --dtype bfloat16 --steps 32x1+499@384:4 1x512
    python scripts/bench step --shape mid --steps 32x1+400 --variants "--dtype float32" "--dtype bfloat16"
    python scripts/bench step --shape mid --dtype bfloat16 --steps 32x1+400 --variants "" "CXX=false"
    git worktree add ../before HEAD~1
    python scripts/bench step --shape mid --steps 32x1+400 --variants "PYTHONPATH=." "PYTHONPATH=../before"

A step is COUNTxNEW+CACHED@SHARED:GROUP, and commas join several parts: 32x1+499@384:4 is a decode of 32 sequences with
499 cached tokens, each four of which share the first 384; 1x512 extends one sequence by 512 tokens. A variant is flags
of the engine, with settings of the environment before them. Each variant has a process of its own, which sleeps while
another one measures; it compiles only what the steps need, and its pool holds the largest step. Flags outside
--variants hold for all variants. The last example compares two trees, as far as this script fits the older one.

Prints milliseconds from submission to tokens on an idle device (greedy), milliseconds of CPU time of all threads, and
how many times as long as for the first variant a step takes: medians, least and most of the rounds. "Queued" are
milliseconds a step where the next one is submitted before a step's tokens are awaited, as the serving loop does it,
and "submit" the host's part of them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shlex
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from bench.models import NAMES, write_config
from bench.output import figure_parser, write_figures
from bench.processes import SCRIPTS, LineChild
from bench.report.trace import kernels
from bench.steps import STEPS
from jaxsgl.errors import JaxsglError

HEAD = (
    f"{'step':<28}{'ms':>9}{'least':>9}{'most':>9}{'CPU ms':>9}{'queued':>9}{'submit':>9}"
    f"{'times':>8}{'least':>7}{'most':>7}  variant"
)


@dataclass(frozen=True)
class Timing:
    """Milliseconds of a step, medians of runs.

    Attributes:
      wall_ms: from submission to tokens on an idle device.
      cpu_ms: of all threads meanwhile.
      queued_ms: of a step in a row of them, each submitted before the tokens of the one before are awaited.
      submit_ms: of the submission of such a step.
    """

    wall_ms: float
    cpu_ms: float
    queued_ms: float
    submit_ms: float


class Variant:
    """An engine in a process of its own, `bench.step_child`. Raises `JaxsglError` with its message if it can't start.

    Args:
      text: NAME=VALUE for the environment, then flags of the engine.
      common: flags that hold for all variants.
      steps: what the engine measures, as `parse_step` takes it.
    """

    def __init__(self, text: str, common: Sequence[str], steps: Sequence[str]) -> None:
        self.text = text
        words = shlex.split(text)
        settings = [word for word in words if "=" in word and not word.startswith("-")]
        flags = [word for word in words if word not in settings]
        env = os.environ | dict(setting.split("=", 1) for setting in settings)
        path = os.pathsep.join(filter(None, (env.get("PYTHONPATH"), str(SCRIPTS))))  # the variant's tree comes first
        env |= {"PYTHONPATH": path, STEPS: json.dumps(list(steps))}
        # -P: else the folder that the process starts in would come before PYTHONPATH.
        self._child = LineChild([sys.executable, "-P", "-m", "bench.step_child", *common, *flags], env)
        try:
            self._timings(self._child.receive())
        except JaxsglError:
            self.close()
            raise

    def measure(self, runs: int, trace: Path | None = None) -> list[Timing]:
        """Runs each step `runs` times, traced into a folder or not. Raises `JaxsglError` if the process ended."""
        return self._timings(self._child.ask(json.dumps([runs, None if trace is None else str(trace)]).encode()))

    def close(self) -> None:
        """Ends the process."""
        self._child.close()

    def _timings(self, line: bytes) -> list[Timing]:
        told = json.loads(line or '{"error": "its process ended; what it printed says why"}')
        if "error" in told:
            raise JaxsglError(f"variant {self.text!r}: {told['error']}")
        return [Timing(**timing) for timing in told["timings"]]


def main(arguments: list[str]) -> int:
    """Measures all variants in turns and prints the figures."""
    parser = figure_parser(__doc__, __name__)
    parser.add_argument(
        "--shape", choices=NAMES, help="random weights of this shape; else --model, a flag of the engine"
    )
    parser.add_argument("--steps", nargs="+", required=True, metavar="STEP", help="the steps to measure")
    parser.add_argument("--variants", nargs="+", default=[""], metavar="FLAGS", help="the variants to compare")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each variant (default 5)")
    parser.add_argument("--runs", type=int, default=5, help="runs of a step in a turn, whose median counts (default 5)")
    parser.add_argument(
        "--traces", type=Path, metavar="FOLDER", help="then trace more runs into it; --json gets each kernel's time"
    )
    options, common = parser.parse_known_args(arguments)
    with tempfile.TemporaryDirectory(prefix="bench-step-") as folder, contextlib.ExitStack() as variants:
        if options.shape:
            common += ["--model", str(write_config(options.shape, Path(folder) / "model")), "--load-format", "dummy"]
        try:
            started = []
            for text in options.variants:
                started.append(Variant(text, common, options.steps))
                variants.callback(started[-1].close)
            rounds = [[variant.measure(options.runs) for variant in started] for _ in range(options.rounds)]
            traced = options.traces and [options.traces / f"variant-{place}" for place in range(len(started))]
            for variant, trace in zip(started, traced or (), strict=False):
                variant.measure(options.runs, trace)
        except JaxsglError as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
    rows = [
        row(step, text, [[timings[i] for timings in turn] for turn in rounds], place)
        | ({"kernels": kernels(traced[place] / str(i)), "traced_runs": options.runs} if traced else {})
        for i, step in enumerate(options.steps)
        for place, text in enumerate(options.variants)
    ]
    print("\n".join([HEAD, *map(line, rows)]))
    write_figures(options.json, jax=jax.__version__, rows=rows)
    return 0


def row(step: str, variant: str, rounds: list[list[Timing]], place: int) -> dict[str, Any]:
    """The figures of the variant at `place`; `rounds` holds the timings of the step by round and variant."""
    mine = [turn[place] for turn in rounds]
    ratios = [turn[place].wall_ms / turn[0].wall_ms for turn in rounds]
    return {
        "step": step,
        "variant": variant,
        "wall_ms": spread([timing.wall_ms for timing in mine]),
        "cpu_ms": spread([timing.cpu_ms for timing in mine]),
        "queued_ms": spread([timing.queued_ms for timing in mine]),
        "submit_ms": spread([timing.submit_ms for timing in mine]),
        "times_of_first": spread(ratios),
        "rounds": [dataclasses.asdict(timing) for timing in mine],
    }


def spread(values: list[float]) -> dict[str, float]:
    """Median, least and most of the values."""
    return {"median": statistics.median(values), "least": min(values), "most": max(values)}


def line(of: dict[str, Any]) -> str:
    """A row as text."""
    names = ("median", "least", "most")
    walls = "".join(f"{of['wall_ms'][name]:9.2f}" for name in names)
    times = f"{of['times_of_first']['median']:8.2f}" + "".join(
        f"{of['times_of_first'][name]:7.2f}" for name in names[1:]
    )
    host = f"{of['cpu_ms']['median']:9.1f}{of['queued_ms']['median']:9.2f}{of['submit_ms']['median']:9.2f}"
    return f"{of['step']:<28}{walls}{host}{times}  {of['variant'] or '(as it is)'}"
