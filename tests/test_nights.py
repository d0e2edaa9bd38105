"""Slices of the nights hold each nightly test once, and take about the same time."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from tests import nights

ROOT = Path(__file__).parent.parent
SOME = ("tests/test_grids.py", "tests/scheduler/test_image_sides.py", "tests/cache/test_pages.py")

pytestmark = pytest.mark.server


@pytest.mark.parametrize("seed", range(20))
def test_each_test_is_in_one_slice_and_slices_are_even(seed: int) -> None:
    rng = random.Random(seed)
    nodeids = [
        f"tests/test_{file}.py::test_{test}[{item}]"
        for file in range(rng.randint(5, 40))
        for test in range(rng.randint(1, 8))
        for item in range(rng.choice((1, 3, 40)))
    ]
    costs = {nights.function_of(nodeid): rng.choice((0.1, 1.0, 9.0)) for nodeid in nodeids if rng.random() < 0.7}
    n = rng.choice((1, 3, 10))
    found = nights.slices(nodeids, n, costs)
    assert sorted(nodeid for tests in found for nodeid in tests) == sorted(nodeids)
    assert found == nights.slices(nodeids, n, costs)
    seconds = [sum(costs.get(nights.function_of(each), nights.UNKNOWN_S) for each in tests) for tests in found]
    assert max(seconds) <= sum(seconds) / n * 1.5 + 9.0


@pytest.mark.parametrize("text", ["0/3", "4/3", "3", "a/b", "1/0", "-1/2", "1/2/3"])
def test_a_slice_that_does_not_exist_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="must be k/n"):
        nights.parse(text)


def collected(*args: str, **environment: str) -> set[str]:
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--collect-only", "-q", *args, *SOME]
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "JAXSGL_TEST"))}
    run = subprocess.run(command, env=env | environment, cwd=ROOT, text=True, stdout=subprocess.PIPE, check=True)
    return {line for line in run.stdout.splitlines() if "::" in line}


def test_the_slices_of_a_run_are_the_whole_night() -> None:
    night = collected(JAXSGL_TEST_NIGHTLY="1")
    found = [collected("--nightly-slice", f"{k}/2") for k in (1, 2)]
    assert set().union(*found) == night
    assert sum(map(len, found)) == len(night) and all(found)
    assert sum("test_image_sides.py" in nodeid for nodeid in night) > 100, "these are fewer by day"


def test_tests_whose_times_are_known_exist() -> None:
    for name in nights.read_costs():
        file, _, function = name.partition("::")
        assert f"def {function.rpartition('::')[2]}(" in (ROOT / file).read_text(), f"{name}: {nights.COSTS} is old"


def test_reports_of_pytest_say_what_tests_take(tmp_path: Path) -> None:
    (tmp_path / "a.xml").write_text(
        '<testsuites><testsuite><testcase classname="tests.cache.test_a" name="test_b[1]" time="2.0"/>'
        '<testcase classname="tests.cache.test_a" name="test_b[2]" time="4.0"/></testsuite></testsuites>'
    )
    assert nights.measured([tmp_path / "a.xml"]) == {"tests/cache/test_a.py::test_b": 3.0}
