"""Attention in C++ equals a float64 softmax, and is bit-identical whatever else is in the batch.

Tested with each way to multiply. `native_cases` has the tolerances and their reasons.
"""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import AttentionOptions, PagedKv, paged_extend_attention
from pallas_kernels.paged_kv import BITS, FLOAT8_BITS, to_numbers
from tests.grids import count, singly
from tests.pallas_kernels.native_cases import (
    MANY,
    RAGGED,
    TOLERANCE,
    WAYS,
    Case,
    attend,
    build,
    check,
    long_prompt,
    sinks_of,
)
from tests.pallas_kernels.texts import TEXTS, own

pytestmark = pytest.mark.usefixtures("each_way")


# Query heads per kv head, head size, page size. The first ones hold each head size, and pages of one token and of many.
SHAPES = [
    (2, 32, 1), (1, 64, 128), (8, 96, 16), (2, 128, 7), (4, 256, 128), (2, 160, 16), (48, 32, 16), (8, 512, 16),
    (1, 32, 16), (8, 32, 7), (2, 64, 16), (8, 64, 1), (1, 96, 7), (2, 96, 128), (1, 128, 1), (8, 128, 128),
    (1, 256, 16), (2, 256, 1), (3, 64, 16), (5, 32, 64), (128, 32, 16),
    (1, 512, 7),
]  # fmt: skip


@pytest.mark.parametrize(
    ("each_way", "shape", "is_decode"),
    singly(WAYS, SHAPES[: count(8, len(SHAPES))], [True, False]),
    indirect=["each_way"],
    ids=str,
)
def test_attention_equals_a_float64_softmax(shape: tuple[int, int, int], is_decode: bool) -> None:
    group, head_dim, page_size = shape
    check(build(RAGGED, page_size, group=group, head_dim=head_dim, seed=page_size, most_new=40), is_decode)


def test_a_large_score_far_from_the_others_takes_all_the_weight() -> None:
    """The tops of the running softmax jump, up and down, in the first tile, a middle one and the last."""
    for place in (0, 70, 199):
        case = build([own(200, 1)], 16, seed=place)
        (row,) = np.flatnonzero(case.lengths)
        page, offset = case.table[row, place // 16], place % 16
        case.k_pages[page, :, offset] = 64 * np.sign(case.q[row : row + 1, ::2][0])
        check(case, is_decode=True)
        expected = case.v_pages[page, :, offset]
        np.testing.assert_allclose(attend(case.decode(), is_decode=True)[row, ::2], expected, atol=1e-5)


def in_runs(case: Case, most: int) -> np.ndarray:
    """Of how many tokens each query sees none after: images of up to `most` tokens, and text between them."""
    rng, seen = np.random.default_rng(most), np.zeros(len(case.q), np.int32)
    for (begin, end), length in zip(np.stack([case.offsets[:-1], case.offsets[1:]], axis=1), case.lengths, strict=True):
        while begin < end:
            run = min(int(rng.integers(1, most + 1)), end - begin)
            stop = length - (end - begin) + run
            seen[begin : begin + run] = stop if rng.random() < 0.7 else np.arange(stop - run, stop) + 1
            begin += run
    return seen


@pytest.mark.parametrize(
    ("each_way", "group", "page_size", "options"),
    singly(WAYS, [2, 8, 48], [16, 7, 128], [{}, {"sliding_window": 40}, {"has_sinks": True}, {"reach": 20}]),
    indirect=["each_way"],
    ids=str,
)
def test_queries_see_ahead_to_the_end_of_their_image(group: int, page_size: int, options: dict[str, Any]) -> None:
    """Units of 128 rows end within images, and tiles of 64 tokens too."""
    case = build(RAGGED, page_size, group=group, seed=5, most_new=150)
    scale = case.q.shape[2] ** 0.5
    rounded = jnp.asarray(case.q / np.float32(scale), jnp.bfloat16).astype(jnp.float32) * np.float32(scale)
    table, lengths, offsets = (jnp.asarray(each, jnp.int32) for each in (case.table, case.lengths, case.offsets))
    kv = PagedKv(jnp.asarray(case.k_pages), jnp.asarray(case.v_pages), table, lengths)
    given = sinks_of(case, options.get("has_sinks", False))
    sinks = None if given is None else jnp.asarray(given)
    window = AttentionOptions(sliding_window=options.get("sliding_window"))
    reach = options.pop("reach", 0)
    biases = jnp.asarray(np.random.default_rng(2).normal(size=(case.q.shape[1], 2 * reach + 1)), jnp.float32)
    biased: dict[str, Any] = {"biases": biases} if reach else {}
    for most in (1, 90):
        seen = in_runs(case, most)
        expected = paged_extend_attention(
            rounded, offsets, kv, window, sinks, jnp.asarray(seen), **biased, backend="reference"
        )
        found = attend(case, seen=seen, **options, **biased)
        np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE * max(1.0, np.abs(found).max()))
        if most == 1:
            np.testing.assert_array_equal(found, attend(case, **options, **biased))
        else:
            assert np.abs(found - attend(case, **options, **biased)).max() > 0.1


@pytest.mark.parametrize(("page_size", "group"), [(16, 1), (128, 2), (1, 8)])
def test_a_prompt_in_any_chunks_is_the_same_to_the_bit(page_size: int, group: int) -> None:
    """Extends of 1 to 300 tokens on a cached prefix, and decode steps, against all tokens at once."""
    whole = long_prompt(430, page_size, group)
    check(whole)
    expected = attend(whole)
    begin = 0
    for size in (1, 2, 63, 64, 300):
        length = begin + size
        chunk = replace(whole, q=whole.q[begin:length], lengths=np.array([length]), offsets=np.array([0, size]))
        np.testing.assert_array_equal(attend(chunk), expected[begin:length])
        last = replace(chunk, q=chunk.q[-1:])
        np.testing.assert_array_equal(attend(last, is_decode=True), expected[length - 1 : length])
        begin = length


@pytest.mark.parametrize(
    ("each_way", "shape", "is_decode"),
    singly(WAYS, SHAPES[1 :: count(10, 6)], [True, False]),
    indirect=["each_way"],
    ids=str,
)
def test_a_cache_of_float8_yields_what_one_of_bfloat16_with_its_numbers_yields_to_the_bit(
    shape: tuple[int, int, int], is_decode: bool
) -> None:
    """Which holds every number of float8. So all that is checked over bfloat16 holds over float8, too."""
    group, head_dim, page_size = shape
    case = build(RAGGED, page_size, group=group, head_dim=head_dim, seed=page_size, most_new=40).of_float8()
    case = case.decode() if is_decode else case
    numbers = np.asarray(to_numbers(jnp.arange(256, dtype=FLOAT8_BITS)), np.float32)
    for pages in (case.k_pages, case.v_pages):
        codes = np.random.default_rng(page_size).choice(numbers[np.isfinite(numbers)], pages.shape)
        np.copyto(pages, codes, where=np.isfinite(pages))
    for options in ({}, {"sliding_window": 33, "k_scale": 0.02, "v_scale": 3.0}):
        expected = attend(replace(case, bits=BITS), is_decode, **options)
        np.testing.assert_array_equal(attend(case, is_decode, **options), expected)


def test_every_code_of_float8_is_read_as_its_number() -> None:
    """NaN, too: a token of its own sequence yields its values as they are."""
    codes = np.arange(256, dtype=np.uint8).reshape(8, 1, 1, 32)
    v_pages = np.asarray(to_numbers(jnp.asarray(codes)), np.float32)
    table, lengths = np.arange(8)[:, None], np.ones(8, int)
    q = np.zeros((8, 1, 32), np.float32)
    case = Case(q, np.zeros_like(v_pages), v_pages, table, lengths, np.arange(9), FLOAT8_BITS)
    np.testing.assert_array_equal(attend(case)[:, 0], v_pages[:, 0, 0])


@pytest.mark.parametrize("options", [{}, {"sliding_window": 70}, {"logit_soft_cap": 2.0}], ids=str)
@pytest.mark.parametrize("name", ["nested", "equal to the end", "cut off anywhere"])
def test_a_sequence_is_the_same_to_the_bit_whatever_else_is_in_the_batch(name: str, options: dict[str, Any]) -> None:
    case = build(TEXTS[name], 16, seed=4, most_new=30)
    together = attend(case, **options)
    for s in np.flatnonzero(np.diff(case.offsets))[::4]:
        mine = slice(case.offsets[s], case.offsets[s + 1])
        alone = replace(
            case,
            q=case.q[mine],
            table=case.table[s : s + 1],
            lengths=case.lengths[s : s + 1],
            offsets=np.array([0, mine.stop - mine.start]),
        )
        np.testing.assert_array_equal(attend(alone, **options), together[mine])


def test_two_threads_may_call_at_once() -> None:
    """Two programs with different head sizes, each in a thread of its own, share no working memory."""
    cases = [build(TEXTS["nested"], 16, head_dim=64, seed=6), build(MANY, 16, group=8, head_dim=128, most_new=2)]
    expected = [attend(case) for case in cases]
    start = threading.Barrier(2)
    wrong: list[int] = []

    def call(i: int) -> None:
        start.wait()
        wrong.extend(i for _ in range(20) if not np.array_equal(attend(cases[i]), expected[i]))

    threads = [threading.Thread(target=call, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_nan_in_view_reaches_the_output_and_nothing_else() -> None:
    """A broken model shows as NaN, and only in the sequences whose own tokens are broken."""
    case = long_prompt(100, 16, 2)
    keys = case.k_pages.copy()
    keys[case.table[0, 2], :, 5] = np.nan  # the token at position 37
    out = attend(replace(case, k_pages=keys))
    assert np.isnan(out[37:]).all()
    np.testing.assert_array_equal(out[:37], attend(case)[:37])
