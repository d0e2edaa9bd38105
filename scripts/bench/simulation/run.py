"""One run: the real scheduler and the real serving loop between simulated clients and a simulated engine."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

from bench.simulation.clients import Clients
from bench.simulation.cost import Costs
from bench.simulation.engine import Clock, SimulatedEngine, SizesBuilder
from bench.simulation.figures import Figures
from bench.workloads.prompts import Ask
from jaxsgl.batch.buckets import BucketSet, Capacity
from jaxsgl.config import EngineConfig
from jaxsgl.models import ModelArch
from jaxsgl.scheduler.loop import run_loop
from jaxsgl.scheduler.scheduler import Scheduler


def simulate(
    config: EngineConfig,
    arch: ModelArch,
    capacity: Capacity,
    costs: Costs,
    trace: Iterable[Ask],
    *,
    host_step_s: float = 0.0,
    host_seq_s: float = 0.0,
    max_concurrency: int | None = None,
) -> tuple[Figures, dict[str, Any]]:
    """Serves `trace` to its end. Returns what was counted, and a summary.

    Args:
      config: as for a real server, of which everything that the scheduler looks at counts.
      arch, capacity, costs: the model and the device.
      trace: in order of time.
      host_step_s, host_seq_s: what the host takes for a step, and for each of its sequences besides.
      max_concurrency: requests that clients keep open.
    """
    clock = Clock()
    buckets = BucketSet.derive(capacity, config.decode_buckets, config.extend_buckets, config.decode_steps)
    engine = SimulatedEngine(arch, capacity, buckets, costs, clock, host_step_s, host_seq_s)
    scheduler = Scheduler(
        capacity,
        buckets,
        arch.eos_token_ids,
        config.scheduling,
        radix_cache=not config.disable_radix_cache,
        random_seed=config.random_seed,
        max_queued_requests=config.max_queued_requests,
        make_builder=SizesBuilder,
        clock=lambda: clock.now_s,
    )
    clients = Clients(trace, clock, capacity.vocab_size, max_concurrency)
    start_s = time.process_time()
    run_loop(scheduler, engine, clients, overlap=not config.disable_overlap_schedule)
    cpu_s = time.process_time() - start_s
    scheduler.check()
    num_steps = sum(counts.steps for counts in engine.counts.values())
    speed = {
        "cpu_s": cpu_s,
        "simulated_s_per_cpu_s": clock.now_s / cpu_s,
        "cpu_s_per_step": cpu_s / max(num_steps, 1),
    }
    return clients.figures, clients.figures.summary(engine) | {"speed": speed}
