"""Where the time of a run went, from stamps alone: pure functions of intervals, in seconds.

The device is busy with a step from the end of its `submit`, or of the step before if that is later, until it is
ready. So launching counts as the host's time if nothing else runs meanwhile. All other time of a run is idle. In some
of it the host waited (the step was ready, but the loop had not yet woken up); the rest is exposed: the host computed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

Interval: TypeAlias = tuple[float, float]


@dataclass(frozen=True)
class TimeSplit:
    """Seconds of a run. `busy_s + idle_s` is all of it, and `host_exposed_s` a part of `idle_s`."""

    busy_s: float
    idle_s: float
    host_exposed_s: float


def busy_intervals(submitted_and_ready: Iterable[Interval]) -> list[Interval]:
    """When the device worked on each step: it runs them one after the other, in the order given."""
    busy: list[Interval] = []
    last_ready_s = float("-inf")
    for submitted_s, ready_s in submitted_and_ready:
        ready_s = max(ready_s, last_ready_s)
        busy.append((min(max(submitted_s, last_ready_s), ready_s), ready_s))
        last_ready_s = ready_s
    return busy


def split(run: Interval, busy: Sequence[Interval], waits: Sequence[Interval]) -> TimeSplit:
    """Splits `run`. `busy` and `waits` (the host waits for a step) are in order and each free of overlaps."""
    gaps = list(zip([run[0], *(end for _, end in busy)], [*(begin for begin, _ in busy), run[1]], strict=True))
    idle_s = sum(end - begin for begin, end in gaps)
    return TimeSplit(run[1] - run[0] - idle_s, idle_s, idle_s - _overlap_s(gaps, waits))


def _overlap_s(ones: Sequence[Interval], others: Sequence[Interval]) -> float:
    """Seconds that lie in both; each in order."""
    total_s, i, k = 0.0, 0, 0
    while i < len(ones) and k < len(others):
        total_s += max(0.0, min(ones[i][1], others[k][1]) - max(ones[i][0], others[k][0]))
        if ones[i][1] <= others[k][1]:
            i += 1
        else:
            k += 1
    return total_s
