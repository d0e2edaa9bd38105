"""The benchmark's table and JSON say the same, and its figures follow from each other."""

import json

import pytest

from tests.scripts.running import run_script


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict]:
    path = tmp_path_factory.mktemp("bench") / "kernels.json"
    done = run_script("bench_kernels.py", "--quick", "--cases", "extend", "--repeats", 1, "--json", path)
    return done.stdout, json.loads(path.read_text())


def test_a_case_is_measured_right_by_ours_and_by_a_baseline(measured: tuple[str, dict]) -> None:
    _, result = measured
    rows = result["rows"]
    assert {row["case"] for row in rows} == {"extend 64 on 700, page 16"}
    assert {row["is_ours"] for row in rows if row["seconds"]} == {True, False}
    assert all(row["is_right"] and row["error"] < 1e-5 for row in rows if row["seconds"])


def test_figures_follow_from_time_work_and_roofline(measured: tuple[str, dict]) -> None:
    _, result = measured
    assert result["device"]["platform"] == "cpu" and result["jax"] and result["command"] and result["date"]
    roofline = result["roofline"]
    assert 1e8 < roofline["bytes_per_s"] < 1e13 and 1e9 < roofline["flops_per_s"] < 1e16
    for row in result["rows"]:
        if row["seconds"] is None:
            assert row["note"]
            continue
        assert row["fastest"] <= row["seconds"] <= row["slowest"]
        assert row["bytes_per_s"] == pytest.approx(row["num_bytes"] / row["seconds"])
        assert row["flops_per_s"] == pytest.approx(row["flops"] / row["seconds"])
        floor_s = max(row["num_bytes"] / roofline["bytes_per_s"], row["flops"] / roofline["flops_per_s"])
        assert row["fraction"] == pytest.approx(floor_s / row["seconds"])


def test_the_table_has_a_line_for_each_row(measured: tuple[str, dict]) -> None:
    text, result = measured
    for row in result["rows"]:
        lines = [line.removeprefix(row["case"]) for line in text.splitlines() if line.startswith(row["case"])]
        (line,) = [line for line in lines if line.strip().startswith(row["contender"] + " ")]
        assert row["note"] in line
