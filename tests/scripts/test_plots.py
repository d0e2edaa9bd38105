"""Pictures show what the figures say; as SVG with letters, so that a test can read them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import matplotlib
import pytest
from bench.plots import plot_buckets, plot_kernels, plot_peers

from tests.scripts.running import ROOT, run_script


@pytest.fixture(autouse=True)
def letters() -> Iterator[None]:
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        yield


def test_the_fastest_contender_is_on_top_of_its_figure(tmp_path: Path) -> None:
    speeds = {"llama.cpp": 194.0, "jaxsgl-bfloat16": 299.0, "transformers": 40.4}
    contenders = {
        name: {"output_tokens_per_s": {"median": of, "min": of - 3, "max": of + 3}} for name, of in speeds.items()
    }
    plot_peers({"contenders": contenders}, "jaxsgl", "a title", tmp_path / "peers.svg")
    drawn = (tmp_path / "peers.svg").read_text()
    assert "a title" in drawn and all(f">{number}<" in drawn for number in ("194", "299", "40"))
    places = [drawn.index(f">{name}<") for name in ("transformers", "llama.cpp", "jaxsgl-bfloat16")]
    assert places == sorted(places), "an axis is labelled from below"


def test_times_and_programs_of_buckets_are_drawn(tmp_path: Path) -> None:
    steps = [
        {"kind": kind, "tokens": size, "seqs": 8, "sampling": "greedy", "median_ms": float(size)}
        for kind in ("decode", "extend")
        for size in (16, 32)
    ]
    report = {
        "model": "some/where/mid",
        "platform": "cpu",
        "steps": steps,
        "programs": [{"kind": "decode", "tokens": 16, "seqs": 16, "compile_s": 2.0, "cached_s": 0.1}],
        "suggested": {"decode_buckets": [16], "extend_buckets": [32]},
    }
    plot_buckets(report, tmp_path / "buckets.svg")
    drawn = (tmp_path / "buckets.svg").read_text()
    for words in (">mid, cpu<", ">decode<", ">extend, 8 sequences<", ">decode 16 x 16<", ">compile_s<"):
        assert words in drawn


def test_measured_kernels_are_drawn_with_the_roofline(tmp_path: Path) -> None:
    kept = json.loads((ROOT / "benchmarks/cpu/kernels.json").read_text())
    plot_kernels(kept["rows"], kept["roofline"], "a title", tmp_path / "kernels.svg")
    drawn = (tmp_path / "kernels.svg").read_text()
    measured = [row for row in kept["rows"] if row["fraction"] is not None]
    assert len(measured) > 20
    for row in measured:
        assert f">{row['case']}<" in drawn and f">{row['contender']}<" in drawn


def test_a_simulated_run_is_drawn(tmp_path: Path) -> None:
    picture = tmp_path / "run.png"
    run_script("simulate.py", "--num-prompts", 20, "--plot", picture)
    assert picture.read_bytes().startswith(b"\x89PNG")
