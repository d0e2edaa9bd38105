"""A run as a picture: the queue, the pool and the rates over time, and the distributions. Needs matplotlib."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from bench.simulation.figures import Distribution, Figures


def plot(figures: Figures, title: str, path: Path) -> None:
    """Raises ImportError where matplotlib isn't installed."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    seconds = np.array([at_s for at_s, _ in figures.series])
    figure, axes = plt.subplots(2, 2, figsize=(14, 8), layout="constrained")
    figure.suptitle(title)
    (queue, rates), (pool, latency) = axes
    for name in ("num_waiting", "num_running"):
        queue.plot(seconds, [getattr(load, name) for _, load in figures.series], label=name)
    queue.set(xlabel="simulated s", ylabel="requests")
    for name in ("prompt_tokens_total", "output_tokens_total"):
        totals = [getattr(load, name) for _, load in figures.series]
        rates.plot(seconds[1:], np.diff(totals) / np.diff(seconds), label=name)
    rates.set(xlabel="simulated s", ylabel="tokens/s")
    pool.plot(seconds, [load.used_tokens for _, load in figures.series], label="used by requests")
    pool.set(xlabel="simulated s", ylabel="tokens of KV")
    for name in ("ttft_s", "itl_s", "e2e_s"):
        values, share = _cumulative(getattr(figures, name))
        latency.plot(values, share, label=name)
    latency.set(xscale="log", xlabel="s", ylabel="share at most so long")
    for part in axes.flat:
        part.grid(alpha=0.3)
        part.legend()
    figure.savefig(path, dpi=100)
    plt.close(figure)


def _cumulative(distribution: Distribution) -> tuple[np.ndarray, np.ndarray]:
    values, counts = np.array(distribution.values), np.array(distribution.counts)
    order = np.argsort(values)
    return values[order], np.cumsum(counts[order]) / max(counts.sum(), 1)
