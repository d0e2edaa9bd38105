"""The comparison of two trees' programs finds what differs, and nothing in a tree beside itself."""

from __future__ import annotations

from pathlib import Path

import pytest
from check import programs

from tests.grids import NIGHTLY

ROOT = Path(__file__).resolve().parents[2]


def test_a_program_that_one_side_lacks_or_has_twice_is_a_difference(capsys: pytest.CaptureFixture[str]) -> None:
    assert programs.differences(["a", "b", "b"], ["a", "b", "b"], show=False) == ([], [])
    assert programs.differences(["a", "b", "b"], ["a", "b", "c"], show=True) == (["b"], ["c"])
    assert "-c\n+b" in capsys.readouterr().out


@pytest.mark.skipif(not NIGHTLY, reason="starts two engines")
@pytest.mark.parametrize("case", list(programs.CASES))
def test_an_engine_compiles_the_same_programs_twice(case: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert programs.main([str(ROOT), "--only", case]) == 0
    count, _, verdict = capsys.readouterr().out.partition(" programs: ")
    assert int(count.split()[1]) >= (3 if case == "labels" else 6) and verdict == "the same text\n"
