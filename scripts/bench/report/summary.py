"""The criteria for kernels and engine on a GPU, and the page that says whether a report meets them.

Pure functions of the results of a report's sections. A kernel's share is of what the same run measured: copy bandwidth
for decode and store, the bfloat16 matrix product for extend. The engine's shares of the roofline are those of
`bench_offline.py`: bytes and FLOPs that the steps need at least, over what the same run measured. Sampling's share is
of a sampled decode step: the forward program (the offline benchmark's step) and the sampling program
(bench sampler).
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from bench.report.ladder import CRASHES, HANGS
from bench.report.plan import STEPS

Rows = Sequence[Mapping[str, Any]]


@dataclasses.dataclass(frozen=True)
class Criterion:
    """Our fastest right backend must reach `share` of a ceiling on one case; `goal` is what we hope for."""

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
    """One line of the summary. `passed` is None if nothing was measured."""

    what: str
    passed: bool | None
    detail: str


def judge(rows: Rows, roofline: Mapping[str, float]) -> list[Verdict]:
    """Judges every criterion of the kernels, and for each case whether ours is ahead of all baselines."""
    return [*(_judge_share(each, rows, roofline) for each in CRITERIA), *_judge_baselines(rows)]


def judge_checks(checks: Iterable[Mapping[str, Any]]) -> list[Verdict]:
    """One verdict for each backend of a correctness run."""
    by_backend: dict[str, list[Mapping[str, Any]]] = {}
    for check in checks:
        by_backend.setdefault(check["backend"], []).append(check)
    verdicts = []
    for backend, mine in by_backend.items():
        counts = collections.Counter(check["verdict"] for check in mine)
        bad = [f"{c['op']} {c['spec']}" for c in mine if c["verdict"] in ("failed", "crashed")]
        detail = ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
        detail += f": {'; '.join(bad[:6])}{' ...' if len(bad) > 6 else ''}" if bad else ""
        passed = False if bad else (counts["passed"] > 0 or None)  # a backend that refused everything has shown nothing
        verdicts.append(Verdict(f"correct on this device: {backend}", passed, detail))
    return verdicts


def fastest(rows: Rows, case: str, *, ours: bool) -> Mapping[str, Any] | None:
    """The fastest right row of a case, among our backends or among the baselines."""
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


JUDGED = ("qwen3-0.6b", "qwen3-8b")
LEAST_SHARE, GOAL_SHARE = 0.60, 0.85  # shares of the roofline
MOST_IDLE = 0.05
MOST_KERNELS = 12  # of a step
ROWS, VOCAB = 256, 151_936
MOST_SAMPLING = 0.05  # share of a step
LEAST_RATIO = 3.0  # our output tokens/s over those of transformers' best mode

Results = Mapping[str, Any]


def judge_engine(results: Results) -> list[Verdict]:
    """Judges every criterion of the engine; "not measured" if its section did not run."""
    verdicts = []
    for shape in JUDGED:
        run = results["offline"].get(shape)
        verdicts += [_judge_roofline(shape, run), _judge_idle(shape, run), _judge_sampling(shape, run, results)]
    return [*verdicts, _judge_peers(results.get("peers"))]


def offline_lines(results: Results) -> list[str]:
    """A line for each run of the offline benchmark."""
    return [f"- {name}: {_offline_line(run)}" for name, run in results["offline"].items()]


def _offline_line(run: Results) -> str:
    waste = ", ".join(f"{name} {share:.1%}" for name, share in run["waste"].items() if share is not None)
    host = run["host"]["wall_ms"].get("median")
    told = f"host {host:.2f} ms per decode step; " if host is not None else ""
    return (
        f"{run['output_tokens_per_s']:,.0f} output tokens/s, {run['total_tokens_per_s']:,.0f} in all; {told}"
        f"padding: {waste}; ready after {run['model']['warmup_s']:.0f} s"
    )


def _judge_roofline(shape: str, run: Results | None) -> Verdict:
    what = f"offline, {shape}: at least {LEAST_SHARE:.0%} of the roofline (goal {GOAL_SHARE:.0%})"
    if run is None:
        return Verdict(what, None, "not measured")
    share, busy = run["roofline"]["fraction"], run["roofline"]["fraction_of_busy"]
    return Verdict(what, share >= LEAST_SHARE, f"{share:.1%} ({busy:.1%} while the device was busy)")


def _judge_idle(shape: str, run: Results | None) -> Verdict:
    what = f"offline, {shape}: device idle less than {MOST_IDLE:.0%}"
    if run is None:
        return Verdict(what, None, "not measured")
    idle, exposed = run["time_split"]["idle"], run["time_split"]["host_exposed"]
    return Verdict(what, idle < MOST_IDLE, f"{idle:.1%} (host exposed {exposed:.1%})")


def _judge_sampling(shape: str, run: Results | None, results: Results) -> Verdict:
    what = f"{shape}: sampling less than {MOST_SAMPLING:.0%} of a step of {ROWS} rows, vocabulary {VOCAB:,}"
    sampling_ms = results.get("sampling", {}).get("ms", {}).get(f"{ROWS} x {VOCAB}")
    buckets = run["step_ms"].items() if run is not None else ()
    step_ms = next((told["median"] for name, told in buckets if name.startswith(f"decode T={ROWS} ")), None)
    if sampling_ms is None or step_ms is None:
        return Verdict(what, None, "not measured")
    share = sampling_ms / (sampling_ms + step_ms)
    return Verdict(what, share < MOST_SAMPLING, f"{share:.1%}: {sampling_ms:.2f} ms beside {step_ms:.2f} ms")


def _judge_peers(peers: Results | None) -> Verdict:
    what = f"{JUDGED[0]}: at least {LEAST_RATIO:.0f} times transformers' best"
    if peers and peers["settings"]["model"] != JUDGED[0]:
        peers = None
    ratios = {
        name: told["ratio_of_best_jaxsgl"]["median"]
        for name, told in (peers["contenders"] if peers else {}).items()
        if name.startswith("transformers") and told["ratio_of_best_jaxsgl"]
    }
    if not ratios:
        absent = "; ".join(f"{name}: {why}" for name, why in (peers or {}).get("could_not_run", {}).items())
        return Verdict(what, None, f"not measured{': ' + absent if absent else ''}")
    best = min(ratios, key=lambda name: ratios[name])
    return Verdict(what, ratios[best] >= LEAST_RATIO, f"{ratios[best]:.1f} times {best}")


_WORDS = {True: "pass", False: "**FAIL**", None: "not measured"}


def no_results() -> dict[str, Any]:
    """The results of a report that has run nothing yet."""
    lists = ("preflight", "rungs", "sections", "check", "bench", "rooflines", "products")
    dicts = ("steps", "engine", "offline", "predicted")
    empty: dict[str, Any] = {name: [] for name in lists}
    return empty | {name: {} for name in dicts} | {"predicted_for": "h200"}


def summary(machine: Mapping[str, Any], results: Mapping[str, Any], *, dry: bool = False) -> tuple[str, bool]:
    """The page as Markdown, and whether anything is wrong: a wrong result, a hang or a crash, but not low speed.

    A dry run is wrong if the rungs that fail on purpose don't.
    """
    checks = judge_checks(results["check"])
    rooflines = results["rooflines"]
    roofline = best_roofline(rooflines)
    speed = judge(results["bench"], roofline)
    wrong_rows = [row for row in results["bench"] if row["seconds"] and not row["is_right"]]
    died = [section for section in results["sections"] if section["status"] or section.get("hung_at")]
    bad = [rung for rung in results["rungs"] if rung["verdict"] not in _allowed(rung["name"])]
    lost = [line for line in results["preflight"] if not line["ok"]]
    lines = [
        f"# {machine.get('kind', 'unknown device')}",
        "",
        f"{machine.get('nvidia_smi') or machine.get('platform')}; packages {machine.get('packages')}; "
        f"ptxas {machine.get('ptxas')}; commit {machine.get('commit')}",
        "",
        f"Ceilings measured (the best of {len(rooflines)} runs): copy {roofline['bytes_per_s'] / 1e9:.0f} GB/s, "
        f"matrix product {roofline['flops_per_s'] / 1e12:.1f} TFLOP/s.",
        *("", "## Preflight"),
        *(f"- {line['what']}: {line['detail']}" for line in lost),
        *("", "## Ladder"),
        *(_rung(rung) for rung in results["rungs"]),
        "",
        "## Criteria",
        *map(_line, [*checks, *speed, *judge_engine(results)]),
        "",
        f"## Steps beside their prediction for an {results['predicted_for'].upper()}",
        "| step | ms | in a row | host's submit | forecast | of it | all kernels at the ceilings | floor |",
        "|---|---|---|---|---|---|---|---|",
        *step_lines(results),
        *("", "## Products", "| product | us | GB/s | TFLOP/s |", "|---|---|---|---|"),
        *map(_product, results["products"]),
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
            f"{', ' + section['hung'] if section.get('hung') else ''}"
            f"{', hung or crashed at: ' + ', '.join(section['hung_at']) if section.get('hung_at') else ''}"
            f"{', left out: ' + ', '.join(section['left_out']) if section.get('left_out') else ''}"
            for section in results["sections"]
        ),
        *(f"- wrong result: {row['contender']} on {row['case']}, error {row['error']}" for row in wrong_rows),
        "",
        "## Fastest of each case",
        "| case | ours | us | of roofline | best baseline | us |",
        "|---|---|---|---|---|---|",
        *_table(results["bench"]),
        *("", "## Kernels of the steps", "| step | kernel | count | us each | us in all |", "|---|---|---|---|---|"),
        *kernel_lines(results),
        "",
    ]
    is_wrong = bool(wrong_rows or died or bad) or any(each.passed is False for each in checks)
    return "\n".join(lines), is_wrong


GOOD = ("passed", "refused", "not run")
ON_PURPOSE = {HANGS: "hung", CRASHES: "crashed"}


def _allowed(rung: str) -> tuple[str, ...]:
    return (ON_PURPOSE[rung],) if rung in ON_PURPOSE else GOOD


def step_lines(results: Results) -> list[str]:
    """A line for each step of fixed shape, joined with its prediction; a dash where there is none.

    A forecast is of steps in a row, whose host works while the device computes.
    """
    lines = []
    for shape, rows in results["steps"].items():
        for row in rows:
            alone, ms, submit = (row[what]["median"] for what in ("wall_ms", "queued_ms", "submit_ms"))
            name, measured = STEPS.get(row["step"], row["step"]), f"{alone:.2f} | {ms:.2f} | {submit:.2f}"
            backends = ("mosaic_gpu", "triton")  # in the order in which "auto" takes them
            predicted = (results["predicted"].get(f"{shape} {backend} {name} greedy") for backend in backends)
            found = next(filter(None, predicted), None)
            if found is None:
                lines.append(f"| {shape} {name} | {measured} | - | - | - | - |")
                continue
            forecast, model, floor = (found[f"{what}_us"] / 1e3 for what in ("forecast", "step", "floor"))
            figures = f"{measured} | {forecast:.2f} | {ms / forecast:.0%} | {model:.2f} | {floor:.2f}"
            lines.append(f"| {shape} {name} | {figures} |")
    return lines


def kernel_lines(results: Results) -> list[str]:
    """The kernels that take the most time of each step: how often it launches them, and what they take."""
    lines = []
    for shape, rows in results["steps"].items():
        for row in rows:
            name, runs = STEPS.get(row["step"], row["step"]), row["traced_runs"]
            for each in row["kernels"][:MOST_KERNELS]:
                figures = f"{each['count'] / runs:g} | {each['us_each']} | {each['us'] / runs:.1f}"
                lines.append(f"| {shape} {name} | {each['name'][:80]} | {figures} |")
    return lines


def _product(row: Mapping[str, Any]) -> str:
    if row["seconds"] is None:
        return f"| {row['name']} | {row['note']} | | |"
    figures = f"{row['bytes_per_s'] / 1e9:.0f} | {row['flops_per_s'] / 1e12:.1f}"
    return f"| {row['name']} | {row['seconds'] * 1e6:.1f} | {figures} |"


def _rung(rung: Mapping[str, Any]) -> str:
    verdict = rung["verdict"] if rung["verdict"] in GOOD else f"**{rung['verdict']}**"
    error = f", error {rung['error']:.1e}" if rung.get("error") is not None else ""
    counts = [str(each["count"]) for each in rung.get("command_buffers", ())]
    error += f", command buffers of its programs: {', '.join(counts)}" if counts else ""
    note = f": {rung['note']}" if rung.get("note") else ""
    return f"- {rung['name']}: {verdict}{error}{note}"


def best_roofline(rooflines: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The highest ceilings that the sections measured."""
    return {name: max((each[name] for each in rooflines), default=0.0) for name in ("bytes_per_s", "flops_per_s")}


def _line(verdict: Verdict) -> str:
    return f"- {_WORDS[verdict.passed]}: {verdict.what}: {verdict.detail}"


def _status(section: Mapping[str, Any]) -> str:
    return f"status {section['status']}, {section['seconds']:.1f} s"


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
