"""Steps are built as their texts say, and variants are measured side by side."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import numpy as np
import pytest
from bench.steps import Seq, page_tables, parse_step

from jaxsgl.batch.buckets import Capacity
from jaxsgl.errors import ConfigError
from tests.engine.conftest import MODEL
from tests.grids import NIGHTLY
from tests.scripts.running import run_script


def test_a_text_names_every_sequence_of_a_step() -> None:
    assert parse_step("2x1+499") == [Seq(1, 499, leader=0), Seq(1, 499, leader=1)]
    assert parse_step("1x512,2x48+16") == [Seq(512, 0), Seq(48, 16, leader=1), Seq(48, 16, leader=2)]
    shared = parse_step("1x9,4x1+50@32:2")[1:]
    assert [(seq.shared, seq.leader) for seq in shared] == [(32, 1), (32, 1), (32, 3), (32, 3)]


@pytest.mark.parametrize("text", ["", "32", "x5", "2x0+5", "2x5+", "2x1+16@32:2", "1x5 1x6"])
def test_a_text_that_is_not_a_step_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"write COUNTxNEW|1 and more"):
        parse_step(text)


def test_sequences_share_the_named_pages_and_no_more() -> None:
    capacity = Capacity(page_size=16, num_pages=100, num_rows=4, context_length=128, max_extend_tokens=1, vocab_size=10)
    tables = page_tables(capacity, parse_step("4x1+50@40:2"), np.random.default_rng(0))
    assert tables.shape == (4, 8)
    for first, second in ((0, 1), (2, 3)):
        assert (tables[first, :2] == tables[second, :2]).all(), "two whole pages hold the 40 shared tokens"
    pages = [*tables[0, :4], *tables[1, 2:4], *tables[2, :4], *tables[3, 2:4]]
    assert len(set(pages)) == len(pages) and 0 not in pages
    assert not tables[:, 4:].any()


@pytest.mark.skipif(not NIGHTLY, reason="compiles two engines; by night")
def test_variants_take_turns_on_the_same_steps(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    file = tmp_path / "steps.json"
    flags = ["--model", tmp_path, "--load-format", "dummy", "--page-size", 4, "--rounds", 2, "--runs", 1]
    variants = ["--variants", "", "XLA_FLAGS= --attention-backend reference"]
    shown = run_script("bench step", *flags, "--steps", "3x1+20@8:3", "1x16", *variants, "--json", file).stdout
    rows = json.loads(file.read_text())["rows"]
    assert [(row["step"], row["variant"]) for row in rows] == [
        (step, variant) for step in ("3x1+20@8:3", "1x16") for variant in variants[1:]
    ]
    for row in rows:
        walls = [turn["wall_ms"] for turn in row["rounds"]]
        assert len(walls) == 2 and 0 < row["wall_ms"]["least"] == min(walls) <= row["wall_ms"]["median"]
        assert f"{row['wall_ms']['median']:9.2f}" in shown
    for first, second in (rows[:2], rows[2:]):
        assert first["times_of_first"] == {"median": 1, "least": 1, "most": 1}
        ratios = [b["wall_ms"] / a["wall_ms"] for a, b in zip(first["rounds"], second["rounds"], strict=True)]
        assert second["times_of_first"]["most"] == max(ratios)


def test_a_variant_that_cannot_start_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    flags = ["--model", tmp_path, "--load-format", "dummy", "--steps", "1x16", "--variants", "--page-size 999"]
    with pytest.raises(subprocess.CalledProcessError) as failed:
        run_script("bench step", *flags)
    assert "error: variant '--page-size 999': --page-size is 999, but must be auto, or 1 to 256" in failed.value.stderr
