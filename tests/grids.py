"""Grids of parameters, thin enough for every day; JAXSGL_TEST_NIGHTLY=1 asks for the whole ones, and long histories."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from typing import Any, TypeVar

NIGHTLY = bool(os.environ.get("JAXSGL_TEST_NIGHTLY"))

ValueT = TypeVar("ValueT")


def pairwise(*axes: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Enough points of the axes' product that any two values of two axes meet in one of them; by night, all points.

    They are the same in every run, in the product's order: a fixture that is costly to set up belongs on the first
    axis.
    """
    points = list(itertools.product(*map(range, map(len, axes))))
    return _at(axes, points if NIGHTLY else _cover(points))


def covering(*axes: Sequence[Any]) -> list[tuple[Any, ...]]:
    """The points of `pairwise`'s days, by night too: for axes that no third one changes the meaning of."""
    return _at(axes, _cover(list(itertools.product(*map(range, map(len, axes))))))


def daily(values: Sequence[ValueT], *, every: int) -> list[ValueT]:
    """One value in `every`, beginning with the first; by night, all values."""
    return list(values[:: 1 if NIGHTLY else every])


def count(of_a_day: int, of_a_night: int) -> int:
    """The number of examples, steps or requests for this run."""
    return of_a_night if NIGHTLY else of_a_day


def _at(axes: tuple[Sequence[Any], ...], points: list[tuple[int, ...]]) -> list[tuple[Any, ...]]:
    return [tuple(axis[i] for axis, i in zip(axes, point, strict=True)) for point in points]


def _cover(points: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    pairs = {point: set(itertools.combinations(enumerate(point), 2)) for point in points}
    missing = set[Any]().union(*pairs.values())
    cover = []
    while missing:
        best = max(points, key=lambda point: len(pairs[point] & missing))  # the first of the points with most new pairs
        cover.append(best)
        missing -= pairs[best]
    return sorted(cover)
