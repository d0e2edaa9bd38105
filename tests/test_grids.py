from __future__ import annotations

import itertools

import pytest

from tests import grids

AXES = ("abcd", range(3), (True, False), "xyz")


def test_by_day_any_two_values_of_two_axes_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grids, "NIGHTLY", False)
    points = grids.pairwise(*AXES)
    for i, j in itertools.combinations(range(len(AXES)), 2):
        assert {(point[i], point[j]) for point in points} == set(itertools.product(AXES[i], AXES[j]))
    assert len(points) <= 15 and points == grids.pairwise(*AXES)
    assert grids.daily("abcde", every=2) == ["a", "c", "e"] and grids.count(3, 30) == 3


def test_singly_has_each_value_once_by_day(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grids, "NIGHTLY", False)
    points = grids.singly(*AXES, range(8))
    assert len(points) == 8
    for place, axis in enumerate((*AXES, range(8))):
        assert {point[place] for point in points} == set(axis)
    assert len({point[:3] for point in points}) == 8, "axes go in step"
    monkeypatch.setattr(grids, "NIGHTLY", True)
    assert grids.singly(*AXES) == grids.covering(*AXES)


@pytest.mark.parametrize("is_night", [False, True])
def test_what_covers_axes_is_the_same_by_day_and_by_night(monkeypatch: pytest.MonkeyPatch, is_night: bool) -> None:
    monkeypatch.setattr(grids, "NIGHTLY", False)
    of_a_day = grids.pairwise(*AXES)
    monkeypatch.setattr(grids, "NIGHTLY", is_night)
    assert grids.covering(*AXES) == of_a_day


def test_by_night_all_points_are_tested(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grids, "NIGHTLY", True)
    assert grids.pairwise(*AXES) == list(itertools.product(*AXES))
    assert len(grids.covering(*AXES)) <= 15
    assert grids.daily("abcde", every=2) == list("abcde") and grids.count(3, 30) == 30
