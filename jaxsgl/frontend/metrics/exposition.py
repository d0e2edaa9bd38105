"""How the measurements are shown: to Prometheus under their names, and to people as a status line in the log.

The rows are those of metric_rows.py. The HTTP endpoint /metrics serves the registry,
server.py runs the status line.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from jaxsgl.frontend.metrics.measurements import SAMPLE_S, Histogram, Metrics
from jaxsgl.frontend.metrics.rows import ROWS, Row, Value
from jaxsgl.frontend.workers.channel import Counts, ProcessesCollector, with_counts

SAMPLES_PER_LINE = 10

logger = logging.getLogger(__name__)


class _Collector:
    """Fills in `ROWS` at each scrape."""

    def __init__(self, metrics: Metrics, model_name: str) -> None:
        self._metrics = metrics
        self._model_name = model_name

    def collect(self) -> Iterator[Metric]:
        """Yields a family for each name."""
        engine = self._metrics.snapshot()
        for row in ROWS:
            value = row.value(self._metrics, engine)
            for name in row.names:
                yield self._family(name, row, value)

    def _family(self, name: str, row: Row, value: Value) -> Metric:
        labels = ["model_name", *row.labels]
        values: Mapping[Any, float | Histogram] = value if isinstance(value, Mapping) else {(): value}
        shown = {
            (self._model_name, *((of_labels,) if isinstance(of_labels, str) else of_labels)): one
            for of_labels, one in values.items()
        }
        if row.of_histograms or isinstance(value, Histogram):
            histograms = HistogramMetricFamily(name, row.help, labels=labels)
            for at, one in shown.items():
                assert isinstance(one, Histogram)
                histograms.add_metric(at, one.buckets(), one.sum)
            return histograms
        family_type = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
        family: CounterMetricFamily | GaugeMetricFamily = family_type(name, row.help, labels=labels)
        for at, one in shown.items():
            assert not isinstance(one, Histogram)
            family.add_metric(at, one)
        return family


def registry_of(metrics: Metrics, model_name: str) -> CollectorRegistry:
    """Returns a new registry with all metrics, and this process's memory and processor time."""
    registry = CollectorRegistry()
    registry.register(_Collector(metrics, model_name))
    ProcessCollector(registry=registry)
    return registry


def registry_of_all(metrics: Metrics, model_name: str, counts: Counts) -> CollectorRegistry:
    """Returns the same for several front-end processes, that have counted `counts` together."""
    registry = CollectorRegistry()
    registry.register(_Collector(with_counts(metrics, counts), model_name))
    registry.register(ProcessesCollector(counts.process))
    return registry


class StatusLine:
    """Logs what the server does, every few seconds while it does something. Also samples the throughput for it."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._steps_total = 0
        self._retractions_total = 0

    async def run(self) -> None:
        """Runs until it is cancelled."""
        self._metrics.sample()
        while True:
            for _ in range(SAMPLES_PER_LINE):
                await asyncio.sleep(SAMPLE_S)
                self._metrics.sample()
            self.write()

    def write(self) -> None:
        """Logs one line if there was a step since the last one, or if requests run or wait."""
        now = self._metrics.snapshot()
        load, rates = now.load, now.rates
        if load.totals.steps == self._steps_total and not load.num_running and not load.num_waiting:
            return
        retractions = load.totals.retractions - self._retractions_total
        self._steps_total, self._retractions_total = load.totals.steps, load.totals.retractions
        logger.info(
            "%d running, %d queued, %.0f output tokens/s, %.0f prompt tokens/s, KV pool %.0f%%, cache hits %.0f%%, "
            "%d retracted",
            load.num_running, load.num_waiting, rates.output_tokens_per_s, rates.prompt_tokens_per_s,
            100 * now.token_usage, 100 * rates.cache_hit_rate, retractions,
        )  # fmt: skip
