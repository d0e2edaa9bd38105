"""What was measured at some sizes, for any size in between: seconds of a step, and of compiling.

Decode steps are of one class. Extend steps are of two, as programs are: "few" and "many" sequences.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from bench.buckets.demand import Steps
from bench.buckets.suggest import Choice, best_lists, best_pair, candidate_sizes
from jaxsgl.batch.buckets import MIN_EXTEND_TOKENS, BucketSet, Capacity
from jaxsgl.batch.inputs import Bucket
from jaxsgl.engine.programs import all_keys

MOST_SIZES = 24  # of a kind
DECODE_UNIT = 4

Rows: TypeAlias = Sequence[Mapping[str, Any]]


class Costs:
    """Interpolates between measured sizes; below the smallest and beyond the largest, theirs.

    Args:
      step_rows: as `measure.steps` yields them.
      program_rows: as `measure.programs` returns them.
      buckets: of the engine that was measured.
      threads: that compile at the same time.
    """

    def __init__(self, step_rows: Rows, program_rows: Rows, buckets: BucketSet, threads: int) -> None:
        self._buckets = buckets
        self._steps = {
            name: _interpolated({row["tokens"]: row["median_ms"] / 1e3 for row in step_rows if self._is(row, name)})
            for name in ("decode", "few", "many")
        }
        compiling: dict[str, Counter[int]] = {"decode": Counter(), "extend": Counter()}
        for row in program_rows:
            kind = "decode" if row["kind"] in ("sampling", "featured") else row["kind"]
            if kind in compiling:
                compiling[kind][row["tokens"]] += (row["lower_s"] + row["compile_s"]) / threads
        self._compiling = {kind: _interpolated(seconds) for kind, seconds in compiling.items()}

    def _is(self, row: Mapping[str, Any], name: str) -> bool:
        if row.get("sampling", "greedy") != "greedy" or row["kind"] != ("decode" if name == "decode" else "extend"):
            return False
        seqs = self._buckets.extend_seqs[0 if name == "few" else -1]
        return name == "decode" or row["seqs"] == min(seqs, row["tokens"])

    def step_s(self, tokens: int, name: str) -> float:
        """Seconds of a greedy step of this padded size and class."""
        return self._steps[name](tokens)

    def class_of(self, kind: str, seqs: int) -> str:
        """Of a step."""
        return "decode" if kind == "decode" else "few" if seqs <= self._buckets.extend_seqs[0] else "many"

    def compile_s(self, tokens: int, kind: str) -> float:
        """Seconds that a size adds to a start: of decode its sampling programs included."""
        return self._compiling[kind](tokens)

    def seconds(self, steps: Steps, buckets: BucketSet) -> float:
        """Of all `steps` with programs of `buckets`."""
        total = 0.0
        for (kind, tokens, seqs), count in steps.items():
            bucket: Bucket
            bucket = buckets.decode(tokens, False) if kind == "decode" else buckets.extend(tokens, seqs, False)
            total += count * self.step_s(bucket.num_tokens, self.class_of(kind, seqs))
        return total

    def start_s(self, buckets: BucketSet) -> float:
        """Compiling every size of `buckets`."""
        sizes = (("decode", buckets.decode_sizes), ("extend", buckets.extend_sizes))
        return sum(self.compile_s(size, kind) for kind, many in sizes for size in many)


def suggested(
    steps: Steps, costs: Costs, capacity: Capacity, compile_weight: float, max_programs: int | None
) -> BucketSet:
    """The lists that cost least for `steps`, of which extend steps have sizes as if there were no padding."""

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
