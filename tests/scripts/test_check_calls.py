"""One Generate call is traced from the receipt of its message to its last reply."""

import json

import pytest
from check.calls import traced_call

from tests.scripts.running import run_script


@pytest.fixture(scope="module")
def figures():
    return traced_call(prompt_len=30, output_len=5).figures()


def test_the_call_passes_through_mailbox_loop_scheduler_cache_and_batch(figures):
    folders = {name.rpartition("/")[0] for name in figures["files"]}
    assert {"scheduler", "cache", "batch"} <= folders
    assert "ipc.py" in figures["files"] and "scheduler/loop.py" in figures["files"]


def test_start_up_and_the_stand_in_for_the_device_are_not_counted(figures):
    assert not any(name.startswith("testing/") for name in figures["files"])
    assert figures["files"]["scheduler/loop.py"] == 1 + 5  # the running loop itself, and the read of each step
    assert all("config" not in name for name in figures["files"])


def test_a_plain_call_takes_no_detour_through_what_it_did_not_ask_for(figures):
    assert figures["unasked"] == []
    assert figures["num_files"] <= 22


def test_figures_agree_with_each_other(figures):
    assert figures["num_files"] == len(figures["files"]) <= figures["num_functions"] <= figures["num_calls"]
    assert figures["num_calls"] == sum(figures["files"].values())
    assert 0 < figures["crossing_share"] < 1
    assert set(figures["unasked"]) <= set(figures["files"])


def test_the_same_call_gives_the_same_counts(figures):
    assert traced_call(prompt_len=30, output_len=5).figures() == figures


def test_longer_outputs_take_more_calls(figures):
    assert traced_call(prompt_len=30, output_len=9).figures()["num_calls"] > figures["num_calls"]


def test_the_script_prints_and_writes_the_counts(tmp_path):
    done = run_script("check calls", "--json", tmp_path / "call.json")
    written = json.loads((tmp_path / "call.json").read_text())
    assert f"{written['num_files']} files, {written['num_functions']} functions" in done.stdout
