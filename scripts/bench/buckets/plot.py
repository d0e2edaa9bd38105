"""Times by size, and what compiling takes, as a picture. Needs matplotlib."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def plot(report: dict[str, Any], path: Path) -> None:
    """Raises ImportError where matplotlib isn't installed."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (times, programs) = plt.subplots(1, 2, figsize=(14, 6), layout="constrained")
    figure.suptitle(f"{Path(report['model']).name}, {report['platform']}")
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
    figure.savefig(path, dpi=100)
    plt.close(figure)
