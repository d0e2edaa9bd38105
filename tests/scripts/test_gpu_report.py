"""One call runs every section, and the failure of one section does not affect the rest."""

import dataclasses
import functools
import itertools
import json
import sys
import time
from pathlib import Path

import pytest
from bench.gpu_report import BUDGET, PARTS, Phase, Report, Section, phases
from bench.gpu_summary import judge_engine

from tests.grids import NIGHTLY
from tests.scripts.running import run_script


def python(work: Path, name: str, code: str, kind: str = "check") -> Section:
    result = work / f"{name}.json"
    return Section(name, kind, (sys.executable, "-c", code, str(result), BUDGET), result)


def write(checks: str) -> str:
    return f"import json, sys; open(sys.argv[1], 'w').write(json.dumps({checks})); print('told', sys.argv[2])"


@functools.cache
def usage_of(command: str) -> str:
    return run_script(command, "--help").stdout


PASSED = "{'checks': [{'backend': 'xla', 'op': 'store_kv', 'spec': 'x', 'verdict': 'passed'}], 'left_out': ['y']}"


def run(tmp_path: Path, *sections: Section, budget_s: float = 60) -> tuple[Report, dict]:
    report = Report(tmp_path, tmp_path, budget_s)
    report.run(Phase(sections, weight=1), weight_left=1)
    return report, json.loads((tmp_path / "report.json").read_text())


def test_a_hanging_section_is_ended_and_keeps_what_it_had_written(tmp_path: Path) -> None:
    hangs = python(tmp_path, "hangs", write(PASSED) + "; import time; time.sleep(600)")
    begin = time.monotonic()
    report, result = run(tmp_path, hangs, python(tmp_path, "fine", write(PASSED)), budget_s=4)
    assert time.monotonic() - begin < 30
    hung, fine = result["sections"]
    assert hung["timed_out"] and not fine["timed_out"] and fine["status"] == 0
    assert len(result["check"]) == 2
    assert report.found_wrong


def test_a_crash_leaves_the_end_of_its_log_and_the_results_of_other_sections(tmp_path: Path) -> None:
    crash = python(tmp_path, "crash", "print('illegal address'); import os; os.abort()")
    report, result = run(tmp_path, crash, python(tmp_path, "fine", write(PASSED)))
    crashed, fine = result["sections"]
    assert crashed["status"] == -6 and "illegal address" in crashed["last_words"]
    assert fine["status"] == 0 and len(result["check"]) == 1
    assert report.found_wrong
    assert "illegal address" in (tmp_path / "log.txt").read_text()


def test_sections_get_their_time_on_the_command_line(tmp_path: Path) -> None:
    report, result = run(tmp_path, python(tmp_path, "fine", write(PASSED)), budget_s=100)
    assert not report.found_wrong
    assert "told 85" in (tmp_path / "log.txt").read_text()
    assert result["sections"][0]["left_out"] == ["y"]


def test_unused_time_goes_to_later_phases(tmp_path: Path) -> None:
    report = Report(tmp_path, tmp_path, budget_s=100)
    for name, weight_left in (("first", 4), ("second", 1)):
        report.run(Phase((python(tmp_path, name, write(PASSED)),), weight=1), weight_left)
    first, second = (int(line.split()[1]) for line in (tmp_path / "log.txt").read_text().splitlines() if "told" in line)
    assert first == 10 and second > 75


@pytest.mark.parametrize("platform", ["cpu", "gpu", "tpu"])
def test_every_command_of_the_plan_is_one_that_its_script_takes(platform: str, tmp_path: Path) -> None:
    plan = phases({"platform": platform}, tmp_path, parts=PARTS, smoke=False)
    sections = [section for phase in plan for section in phase.sections]
    assert {section.kind for section in sections} == {"check", "bench", *PARTS} - {"kernels"}
    for section in sections:
        script, *names = itertools.takewhile(lambda word: not word.startswith("--"), section.command[1:])
        usage = usage_of(" ".join([Path(script).name, *names]))
        assert all(flag in usage for flag in section.command if flag.startswith("--"))


def test_only_chosen_sections_are_planned(tmp_path: Path) -> None:
    plan = phases({"platform": "gpu"}, tmp_path, parts=("offline", "sampling"), smoke=False)
    names = [section.name for phase in plan for section in phase.sections]
    assert names == ["offline qwen3-0.6b", "offline qwen3-8b", "sampling"]


def test_a_section_whose_package_is_missing_is_skipped_with_a_note(tmp_path: Path) -> None:
    section = dataclasses.replace(python(tmp_path, "peers", write(PASSED)), needs=("torch", "transformers"))
    report = Report(tmp_path, tmp_path, 60)
    report.machine["packages"] = {"torch": "2", "transformers": None}
    report.run(Phase((section,), weight=1), weight_left=1)
    assert not report.found_wrong and not section.result.exists()
    assert "peers: not run: no transformers here" in (tmp_path / "summary.md").read_text()


def offline(fraction: float, idle: float, step_ms: float) -> dict:
    return {
        "roofline": {"fraction": fraction, "fraction_of_busy": fraction},
        "time_split": {"idle": idle, "host_exposed": idle},
        "step_ms": {"decode T=256 S=256 greedy": {"median": step_ms}, "decode T=8 S=8 greedy": {}},
    }


def test_the_engine_passes_what_it_reaches_and_fails_what_it_misses() -> None:
    peers = {
        "settings": {"model": "qwen3-0.6b"},
        "contenders": {f"transformers-{n}": {"ratio_of_best_jaxsgl": {"median": n}} for n in (4.0, 2.5)},
    }
    results = {
        "offline": {"qwen3-0.6b": offline(0.59, 0.04, 1.0), "qwen3-8b": offline(0.61, 0.06, 9.0)},
        "sampling": {"ms": {"256 x 151936": 0.2}},
        "peers": peers,
    }
    passed = [verdict.passed for verdict in judge_engine(results)]
    assert passed == [False, True, False, True, False, True, False]
    assert {verdict.passed for verdict in judge_engine({"offline": {}})} == {None}


def test_a_smoke_run_runs_every_section(tmp_path: Path) -> None:
    """By day without the sections whose scripts have other tests that run them, and without the engine."""
    chosen = ("--tune",) if NIGHTLY else ("--sections", "check,sampling")
    run_script("gpu_report.py", "--smoke", *chosen, "--out", tmp_path, "--budget-s", 1200)
    report = json.loads((tmp_path / "report.json").read_text())
    assert all(section["status"] == 0 for section in report["sections"]), report["sections"]
    names = [section["name"] for section in report["sections"]]
    speed = ["offline bundled", "sampling", "peers", "tune"] if NIGHTLY else ["sampling"]
    mine = ["bench xla", "bench baselines", "engine"] if NIGHTLY else []
    assert names == ["check triton", *mine, *speed]
    assert report["sampling"]["ms"]["4 x 1024"] > 0
    assert {check["backend"] for check in report["check"]} == {"triton"}
    assert all(check["verdict"] == "passed" for check in report["check"])
    assert report["machine"]["platform"] == "cpu" and report["machine"]["packages"]["jax"]
    summary = (tmp_path / "summary.md").read_text()
    assert "pass: correct on this device: triton" in summary and "not measured: decode 64 x 4096" in summary
    assert "not measured: offline, qwen3-8b" in summary
    assert len(list(tmp_path.iterdir())) <= 8
    if NIGHTLY:
        assert all(count == 48 for count in report["engine"]["auto"]["equal_tokens"])
        assert {row["is_ours"] for row in report["bench"]} == {True, False}
        assert report["offline"]["bundled"]["output_tokens_per_s"] > 0 and "- bundled: " in summary
        assert report["peers"]["contenders"]["transformers-static8-float32"]["ratio_of_best_jaxsgl"]["median"] > 0
        assert json.loads((tmp_path / "table.json").read_text())["devices"] == ["cpu"]
