"""Count what ranks of one engine lose to each other: tokens that steps are padded to, gaps between tokens, prefixes.

    python scripts/bench ranks --ranks 8
    python scripts/bench ranks --trace shared-prefix --num-prompts 400

The real schedulers run a trace on a simulated clock: in one rank on all devices, in --ranks ranks, and in as many
replicas, which have the same rows, pages and chunk but a part of the devices each. A step takes --step-us and, for each
position, --token-us on all devices. --attention-share of that is for what ranks compute alone, where each is padded to
the largest; the rest is for MLPs, which all devices compute for the tokens of all ranks. A replica waits for no other
and takes --ranks times as long for a token; it reads its weights as fast as all devices together, which favours it.

Printed are positions for each real token, in MLPs and in attention, the share of prompt tokens that a prefix cache had,
gaps between tokens and times to the first token.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

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
from jaxsgl.cache.manager import namespace_of
from jaxsgl.cache.pages import full_pages
from jaxsgl.config.engine import SchedulingConfig
from jaxsgl.messages.orders import Shutdown
from jaxsgl.messages.replies import Replies
from jaxsgl.requests import placement
from jaxsgl.requests.request import Request
from jaxsgl.scheduler.loop import run_loop
from jaxsgl.scheduler.ranks import RankedScheduler
from jaxsgl.scheduler.scheduler import Scheduler
from jaxsgl.scheduler.served_engine import StepsOnly

VOCAB_SIZE, PAGE_SIZE, CONTEXT = 32_000, 16, 4096
ROWS, CHUNK, POOL_TOKENS = 256, 4096, 400_000  # of all ranks


@dataclass(frozen=True)
class Costs:
    """Seconds of a step, and of a position on all devices: what ranks compute alone, and MLPs."""

    step_s: float
    attention_s: float
    mlp_s: float


@dataclass
class Positions:
    """Tokens of steps, and the positions that they were computed in."""

    real: int = 0
    mlps: int = 0
    attention: int = 0


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
    """Computes nothing, one step after the other.

    Attributes:
      clock, costs: when, and how long.
      share: of the devices, that it has.
      positions: of its steps so far.
    """

    clock: Clock
    costs: Costs
    share: float = 1.0
    recompiles: int = 0
    free_at_s: float = 0.0
    positions: Positions = field(default_factory=Positions)

    def submit(self, inputs: StepInputs) -> TimedHandle:
        """Runs a step after those before."""
        bucket, costs, positions = inputs.bucket, self.costs, self.positions
        attention, mlps = max(len(inputs.of_ranks), 1) * bucket.padded_tokens, inputs.padded_tokens
        positions.real += inputs.num_tokens
        positions.mlps += mlps
        positions.attention += attention
        seconds = costs.step_s + (costs.attention_s * attention + costs.mlp_s * mlps) / self.share
        self.free_at_s = max(self.free_at_s, self.clock.now_s) + seconds
        return TimedHandle(self.clock, self.free_at_s, inputs.num_seqs)

    def start_profile(self, folder: str) -> None:
        """Does nothing."""

    def stop_profile(self) -> None:
        """Does nothing."""


class Replica:
    """A scheduler with an engine and a time of its own, one step of which may be in flight unread."""

    def __init__(self, scheduler: Scheduler, engine: TimedEngine) -> None:
        self.scheduler, self.engine = scheduler, engine
        self.now_s = 0.0
        self._in_flight: deque[TimedHandle] = deque()

    def turn(self) -> Replies:
        """One turn of the serving loop, at the clock's time; `now_s` is when the next one begins."""
        scheduler = self.scheduler
        inputs = scheduler.launch()
        if inputs is not None:
            self._in_flight.append(self.engine.submit(inputs))
        if self._in_flight and (inputs is None or len(self._in_flight) > 1):
            step = self._in_flight.popleft()
            scheduler.collect(step.tokens())
        self.now_s = self.engine.clock.now_s
        return Replies(scheduler.take_replies(), scheduler.load(0))


def serve_by_replicas(replicas: Sequence[Replica], clients: Clients, clock: Clock) -> None:
    """Serves all requests: the replica whose turn is the earliest goes on."""
    while True:
        busy = [replica for replica in replicas if not replica.scheduler.is_idle]
        if busy:
            clock.now_s = min(clients.next_due_s, *(replica.now_s for replica in busy))
        for message in clients.receive(0.0 if busy else math.inf):
            if isinstance(message, Shutdown):
                return
            assert isinstance(message, Request)
            chosen = replicas[_place(replicas, message)]
            chosen.now_s = max(chosen.now_s, clock.now_s)
            chosen.scheduler.receive([message])
        for replica in busy:
            if replica.now_s <= clock.now_s:
                clients.send(replica.turn())
                break


def _place(replicas: Sequence[Replica], request: Request) -> int:
    """As `frontend/engines/router.py` chooses, with caches in the place of what it remembers of them."""
    schedulers = [replica.scheduler for replica in replicas]
    ids, namespace = request.prompt_ids, namespace_of(request.cache_salt, None, request.kv_source)
    cached = [each.cache.peek(np.asarray(ids, np.int32), namespace).num_pages for each in schedulers]
    loads = [each.place_load for each in schedulers]
    busy = [(load.num_requests, each.cache.cached_tokens) for each, load in zip(schedulers, loads, strict=True)]
    return placement.choose(full_pages(len(ids), PAGE_SIZE), cached, loads, busy)


@dataclass(frozen=True)
class Run:
    """A trace, and how it is served."""

    trace: TraceConfig
    seed: int
    config: SchedulingConfig
    costs: Costs

    def in_one(self) -> dict[str, float]:
        """Figures of one rank on all devices."""
        clock = Clock()
        (scheduler,), engine = self._schedulers(1, clock), TimedEngine(clock, self.costs)
        return self._looped(scheduler, engine)

    def in_ranks(self, num_ranks: int) -> dict[str, float]:
        """Figures of ranks that share all devices."""
        clock = Clock()
        mixed = replace(self, config=replace(self.config, enable_mixed_chunk=True))
        scheduler = RankedScheduler(mixed._schedulers(num_ranks, clock, num_ranks), clock=lambda: clock.now_s)
        return self._looped(scheduler, TimedEngine(clock, self.costs))

    def in_replicas(self, num_replicas: int) -> dict[str, float]:
        """Figures of replicas that have a part of the devices each."""
        clock, clients = self._clients(Clock())
        replicas = [
            Replica(scheduler, TimedEngine(clock, self.costs, 1 / num_replicas))
            for scheduler in self._schedulers(num_replicas, clock)
        ]
        serve_by_replicas(replicas, clients, clock)
        return _figures(clients, clock, [replica.engine for replica in replicas])

    def _looped(self, scheduler: Scheduler | RankedScheduler, engine: TimedEngine) -> dict[str, float]:
        clock, clients = self._clients(engine.clock)
        run_loop(scheduler, StepsOnly(engine), clients, depth=1)
        return _figures(clients, clock, [engine])

    def _clients(self, clock: Clock) -> tuple[Clock, Clients]:
        return clock, Clients(made_up(self.trace, self.seed), clock, VOCAB_SIZE)

    def _schedulers(self, count: int, clock: Clock, num_ranks: int = 1) -> list[Scheduler]:
        num_pages = POOL_TOKENS // PAGE_SIZE // count + 1
        sizes = Capacity(PAGE_SIZE, num_pages, ROWS // count, CONTEXT, CHUNK // count, VOCAB_SIZE)
        buckets = BucketSet.derive(sizes, num_ranks=num_ranks)
        return [Scheduler(sizes, buckets, (), self.config, clock=lambda: clock.now_s) for _ in range(count)]


def _figures(clients: Clients, clock: Clock, engines: Sequence[TimedEngine]) -> dict[str, float]:
    real, mlps, attention = (
        sum(getattr(engine.positions, name) for engine in engines) for name in ("real", "mlps", "attention")
    )
    found = clients.figures
    itl, ttft = found.itl_s.summary(), found.ttft_s.summary()
    return {
        "padded_per_real_token": mlps / real,
        "attention_per_real_token": attention / real,
        "cached_share": found.cached_tokens / found.input_tokens,
        "itl_median_ms": 1000 * itl["median"],
        "itl_p99_ms": 1000 * itl["p99"],
        "ttft_mean_ms": 1000 * ttft["mean"],
        "ttft_p99_ms": 1000 * ttft["p99"],
        "seconds": clock.now_s,
    }


def main(arguments: list[str]) -> None:
    """Prints the figures of one rank, of several, and of replicas."""
    parser = figure_parser(__doc__, __name__)
    parser.add_argument("--ranks", type=int, default=8, help="ranks that share rows, pages and chunk (default 8)")
    parser.add_argument("--trace", default="chat", choices=sorted(DEFAULTS), help="requests (default chat)")
    parser.add_argument("--num-prompts", type=int, default=600, help="requests (default 600)")
    parser.add_argument("--request-rate", type=float, default=40.0, help="arrivals a second (default 40)")
    parser.add_argument("--step-us", type=float, default=8000.0, help="of each step (default 8000)")
    parser.add_argument("--token-us", type=float, default=5.0, help="of each token, on all devices (default 5)")
    parser.add_argument(
        "--attention-share", type=float, default=0.32, help="of a token's time, that ranks compute alone (default 0.32)"
    )
    parser.add_argument(
        "--enable-mixed-chunk", action="store_true", help="of one rank and of replicas, as of jaxsgl.serve; ranks do"
    )
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(arguments)
    trace = TraceConfig(trace=args.trace, num_prompts=args.num_prompts, request_rate=args.request_rate)
    token_s = args.token_us * 1e-6
    costs = Costs(args.step_us * 1e-6, args.attention_share * token_s, (1 - args.attention_share) * token_s)
    run = Run(trace, args.seed, SchedulingConfig(enable_mixed_chunk=args.enable_mixed_chunk), costs)
    found = {
        "one rank": run.in_one(),
        f"{args.ranks} ranks": run.in_ranks(args.ranks),
        f"{args.ranks} replicas": run.in_replicas(args.ranks),
    }
    for name, figures in found.items():
        print(
            f"{name:10} {figures['padded_per_real_token']:.2f} positions of MLPs for each token, "
            f"{figures['attention_per_real_token']:.2f} of attention, "
            f"{100 * figures['cached_share']:.1f}% of prompt tokens cached, gaps between tokens median "
            f"{figures['itl_median_ms']:.1f} ms, p99 {figures['itl_p99_ms']:.1f} ms, first token mean "
            f"{figures['ttft_mean_ms']:.0f} ms, p99 {figures['ttft_p99_ms']:.0f} ms, {figures['seconds']:.1f} s"
        )
    write_figures(args.json, **{name.replace(" ", "_"): figures for name, figures in found.items()})
