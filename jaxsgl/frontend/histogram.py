"""A histogram for the hot path: one bisection per observation, no lock, since one thread observes and reads.

prometheus_client's own takes a lock for each of two numbers, and counts one value at a time. Used by metrics.py.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left


class Histogram:
    """Counts values up to each of `bounds` (ascending), and the rest."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Counts `value` as `times` equal ones."""
        self._counts[bisect_left(self._bounds, value)] += times
        self.sum += value * times

    def buckets(self) -> list[tuple[str, float]]:
        """(bound, how many values are up to it) for each bound and infinity, as Prometheus wants them."""
        bounds = [*map(str, self._bounds), "+Inf"]
        return [(bound, float(count)) for bound, count in zip(bounds, itertools.accumulate(self._counts), strict=True)]


def one_two_five(first: float, last: float) -> tuple[float, ...]:
    """Bounds 1, 2, 5, 10, 20, ... times a power of ten, from `first` to `last`."""
    series = (float(f"{digit}e{power}") for power in range(-9, 10) for digit in (1, 2, 5))
    return tuple(bound for bound in series if first <= bound <= last)
