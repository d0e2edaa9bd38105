"""Every backend gives what the reference gives, and the reference what a dense float64 softmax gives."""

import dataclasses
import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import AttentionOptions, PagedKv, paged_decode_attention, paged_extend_attention, tuning
from pallas_kernels.specs import SMALL_SPECS, ArgSpec
from tests.grids import count, daily
from tests.pallas_kernels.cases import Case, assert_close, build_case, cases, dense_attention

BY_NAME = {spec.name: spec for spec in SMALL_SPECS}

# Fewer examples in the interpreter, where each takes long; the specs multiply either number.
XLA = pytest.param("xla", count(6, 12), id="xla")
PALLAS_GPU = pytest.param("triton", count(3, 4), id="triton")
each_backend = pytest.mark.parametrize(("backend", "num_examples"), [XLA, PALLAS_GPU])


@functools.cache
def compiled(op, spec: ArgSpec, backend: str):
    """One compilation for all the examples of a spec."""
    interpret = backend not in ("reference", "xla")
    return jax.jit(functools.partial(op, backend=backend, interpret=interpret, **spec.attention))


def check(op, case: Case, backend: str) -> None:
    args = case.decode_args() if op is paged_decode_attention else case.extend_args()
    expected = compiled(op, case.spec, "reference")(*args)
    actual = compiled(op, case.spec, backend)(*args)
    assert actual.dtype == args[0].dtype
    assert_close(actual, expected, case.spec.dtype)


def run_examples(prop, strategy, num_examples: int) -> None:
    settings(max_examples=num_examples, derandomize=True, database=None)(given(strategy)(prop))()


@pytest.mark.parametrize("name", daily(list(BY_NAME), every=3))
@each_backend
def test_decode_equals_the_reference(name: str, backend: str, num_examples: int) -> None:
    strategy = cases(BY_NAME[name], decode=True)
    run_examples(lambda case: check(paged_decode_attention, case, backend), strategy, num_examples)


@pytest.mark.parametrize("name", daily(list(BY_NAME)[::-1], every=3))
@each_backend
def test_extend_equals_the_reference(name: str, backend: str, num_examples: int) -> None:
    run_examples(lambda case: check(paged_extend_attention, case, backend), cases(BY_NAME[name]), num_examples)


def seen_of(case: Case) -> np.ndarray:
    """Runs of tokens that see up to the end of theirs, as images', between tokens that see up to themselves."""
    seen = np.zeros(case.spec.num_tokens, np.int32)
    rng = np.random.default_rng(len(case.lengths) + int(case.lengths.sum()))
    for s, length in enumerate(case.lengths):
        begin, end = case.query_offsets[s : s + 2]
        while begin < end:
            run = min(int(rng.integers(1, 9)), end - begin)
            stop = length - (end - begin) + run
            seen[begin : begin + run] = stop if rng.random() < 0.7 else np.arange(stop - run, stop) + 1
            begin += run
    return seen


@pytest.mark.parametrize("name", daily([name for name in BY_NAME if "latent" not in name][::-1], every=3))
@each_backend
def test_queries_that_see_ahead_equal_the_reference(name: str, backend: str, num_examples: int) -> None:
    def check_ahead(case: Case) -> None:
        args, seen = case.extend_args(), seen_of(case)
        expected, actual = (
            compiled(paged_extend_attention, case.spec, each)(*args, seen=seen) for each in ("reference", backend)
        )
        assert_close(actual, expected, case.spec.dtype)

    run_examples(check_ahead, cases(BY_NAME[name]), num_examples)


def biased_dense(case: Case, biases: np.ndarray, seen: np.ndarray | None) -> np.ndarray:
    """Attention in float64 with biases, a query at a time; zeros for padding."""
    q, _, kv = case.extend_args()
    pages = [np.asarray(each, np.float64) for each in (kv.k, kv.v)]
    heads, reach, options = q.shape[1], biases.shape[1] // 2, case.spec.attention["options"]
    out = np.zeros(q.shape)
    for s, length in enumerate(case.lengths):
        k, v = (np.concatenate(each[case.page_table[s]], axis=1) for each in pages)
        begin, end = case.query_offsets[s : s + 2]
        for token in range(begin, end):
            position = length - (end - token)
            stop = position + 1 if seen is None else seen[token]
            places = np.arange(max(0, position - (options.sliding_window or length) + 1), stop)
            for head in range(heads):
                of_head = head // (heads // len(k))
                added = biases[head, np.clip(places - position, -reach, reach) + reach]
                query = np.asarray(q[token, head], np.float64)
                scores = k[of_head][places] @ query * options.scale(q.shape[2]) + added
                weights = np.exp(scores - scores.max())
                out[token, head] = weights / weights.sum() @ v[of_head][places]
    return out


@pytest.mark.parametrize(("name", "is_ahead"), [("plain", True), ("sliding_window", False)])
@pytest.mark.parametrize("backend", ["reference", "xla", "triton"])
def test_scores_have_biases_by_the_distance_of_the_key(name: str, is_ahead: bool, backend: str) -> None:
    case = build_case(BY_NAME[name], [20, 9, 0, 1], [13, 2, 0, 1], 0, seed=3)
    seen = seen_of(case) if is_ahead else None
    biases = np.random.default_rng(1).normal(size=(case.q.shape[1], 9)).astype(np.float32)
    found = compiled(paged_extend_attention, case.spec, backend)(*case.extend_args(), seen=seen, biases=biases)
    assert_close(found, biased_dense(case, biases, seen), case.spec.dtype)


@pytest.mark.parametrize(
    ("wrong", "options"),
    [
        (np.zeros((4, 8), np.float32), AttentionOptions()),
        (np.zeros((3, 9), np.float32), AttentionOptions()),
        (np.zeros((4, 9), np.float16), AttentionOptions()),
        (np.zeros((4, 9), np.float32), AttentionOptions(chunk=16)),
    ],
)
def test_biases_that_are_not_float32_of_each_head_and_an_odd_number_of_distances_are_refused(
    wrong: np.ndarray, options: AttentionOptions
) -> None:
    pages = jnp.zeros((2, 2, 16, 16))
    kv = PagedKv(pages, pages, jnp.ones((1, 1), jnp.int32), jnp.ones(1, jnp.int32))
    with pytest.raises(ValueError, match=r"biases is .* it must be .* float32 with the N of q"):
        paged_extend_attention(
            jnp.zeros((1, 4, 16)), jnp.array([0, 1], jnp.int32), kv, options, biases=jnp.asarray(wrong)
        )


def test_queries_that_see_up_to_themselves_give_causal_attention() -> None:
    case = build_case(BY_NAME["plain"], [20, 9, 0, 1], [13, 2, 0, 1], 0, seed=3)
    attend, args = compiled(paged_extend_attention, case.spec, "reference"), case.extend_args()
    own = np.zeros(case.spec.num_tokens, np.int32)
    own[:13], own[13:16] = np.arange(7, 20) + 1, [8, 9, 1]
    causal = attend(*args)
    np.testing.assert_array_equal(causal, attend(*args, seen=own))
    ahead = attend(*args, seen=np.where(np.arange(len(own)) < 13, np.minimum(own + 3, 20), own))
    assert np.abs(np.asarray(ahead - causal)[:10]).max() > 1e-3


@pytest.mark.parametrize("backend", ["xla", "triton"])
@pytest.mark.parametrize("name", daily(["heads_of_80", "heads_of_96"], every=2))
def test_heads_in_a_wider_cache_attend_as_in_one_of_their_own_size(name: str, backend: str) -> None:
    spec = BY_NAME[name]
    case = build_case(spec, [70, 0, 33], [1, 0, 15], 0, seed=9)
    q, offsets, kv = case.extend_args()
    h = spec.head_dim
    narrow = dataclasses.replace(kv, k=kv.k[..., :h], v=kv.v[..., :h])
    expected = paged_extend_attention(q[..., :h], offsets, narrow, backend="reference")
    actual = compiled(paged_extend_attention, spec, backend)(q, offsets, kv)
    assert_close(actual[..., :h], expected, spec.dtype)
    assert (actual[..., h:] == 0).all()
    expected = paged_decode_attention(q[: spec.num_seqs, :, :h], narrow, backend="reference")
    assert_close(compiled(paged_decode_attention, spec, backend)(*case.decode_args())[..., :h], expected, spec.dtype)


@pytest.mark.parametrize("name", BY_NAME)
def test_reference_equals_a_dense_softmax(name: str) -> None:
    def prop(case: Case) -> None:
        args = case.extend_args()
        actual = compiled(paged_extend_attention, case.spec, "reference")(*args)
        expected: Any = dense_attention(*args, **case.spec.attention)
        assert_close(actual, expected, case.spec.dtype)

    run_examples(prop, cases(BY_NAME[name]), 4)


@pytest.mark.parametrize("backend", ["reference", "xla", "triton"])
def test_decode_is_an_extend_by_one_token(backend: str) -> None:
    spec = BY_NAME["plain"]
    case = build_case(spec, [17, 0, 80, 1], [1, 0, 1, 1], 1, seed=3)
    q, _, kv = case.extend_args()
    # A padding row owns a row of a decode's output, but no token of an extend's.
    decoded = compiled(paged_decode_attention, spec, backend)(q[np.array([0, 3, 1, 2])], kv)
    extended = compiled(paged_extend_attention, spec, backend)(*case.extend_args())
    assert_close(decoded[np.array([0, 2, 3])], extended[:3], spec.dtype)


@pytest.mark.parametrize("backend", ["reference", "xla", "triton"])
def test_padding_yields_exact_zeros(backend: str) -> None:
    spec = BY_NAME["plain"]
    case = build_case(spec, [0, 30, 0, 7], [0, 20, 0, 2], 0, seed=1)
    decoded = np.asarray(compiled(paged_decode_attention, spec, backend)(*case.decode_args()))
    assert (decoded[[0, 2]] == 0).all() and (decoded[[1, 3]] != 0).any(axis=2).all()
    extended = np.asarray(compiled(paged_extend_attention, spec, backend)(*case.extend_args()))
    assert (extended[22:] == 0).all() and (extended[:22] != 0).any(axis=2).all()


@pytest.mark.parametrize("backend", ["xla", "triton"])
def test_a_batch_of_nothing_but_padding_yields_zeros(backend: str) -> None:
    case = build_case(BY_NAME["plain"], [0] * 4, [0] * 4, 0, seed=1)
    for op, args in (
        (paged_decode_attention, case.decode_args()),
        (paged_extend_attention, case.extend_args()),
    ):
        assert (np.asarray(compiled(op, case.spec, backend)(*args)) == 0).all()


@pytest.mark.parametrize("name", daily(["page_size_64", "plain", "scale_window_cap_and_sinks", "float8"], every=2))
def test_a_decode_in_several_splits_equals_the_reference(name: str) -> None:
    spec = BY_NAME[name]
    longest = spec.pages_per_seq * spec.page_size
    lengths = [longest, 0, 17, longest - 1][: spec.num_seqs]  # a padding row, and one with more splits than tiles
    case = build_case(spec, lengths, [min(n, 1) for n in lengths], 0, seed=5)
    many_programs = {"programs_per_core": 1000, "min_split_tokens": 16, "tile_tokens": 16}
    with tuning.override("paged_decode_attention", "triton", many_programs):
        decode = functools.partial(paged_decode_attention, backend="triton", interpret=True, **spec.attention)
        lse = re.search(
            rf"f32\[(\d+),{spec.num_seqs},{case.q.shape[1]}\]", str(jax.make_jaxpr(decode)(*case.decode_args()))
        )
        assert lse is not None and int(lse[1]) > 1
        actual = decode(*case.decode_args())
    expected = compiled(paged_decode_attention, spec, "reference")(*case.decode_args())
    assert_close(actual, expected, spec.dtype)
    assert (np.asarray(actual)[1] == 0).all()


@pytest.mark.parametrize("backend", ["xla", "triton"])
@pytest.mark.parametrize("num_queries", [[300, 1, 1], [1, 300, 1], [64, 65, 200], [1, 1, 0]])
def test_extend_over_many_tiles_equals_the_reference(backend: str, num_queries: list[int]) -> None:
    """Sequences are long enough for several query and KV tiles; single queries stand beside long ones."""
    spec = ArgSpec("many_tiles", 3, 330, 32, 16, 1, 2, 16)
    check(paged_extend_attention, build_case(spec, [512, 303, 210], num_queries, 5, seed=7), backend)


@settings(max_examples=6, derandomize=True, database=None)
@given(st.integers(1, 500), st.integers(1, 64))
def test_any_chunking_of_a_prompt_gives_the_same_output(length: int, chunk: int) -> None:
    spec = ArgSpec("chunks", 1, 512, 32, 16, 1, 2, 16)
    case = build_case(spec, [length], [length], 0, seed=length)
    q, offsets, kv = case.extend_args()
    whole = compiled(paged_extend_attention, spec, "xla")(q, offsets, kv)
    begin = (length - 1) // chunk * chunk  # the last chunk
    count = length - begin
    part = compiled(paged_extend_attention, spec, "xla")(np.roll(q, -begin, axis=0), np.array([0, count], np.int32), kv)
    assert_close(part[:count], whole[begin:length], spec.dtype)
