"""Rows as text and as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kernel_bench.measure import Row
from kernel_bench.work import Roofline

HEADER = f"{'case':<38}{'contender':<30}{'time us':>11}{'GB/s':>8}{'TFLOP/s':>9}{'roof':>7}{'error':>9}"


def line(row: Row) -> str:
    """One row, as wide as the header."""
    start = f"{row.case:<38}{row.contender:<30}"
    if row.seconds is None or row.error is None:
        return f"{start}  {row.note}"
    wrong = "" if row.is_right else "  WRONG"
    return (
        f"{start}{row.seconds * 1e6:>11.1f}{row.num_bytes / row.seconds / 1e9:>8.4g}"
        f"{row.flops / row.seconds / 1e12:>9.3g}{row.floor_s / row.seconds:>7.1%}{row.error:>9.1e}{wrong}"
    )


def roofline_line(roofline: Roofline) -> str:
    """The ceilings."""
    return (
        f"measured here: copy {roofline.bytes_per_s / 1e9:.1f} GB/s (read plus written), "
        f"matrix product {roofline.flops_per_s / 1e12:.3f} TFLOP/s"
    )


def plot(rows: Sequence[Row], roofline: Roofline, title: str, path: Path) -> None:
    """Left: FLOP/s over FLOPs per byte under the roofline. Right: the fraction of it, by case and contender.

    Raises:
        ImportError: matplotlib isn't installed.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    timed = [row for row in rows if row.seconds is not None and row.is_right]
    cases = list(dict.fromkeys(row.case for row in timed))
    names = list(dict.fromkeys(row.contender for row in timed))
    figure, (roof, bars) = plt.subplots(1, 2, figsize=(18, 3 + 0.35 * len(cases)), layout="constrained")
    figure.suptitle(title)
    ridge = roofline.flops_per_s / roofline.bytes_per_s
    roof.plot([0.1, ridge, 100 * ridge], [0.1 * roofline.bytes_per_s, *[roofline.flops_per_s] * 2], color="black")
    roof.set(xscale="log", yscale="log", xlabel="FLOP per byte (useful)", ylabel="FLOP/s")
    bars.axvline(1, color="black")
    bars.set(xlabel="fraction of the measured roofline", yticks=range(len(cases)), yticklabels=cases)
    bars.invert_yaxis()
    for i, name in enumerate(names):
        mine = [row for row in timed if row.contender == name]
        style = {"label": name, "color": f"C{i}", "marker": "o" if mine[0].is_ours else "x", "linestyle": "none"}
        with_flops = [row for row in mine if row.flops]
        roof.plot(
            [row.flops / row.num_bytes for row in with_flops], [row.flops_per_s for row in with_flops], **style
        )  # a store has none
        bars.plot([row.fraction for row in mine], [cases.index(row.case) for row in mine], **style)
    bars.grid(axis="x", alpha=0.3)
    bars.legend(fontsize="small")
    figure.savefig(path, dpi=100)
    plt.close(figure)
