"""The steps of a workload, their cost with a list of compiled sizes, and the list that costs least.

Demand: the real scheduler runs on an engine that only counts. All requests are there at the start, so the steps depend
on lengths and sizes alone, not on time. Costs: times that were measured at some sizes are interpolated. Decode steps
are of one class; extend steps are of two, as programs are: "few" and "many" sequences. Suggestion: a dynamic program
over candidate sizes. A step takes the time of the smallest size that holds it, and each size takes time to compile; for
every number of sizes, the best list that ends at the largest size follows from the best lists of one size less.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from bench.simulation.engine import SizesBuilder
from jaxsgl.batch.buckets import MIN_EXTEND_TOKENS, BucketSet, Capacity
from jaxsgl.batch.inputs import Bucket, StepInputs
from jaxsgl.batch.outputs import NO_OUTPUTS, HostOutputs
from jaxsgl.bench.requests import Job, greedy_requests
from jaxsgl.config.engine import EngineConfig
from jaxsgl.engine.step_programs import all_keys
from jaxsgl.scheduler.loop import run_loop
from jaxsgl.scheduler.scheduler import Scheduler
from jaxsgl.scheduler.served_engine import StepsOnly
from jaxsgl.testing.engine import ScriptedMailbox


class Choice(NamedTuple):
    """A list of ascending sizes, and its cost: seconds of steps plus weighed seconds of compiling."""

    cost_s: float
    sizes: tuple[int, ...]


StepTime = Callable[[int, str], float]  # seconds of a step by its size and class


def best_lists(
    demand: Mapping[tuple[int, str], float],
    candidates: Sequence[int],
    step_s: StepTime,
    size_s: Callable[[int], float],
    most: int,
) -> list[Choice]:
    """The best list of 1, 2, ... `most` sizes (fewer lists if there are fewer candidates).

    Args:
      demand: the number of steps, by tokens and class.
      candidates: ascending sizes to choose from; the last one is in every list, so it must hold every step.
      step_s: seconds of a step.
      size_s: seconds that a size costs, weighed.
      most: largest number of sizes.
    """
    if demand and max(tokens for tokens, _ in demand) > candidates[-1]:
        raise ValueError(f"a step has {max(demand)[0]} tokens, but the largest candidate is {candidates[-1]}")
    num = len(candidates)
    classes = sorted({name for _, name in demand})
    # counts[c][i]: steps of class c for which candidate i - 1 is the smallest that holds them
    counts = {name: np.zeros(num + 1) for name in classes}
    for (tokens, name), count in demand.items():
        counts[name][bisect_left(candidates, tokens) + 1] += count
    sums = {name: np.cumsum(counts[name]) for name in classes}
    # between[i, j]: cost if size j - 1 serves all steps that size i - 1 does not hold; for i = 0, all steps up to it
    between = np.full((num + 1, num + 1), np.inf)
    for j, size in enumerate(candidates, start=1):
        served = sum((step_s(size, name) * (sums[name][j] - sums[name][:j]) for name in classes), np.zeros(j))
        between[:j, j] = served + size_s(size)
    best, lists = between[0].copy(), [[(j,) if j else () for j in range(num + 1)]]
    choices = [_choice(best, lists[0], candidates)]
    for _ in range(1, min(most, num)):
        through = best[:, None] + between
        last = through.argmin(axis=0)
        lists = [[(*lists[0][last[j]], j) for j in range(num + 1)]]
        best = through[last, np.arange(num + 1)]
        choices.append(_choice(best, lists[0], candidates))
    return [choice for choice in choices if np.isfinite(choice.cost_s)]


def _choice(best: np.ndarray, lists: Sequence[tuple[int, ...]], candidates: Sequence[int]) -> Choice:
    return Choice(float(best[-1]), tuple(candidates[j - 1] for j in lists[-1]))


def best_pair(
    decode: Sequence[Choice],
    extend: Sequence[Choice],
    num_programs: Callable[[Sequence[int], Sequence[int]], int],
    max_programs: int | None,
) -> tuple[Choice, Choice]:
    """The cheapest pair of lists. Raises `ValueError` if even the shortest lists take too many programs."""
    pairs = [
        (first, second)
        for first in decode
        for second in extend
        if max_programs is None or num_programs(first.sizes, second.sizes) <= max_programs
    ]
    if not pairs:
        least = num_programs(decode[0].sizes, extend[0].sizes)
        raise ValueError(f"--max-programs is {max_programs}, but one size of each kind takes {least} programs already")
    return min(pairs, key=lambda pair: pair[0].cost_s + pair[1].cost_s)


def candidate_sizes(least: int, unit: int, largest: int) -> list[int]:
    """`least` doubled up to `unit`, then multiples of `unit`, from 32 of them on every fourth one, and `largest`."""
    sizes = [size for size in (least << i for i in range(unit.bit_length())) if size < unit]
    sizes += [*range(unit, 32 * unit, unit), *range(32 * unit, largest, 4 * unit)]
    return [size for size in sizes if size < largest] + [largest]


FINE_TOKENS = 16

Steps: TypeAlias = Counter[tuple[str, int, int]]  # number of steps by (kind, tokens, sequences), without padding


@dataclass(frozen=True)
class _Done:
    """Handle of a step that was counted."""

    num_seqs: int

    def tokens(self) -> npt.NDArray[np.int32]:
        """Zeros: the counting needs no tokens."""
        return np.zeros(self.num_seqs, np.int32)

    def outputs(self) -> HostOutputs:
        """No scores."""
        return NO_OUTPUTS

    def drafts(self) -> npt.NDArray[np.int32]:
        """Nothing drafts."""
        return np.zeros((0, 0), np.int32)


@dataclass
class CountingEngine:
    """A `StepEngine` that counts the steps it is asked for."""

    steps: Steps = field(default_factory=Counter)
    recompiles: int = 0

    def submit(self, inputs: StepInputs) -> _Done:
        """Counts a step."""
        self.steps[inputs.bucket.kind, inputs.num_tokens, inputs.num_seqs] += 1
        return _Done(inputs.num_seqs)

    def start_profile(self, folder: str) -> None:
        """Does nothing: no request of a benchmark asks for a profile."""

    def stop_profile(self) -> None:
        """Does nothing, see `start_profile`."""


def steps_of(jobs: Sequence[Job], config: EngineConfig, capacity: Capacity, buckets: BucketSet) -> Steps:
    """The steps that serving `jobs` takes with programs of `buckets`."""
    scheduler = Scheduler(
        capacity,
        buckets,
        (),
        config.scheduling,
        radix_cache=not config.disable_radix_cache,
        make_builder=SizesBuilder,
    )
    engine = CountingEngine()
    requests = greedy_requests(jobs)
    run_loop(scheduler, StepsOnly(engine), ScriptedMailbox([requests]), depth=config.unread_steps)
    return engine.steps


def unpadded(capacity: Capacity) -> BucketSet:
    """Buckets with enough extend sizes that the scheduler never shortens a chunk to avoid padding."""
    sizes = tuple(range(FINE_TOKENS, capacity.max_extend_tokens, FINE_TOKENS))
    return BucketSet.derive(capacity, extend_sizes=(*sizes, capacity.max_extend_tokens))


def padding(steps: Steps, buckets: BucketSet) -> dict[str, dict[str, float]]:
    """By kind of step: steps, real and padded tokens (rows for decode), and waste, which is (padded - real) / real."""
    found: dict[str, dict[str, float]] = {}
    for (kind, tokens, seqs), count in steps.items():
        of = found.setdefault(kind, {"steps": 0, "real": 0, "padded": 0})
        bucket = buckets.decode(tokens) if kind == "decode" else buckets.extend(tokens, seqs)
        of["steps"] += count
        of["real"] += count * tokens
        of["padded"] += count * bucket.num_tokens
    for of in found.values():
        of["waste"] = of["padded"] / of["real"] - 1
    return found


MOST_SIZES = 24  # largest number of sizes of one kind
DECODE_UNIT = 4

Rows: TypeAlias = Sequence[Mapping[str, Any]]


class Costs:
    """Interpolates between measured sizes; outside their range, the nearest measured size counts.

    Args:
      step_rows: rows of `bucket_times.steps`.
      program_rows: rows of `bucket_times.programs`.
      buckets: buckets of the engine that was measured.
      threads: number of threads that compile at the same time.
    """

    def __init__(self, step_rows: Rows, program_rows: Rows, buckets: BucketSet, threads: int) -> None:
        self._buckets = buckets
        self._steps = {
            name: _interpolated({row["tokens"]: row["median_ms"] / 1e3 for row in step_rows if self._is(row, name)})
            for name in ("decode", "few", "many")
        }
        compiling: dict[str, Counter[int]] = {"decode": Counter(), "extend": Counter()}
        for row in program_rows:
            kind = "decode" if row["kind"] in ("sampled", "filtered", "featured") else row["kind"]
            if kind in compiling:
                compiling[kind][row["tokens"]] += (row["lower_s"] + row["compile_s"]) / threads
        self._compiling = {kind: _interpolated(seconds) for kind, seconds in compiling.items()}

    def _is(self, row: Mapping[str, Any], name: str) -> bool:
        if row.get("sampling", "greedy") != "greedy" or row["kind"] != ("decode" if name == "decode" else "extend"):
            return False
        seqs = self._buckets.extend_seqs[0 if name == "few" else -1]
        return name == "decode" or row["seqs"] == min(seqs, row["tokens"])

    def step_s(self, tokens: int, name: str) -> float:
        """Seconds of a greedy step of `tokens` padded tokens, by the name of its class."""
        return self._steps[name](tokens)

    def class_of(self, kind: str, seqs: int) -> str:
        """The class of a step."""
        return "decode" if kind == "decode" else "few" if seqs <= self._buckets.extend_seqs[0] else "many"

    def compile_s(self, tokens: int, kind: str) -> float:
        """Seconds that a size adds to the start; for decode, its sampling programs are included."""
        return self._compiling[kind](tokens)

    def seconds(self, steps: Steps, buckets: BucketSet) -> float:
        """Seconds of all `steps` with programs of `buckets`."""
        total = 0.0
        for (kind, tokens, seqs), count in steps.items():
            bucket: Bucket
            bucket = buckets.decode(tokens) if kind == "decode" else buckets.extend(tokens, seqs)
            total += count * self.step_s(bucket.num_tokens, self.class_of(kind, seqs))
        return total

    def start_s(self, buckets: BucketSet) -> float:
        """Seconds to compile every size of `buckets`."""
        sizes = (("decode", buckets.decode_sizes), ("extend", buckets.extend_sizes))
        return sum(self.compile_s(size, kind) for kind, many in sizes for size in many)


def suggested(
    steps: Steps, costs: Costs, capacity: Capacity, compile_weight: float, max_programs: int | None
) -> BucketSet:
    """The lists that cost least for `steps`, which must come from buckets without padding (`unpadded`)."""

    def choices(kind: str, candidates: Sequence[int]) -> list[Choice]:
        demand = Counter[tuple[int, str]]()
        for (of, tokens, seqs), count in steps.items():
            if of == kind:
                demand[tokens, costs.class_of(kind, seqs)] += count
        return best_lists(
            demand, candidates, costs.step_s, lambda size: compile_weight * costs.compile_s(size, kind), MOST_SIZES
        )

    def buckets_of(decode: Sequence[int], extend: Sequence[int]) -> BucketSet:
        return BucketSet.derive(capacity, tuple(decode), tuple(extend))

    decode = choices("decode", candidate_sizes(1, DECODE_UNIT, capacity.num_rows))
    least = min(MIN_EXTEND_TOKENS, capacity.max_extend_tokens)
    extend = choices("extend", candidate_sizes(least, MIN_EXTEND_TOKENS, capacity.max_extend_tokens))
    pair = best_pair(decode, extend, lambda *sizes: len(all_keys(buckets_of(*sizes))), max_programs)
    return buckets_of(*(choice.sizes for choice in pair))


def _interpolated(seconds: Mapping[int, float]) -> Callable[[int], float]:
    sizes = sorted(seconds)
    values = [seconds[size] for size in sizes]
    return lambda size: float(np.interp(size, sizes, values))
