"""Figures of a simulated run, by the definitions of SGLang's bench_serving.

TTFT: first token - send. E2E: last token - send. TPOT: (E2E - TTFT) / (output tokens - 1), of requests with more than
one. ITL: gap between two tokens of a request. Concurrency: sum of E2E / duration. `step_itl_s` is the longest ITL of
each step, so that a step counts once, however many sequences it holds.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from bench.simulation.engine import SimulatedEngine
from jaxsgl.bench.requests import Ask
from jaxsgl.messages.replies import Load

PERCENTILES = (50, 90, 95, 99)
SERIES_S = 1.0


class Distribution:
    """Values with counts, since all requests of a decode step have the same gap: 50 million gaps fit into memory."""

    def __init__(self) -> None:
        self.values = array("d")
        self.counts = array("q")

    def add(self, value: float, count: int = 1) -> None:
        """Adds `value`, `count` times."""
        self.values.append(value)
        self.counts.append(count)

    def summary(self) -> dict[str, float]:
        """Mean, median, std, p90, p95, p99 and max, as numpy defines them (linear interpolation);

        all 0 without values.
        """
        if not self.values:
            return dict.fromkeys(("mean", "median", "std", "p90", "p95", "p99", "max"), 0.0)
        values, counts = np.array(self.values), np.array(self.counts)
        mean = np.average(values, weights=counts)
        std = np.sqrt(np.average((values - mean) ** 2, weights=counts))
        median, p90, p95, p99 = self._percentiles(values, counts)
        spread = {"median": median, "std": float(std), "p90": p90, "p95": p95, "p99": p99}
        return {"mean": float(mean), **spread, "max": float(values.max())}

    def _percentiles(self, values: npt.NDArray[np.float64], counts: npt.NDArray[np.int64]) -> list[float]:
        order = np.argsort(values)
        values, ends = values[order], np.cumsum(counts[order])
        rank = np.array(PERCENTILES) / 100 * (ends[-1] - 1)
        low, high = (values[np.searchsorted(ends, place, side="right")] for place in (np.floor(rank), np.ceil(rank)))
        found: list[float] = (low + (high - low) * (rank % 1)).tolist()
        return found


@dataclass(slots=True)
class Sent:
    """An open request."""

    ask: Ask
    prompt_len: int
    sent_s: float
    first_s: float = 0.0
    last_s: float = 0.0
    num_tokens: int = 0


@dataclass
class Figures:
    """Counts and distributions, updated during a run."""

    completed: int = 0
    refused: int = 0
    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    duration_s: float = 0.0
    ttft_s: Distribution = field(default_factory=Distribution)
    tpot_s: Distribution = field(default_factory=Distribution)
    itl_s: Distribution = field(default_factory=Distribution)
    e2e_s: Distribution = field(default_factory=Distribution)
    step_itl_s: Distribution = field(default_factory=Distribution)
    load: Load = field(default_factory=Load)
    waiting_seconds: float = 0.0
    running_seconds: float = 0.0
    max_waiting: int = 0
    series: list[tuple[float, Load]] = field(default_factory=list)  # one entry per simulated second, for plots

    def end(self, sent: Sent, cached_tokens: int, now_s: float) -> None:
        """Counts a request that has all its tokens."""
        self.completed += 1
        self.duration_s = now_s
        self.input_tokens += sent.prompt_len
        self.output_tokens += sent.num_tokens
        self.cached_tokens += cached_tokens
        ttft_s, e2e_s = sent.first_s - sent.sent_s, now_s - sent.sent_s
        self.ttft_s.add(ttft_s)
        self.e2e_s.add(e2e_s)
        if sent.num_tokens > 1:
            self.tpot_s.add((e2e_s - ttft_s) / (sent.num_tokens - 1))

    def step(self, load: Load, since_s: float, now_s: float) -> None:
        """Counts a step. From `since_s` to `now_s` the load was `self.load`; from now on it is `load`."""
        self.waiting_seconds += self.load.num_waiting * (now_s - since_s)
        self.running_seconds += self.load.num_running * (now_s - since_s)
        self.max_waiting = max(self.max_waiting, load.num_waiting)
        self.load = load
        if not self.series or now_s - self.series[-1][0] >= SERIES_S:
            self.series.append((now_s, load))

    def summary(self, engine: SimulatedEngine) -> dict[str, Any]:
        """All figures as JSON: seconds, tokens, and shares of 1."""
        duration_s = self.duration_s or 1.0
        busy_s = sum(counts.busy_s for counts in engine.counts.values())
        return {
            "completed": self.completed,
            "refused": self.refused,
            "duration_s": self.duration_s,
            "requests_per_s": self.completed / duration_s,
            "input_tokens_per_s": self.input_tokens / duration_s,
            "output_tokens_per_s": self.output_tokens / duration_s,
            "total_tokens_per_s": (self.input_tokens + self.output_tokens) / duration_s,
            "concurrency": float(np.sum(self.e2e_s.values)) / duration_s,
            **{name: getattr(self, name).summary() for name in ("ttft_s", "tpot_s", "itl_s", "e2e_s", "step_itl_s")},
            "cache_hit_rate": self.cached_tokens / max(self.input_tokens, 1),
            "retractions": self.load.totals.retractions,
            "waiting": {"mean": self.waiting_seconds / duration_s, "max": self.max_waiting},
            "running_mean": self.running_seconds / duration_s,
            "device_busy": busy_s / duration_s,
            "steps": {
                kind: {"count": counts.steps, "seconds": counts.busy_s, "waste": counts.padded / counts.real}
                for kind, counts in sorted(engine.counts.items())
            },
        }
