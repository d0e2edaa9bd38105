"""Count what ranks of one engine lose to each other: tokens that steps are padded to, and prefixes that others have.

    python scripts/bench ranks --ranks 8
    python scripts/bench ranks --trace shared-prefix --num-prompts 400

The real schedulers and the serving loop run a trace against a device whose steps take --step-us and --token-us for each
token that they are padded to, on a simulated clock. A step of several ranks is as large as its largest batch, so a rank
with less work computes padding. Printed are padded tokens for each real one and the share of prompt tokens that a
prefix cache had, in one rank with all rows and pages and in --ranks ranks that share them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from bench.output import figure_parser, write_figures
from bench.simulation.engine import Clock
from bench.simulation.run import Clients
from jaxsgl.batch.buckets import BucketSet, Capacity
from jaxsgl.batch.inputs import StepInputs
from jaxsgl.batch.outputs import NO_OUTPUTS, HostOutputs
from jaxsgl.bench.requests import OUTPUT_TOKEN
from jaxsgl.bench.traces import DEFAULTS, TraceConfig, made_up
from jaxsgl.config.engine import SchedulingConfig
from jaxsgl.scheduler.loop import run_loop
from jaxsgl.scheduler.ranks import RankedScheduler
from jaxsgl.scheduler.scheduler import Scheduler
from jaxsgl.scheduler.served_engine import StepsOnly
from jaxsgl.scheduler.serving import AnyScheduler

VOCAB_SIZE, PAGE_SIZE, CONTEXT = 32_000, 16, 4096
ROWS, CHUNK, POOL_TOKENS = 256, 4096, 400_000  # of all ranks


@dataclass
class TimedHandle:
    """A launched step that ends at `ready_at_s`."""

    clock: Clock
    ready_at_s: float
    num_seqs: int

    def tokens(self) -> npt.NDArray[np.int32]:
        """Moves the clock to the end of the step."""
        self.clock.now_s = max(self.clock.now_s, self.ready_at_s)
        return np.full(self.num_seqs, OUTPUT_TOKEN, np.int32)

    def outputs(self) -> HostOutputs:
        """None."""
        return NO_OUTPUTS

    def drafts(self) -> npt.NDArray[np.int32]:
        """Nothing drafts."""
        raise NotImplementedError


@dataclass
class TimedEngine:
    """Computes nothing: a step takes `step_s`, and `token_s` for each token of a rank that it is padded to."""

    clock: Clock
    step_s: float
    token_s: float
    recompiles: int = 0
    free_at_s: float = 0.0

    def submit(self, inputs: StepInputs) -> TimedHandle:
        """Runs a step after those before."""
        seconds = self.step_s + self.token_s * inputs.bucket.padded_tokens
        self.free_at_s = max(self.free_at_s, self.clock.now_s) + seconds
        return TimedHandle(self.clock, self.free_at_s, inputs.num_seqs)

    def start_profile(self, folder: str) -> None:
        """Does nothing."""

    def stop_profile(self) -> None:
        """Does nothing."""


def served(
    trace: TraceConfig, num_ranks: int, config: SchedulingConfig, seed: int, step_s: float, token_s: float
) -> dict[str, float]:
    """Padded tokens for each real one, and the share of prompt tokens that was cached."""
    clock = Clock()
    num_pages = POOL_TOKENS // PAGE_SIZE // num_ranks + 1
    sizes = Capacity(PAGE_SIZE, num_pages, ROWS // num_ranks, CONTEXT, CHUNK // num_ranks, VOCAB_SIZE)
    buckets = BucketSet.derive(sizes)
    ranks = [Scheduler(sizes, buckets, (), config, clock=lambda: clock.now_s) for _ in range(num_ranks)]
    scheduler: AnyScheduler = ranks[0] if num_ranks == 1 else RankedScheduler(ranks, clock=lambda: clock.now_s)
    clients = Clients(made_up(trace, seed), clock, VOCAB_SIZE)
    run_loop(scheduler, StepsOnly(TimedEngine(clock, step_s, token_s / num_ranks)), clients, depth=1)
    totals = scheduler.load(0).totals
    real = totals.extend_tokens + totals.decode_rows
    return {
        "padded_per_real_token": (totals.extend_tokens_padded + totals.decode_rows_padded) / real,
        "cached_share": totals.cached_prompt_tokens / totals.prompt_tokens,
        "seconds": clock.now_s,
    }


def main(arguments: list[str]) -> None:
    """Prints both figures of one rank and of several."""
    parser = figure_parser(__doc__, __name__)
    parser.add_argument("--ranks", type=int, default=8, help="ranks that share rows, pages and chunk (default 8)")
    parser.add_argument("--trace", default="chat", choices=sorted(DEFAULTS), help="requests (default chat)")
    parser.add_argument("--num-prompts", type=int, default=600, help="requests (default 600)")
    parser.add_argument("--request-rate", type=float, default=40.0, help="arrivals a second (default 40)")
    parser.add_argument("--step-us", type=float, default=8000.0, help="of each step (default 8000)")
    parser.add_argument("--token-us", type=float, default=5.0, help="of each token, on all devices (default 5)")
    parser.add_argument("--decode-first", action="store_true", help="as of jaxsgl.serve")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(arguments)
    trace = TraceConfig(trace=args.trace, num_prompts=args.num_prompts, request_rate=args.request_rate)
    config = SchedulingConfig(decode_first=args.decode_first)
    found = {
        name: served(trace, count, config, args.seed, args.step_us * 1e-6, args.token_us * 1e-6)
        for name, count in (("one rank", 1), (f"{args.ranks} ranks", args.ranks))
    }
    for name, figures in found.items():
        print(
            f"{name:10} {figures['padded_per_real_token']:.2f} padded tokens for each real one, "
            f"{100 * figures['cached_share']:.1f}% of prompt tokens cached, {figures['seconds']:.1f} s"
        )
    write_figures(args.json, **{name.replace(" ", "_"): figures for name, figures in found.items()})
