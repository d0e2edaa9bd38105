"""Finding block sizes: from the table's sizes to better neighbours, each checked before it is timed.

Knows no kernel's sizes by name, but for two small counts: candidates are the sizes at hand with one integer
halved or doubled. Sizes that don't trace, compile or give the right result are passed over.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from bench.kernels import ours
from bench.kernels.inputs import Inputs
from bench.kernels.measure import MAX_ERROR, check_error
from bench.kernels.runners import JaxRunner, Runner, time_all
from pallas_kernels import tuning

Sizes = dict[str, int]
T = TypeVar("T")

# A neighbour has to be that much faster, or else noise would choose.
_GAIN = 0.98
_BY_ONE = ("num_stages", "programs_per_core")


@dataclasses.dataclass(frozen=True)
class Found:
    """What a search ended with; `usual` is what the tables said before."""

    op: str
    backend: str
    case: str
    shape: tuning.ShapeClass | None
    """None where the backend looks no sizes up."""
    usual: Sizes
    usual_s: float
    best: Sizes
    best_s: float


def neighbours(sizes: Sizes) -> Iterator[Sizes]:
    """The same sizes with one integer halved or doubled; one more or less where it is a small count."""
    for name, value in sizes.items():
        steps = (value - 1, value + 1) if name in _BY_ONE else (value // 2, value * 2)
        yield from ({**sizes, name: step} for step in steps if step >= 1 and step != value)


def shape_asked(backend: str, inputs: Inputs) -> tuning.ShapeClass | None:
    """The shape class that the backend looks its sizes up with, or None.

    Raises:
        Unsupported: the backend refuses the shapes.
    """
    with tuning.override(inputs.case.op, backend, {}) as asked:
        ours.prepare(backend, inputs)
    return asked[0] if asked else None


def search(
    backend: str,
    inputs: Inputs,
    platform: str,
    deadline: float,
    report: Callable[[str], None],
    *,
    known: Sizes | None = None,
    repeats: int = 5,
) -> Found | None:
    """Climbs until no neighbour is faster, or until `deadline` (of `time.monotonic`).

    With `known` sizes, or none to look up, it only takes the time. Returns None if the first sizes fail.

    Raises:
        Unsupported: the backend refuses the shapes.
    """
    op = inputs.case.op
    shape = shape_asked(backend, inputs)
    usual = tuning.blocks(op, backend, shape) if shape is not None else {}
    best = known or usual
    found: Found | None = None
    tried: list[Sizes] = []
    while True:
        moves = [] if known is not None else [sizes for sizes in neighbours(best) if sizes not in tried]
        candidates = [best, *moves]
        tried += candidates
        runners = _right_runners(backend, inputs, candidates)
        timings = {int(i): timing for i, timing in time_all(runners, platform, repeats).items()}
        for i, timing in timings.items():
            report(f"    {candidates[i]} {timing.seconds * 1e6:.1f} us")
        if 0 not in timings:  # the best so far fails now: the device is lost, or the table is wrong
            return found
        fastest = min(timings, key=lambda i: timings[i].seconds)
        improved = timings[fastest].seconds < _GAIN * timings[0].seconds
        if improved:  # the fastest of many is often the luckiest: once more, the two alone
            again = time_all({i: runners[i] for i in ("0", str(fastest))}, platform, repeats)
            timings |= {0: again["0"], fastest: again[str(fastest)]}
            improved = timings[fastest].seconds < _GAIN * timings[0].seconds
        best = candidates[fastest] if improved else best
        best_s = timings[fastest if improved else 0].seconds
        usual_s = found.usual_s if found else timings[0].seconds
        found = Found(op, backend, inputs.case.label, shape, usual, usual_s, best, best_s)
        if not improved or time.monotonic() > deadline:
            return found


def _right_runners(backend: str, inputs: Inputs, candidates: list[Sizes]) -> dict[str, Runner]:
    """The candidates that give the right result, by their place in the list."""
    runners: dict[str, JaxRunner] = {}
    for i, sizes in enumerate(candidates):
        with tuning.override(inputs.case.op, backend, sizes):
            runner = _or_none(lambda: JaxRunner(ours.prepare(backend, inputs)))
        if runner is not None:
            runners[str(i)] = runner
    with ThreadPoolExecutor(max_workers=4) as pool:
        list(pool.map(lambda runner: _or_none(lambda: runner.program), runners.values()))
    right: dict[str, Runner] = {}
    for name, runner in runners.items():
        error = _or_none(functools.partial(check_error, inputs, runner))
        if error is not None and error < MAX_ERROR:
            right[name] = runner
    return right


def _or_none(attempt: Callable[[], T]) -> T | None:
    try:
        return attempt()
    except Exception:  # whatever a kernel or a compiler says to sizes that it can't use
        return None
