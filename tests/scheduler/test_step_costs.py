from __future__ import annotations

import pytest

from jaxsgl.scheduler.speculation.pace import MeasuredCosts, StepCosts

SIZES = (2, 4, 8, 16, 32, 64)


def costs(free_tokens: int = 16) -> MeasuredCosts:
    return MeasuredCosts((1, *SIZES[:-1]), SIZES, free_tokens)


@pytest.mark.parametrize(
    ("rows", "probability", "drafts"),
    [
        (1, 0.9, 7),  # 8 tokens are as long as 1
        (1, 0.1, 7),
        (8, 0.9, 24),  # 3.4 x as many tokens in 1.75 x the time, and 5.7 x as many in 3.25 x the time
        (8, 0.3, 8),  # of 16 tokens all are free, of more the second draft of each is kept too seldom
        (16, 0.9, 16),
        (16, 0.3, 0),
        (32, 0.5, 0),
    ],
)
def test_drafts_pay_while_they_are_free_or_likely(rows: int, probability: float, drafts: int) -> None:
    assert costs().affordable(rows, [(7, probability)] * rows) == drafts


def test_the_likeliest_drafts_of_all_requests_count() -> None:
    chances = [(7, 0.05)] * 6 + [(7, 0.95)] * 2
    assert costs().affordable(8, chances) in (8, 24)
    assert costs().affordable(8, [(7, 0.05)] * 8) == 0


def test_measured_times_count_more_than_the_device() -> None:
    known = costs()
    for _ in range(9):
        known.measured(1, False, 0.010)
        known.measured(8, True, 0.070)  # a mixture that reads other experts for each token
    assert known.affordable(1, [(7, 0.8)]) < 7
    known = costs()
    for _ in range(9):
        known.measured(32, False, 0.010)
        known.measured(64, True, 0.011)
    assert known.affordable(32, [(7, 0.8)] * 32) == 32


def test_one_slow_step_changes_nothing() -> None:
    known = costs()
    for seconds in (0.011, 0.010, 0.500, 0.010, 0.011):
        known.measured(7, True, seconds)
    assert known.seconds(8, True) == 0.011


def test_a_size_that_was_not_measured_costs_what_the_nearest_does() -> None:
    known = costs()
    for _ in range(3):
        known.measured(2, False, 0.010)
    assert known.seconds(8, True) == 0.010
    assert known.seconds(64, True) == pytest.approx(0.0325)
    for _ in range(3):
        known.measured(30, True, 0.030)
    assert known.seconds(64, True) == pytest.approx(0.030 * 3.25 / 1.75)


def test_a_step_lasts_from_the_end_of_the_step_before_and_steps_of_prompts_are_left_out() -> None:
    now_s = 5.0
    known = MeasuredCosts((1, *SIZES[:-1]), SIZES, 16, lambda: now_s)
    for passed_s, num_tokens, verifies in [(9.0, 1, False), (0.5, 0, False), *[(0.01, 1, False), (0.03, 4, True)] * 3]:
        now_s += passed_s
        known.collected(num_tokens, verifies)
    assert [known.seconds(1, False), known.seconds(4, True)] == pytest.approx([0.01, 0.03])


def test_more_requests_than_could_gain_are_not_asked_for_drafts() -> None:
    known = costs()
    assert known.may_pay(1) and known.may_pay(8) and not known.may_pay(64)
    for _ in range(9):
        known.measured(16, False, 0.010)
        known.measured(32, True, 0.025)
        known.measured(64, True, 0.050)
    assert not known.may_pay(16)


def test_drafts_that_did_not_pay_are_tried_again_after_a_while_and_one_slow_step_does_not_end_them() -> None:
    now_s = 0.0
    known = MeasuredCosts((1, *SIZES[:-1]), SIZES, 16, lambda: now_s)

    def step(seconds: float, num_tokens: int, verifies: bool) -> int:
        nonlocal now_s
        now_s += seconds
        known.collected(num_tokens, verifies)
        return known.affordable(1, [(7, 0.8)])

    for _ in range(10):
        step(0.01, 1, False)
    assert step(0.9, 8, True) == 7
    assert [step(0.9, 8, True) for _ in range(3)][-1] < 7
    found = [step(0.9, size, True) for _ in range(4) for size in (2, 4)][-1]
    assert found == 0
    assert [step(0.01, 1, False) for _ in range(250)][-1] == 0
    assert [step(0.01, 1, False) for _ in range(6)][-1] == 7


def test_without_measuring_all_drafts_pay() -> None:
    assert StepCosts().affordable(32, [(3, 0.1), (7, 0.0)]) == 10
