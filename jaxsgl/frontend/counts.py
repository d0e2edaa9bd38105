"""What each of several front-end processes has counted, as a message; and the sum of all, as one process's metrics.

Takes every counter and histogram of `Metrics` by its name, so a new one needs no line here. Never knows what they
count. worker.py sends the counts of its process, workers.py adds up all of them, exposition.py shows them.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec
from prometheus_client import ProcessCollector
from prometheus_client.metrics_core import Metric

from jaxsgl.frontend.metrics import Histogram, Metrics

START_TIME = "process_start_time_seconds"


class Counts(msgspec.Struct, frozen=True, tag="counts"):
    """Counts of one process, or of several together.

    Attributes:
      counters: by the name that they have in `Metrics`.
      histograms: likewise: values in each bucket, and their sum.
      process: memory, processor time and files, by the names that Prometheus gives them; empty where /proc is missing.
      num_open: calls that are open.
    """

    counters: dict[str, dict[str, int]] = {}
    histograms: dict[str, tuple[list[int], float]] = {}
    process: dict[str, float] = {}
    num_open: int = 0

    def ended(self) -> Counts:
        """Returns what remains of them when their process has ended: what it has counted, and its processor time."""
        kept = {name: value for name, value in self.process.items() if name.endswith("_total")}
        return Counts(self.counters, self.histograms, kept)


def counts_of(metrics: Metrics, num_open: int) -> Counts:
    """Returns the counts of this process."""
    found = vars(metrics)
    return Counts(
        {name: dict(value) for name, value in found.items() if isinstance(value, Counter)},
        {name: value.state() for name, value in found.items() if isinstance(value, Histogram)},
        {sample.name: sample.value for family in process_families() for sample in family.samples},
        num_open,
    )


def process_families() -> list[Metric]:
    """Returns Prometheus' metrics of this process, each with one sample."""
    return list(ProcessCollector(registry=None).collect())


def summed(parts: Iterable[Counts]) -> Counts:
    """Returns the sum; processes have started when the first one has."""
    counters: dict[str, Counter[str]] = {}
    histograms: dict[str, tuple[list[int], float]] = {}
    process: dict[str, float] = {}
    num_open = 0
    for part in parts:
        for name, counter in part.counters.items():
            counters.setdefault(name, Counter()).update(counter)
        for name, (counts, total) in part.histograms.items():
            before, so_far = histograms.get(name, ([0] * len(counts), 0.0))
            histograms[name] = [a + b for a, b in zip(before, counts, strict=True)], so_far + total
        for name, value in part.process.items():
            if name == START_TIME:
                process[name] = min(process.get(name, value), value)
            else:
                process[name] = process.get(name, 0.0) + value
        num_open += part.num_open
    return Counts({name: dict(counter) for name, counter in counters.items()}, histograms, process, num_open)


def with_counts(metrics: Metrics, counts: Counts) -> Metrics:
    """Returns metrics with the engine's numbers of `metrics` and these counts."""
    total = copy.copy(metrics)
    values: dict[str, Any] = {name: Counter(counter) for name, counter in counts.counters.items()}
    for name, state in counts.histograms.items():
        values[name] = getattr(metrics, name).with_state(*state)
    vars(total).update(values)
    return total


class ProcessesCollector:
    """Shows the figures of several processes under the names that those of one process have."""

    def __init__(self, of_all: dict[str, float]) -> None:
        self._of_all = of_all

    def collect(self) -> Iterator[Metric]:
        """Yields a family for each figure."""
        for family in process_families():
            family.samples = [
                sample._replace(value=self._of_all.get(sample.name, sample.value)) for sample in family.samples
            ]
            yield family
