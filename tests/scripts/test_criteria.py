"""A summary passes a criterion only if a right result reached it; missing results never pass."""

import pytest
from bench.report.ladder import CRASHES, HANGS
from bench.report.summary import CRITERIA, judge, judge_checks, judge_engine, no_results, step_lines, summary

pytestmark = pytest.mark.unit

ROOFLINE = {"bytes_per_s": 4e12, "flops_per_s": 8e14}


def row(case: str, contender: str, share: float, *, is_ours: bool = True, is_right: bool = True) -> dict:
    """A row that reaches a share of both ceilings."""
    figures = {"bytes_per_s": share * 4e12, "flops_per_s": share * 8e14, "fraction": share}
    known = {"case": case, "contender": contender, "is_ours": is_ours, "is_right": is_right, "error": 1e-3}
    return {**known, **figures, "seconds": 1e-4 / share}


def verdict_on(case: str, *rows: dict, what: str = "ceiling"):
    (verdict,) = [v for v in judge(rows, ROOFLINE) if v.what.startswith(case) and what in v.what]
    return verdict


@pytest.mark.parametrize("criterion", CRITERIA, ids=lambda each: each.case)
def test_a_criterion_passes_from_its_share_on(criterion) -> None:
    assert verdict_on(criterion.case, row(criterion.case, "triton", criterion.share + 0.001)).passed is True
    assert verdict_on(criterion.case, row(criterion.case, "triton", criterion.share - 0.001)).passed is False
    assert verdict_on(criterion.case).passed is None


def test_the_best_right_backend_counts() -> None:
    case = "decode 64 x 4096, page 16"
    verdict = verdict_on(case, row(case, "triton", 0.5), row(case, "mosaic_gpu", 0.9), row(case, "xla", 0.1))
    assert verdict.passed and "90.0% by mosaic_gpu" in verdict.detail
    wrong = row(case, "mosaic_gpu", 0.9, is_right=False)
    assert verdict_on(case, row(case, "triton", 0.5), wrong).passed is False


def test_a_lead_is_judged_against_the_fastest_baseline() -> None:
    slow, fast = (row("x", name, share, is_ours=False) for name, share in (("gather", 0.1), ("cuDNN", 0.6)))
    assert verdict_on("x", row("x", "triton", 0.7), slow, fast, what="baseline").passed is True
    behind = verdict_on("x", row("x", "triton", 0.5), slow, fast, what="baseline")
    assert behind.passed is False and "triton is 0.83 x as fast as cuDNN" in behind.detail
    assert verdict_on("x", row("x", "triton", 0.5), what="baseline").passed is None


def test_failed_and_crashed_checks_fail_their_backend_only() -> None:
    def check(backend: str, verdict: str) -> dict:
        return {"backend": backend, "verdict": verdict, "op": "store_kv", "spec": verdict}

    checks = [check("xla", "passed"), check("triton", "crashed"), check("triton", "passed"), check("xla", "refused")]
    xla, triton = judge_checks(checks)
    assert xla.passed is True and xla.detail == "1 passed, 1 refused"
    assert triton.passed is False and "store_kv crashed" in triton.detail


def test_a_backend_that_refused_everything_has_not_passed() -> None:
    refused = {"backend": "mosaic_gpu", "verdict": "refused", "op": "store_kv", "spec": "any"}
    (verdict,) = judge_checks([refused])
    assert verdict.passed is None


def test_without_a_benchmark_each_criterion_is_not_measured() -> None:
    text, _ = summary({}, nothing_but())
    assert text.count("- not measured: ") == len(CRITERIA) + len(judge_engine(nothing_but()))


def nothing_but(**results) -> dict:
    return no_results() | results


def test_a_summary_is_wrong_if_a_section_died_or_a_result_is_wrong() -> None:
    section = {"name": "bench triton", "status": 0, "seconds": 3.0, "hung": "", "hung_at": []}
    assert summary({}, nothing_but(sections=[section]))[1] is False
    hung = {**section, "status": -6, "hung": "silent for 60 s", "hung_at": ["decode 8 x 4096, page 16"]}
    text, is_wrong = summary({}, nothing_but(sections=[hung]))
    assert is_wrong and "bench triton: status -6, 3.0 s, silent for 60 s" in text
    assert "hung or crashed at: decode 8 x 4096, page 16" in text
    found_at_first = {**section, "hung_at": ["store"]}  # the second start, without it, went well
    assert summary({}, nothing_but(sections=[found_at_first]))[1] is True
    bad = row("decode 8 x 4096, page 16", "triton", 0.9, is_right=False)
    text, is_wrong = summary({}, nothing_but(bench=[bad], rooflines=[ROOFLINE]))
    assert is_wrong and "wrong result: triton on decode 8 x 4096, page 16" in text


def test_slowness_is_reported_but_is_no_error() -> None:
    slow = row("decode 8 x 4096, page 16", "triton", 0.2)
    text, is_wrong = summary({}, nothing_but(bench=[slow], rooflines=[ROOFLINE]))
    assert not is_wrong
    assert "**FAIL**: decode 8 x 4096, page 16: at least 60% of the ceiling (goal 92%): 20.0% by triton" in text


@pytest.mark.parametrize("name", ["decode, one tile", HANGS, CRASHES])
@pytest.mark.parametrize("verdict", ["passed", "refused", "not run", "failed", "hung", "crashed"])
def test_rungs_that_fail_on_purpose_must_and_all_others_must_not(name: str, verdict: str) -> None:
    rung = {"name": name, "verdict": verdict, "note": "a note"}
    text, is_wrong = summary({}, nothing_but(rungs=[rung]))
    right = {HANGS: "hung", CRASHES: "crashed"}.get(name)
    assert is_wrong == (verdict != right if right else verdict in ("failed", "hung", "crashed"))
    assert name in text and "a note" in text


def test_steps_stand_beside_their_prediction() -> None:
    times = {"wall_ms": {"median": 13.0}, "queued_ms": {"median": 12.0}, "submit_ms": {"median": 1.1}}
    rows = [{"step": step, **times} for step in ("256x1+1023", "7x1")]
    predicted = {
        "qwen3-0.6b mosaic_gpu decode 256 greedy": {"step_us": 8000.0, "floor_us": 7500.0, "forecast_us": 10_000.0}
    }
    first, second = step_lines({"steps": {"qwen3-0.6b": rows}, "predicted": predicted})
    assert first == "| qwen3-0.6b decode 256 | 13.00 | 12.00 | 1.10 | 10.00 | 120% | 8.00 | 7.50 |"
    assert second == "| qwen3-0.6b 7x1 | 13.00 | 12.00 | 1.10 | - | - | - | - |"
