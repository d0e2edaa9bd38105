"""Rows as lines of a table."""

from __future__ import annotations

from bench.kernels.measure import Row
from bench.kernels.work import Roofline

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
