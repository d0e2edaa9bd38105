"""The page that a person reads: each criterion with its figure, what failed to run, and the fastest of each case."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bench.kernels.criteria import Verdict, fastest, judge, judge_checks
from bench.report.engine_criteria import judge_engine, offline_lines

_WORDS = {True: "pass", False: "**FAIL**", None: "not measured"}


def summary(machine: Mapping[str, Any], results: Mapping[str, Any]) -> tuple[str, bool]:
    """Markdown, and whether anything is wrong: a wrong result, or a section that died. Slowness is no such thing."""
    checks = judge_checks(results["check"])
    rooflines = results["rooflines"]
    roofline = best_roofline(rooflines)
    speed = judge(results["bench"], roofline)
    wrong_rows = [row for row in results["bench"] if row["seconds"] and not row["is_right"]]
    died = [section for section in results["sections"] if section["status"] or section["timed_out"]]
    lines = [
        f"# {machine.get('kind', 'unknown device')}",
        "",
        f"{machine.get('nvidia_smi') or machine.get('platform')}; packages {machine.get('packages')}; "
        f"commit {machine.get('commit')}",
        "",
        f"Ceilings measured (the best of {len(rooflines)} runs): copy {roofline['bytes_per_s'] / 1e9:.0f} GB/s, "
        f"matrix product {roofline['flops_per_s'] / 1e12:.1f} TFLOP/s.",
        "",
        "## Criteria",
        *map(_line, [*checks, *speed, *judge_engine(results)]),
        "",
        "## Engine: tokens equal to XLA's",
        *(f"- {backend}: {_engine(told)}" for backend, told in results["engine"].items()),
        "",
        "## Offline benchmark",
        *offline_lines(results),
        "",
        "## Sections",
        *(
            f"- {section['name']}: {section.get('note') or _status(section)}"
            f"{', ended by its time limit' if section['timed_out'] else ''}"
            f"{', left out: ' + ', '.join(section['left_out']) if section.get('left_out') else ''}"
            for section in results["sections"]
        ),
        *(f"- wrong result: {row['contender']} on {row['case']}, error {row['error']}" for row in wrong_rows),
        "",
        "## Fastest of each case",
        "| case | ours | us | of roofline | best baseline | us |",
        "|---|---|---|---|---|---|",
        *_table(results["bench"]),
        "",
    ]
    is_wrong = bool(wrong_rows or died) or any(each.passed is False for each in checks)
    return "\n".join(lines), is_wrong


def best_roofline(rooflines: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The highest ceilings that any section measured."""
    return {name: max((each[name] for each in rooflines), default=0.0) for name in ("bytes_per_s", "flops_per_s")}


def _line(verdict: Verdict) -> str:
    return f"- {_WORDS[verdict.passed]}: {verdict.what}: {verdict.detail}"


def _status(section: Mapping[str, Any]) -> str:
    return f"status {section['status']}, {section['seconds']} s"


def _engine(told: Mapping[str, Any]) -> str:
    if "note" in told:
        return str(told["note"])
    seconds = f"started in {told['start_s']:.1f} s, generated in {told['generate_s']:.2f} s"
    return f"{told.get('equal_tokens', 'the reference')}, {seconds}"


def _table(rows: list[dict[str, Any]]) -> list[str]:
    lines = []
    for case in dict.fromkeys(row["case"] for row in rows):
        mine, other = fastest(rows, case, ours=True), fastest(rows, case, ours=False)
        left = f"{mine['contender']} | {mine['seconds'] * 1e6:.1f} | {mine['fraction']:.1%}" if mine else "none | |"
        right = f"{other['contender']} | {other['seconds'] * 1e6:.1f}" if other else "none |"
        lines.append(f"| {case} | {left} | {right} |")
    return lines
