from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from jaxsgl.engine.engine import Engine
from tests.engine.driving import Driver
from tests.grids import NIGHTLY

ROOT = Path(__file__).resolve().parents[2]


def test_a_profile_is_a_trace_of_the_steps_that_ran_meanwhile(engine: Engine, tmp_path: Path) -> None:
    driver, before = Driver(engine), engine.recompiles
    engine.start_profile(str(tmp_path / "new" / "traces"))
    driver.generate({0: [5, 6, 7]}, 3)
    engine.stop_profile()
    (trace,) = (tmp_path / "new" / "traces").rglob("*.xplane.pb")
    assert b"forward" in trace.read_bytes()
    assert engine.recompiles == before


def test_a_folder_that_cannot_be_made_is_refused_before_anything_is_recorded(engine: Engine, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for folder in (str(tmp_path / "file"), str(tmp_path / "file" / "traces"), "no\0name"):
        with pytest.raises((OSError, ValueError)):
            engine.start_profile(folder)
    with pytest.raises(RuntimeError, match="No profile started"):
        engine.stop_profile()


def test_a_trace_that_cannot_be_written_is_dropped_and_the_next_one_is_recorded(engine: Engine, tmp_path: Path) -> None:
    driver = Driver(engine)
    engine.start_profile(str(tmp_path / "gone"))
    (tmp_path / "gone").rmdir()
    (tmp_path / "gone").touch()
    with pytest.raises(RuntimeError, match="gone"):
        engine.stop_profile()
    engine.start_profile(str(tmp_path / "next"))
    driver.generate({0: [5, 6, 7]}, 3)
    engine.stop_profile()
    assert list((tmp_path / "next").rglob("*.xplane.pb"))


@pytest.mark.skipif(not NIGHTLY, reason="loads a model into a process of its own")
def test_the_memory_that_a_profile_took_is_returned(tmp_path: Path) -> None:
    """The first one of a process counts: what it leaves, later ones use again."""
    program = """
import sys, jaxsgl
from jaxsgl.scheduler.orders.profiling import resident_bytes
llm = jaxsgl.LLM(max_running_requests=4)
params = jaxsgl.SamplingParams(temperature=0.0, max_tokens=150, ignore_eos=True)
llm.generate(["One?"] * 4, params)
before = resident_bytes()
llm.engine.start_profile(sys.argv[1])
llm.generate(["Two?"] * 4, params)
recorded = resident_bytes() - before
llm.engine.stop_profile()
left = resident_bytes() - before
assert recorded > 5e6, recorded
assert left < 30e6, left
"""
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=True, cwd=ROOT)
