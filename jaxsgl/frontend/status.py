"""The status line: what the server does, every few seconds while it does something. server.py runs it."""

from __future__ import annotations

import asyncio
import logging

from jaxsgl.frontend.metrics import Metrics
from jaxsgl.frontend.throughput import Throughput

SAMPLE_S = 1.0
SAMPLES_PER_LINE = 10

logger = logging.getLogger(__name__)


class StatusLine:
    """Writes the line from `metrics`, and keeps `throughput` sampled."""

    def __init__(self, metrics: Metrics, throughput: Throughput) -> None:
        self._metrics = metrics
        self._throughput = throughput
        self._steps_total = 0

    async def run(self) -> None:
        """Goes on for ever."""
        self._throughput.sample()
        while True:
            for _ in range(SAMPLES_PER_LINE):
                await asyncio.sleep(SAMPLE_S)
                self._throughput.sample()
            self.write()

    def write(self) -> None:
        """Writes the line if there was a step since the last one, or if requests run or wait."""
        now = self._metrics.snapshot()
        load, rates = now.load, now.rates
        if load.steps_total == self._steps_total and not load.num_running and not load.num_waiting:
            return
        self._steps_total = load.steps_total
        logger.info(
            "%d running, %d queued, %.0f output tokens/s, %.0f prompt tokens/s, KV pool %.0f%%, cache hits %.0f%%",
            load.num_running, load.num_waiting, rates.output_tokens_per_s, rates.prompt_tokens_per_s,
            100 * now.token_usage, 100 * rates.cache_hit_rate,
        )  # fmt: skip
