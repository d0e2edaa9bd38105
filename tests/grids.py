"""Grids of parameters, thin enough for every day; JAXSGL_TEST_NIGHTLY=1 asks for the whole ones, and long histories."""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Sequence
from typing import Any, TypeVar

NIGHTLY = bool(os.environ.get("JAXSGL_TEST_NIGHTLY"))

ValueT = TypeVar("ValueT")


def pairwise(*axes: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Points of `covering`; by night, all points of the axes' product, in the same order."""
    return list(itertools.product(*axes)) if NIGHTLY else covering(*axes)


def covering(*axes: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Enough points of the axes' product that any two values of two axes meet in one of them, by day and by night.

    They are the same in every run, in the product's order: a fixture that is costly to set up belongs on the first
    axis.
    """
    points = _cover(list(itertools.product(*map(range, map(len, axes)))))
    return [tuple(axis[i] for axis, i in zip(axes, point, strict=True)) for point in points]


def singly(*axes: Sequence[Any]) -> list[tuple[Any, ...]]:
    """By day as many points as the longest axis has values, so that each value is in one; by night `covering`.

    They are the same in every run.
    """
    if NIGHTLY:
        return covering(*axes)
    drawn, most = random.Random(0), max(map(len, axes))

    def column(length: int) -> list[int]:
        rounds = (drawn.sample(range(length), length) for _ in range(-(-most // length)))
        return [i for each in rounds for i in each][:most]

    points = sorted(zip(*(column(len(axis)) for axis in axes), strict=True))
    return [tuple(axis[i] for axis, i in zip(axes, point, strict=True)) for point in points]


def daily(values: Sequence[ValueT], *, every: int) -> list[ValueT]:
    """One value in `every`, beginning with the first; by night, all values."""
    return list(values[:: 1 if NIGHTLY else every])


def count(of_a_day: int, of_a_night: int) -> int:
    """The number of examples, steps or requests for this run."""
    return of_a_night if NIGHTLY else of_a_day


def _cover(points: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    pairs = {point: set(itertools.combinations(enumerate(point), 2)) for point in points}
    missing = set[Any]().union(*pairs.values())
    cover = []
    while missing:
        best = max(points, key=lambda point: len(pairs[point] & missing))  # the first of the points with most new pairs
        cover.append(best)
        missing -= pairs[best]
    return sorted(cover)
