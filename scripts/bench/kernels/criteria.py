"""What the kernels are meant to reach on a GPU, and whether a benchmark's rows show it. Pure functions of the rows.

Shares are of what the same run measured: copy bandwidth for decode and store, the bf16 matrix product for extend.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Rows = Sequence[Mapping[str, Any]]


@dataclasses.dataclass(frozen=True)
class Criterion:
    """The best right backend of ours has to reach `share` of a ceiling on one case; `goal` is what we hope for."""

    case: str
    ceiling: str
    share: float
    goal: float


CRITERIA = (
    *(Criterion(f"decode 64 x 4096, page {page}", "bytes_per_s", 0.80, 0.92) for page in (16, 64)),
    *(Criterion(f"decode 8 x 4096, page {page}", "bytes_per_s", 0.60, 0.92) for page in (16, 64)),
    *(Criterion(f"extend 1 x 8192, page {page}", "flops_per_s", 0.50, 0.80) for page in (16, 64)),
    *(
        Criterion(f"store {tokens}, page {page}", "bytes_per_s", 0.75, 0.90)
        for tokens in (4096, 16384, 65536)
        for page in (16, 64)
    ),
)


@dataclasses.dataclass(frozen=True)
class Verdict:
    """One line of a summary. `passed` is None where nothing was measured."""

    what: str
    passed: bool | None
    detail: str


def judge(rows: Rows, roofline: Mapping[str, float]) -> list[Verdict]:
    """Every criterion, then whether ours is ahead of all baselines of each case."""
    return [*(_judge_share(each, rows, roofline) for each in CRITERIA), *_judge_baselines(rows)]


def judge_checks(checks: Iterable[Mapping[str, Any]]) -> list[Verdict]:
    """One line for each backend of a correctness run."""
    by_backend: dict[str, list[Mapping[str, Any]]] = {}
    for check in checks:
        by_backend.setdefault(check["backend"], []).append(check)
    verdicts = []
    for backend, mine in by_backend.items():
        counts = collections.Counter(check["verdict"] for check in mine)
        bad = [f"{c['op']} {c['spec']}" for c in mine if c["verdict"] in ("failed", "crashed")]
        detail = ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
        detail += f": {'; '.join(bad[:6])}{' ...' if len(bad) > 6 else ''}" if bad else ""
        passed = False if bad else (counts["passed"] > 0 or None)  # a backend that refused everything showed nothing
        verdicts.append(Verdict(f"correct on this device: {backend}", passed, detail))
    return verdicts


def fastest(rows: Rows, case: str, *, ours: bool) -> Mapping[str, Any] | None:
    """The fastest right row of a case, among our backends or among the others."""
    mine = [row for row in rows if row["case"] == case and row["is_ours"] == ours]
    right = [row for row in mine if row["seconds"] and row["is_right"]]
    return min(right, key=lambda row: row["seconds"], default=None)


def _judge_share(criterion: Criterion, rows: Rows, roofline: Mapping[str, float]) -> Verdict:
    what = f"{criterion.case}: at least {criterion.share:.0%} of the ceiling (goal {criterion.goal:.0%})"
    best = fastest(rows, criterion.case, ours=True)
    if best is None:
        return Verdict(what, None, "not measured")
    share = best[criterion.ceiling] / roofline[criterion.ceiling]
    return Verdict(
        what, share >= criterion.share, f"{share:.1%} by {best['contender']}, {best['seconds'] * 1e6:.1f} us"
    )


def _judge_baselines(rows: Rows) -> list[Verdict]:
    verdicts = []
    for case in dict.fromkeys(row["case"] for row in rows):
        mine, other = fastest(rows, case, ours=True), fastest(rows, case, ours=False)
        what = f"{case}: ahead of every baseline"
        if mine is None or other is None:
            verdicts.append(Verdict(what, None, "no baseline ran" if mine else "none of our backends ran"))
            continue
        ratio = other["seconds"] / mine["seconds"]
        verdicts.append(
            Verdict(what, ratio > 1, f"{mine['contender']} is {ratio:.2f} x as fast as {other['contender']}")
        )
    return verdicts
