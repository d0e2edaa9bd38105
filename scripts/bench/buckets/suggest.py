"""The list of sizes that costs least: a dynamic program over candidates. Pure functions of counts and times.

A step falls into the smallest size that holds it and takes that size's time; each size takes time to compile. For
every number of sizes, the best list that ends at the largest size comes from the best lists of one size less.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np


class Choice(NamedTuple):
    """A list of sizes, ascending, and what it costs in seconds: of steps, and of compiling as it was weighed."""

    cost_s: float
    sizes: tuple[int, ...]


StepTime = Callable[[int, str], float]  # seconds of a step of this size, by size and class of the step


def best_lists(
    demand: Mapping[tuple[int, str], float],
    candidates: Sequence[int],
    step_s: StepTime,
    size_s: Callable[[int], float],
    most: int,
) -> list[Choice]:
    """The best list of 1, 2, ... `most` sizes (fewer lists if there are fewer candidates).

    Args:
      demand: how many steps, by tokens and class.
      candidates: sizes to choose from, ascending; the last is in every list, so it must hold every step.
      step_s: time of a step.
      size_s: what it costs to have a size.
      most: sizes.
    """
    if demand and max(tokens for tokens, _ in demand) > candidates[-1]:
        raise ValueError(f"a step has {max(demand)[0]} tokens, but the largest candidate is {candidates[-1]}")
    num = len(candidates)
    classes = sorted({name for _, name in demand})
    # counts[c][i]: steps of class c that need candidate i or a larger one than the one before it
    counts = {name: np.zeros(num + 1) for name in classes}
    for (tokens, name), count in demand.items():
        counts[name][bisect_left(candidates, tokens) + 1] += count
    sums = {name: np.cumsum(counts[name]) for name in classes}
    # between[i, j]: size j - 1 serves all steps beyond size i - 1; i = 0: all up to it
    between = np.full((num + 1, num + 1), np.inf)
    for j, size in enumerate(candidates, start=1):
        served = sum((step_s(size, name) * (sums[name][j] - sums[name][:j]) for name in classes), np.zeros(j))
        between[:j, j] = served + size_s(size)
    best, lists = between[0].copy(), [[(j,) if j else () for j in range(num + 1)]]
    choices = [_choice(best, lists[0], candidates)]
    for _ in range(1, min(most, num)):
        through = best[:, None] + between
        last = through.argmin(axis=0)
        lists = [[(*lists[0][last[j]], j) for j in range(num + 1)]]
        best = through[last, np.arange(num + 1)]
        choices.append(_choice(best, lists[0], candidates))
    return [choice for choice in choices if np.isfinite(choice.cost_s)]


def _choice(best: np.ndarray, lists: Sequence[tuple[int, ...]], candidates: Sequence[int]) -> Choice:
    return Choice(float(best[-1]), tuple(candidates[j - 1] for j in lists[-1]))


def best_pair(
    decode: Sequence[Choice],
    extend: Sequence[Choice],
    num_programs: Callable[[Sequence[int], Sequence[int]], int],
    max_programs: int | None,
) -> tuple[Choice, Choice]:
    """The cheapest of both kinds together. Raises `ValueError` if even the shortest lists take too many programs."""
    pairs = [
        (first, second)
        for first in decode
        for second in extend
        if max_programs is None or num_programs(first.sizes, second.sizes) <= max_programs
    ]
    if not pairs:
        least = num_programs(decode[0].sizes, extend[0].sizes)
        raise ValueError(f"--max-programs is {max_programs}, but one size of each kind takes {least} programs already")
    return min(pairs, key=lambda pair: pair[0].cost_s + pair[1].cost_s)


def candidate_sizes(least: int, unit: int, largest: int) -> list[int]:
    """`least` and its doubles below `unit`, multiples of `unit`, in larger steps from 32 of them on, and `largest`."""
    sizes = [size for size in (least << i for i in range(unit.bit_length())) if size < unit]
    sizes += [*range(unit, 32 * unit, unit), *range(32 * unit, largest, 4 * unit)]
    return [size for size in sizes if size < largest] + [largest]
