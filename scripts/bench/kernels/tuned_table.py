"""Search results as a table of `pallas_kernels/tables`: entries by shape class, and the order of the backends.

An entry holds for its own head size, groups, page size and dtypes, and among batches for all that are nearer to it
than to another that was measured. Entries of an op and backend that were there before are replaced.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from bench.kernels.search import Found
from pallas_kernels.target import TargetDevice
from pallas_kernels.tuning import ShapeClass

_BATCH_FIELDS = ("num_seqs", "num_tokens")
_MODEL_FIELDS = [field.name for field in dataclasses.fields(ShapeClass) if field.name not in _BATCH_FIELDS]
_POWERS = [1 << i for i in range(17)]


def table_path(folder: Path, device: TargetDevice) -> Path:
    """The file of a device: "NVIDIA H200" has nvidia_h200.json."""
    return folder / (re.sub(r"\W+", "_", device.kind.lower()).strip("_") + ".json")


def updated_table(old: dict[str, Any], found: Sequence[Found], device: TargetDevice, source: str) -> dict[str, Any]:
    """The table with what was found; `source` says how, and each entry adds its time."""
    entries = list(_entries(found, source))
    replaced = {(entry["op"], entry["backend"]) for entry in entries}
    kept = [entry for entry in old.get("blocks", []) if (entry["op"], entry["backend"]) not in replaced]
    order = old.get("backends", {}) | {op: {device.platform: names} for op, names in backend_order(found).items()}
    return {"devices": [device.kind], "backends": order, "blocks": [*kept, *entries]}


def backend_order(found: Sequence[Found]) -> dict[str, list[str]]:
    """The backends of each op, best first: by the geometric mean of their times over the fastest one's of each case.

    A backend that some cases were too much for is judged by the others. Behind "xla", which takes everything,
    nothing is listed.
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
    """One entry a line, as the default table has it."""
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
    """The powers of two that are nearer to `value` than to another measured one; no condition if it is the only one."""
    if len(measured) == 1:
        return {}

    def nearest(power: int) -> int:
        return min(sorted(measured), key=lambda other: abs(math.log2(power / other)))

    return {field: [power for power in _POWERS if nearest(power) == value]}
