"""Attention in C++ sees all tokens that it should and no other: windows, shared pages, padding.

`native_cases` has the tolerances and their reasons.
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.grids import pairwise
from tests.pallas_kernels.native_cases import MANY, RAGGED, attend, build, check, each_op
from tests.pallas_kernels.texts import TEXTS, random_texts

pytestmark = pytest.mark.usefixtures("native_runs_here")


OPTIONS = [
    *({"sliding_window": n} for n in (1, 2, 9, 63, 64, 65, 100, 256, 1000)), {"logit_soft_cap": 0.5},
    {"logit_soft_cap": 30.0}, {"sm_scale": 1.0}, {"sm_scale": 0.01}, {"k_scale": 0.5, "v_scale": 3.0},
    {"sliding_window": 33, "logit_soft_cap": 2.0, "sm_scale": 0.3, "k_scale": 2.0, "has_sinks": True},
]  # fmt: skip


@pytest.mark.parametrize(("options", "page_size", "is_decode"), pairwise(OPTIONS, [1, 16], [True, False]), ids=str)
def test_window_and_soft_cap_hold(is_decode: bool, page_size: int, options: dict[str, float]) -> None:
    check(build(RAGGED, page_size, seed=1, most_new=100), is_decode, **options)


@pytest.mark.parametrize(
    ("pages", "name", "is_decode"),
    pairwise([(1, 8), (16, 1), (16, 8), (64, 2), (7, 8)], [*TEXTS, "many"], [True, False]),
    ids=str,
)
def test_shared_pages_change_nothing(pages: tuple[int, int], name: str, is_decode: bool) -> None:
    """For each page size and number of query heads per kv head."""
    page_size, group = pages
    texts = TEXTS.get(name, MANY)
    check(build(texts, page_size, group=group, seed=page_size, most_new=3 if group == 8 else 20), is_decode)


@pytest.mark.parametrize("page_size", [1, 16, 128])
@pytest.mark.parametrize("name", ["equal to the end", "cut off anywhere", "nested"])
def test_new_tokens_may_lie_inside_shared_pages(name: str, page_size: int) -> None:
    """Equal prompts extended in one step are such a case: none of them may see later tokens in its own page."""
    for seed in range(2):
        check(build(TEXTS[name][:12], page_size, group=1, seed=seed))


@each_op
@pytest.mark.parametrize("options", [{"logit_soft_cap": 1.5, "has_sinks": True}, {"sliding_window": 70}], ids=str)
def test_window_and_soft_cap_hold_over_shared_pages(is_decode: bool, options: dict[str, float]) -> None:
    for name in ("groups of 1 to 9", "nested", "equal to the end"):
        check(build(TEXTS[name], 16, seed=3, most_new=4), is_decode, **options)


@settings(max_examples=25, derandomize=True, database=None)
@given(random_texts(), st.sampled_from([1, 7, 16, 64]), st.sampled_from([1, 3, 30]), st.integers(0, 2**32 - 1))
def test_any_tree_of_texts_is_right(texts: list[str], page_size: int, most_new: int, seed: int) -> None:
    check(build(texts, page_size, group=(1, 2, 8)[seed % 3], seed=seed, most_new=most_new), is_decode=seed % 2 == 0)


def test_padding_yields_exact_zeros() -> None:
    case = build(TEXTS["nested"], 16, seed=5, most_new=3)
    is_padding = case.lengths == 0
    decoded = attend(case.decode(), is_decode=True)
    assert is_padding.any() and (decoded[is_padding] == 0).all() and (decoded[~is_padding] != 0).all(axis=(1, 2)).all()
    extended, end = attend(case), case.offsets[-1]
    assert (extended[end:] == 0).all() and (extended[:end] != 0).any(axis=(1, 2)).all()


@each_op
def test_a_batch_of_nothing_but_padding_yields_zeros(is_decode: bool) -> None:
    case = build([], 16)
    assert (attend(case.decode() if is_decode else case, is_decode) == 0).all()
