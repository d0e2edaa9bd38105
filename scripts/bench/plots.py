"""The figures of kernels, buckets, contenders and simulated runs as pictures. Needs matplotlib, and imports it late.

Every function raises ImportError where matplotlib isn't installed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from bench.simulation.figures import Distribution, Figures


@contextmanager
def _picture(path: Path, *shape: int, width: float, height: float, title: str | None = None) -> Iterator[Any]:
    """Yields the axes of a figure of `shape` rows and columns, and writes it to `path` at the end."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(*shape, figsize=(width, height), layout="constrained")
    if title is not None:
        figure.suptitle(title)
    yield axes
    figure.savefig(path, dpi=100)
    plt.close(figure)


def plot_kernels(rows: Sequence[Mapping[str, Any]], roofline: Mapping[str, float], title: str, path: Path) -> None:
    """Left: FLOP/s over FLOPs per byte under the roofline. Right: the fraction of it, by case and contender.

    `rows` are those of the JSON files of `bench_kernels.py`.
    """
    timed = [row for row in rows if row["seconds"] and row["is_right"]]
    cases = list(dict.fromkeys(row["case"] for row in timed))
    names = list(dict.fromkeys(row["contender"] for row in timed))
    with _picture(path, 1, 2, width=18, height=4 + 0.3 * len(cases), title=title) as (roof, bars):
        bandwidth, rate = roofline["bytes_per_s"], roofline["flops_per_s"]
        roof.plot([0.1, rate / bandwidth, 100 * rate / bandwidth], [0.1 * bandwidth, rate, rate], color="black")
        roof.set(xscale="log", yscale="log", xlabel="FLOP per byte (useful)", ylabel="FLOP/s")
        bars.axvline(1, color="black")
        bars.set(xlabel="fraction of the measured roofline", yticks=range(len(cases)), yticklabels=cases)
        bars.invert_yaxis()
        for i, name in enumerate(names):
            mine = [row for row in timed if row["contender"] == name]
            style = {"label": name, "color": f"C{i}", "marker": "o" if mine[0]["is_ours"] else "x", "linestyle": "none"}
            computing = [row for row in mine if row["flops"]]  # a store has no FLOPs
            roof.plot([r["flops"] / r["num_bytes"] for r in computing], [r["flops_per_s"] for r in computing], **style)
            bars.plot([row["fraction"] for row in mine], [cases.index(row["case"]) for row in mine], **style)
        bars.grid(axis="x", alpha=0.3)
        bars.legend(fontsize="small")


def plot_buckets(report: dict[str, Any], path: Path) -> None:
    """Left: step times by size, with the suggested sizes. Right: what compiling each program takes."""
    title = f"{Path(report['model']).name}, {report['platform']}"
    with _picture(path, 1, 2, width=14, height=6, title=title) as (times, programs):
        for kind in ("decode", "extend"):
            rows = [row for row in report["steps"] if row["kind"] == kind and row["sampling"] == "greedy"]
            for seqs in sorted({0 if kind == "decode" else row["seqs"] for row in rows}):
                mine = [row for row in rows if kind == "decode" or row["seqs"] == seqs]
                label = kind if kind == "decode" else f"extend, {seqs} sequences"
                times.plot([row["tokens"] for row in mine], [row["median_ms"] for row in mine], "o-", label=label)
            for size in report["suggested"][f"{kind}_buckets"]:
                times.axvline(size, color="C0" if kind == "decode" else "C1", alpha=0.3)
        times.set(xscale="log", yscale="log", xlabel="tokens (lines: suggested sizes)", ylabel="ms a step")
        times.legend()
        names = [f"{row['kind']} {row['tokens']} x {row['seqs']}" for row in report["programs"]]
        for name in ("compile_s", "cached_s"):
            programs.barh(names, [row[name] for row in report["programs"]], label=name)
        programs.set(xlabel="s")
        programs.legend()


def plot_peers(figures: dict[str, Any], ours: str, title: str, path: Path) -> None:
    """Output tokens per second: bars of the medians, fastest first, with the least and the most of the rounds.

    Names that begin with `ours` get a colour of their own.
    """
    speeds = {name: of["output_tokens_per_s"] for name, of in figures["contenders"].items()}
    names = sorted(speeds, key=lambda name: speeds[name]["median"])
    medians = [speeds[name]["median"] for name in names]
    spreads = [
        [abs(speeds[name][end] - median) for name, median in zip(names, medians, strict=True)] for end in ("min", "max")
    ]
    colors = ["C0" if name.startswith(ours) else "0.7" for name in names]
    with _picture(path, width=9, height=1 + 0.35 * len(names)) as axes:
        bars = axes.barh(names, medians, xerr=spreads, color=colors, capsize=3)
        axes.bar_label(bars, fmt="%.0f", padding=6)
        axes.set(title=title, xlabel="output tokens/s (median; lines: least and most of the rounds)")
        axes.spines[["top", "right"]].set_visible(False)


def plot_simulation(figures: Figures, title: str, path: Path) -> None:
    """The queue, the pool and the token rates over simulated time, and the distributions of latencies."""
    seconds = np.array([at_s for at_s, _ in figures.series])
    with _picture(path, 2, 2, width=14, height=8, title=title) as axes:
        (queue, rates), (pool, latency) = axes
        for name in ("num_waiting", "num_running"):
            queue.plot(seconds, [getattr(load, name) for _, load in figures.series], label=name)
        queue.set(xlabel="simulated s", ylabel="requests")
        for name in ("prompt_tokens", "output_tokens"):
            totals = [getattr(load.totals, name) for _, load in figures.series]
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


def _cumulative(distribution: Distribution) -> tuple[np.ndarray, np.ndarray]:
    values, counts = np.array(distribution.values), np.array(distribution.counts)
    order = np.argsort(values)
    return values[order], np.cumsum(counts[order]) / max(counts.sum(), 1)
