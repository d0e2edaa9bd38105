"""Rows, as the JSON files have them, as a picture. Needs matplotlib and nothing else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def plot(rows: Sequence[Mapping[str, Any]], roofline: Mapping[str, float], title: str, path: Path) -> None:
    """Left: FLOP/s over FLOPs per byte under the roofline. Right: the fraction of it, by case and contender.

    Raises:
        ImportError: matplotlib isn't installed.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    timed = [row for row in rows if row["seconds"] and row["is_right"]]
    cases = list(dict.fromkeys(row["case"] for row in timed))
    names = list(dict.fromkeys(row["contender"] for row in timed))
    figure, (roof, bars) = plt.subplots(1, 2, figsize=(18, 4 + 0.3 * len(cases)), layout="constrained")
    figure.suptitle(title)
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
    figure.savefig(path, dpi=100)
    plt.close(figure)
