"""Output tokens per second of all contenders, as a picture. Needs matplotlib."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bench.peers.rounds import OURS


def plot(figures: dict[str, Any], title: str, path: Path) -> None:
    """Bars of the medians, fastest first, with the least and the most of the rounds. Raises ImportError without it."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    speeds = {name: of["output_tokens_per_s"] for name, of in figures["contenders"].items()}
    names = sorted(speeds, key=lambda name: speeds[name]["median"])
    medians = [speeds[name]["median"] for name in names]
    spreads = [
        [abs(speeds[name][end] - median) for name, median in zip(names, medians, strict=True)] for end in ("min", "max")
    ]
    colors = ["C0" if name.startswith(OURS) else "0.7" for name in names]
    figure, axes = plt.subplots(figsize=(9, 1 + 0.35 * len(names)), layout="constrained")
    bars = axes.barh(names, medians, xerr=spreads, color=colors, capsize=3)
    axes.bar_label(bars, fmt="%.0f", padding=6)
    axes.set(title=title, xlabel="output tokens/s (median; lines: least and most of the rounds)")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=100)
    plt.close(figure)
