"""A result that is off is named, with its rows, with whether it stays off, and with the threads' rounding."""

from __future__ import annotations

import ctypes
import ctypes.util
from collections.abc import Callable

import numpy as np
import pytest

from tests.agreement import check_agreement
from tests.floating_point import controls

pytestmark = pytest.mark.device  # a report asks the threads of torch and of XLA

EXACT = np.random.default_rng(0).standard_normal((300, 8))
RIGHT = EXACT.astype(np.float32)
UPWARD, TO_NEAREST = 0x800, 0  # of C's fesetround on x86


def results(*of_each_call: np.ndarray) -> Callable[[], np.ndarray]:
    calls = iter(of_each_call)
    return lambda: next(calls)


def wrong_from(row: int) -> np.ndarray:
    wrong = RIGHT.copy()
    wrong[row:] += 3e-3
    return wrong


def report(**sides: Callable[[], np.ndarray]) -> str:
    with pytest.raises(AssertionError) as caught:
        check_agreement(sides, EXACT, atol=1e-4, context="2 threads")
    return str(caught.value)


def test_right_results_are_computed_once() -> None:
    check_agreement({"ours": results(RIGHT), "theirs": results(RIGHT)}, EXACT, atol=1e-4)


def test_a_side_that_is_wrong_once_is_named_with_its_rows() -> None:
    said = report(ours=results(RIGHT, RIGHT, RIGHT), theirs=results(wrong_from(150), RIGHT, RIGHT))
    assert "ours: right, off by" in said
    assert "theirs: WRONG by up to 0.003 in rows 150..299 of 300 and columns 0..7 of 8" in said
    assert said.count("computed again (1): right") == 2
    assert "the same bits as the first time" in said and "other bits than the first time in rows 150..299" in said
    assert "this thread: MXCSR 0x1f80" in said or controls() is None
    assert said.endswith("2 threads")


def test_a_side_that_stays_wrong_is_told_from_one_that_was_wrong_once() -> None:
    wrong = wrong_from(299)
    wrong[299, 3] = np.nan
    said = report(ours=results(wrong, wrong, wrong))
    assert said.count("WRONG by up to nan in rows 299 of 300") == 3
    assert said.count("the same bits as the first time") == 2


@pytest.mark.skipif(controls() is None, reason="reads the controls of x86 processors under glibc")
def test_a_changed_rounding_is_seen() -> None:
    libm, before = ctypes.CDLL(ctypes.util.find_library("m")), controls()
    libm.fesetround(UPWARD)
    try:
        changed = controls()
    finally:
        libm.fesetround(TO_NEAREST)
    assert before is not None and changed is not None
    assert changed.mxcsr == before.mxcsr | 0x4000 and changed.x87 != before.x87
    assert controls() == before
