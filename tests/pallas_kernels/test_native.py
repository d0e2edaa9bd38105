"""Attention in C++ gives what a float64 softmax gives, to the bit the same whatever else is in the batch.

Queries of zero give all tokens in view the same weight: then the output is their mean, exactly, and no tolerance hides
a token too many or too few. With random queries the reference takes them rounded to bfloat16, as the kernel does; what
is left is the rounding of the weights.
"""

from __future__ import annotations

import functools
import threading
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import paged_decode_attention, paged_extend_attention
from pallas_kernels.bfloat16_bits import to_bits
from tests.pallas_kernels.cases import dense_attention
from tests.pallas_kernels.texts import LONGEST, NUM_SEQS, TEXTS, family, lay_out, own, random_texts, unseen_places

K = 2
MEAN_TOLERANCE, TOLERANCE = 1e-5, 1e-2  # a weight is off by 2^-9 of itself, a value is 4 at most


pytestmark = pytest.mark.usefixtures("native_runs_here")


@dataclass(frozen=True)
class Case:
    """An extend's arguments, the pages as float32 numbers; a decode takes the last query of each sequence."""

    q: np.ndarray
    k_pages: np.ndarray
    v_pages: np.ndarray
    table: np.ndarray
    lengths: np.ndarray
    offsets: np.ndarray

    def decode(self) -> Case:
        """One query of each sequence; of a padding row too."""
        return replace(self, q=self.q[: len(self.lengths)], offsets=np.arange(len(self.lengths) + 1))

    def of_zeros(self) -> Case:
        return replace(self, q=np.zeros_like(self.q))


def build(
    texts: list[str], page_size: int, *, group: int = 2, head_dim: int = 32, seed: int = 0, most_new: int = LONGEST
) -> Case:
    """The last tokens of each text are new, as many as chance says; `most_new` at most, sometimes none."""
    rng = np.random.default_rng(seed)
    table, lengths = lay_out(texts, page_size, seed)
    unseen = unseen_places(table, lengths, page_size)
    shape = (len(unseen), K, page_size, head_dim)
    k_pages = np.array(jnp.asarray(rng.normal(size=shape), jnp.bfloat16).astype(jnp.float32))
    v_pages = np.round(16 * rng.normal(size=shape).clip(-4, 4)).astype(np.float32) / 16  # sums of them are exact
    for pages in (k_pages, v_pages):
        pages.swapaxes(1, 2)[unseen] = np.nan
    offsets = np.concatenate([[0], np.cumsum(rng.integers(0, np.minimum(lengths, most_new) + 1))])
    num_tokens = max(NUM_SEQS, int(offsets[-1]) + 5)
    q = rng.normal(size=(num_tokens, K * group, head_dim)) * rng.uniform(0.1, 4, (num_tokens, 1, 1))
    return Case(q.astype(np.float32), k_pages, v_pages, table, lengths, offsets)


@functools.cache
def compiled(is_decode: bool, options: tuple[tuple[str, float], ...]):
    op = paged_decode_attention if is_decode else paged_extend_attention
    return jax.jit(functools.partial(op, backend="native", **dict(options)))


def attend(case: Case, is_decode: bool = False, **options: float) -> np.ndarray:
    bits = (to_bits(jnp.asarray(pages)) for pages in (case.k_pages, case.v_pages))
    ints = [jnp.asarray(a, jnp.int32) for a in (case.table, case.lengths, case.offsets)]
    return np.asarray(compiled(is_decode, tuple(options.items()))(case.q, *bits, *ints[: 2 if is_decode else 3]))


def dense(case: Case, **options: float) -> np.ndarray:
    """The float64 softmax with queries as the kernel rounds them; zeros for padding rows of a decode."""
    head_dim = case.q.shape[2]
    scaled = case.q * np.float32(options.pop("k_scale", 1)) * np.float32(options.pop("sm_scale", head_dim**-0.5))
    q = np.asarray(jnp.asarray(scaled, jnp.bfloat16).astype(jnp.float32), np.float64) * np.sqrt(head_dim)
    has_query = np.repeat(case.lengths > 0, np.diff(case.offsets))
    counts = np.diff(case.offsets) * (case.lengths > 0)
    offsets = np.concatenate([[0], np.cumsum(counts)])
    rows = np.flatnonzero(has_query)
    out = np.zeros(q.shape)
    options = {"sliding_window": None, "logit_soft_cap": None, **options}
    out[rows] = dense_attention(q[rows], case.k_pages, case.v_pages, case.table, case.lengths, offsets, options)
    return out


def check(case: Case, is_decode: bool = False, **options: float) -> None:
    case = case.decode() if is_decode else case
    for each, tolerance in ((case.of_zeros(), MEAN_TOLERANCE), (case, TOLERANCE)):
        expected = dense(each, **options)
        scale = max(1.0, np.abs(expected).max())
        np.testing.assert_allclose(attend(each, is_decode, **options), expected, rtol=0, atol=tolerance * scale)


each_op = pytest.mark.parametrize("is_decode", [True, False], ids=["decode", "extend"])

# Empty and single tokens, whole tiles and one more or less, and several.
RAGGED = [*(own(n, n) for n in (1, 2, 15, 16, 17, 63, 64, 65, 128, 129, 200)), *family("s" * 130, 3, 1)]


@each_op
@pytest.mark.parametrize(
    ("group", "head_dim", "page_size"),
    [(1, 32, 16), (2, 32, 1), (8, 32, 7), (1, 64, 128), (2, 64, 16), (8, 64, 1), (1, 96, 7), (2, 96, 128), (8, 96, 16),
     (1, 128, 1), (2, 128, 7), (8, 128, 128), (1, 256, 16), (2, 256, 1), (4, 256, 128), (2, 160, 16),
     (3, 64, 16), (5, 32, 64), (48, 32, 16), (128, 32, 16)],
)  # fmt: skip
def test_attention_equals_a_float64_softmax(is_decode: bool, group: int, head_dim: int, page_size: int) -> None:
    check(build(RAGGED, page_size, group=group, head_dim=head_dim, seed=page_size, most_new=40), is_decode)


@each_op
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize(
    "options",
    [*({"sliding_window": n} for n in (1, 2, 9, 63, 64, 65, 100, 256, 1000)), {"logit_soft_cap": 0.5},
     {"logit_soft_cap": 30.0}, {"sm_scale": 1.0}, {"sm_scale": 0.01}, {"k_scale": 0.5, "v_scale": 3.0},
     {"sliding_window": 33, "logit_soft_cap": 2.0, "sm_scale": 0.3, "k_scale": 2.0}],
    ids=str,
)  # fmt: skip
def test_options_hold(is_decode: bool, page_size: int, options: dict[str, float]) -> None:
    check(build(RAGGED, page_size, seed=1, most_new=100), is_decode, **options)


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


# 45 sequences of 8 heads a kv head are more than two units of 128 rows; half the pages are common to all.
MANY = ["m" * 128 + own(1 + 2 * i, i) for i in range(45)]


@each_op
@pytest.mark.parametrize(("page_size", "group"), [(1, 8), (16, 1), (16, 8), (64, 2), (7, 8)])
@pytest.mark.parametrize("name", [*TEXTS, "many"])
def test_shared_pages_change_nothing(is_decode: bool, page_size: int, group: int, name: str) -> None:
    texts = TEXTS.get(name, MANY)
    check(build(texts, page_size, group=group, seed=page_size, most_new=3 if group == 8 else 20), is_decode)


@pytest.mark.parametrize("page_size", [1, 16, 128])
@pytest.mark.parametrize("name", ["equal to the end", "cut off anywhere", "nested"])
def test_new_tokens_may_lie_inside_shared_pages(name: str, page_size: int) -> None:
    """As where equal prompts are extended in one step: none of them may see what lies behind it in its own page."""
    for seed in range(2):
        check(build(TEXTS[name][:12], page_size, group=1, seed=seed))


@each_op
@pytest.mark.parametrize("options", [{"logit_soft_cap": 1.5}, {"sliding_window": 70}], ids=str)
def test_options_hold_over_shared_pages(is_decode: bool, options: dict[str, float]) -> None:
    for name in ("groups of 1 to 9", "nested", "equal to the end"):
        check(build(TEXTS[name], 16, seed=3, most_new=4), is_decode, **options)


@settings(max_examples=25, deadline=None, derandomize=True, database=None)
@given(random_texts(), st.sampled_from([1, 7, 16, 64]), st.sampled_from([1, 3, 30]), st.integers(0, 2**32 - 1))
def test_any_tree_of_texts_is_right(texts: list[str], page_size: int, most_new: int, seed: int) -> None:
    check(build(texts, page_size, group=(1, 2, 8)[seed % 3], seed=seed, most_new=most_new), is_decode=seed % 2 == 0)


def long_prompt(length: int, page_size: int, group: int) -> Case:
    """One sequence whose tokens are all new, on pages in random order."""
    rng = np.random.default_rng(length)
    num_pages = -(-length // page_size)
    shape = (num_pages + 1, K, page_size, 64)
    k_pages, v_pages = (np.array(jnp.asarray(rng.normal(size=shape), jnp.bfloat16), np.float32) for _ in range(2))
    table = 1 + rng.permutation(num_pages)[None]
    for pages in (k_pages, v_pages):
        pages[0] = np.nan
        pages[table[0, -1], :, length - (num_pages - 1) * page_size :] = np.nan
    q = rng.normal(size=(length, K * group, 64)).astype(np.float32)
    return Case(q, k_pages, v_pages, table, np.array([length]), np.array([0, length]))


@pytest.mark.parametrize(("page_size", "group"), [(16, 1), (128, 2), (1, 8)])
def test_a_prompt_in_any_chunks_is_the_same_to_the_bit(page_size: int, group: int) -> None:
    """Extends of 1 to 300 tokens on a cached prefix, and decode steps, against all tokens at once."""
    whole = long_prompt(430, page_size, group)
    check(whole)
    expected = attend(whole)
    begin = 0
    for count in (1, 2, 63, 64, 300):
        length = begin + count
        chunk = replace(whole, q=whole.q[begin:length], lengths=np.array([length]), offsets=np.array([0, count]))
        np.testing.assert_array_equal(attend(chunk), expected[begin:length])
        last = replace(chunk, q=chunk.q[-1:])
        np.testing.assert_array_equal(attend(last, is_decode=True), expected[length - 1 : length])
        begin = length


@pytest.mark.parametrize("options", [{}, {"sliding_window": 70}, {"logit_soft_cap": 2.0}], ids=str)
@pytest.mark.parametrize("name", ["nested", "equal to the end", "cut off anywhere"])
def test_a_sequence_is_the_same_to_the_bit_whatever_else_is_in_the_batch(name: str, options: dict[str, float]) -> None:
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


def test_two_threads_may_call_at_once() -> None:
    """Two programs, each in a thread of its own, with other head sizes: nothing that they work with is common."""
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
