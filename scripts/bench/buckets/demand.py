"""Which steps a workload takes, and how much of them is padding. The real scheduler says so, on an engine that computes
nothing. Knows no time: all requests are there at the start, so the steps depend on lengths and sizes alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from bench.simulation.engine import SizesBuilder
from bench.workloads.jobs import Job
from jaxsgl.batch.buckets import BucketSet, Capacity
from jaxsgl.batch.engine_api import StepScores
from jaxsgl.batch.inputs import StepInputs
from jaxsgl.config import EngineConfig
from jaxsgl.request import Request, SamplingParams
from jaxsgl.scheduler.loop import run_loop
from jaxsgl.scheduler.scheduler import Scheduler
from jaxsgl.testing import ScriptedMailbox

FINE_TOKENS = 16

Steps: TypeAlias = Counter[tuple[str, int, int]]  # (kind, tokens, sequences), none of them padding -> how often


@dataclass(frozen=True)
class _Done:
    """A step that was counted."""

    num_seqs: int

    def tokens(self) -> npt.NDArray[np.int32]:
        """Any."""
        return np.zeros(self.num_seqs, np.int32)

    def scores(self) -> StepScores:
        """None."""
        return StepScores()


@dataclass
class CountingEngine:
    """A `StepEngine` that counts what it is asked for."""

    steps: Steps = field(default_factory=Counter)
    recompiles: int = 0

    def submit(self, inputs: StepInputs) -> _Done:
        """Counts."""
        self.steps[inputs.bucket.kind, inputs.num_tokens, inputs.num_seqs] += 1
        return _Done(inputs.num_seqs)

    def start_profile(self, folder: str) -> None:
        """Nobody asks for one."""

    def stop_profile(self) -> None:
        """Nor for its end."""


def steps_of(jobs: Sequence[Job], config: EngineConfig, capacity: Capacity, buckets: BucketSet) -> Steps:
    """All steps of serving `jobs` with programs of `buckets`."""
    scheduler = Scheduler(
        capacity,
        buckets,
        (),
        config.scheduling,
        radix_cache=not config.disable_radix_cache,
        make_builder=SizesBuilder,
    )
    engine = CountingEngine()
    requests = [
        Request(str(i), job.prompt_ids, SamplingParams(temperature=0.0, max_tokens=job.output_len, ignore_eos=True))
        for i, job in enumerate(jobs)
    ]
    run_loop(scheduler, engine, ScriptedMailbox([requests]), overlap=not config.disable_overlap_schedule)
    return engine.steps


def unpadded(capacity: Capacity) -> BucketSet:
    """So many extend sizes that the scheduler never makes a chunk shorter for the sake of padding."""
    sizes = tuple(range(FINE_TOKENS, capacity.max_extend_tokens, FINE_TOKENS))
    return BucketSet.derive(capacity, extend_sizes=(*sizes, capacity.max_extend_tokens))


def padding(steps: Steps, buckets: BucketSet) -> dict[str, dict[str, float]]:
    """By kind: steps, real and padded tokens (of decode: rows), and waste, (padded - real) / real."""
    found: dict[str, dict[str, float]] = {}
    for (kind, tokens, seqs), count in steps.items():
        of = found.setdefault(kind, {"steps": 0, "real": 0, "padded": 0})
        bucket = buckets.decode(tokens, False) if kind == "decode" else buckets.extend(tokens, seqs, False)
        of["steps"] += count
        of["real"] += count * tokens
        of["padded"] += count * bucket.num_tokens
    for of in found.values():
        of["waste"] = of["padded"] / of["real"] - 1
    return found
