"""What a device ran, from a trace of JAX's profiler: the kernels, by the time that they took. Imports no JAX."""

from __future__ import annotations

import collections
import gzip
import json
from pathlib import Path
from typing import Any

MOST_KERNELS = 40


def kernels(folder: Path) -> list[dict[str, Any]]:
    """Name, count, microseconds of all and of one, most first; of a GPU's streams, or of the host without any.

    Empty if the folder holds no trace.
    """
    found = sorted(folder.glob("**/*.trace.json.gz"))
    if not found:
        return []
    events = json.loads(gzip.decompress(found[-1].read_bytes()))["traceEvents"]
    lanes = {(each["pid"], each["tid"]): each["args"]["name"] for each in events if each.get("name") == "thread_name"}
    streams = {lane for lane, name in lanes.items() if name.startswith("Stream")}  # others repeat what ran on these
    totals: collections.Counter[str] = collections.Counter()
    counts: collections.Counter[str] = collections.Counter()
    for each in events:
        if each.get("ph") == "X" and (not streams or (each["pid"], each["tid"]) in streams):
            totals[each["name"]] += each["dur"]
            counts[each["name"]] += 1
    return [
        {"name": name, "count": counts[name], "us": round(us, 1), "us_each": round(us / counts[name], 2)}
        for name, us in totals.most_common(MOST_KERNELS)
    ]
