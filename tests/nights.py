"""Slices of the nights: `pytest --nightly-slice k/n` runs the k-th of n parts of what JAXSGL_TEST_NIGHTLY=1 would run.

Each test is in one slice, and slices take about the same time, by what tests took that were measured (night_costs.json:
seconds of each test function's average item; others count `UNKNOWN_S`). A slice holds whole files, or runs of a long
file's tests, so that fixtures are set up in few slices. conftest.py calls this. To measure anew:

    pytest -n 3 --nightly-slice 3/24 --junitxml night-3.xml; python -m tests.nights night-*.xml
"""

from __future__ import annotations

import json
import sys
import xml.etree.ElementTree as ET
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from pathlib import Path

COSTS = Path(__file__).with_name("night_costs.json")
UNKNOWN_S = 0.1
LEAST_S = 0.5  # functions whose items take less are not listed
SOAK_S = 120  # in place of an hour, in slices


def parse(text: str) -> tuple[int, int]:
    """Returns k and n of "k/n". Raises `ValueError`."""
    k, _, n = text.partition("/")
    if not (k.isdecimal() and n.isdecimal() and 1 <= int(k) <= int(n)):
        raise ValueError(f"--nightly-slice is {text!r}, but must be k/n with 1 <= k <= n, such as 3/24")
    return int(k), int(n)


def slices(nodeids: Sequence[str], n: int, costs: Mapping[str, float]) -> list[set[str]]:
    """Deals the tests, those of a file next to each other, to n slices."""
    seconds = {nodeid: costs.get(function_of(nodeid), UNKNOWN_S) for nodeid in nodeids}
    most_s = sum(seconds.values()) / n / 2  # so that two workers have something to do
    parts: list[tuple[float, list[str]]] = []
    for _, of_file in groupby(nodeids, key=lambda nodeid: nodeid.partition("::")[0]):
        run_s, run = 0.0, list[str]()
        for nodeid in of_file:
            if run and run_s + seconds[nodeid] > most_s:
                parts.append((run_s, run))
                run_s, run = 0.0, []
            run.append(nodeid)
            run_s += seconds[nodeid]
        parts.append((run_s, run))
    dealt = [(0.0, i, set[str]()) for i in range(n)]
    for run_s, run in sorted(parts, key=lambda part: -part[0]):  # the longest first, to the emptiest slice
        taken_s, i, tests = min(dealt, key=lambda slice: slice[:2])
        dealt[i] = taken_s + run_s, i, tests | set(run)
    return [tests for _, _, tests in dealt]


def function_of(nodeid: str) -> str:
    """The test without its parameters."""
    return nodeid.partition("[")[0]


def read_costs() -> dict[str, float]:
    """Seconds by test function."""
    costs: dict[str, float] = json.loads(COSTS.read_text())
    return costs


def measured(reports: Iterable[Path]) -> dict[str, float]:
    """Seconds of the average item of each test function in pytest's JUnit reports, fixtures included."""
    items: dict[str, list[float]] = defaultdict(list)
    for report in reports:
        for case in ET.parse(report).iter("testcase"):
            file = case.attrib["classname"].replace(".", "/") + ".py"
            items[f"{file}::{function_of(case.attrib['name'])}"].append(float(case.attrib["time"]))
    return {name: round(sum(each) / len(each), 1) for name, each in items.items()}


def main() -> None:
    """Adds what reports say to the costs that are known."""
    known = read_costs() | measured(map(Path, sys.argv[1:]))
    kept = {name: seconds for name, seconds in sorted(known.items()) if seconds >= LEAST_S}
    COSTS.write_text(json.dumps(kept, indent=0) + "\n")


if __name__ == "__main__":
    main()
