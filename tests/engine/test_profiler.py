from __future__ import annotations

from pathlib import Path

import pytest

from jaxsgl.engine.engine import Engine
from tests.engine.driving import Driver


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
