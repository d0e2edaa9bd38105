from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from jaxsgl.scheduler.budget import STEP_COST_TOKENS, fair_shares, without_much_padding

SIZES = (16, 32, 64, 128, 256, 512, 1024, 2048)


@given(st.lists(st.integers(0, 5000), max_size=12), st.integers(0, 4096))
def test_a_share_is_small_only_where_no_share_is_much_larger(wanted: list[int], budget: int) -> None:
    shares = fair_shares(wanted, budget)
    assert sum(shares) == min(sum(wanted), budget)
    assert all(0 <= share <= want for share, want in zip(shares, wanted, strict=True))
    for share, want in zip(shares, wanted, strict=True):
        if share < want:
            assert max(shares) <= share + 1


def test_a_short_prompt_beside_a_long_one_gets_all_that_it_wants() -> None:
    assert fair_shares([10_000, 30], 512) == [482, 30]


def test_a_tail_over_a_bucket_waits_for_the_next_step() -> None:
    assert without_much_padding(1100, SIZES, can_shed=1000) == 1024


def test_nothing_is_shed_where_a_second_step_costs_more_than_the_padding() -> None:
    assert without_much_padding(140, SIZES, can_shed=100) == 140
    assert without_much_padding(2000, SIZES, can_shed=1999) == 2000


@given(st.integers(1, 2048), st.integers(0, 2048))
def test_shedding_never_costs_more(num_tokens: int, can_shed: int) -> None:
    def padded(tokens: int) -> int:
        return next(size for size in SIZES if size >= tokens)

    better = without_much_padding(num_tokens, SIZES, can_shed)
    assert 0 < better <= num_tokens
    assert num_tokens - better <= can_shed
    if better < num_tokens:
        assert padded(better) + padded(num_tokens - better) + STEP_COST_TOKENS < padded(num_tokens)
