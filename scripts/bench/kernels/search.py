"""The search for block sizes, and the table of `pallas_kernels` that its results go into.

The search starts at the table's sizes and moves to better neighbours: the same sizes with one integer halved or
doubled. Each candidate is checked before it is timed; sizes that fail to trace, to compile or to give the right result
are skipped. Knows no kernel's sizes by name, except for two small counts.

An entry of the table holds for its own head size, groups, page size and dtypes, and among batches for all that are
nearer to it than to another measured one. Entries that the table had for the same op and backend are replaced.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from bench.kernels.contenders import prepare_backend
from bench.kernels.inputs import Inputs
from bench.kernels.measure import MAX_ERROR, check_error
from bench.kernels.runners import JaxRunner, Runner, time_all
from pallas_kernels import tuning
from pallas_kernels.target import TargetDevice
from pallas_kernels.tuning import ShapeClass

Sizes = dict[str, int]
T = TypeVar("T")

# A neighbour must be faster by so much, or else noise would decide.
_GAIN = 0.98
_BY_ONE = ("num_stages", "programs_per_core")


@dataclasses.dataclass(frozen=True)
class Found:
    """The result of a search. `usual` are the sizes of the table, `best` those that were found."""

    op: str
    backend: str
    case: str
    shape: tuning.ShapeClass | None
    """None if the backend looks up no sizes."""
    usual: Sizes
    usual_s: float
    best: Sizes
    best_s: float


def neighbours(sizes: Sizes) -> Iterator[Sizes]:
    """Yields the sizes with one integer halved or doubled; small counts change by one."""
    for name, value in sizes.items():
        steps = (value - 1, value + 1) if name in _BY_ONE else (value // 2, value * 2)
        yield from ({**sizes, name: step} for step in steps if step >= 1 and step != value)


def shape_asked(backend: str, inputs: Inputs) -> tuning.ShapeClass | None:
    """The shape class by which the backend looks up its sizes; None if it looks up none.

    Raises:
        Unsupported: the backend refuses the shapes.
    """
    with tuning.override(inputs.case.op, backend, {}) as asked:
        prepare_backend(backend, inputs)
    return next((each for each in asked if isinstance(each, tuning.ShapeClass)), None)


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
    """Moves to faster neighbours until there is none, or until `deadline` (of `time.monotonic`).

    With `known` sizes, or if the backend looks up none, it only measures. Returns None if the first sizes fail.

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
        if 0 not in timings:  # the best sizes so far fail now: the device is lost, or the table is wrong
            return found
        fastest = min(timings, key=lambda i: timings[i].seconds)
        improved = timings[fastest].seconds < _GAIN * timings[0].seconds
        if improved:  # the fastest of many may be luck: measure the two again, alone
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
    """Runners of the candidates that give the right result, by place in the list."""
    runners: dict[str, JaxRunner] = {}
    for i, sizes in enumerate(candidates):
        with tuning.override(inputs.case.op, backend, sizes):
            runner = _or_none(lambda: JaxRunner(prepare_backend(backend, inputs)))
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
    except Exception:  # kernels and compilers refuse sizes with errors of any class
        return None


_BATCH_FIELDS = ("num_seqs", "num_tokens")
_MODEL_FIELDS = [field.name for field in dataclasses.fields(ShapeClass) if field.name not in _BATCH_FIELDS]
_POWERS = [1 << i for i in range(17)]


def table_path(folder: Path, device: TargetDevice) -> Path:
    """The table of a device: nvidia_h200.json for "NVIDIA H200"."""
    return folder / (re.sub(r"\W+", "_", device.kind.lower()).strip("_") + ".json")


def updated_table(old: dict[str, Any], found: Sequence[Found], device: TargetDevice, source: str) -> dict[str, Any]:
    """The table with the results; `source` says how they were found, and each entry adds its time."""
    entries = list(_entries(found, source))
    replaced = {(entry["op"], entry["backend"]) for entry in entries}
    kept = [entry for entry in old.get("blocks", []) if (entry["op"], entry["backend"]) not in replaced]
    order = old.get("backends", {}) | {op: {device.platform: names} for op, names in backend_order(found).items()}
    return {"devices": [device.kind], "backends": order, "blocks": [*kept, *entries]}


def backend_order(found: Sequence[Found]) -> dict[str, list[str]]:
    """The backends of each op, best first, by the geometric mean of their times over the fastest time of each case.

    A backend that refused some cases is judged by the rest. The list ends with "xla", which takes every case.
    """
    fastest: dict[tuple[str, str], float] = {}
    for one in found:
        key = (one.op, one.case)
        fastest[key] = min(one.best_s, fastest.get(key, math.inf))
    slowness: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for one in found:
        slowness[one.op][one.backend].append(math.log(one.best_s / fastest[one.op, one.case]))
    order = {}
    for op, by_backend in slowness.items():
        names = sorted(by_backend, key=lambda name: sum(by_backend[name]) / len(by_backend[name]))
        order[op] = names[: names.index("xla") + 1] if "xla" in names else names
    return order


def write_table(path: Path, table: dict[str, Any]) -> None:
    """Writes the table with one entry per line, like the default table."""
    blocks = ",\n  ".join(json.dumps(entry) for entry in table["blocks"])
    head = f' "devices": {json.dumps(table["devices"])},\n "backends": {json.dumps(table["backends"])},\n'
    path.write_text(f'{{\n{head} "blocks": [\n  {blocks}\n ]\n}}\n')


def _entries(found: Iterable[Found], source: str) -> Iterable[dict[str, Any]]:
    groups: dict[tuple[Any, ...], list[Found]] = defaultdict(list)
    seen: set[Any] = set()
    for one in found:
        is_first = (one.op, one.backend, one.shape) not in seen
        seen.add((one.op, one.backend, one.shape))
        if one.shape is not None and is_first:
            model = tuple(getattr(one.shape, name) for name in _MODEL_FIELDS)
            groups[one.op, one.backend, model].append(one)
    for (op, backend, model), members in groups.items():
        for one in members:
            assert one.shape is not None
            seqs = {other.shape.num_seqs for other in members if other.shape is not None}
            same_seqs = [other.shape for other in members if other.shape and other.shape.num_seqs == one.shape.num_seqs]
            when = dict(zip(_MODEL_FIELDS, model, strict=True))
            when |= _nearest("num_seqs", one.shape.num_seqs, seqs)
            when |= _nearest("num_tokens", one.shape.num_tokens, {shape.num_tokens for shape in same_seqs})
            measured = f"{source}: {one.best_s * 1e6:.1f} us for {one.case}"
            yield {"op": op, "backend": backend, "when": when, "blocks": one.best, "source": measured}


def _nearest(field: str, value: int, measured: set[int]) -> dict[str, list[int]]:
    """The powers of two nearer to `value` than to any other measured one; no condition if there is no other."""
    if len(measured) == 1:
        return {}

    def nearest(power: int) -> int:
        return min(sorted(measured), key=lambda other: abs(math.log2(power / other)))

    return {field: [power for power in _POWERS if nearest(power) == value]}
