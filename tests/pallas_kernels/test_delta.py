"""The gated delta rule and that of Mamba-2, in blocks and token by token, against the plain recurrence."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.delta import DeltaStates, delta_decode, delta_extend, delta_run
from pallas_kernels.delta_tokens import (
    BLOCK,
    ChannelTokens,
    DeltaTokens,
    DeltaVectors,
    MambaTokens,
    MambaVectors,
    Sequences,
    StateTokens,
)
from pallas_kernels.selftest.cases.states import channels_of, state_cases, state_tokens
from pallas_kernels.selftest.shapes import KernelShapes, StateShape
from pallas_kernels.triton import delta_common
from tests.grids import NIGHTLY, daily
from tests.plain_model import plain_recur

HEADS, GROUP, KEY, VALUE, TAPS = 2, 3, 8, 16, 4
CHANNELS = 2 * KEY + GROUP * VALUE
PLACES = 7
DUMMY = PLACES - 1
NUM_TOKENS, NUM_SEQS = 320, 6  # of a padded step
ATOL = 2e-5
A_MODEL = KernelShapes(2, 2, 16, 16, 32, "float32", "float32", "float32")

extend = jax.jit(delta_extend, static_argnames=("backend",))
run = jax.jit(delta_run, static_argnames=("backend", "moves"))
decode = jax.jit(delta_decode, static_argnames=("backend",))
_recur = jax.jit(functools.partial(plain_recur, 0))


def drawn(num_tokens: int, seed: int, rule: str = "delta rule") -> StateTokens:
    rng, corrects = np.random.default_rng(seed), rule == "delta rule"
    if rule == "by channel":
        return by_channel(rng.standard_normal((num_tokens, HEADS, 2 * KEY + VALUE + 1 + VALUE + KEY)))
    taps = np.random.default_rng(99).standard_normal((HEADS, CHANNELS, TAPS))
    rates = np.random.default_rng(98).uniform(-2, 0, (HEADS, 3, GROUP))
    if corrects:
        rates[:, 2] = 1.7  # times b; without it in models' tests
    fused = rng.standard_normal((num_tokens, HEADS, CHANNELS + GROUP * (VALUE + (2 if corrects else 1))))
    scales = np.random.default_rng(97).standard_normal((1, VALUE) if corrects else (1, HEADS, GROUP * VALUE))
    a, b, c, d = (jnp.asarray(x, jnp.float32) for x in (fused, taps[None], rates[None], scales))
    if corrects:
        return DeltaTokens(a, DeltaVectors(b, c, d, row=0, eps=1e-6), KEY, a.dtype)
    bias = jnp.asarray(np.random.default_rng(96).standard_normal((1, HEADS, CHANNELS)), jnp.float32)
    return MambaTokens(a, MambaVectors(b, bias, c, d, row=0, eps=1e-6), KEY, a.dtype)


def by_channel(fused: np.ndarray) -> ChannelTokens:
    """Decays from 1 to exp(-10) a token, so that after a block nothing is left of some numbers, and all of others."""
    rates = np.random.default_rng(98).uniform(-3, 2, (1, HEADS, 2, KEY))
    taps = np.random.default_rng(99).standard_normal((1, HEADS, 2 * KEY + VALUE, TAPS))
    scales = np.random.default_rng(97).standard_normal((1, VALUE))
    a, b, c, d = (jnp.asarray(x, jnp.float32) for x in (fused, taps, rates, scales))
    return ChannelTokens(a, DeltaVectors(b, c, d, row=0, eps=1e-6), KEY, a.dtype)


RULES = pytest.mark.parametrize("rule", ["delta rule", "Mamba-2", "by channel"])


@pytest.fixture(params=["xla", "native"])
def backend(request: pytest.FixtureRequest) -> str:
    """What moves the states: XLA in blocks, or C++ token by token."""
    if request.param == "native":
        request.getfixturevalue("native_runs_here")
    return str(request.param)


def recur(seq: StateTokens) -> np.ndarray:
    """The sequence's recurrence, token by token; padded to one length, so that one program serves all."""
    length = len(seq.fused)
    padded = np.pad(np.asarray(seq.fused), ((0, NUM_TOKENS - length), (0, 0), (0, 0)))
    return np.asarray(_recur(replace(seq, product=jnp.asarray(padded))))[:length]


def stale(rule: str = "delta rule") -> DeltaStates:
    """States that no sequence may begin with."""
    group = 1 if rule == "by channel" else GROUP
    matrices = jnp.full((PLACES, HEADS, group, KEY, VALUE), 7.0)
    return DeltaStates(matrices, jnp.full((PLACES, TAPS, HEADS, 2 * KEY + group * VALUE), 7.0))


def step_of(
    seqs: Sequence[StateTokens],
    chunks: Sequence[tuple[int, int, int]],
    kept: Sequence[tuple[int, int]] = ((0, DUMMY), (0, DUMMY)),
) -> tuple[StateTokens, Sequences, list[int]]:
    """The chunks (sequence, first token, tokens), padded; and where each begins. Sequence s is at place s.

    `kept` are (tokens, place) of states of the first chunk that are kept besides.
    """
    parts = [np.asarray(seqs[s].fused)[first : first + count] for s, first, count in chunks]
    rest = np.full((NUM_TOKENS - sum(map(len, parts)), *parts[0].shape[1:]), 3.0, np.float32)
    offsets = np.cumsum([0, *(count for *_, count in chunks)])
    padding = NUM_SEQS - len(chunks)
    places = np.array([*(s for s, *_ in chunks), *[DUMMY] * padding], np.int32)
    starts = np.array([*(first for _, first, _ in chunks), *[0] * padding], np.int32)
    ends = np.concatenate([offsets, np.full(padding, offsets[-1])]).astype(np.int32)
    tokens = replace(seqs[0], product=jnp.asarray(np.concatenate([*parts, rest])))
    at, to = np.zeros((2, NUM_SEQS), np.int32), np.full((2, NUM_SEQS), DUMMY, np.int32)
    at[:, 0], to[:, 0] = zip(*kept, strict=True)
    of_step = Sequences(*map(jnp.asarray, (ends, starts, places, places, at, to)))
    return tokens, of_step, offsets[:-1].tolist()


@RULES
def test_ragged_chunks_of_several_sequences_are_each_sequences_recurrence(rule: str, backend: str) -> None:
    rng, lengths = np.random.default_rng(1), (1, 11, 150, BLOCK, 2 * BLOCK + 1)
    seqs = [drawn(length, seed, rule) for seed, length in enumerate(lengths)]
    found: list[list[np.ndarray]] = [[] for _ in seqs]
    done, states = [0] * len(seqs), stale(rule)
    while any(left := [length - n for length, n in zip(lengths, done, strict=True)]):
        chunks = [(s, done[s], min(int(rng.integers(1, 60)), left[s])) for s in range(len(seqs)) if left[s]]
        tokens, of_step, offsets = step_of(seqs, chunks)
        out, states = extend(tokens, states, of_step, backend=backend)
        for (s, _, count), first in zip(chunks, offsets, strict=True):
            found[s].append(np.asarray(out)[first : first + count])
            done[s] += count
    for seq, parts in zip(seqs, found, strict=True):
        np.testing.assert_allclose(np.concatenate(parts), recur(seq), atol=ATOL)
    assert (np.asarray(states.matrices[len(seqs)]) == 7.0).all(), "a place of no sequence was written"


def test_a_step_may_have_fewer_tokens_than_the_convolution_has_taps(backend: str) -> None:
    seqs, states = [drawn(5, 0), drawn(5, 1)], stale()
    for i in range(5):
        tokens, of_step, _ = step_of(seqs, [(0, i, 1), (1, i, 1)])
        out, states = extend(replace(tokens, product=tokens.product[:2]), states, of_step, backend=backend)
        for row, seq in enumerate(seqs):
            np.testing.assert_allclose(out[row], recur(seq)[i], atol=ATOL)


@RULES
def test_decoding_goes_on_where_a_prompt_ended_and_from_nothing_at_position_0(rule: str, backend: str) -> None:
    seqs = [drawn(40, 0, rule), drawn(40, 1, rule)]
    tokens, of_step, _ = step_of(seqs, [(0, 0, 37)])
    _, states = extend(tokens, stale(rule), of_step, backend=backend)
    dummies = [np.asarray(each[DUMMY]) for each in states]
    first = np.array([37, 0])
    for i in range(3):
        one = replace(tokens, product=jnp.stack([seq.fused[n + i] for seq, n in zip(seqs, first, strict=True)]))
        places = jnp.array([0, 1])
        kept_to = jnp.array([-1, 4 if i == 1 else -1])
        out, states = decode(one, states, jnp.asarray(first + i), places, kept_to, backend=backend)
        if i == 1:
            kept = [np.asarray(each[1]) for each in states]
        for row, (seq, n) in enumerate(zip(seqs, first, strict=True)):
            np.testing.assert_allclose(out[row], recur(seq)[n + i], atol=ATOL)
    for each, right, dummy in zip(states, kept, dummies, strict=True):
        np.testing.assert_array_equal(each[4], right)
        np.testing.assert_array_equal(each[DUMMY], dummy)


STATES = (
    StateShape(2, 3, 16, 64, TAPS),
    StateShape(2, 1, 32, 16, TAPS, "delta rule by channel"),
    StateShape(1, 1, 8, 96, TAPS, "Mamba", rank=5),
    StateShape(2, 3, 32, 16, TAPS, "Mamba-2"),
    StateShape(2, 3, 32, 32, TAPS),
)


def states_of(shape: StateShape) -> DeltaStates:
    """Any states."""
    rng, heads = np.random.default_rng(5), (shape.key_heads, shape.group)
    matrices = PLACES, *heads, shape.key_size, shape.value_size
    inputs = PLACES, TAPS, shape.key_heads, channels_of(shape)
    return DeltaStates(*(jnp.asarray(rng.standard_normal(dims), jnp.float32) for dims in (matrices, inputs)))


@pytest.mark.parametrize(
    "shape", STATES if NIGHTLY else STATES[:4], ids=lambda shape: f"{shape.rule} {shape.value_size}"
)
def test_kernels_of_gpus_move_and_keep_states_as_xla_does(shape: StateShape) -> None:
    cases = list(state_cases(replace(A_MODEL, states=(shape,))))
    first = STATES.index(shape)
    for case in cases if NIGHTLY else (cases[first], cases[(first + 3) % len(cases)]):  # by day each case with a rule
        for found, right in zip(case.call("triton", True), case.right(), strict=True):
            np.testing.assert_allclose(found, right, rtol=2e-5, atol=2e-5)
    with pytest.raises(ValueError, match="states are 8 x 16; it takes powers of two from 16"):
        delta_decode(drawn(1, 0), stale(), jnp.zeros(1, int), jnp.zeros(1, int), backend="triton", interpret=True)


def test_programs_that_share_a_large_state_move_it_as_one_would(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = StateShape(2, 3, 32, 32, TAPS, "Mamba-2")
    monkeypatch.setattr(delta_common, "_MOST_NUMBERS", shape.key_size * shape.value_size // 2)
    assert delta_common.num_value_parts(states_of(shape).matrices, corrects=False) == 2
    tokens = state_tokens(jax.random.split(jax.random.key(5), 6), shape, 3, jnp.dtype("float32"))
    states, positions, places = states_of(shape), jnp.array([0, 9, 63]), jnp.array([1, 2, 3])
    kept_to = jnp.array([-1, 4, -1])
    ways = ({"backend": "triton", "interpret": True}, {"backend": "xla"})
    found, right = (delta_decode(tokens, states, positions, places, kept_to, **way) for way in ways)
    for mine, others in zip(jax.tree.leaves(found), jax.tree.leaves(right), strict=True):
        np.testing.assert_allclose(mine, others, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("num_parts", [2, 3])
def test_a_kernel_adds_up_parts_of_the_product_whatever_their_number(num_parts: int) -> None:
    shape = StateShape(2, 3, 16, 16, TAPS)
    whole = state_tokens(jax.random.split(jax.random.key(5), 6), shape, 2, jnp.dtype("float32"))
    parts = np.random.default_rng(5).standard_normal((num_parts, *whole.product.shape))
    tokens, states = replace(whole, product=jnp.asarray(parts, jnp.float32)), states_of(shape)
    positions, places = jnp.array([40, 0]), jnp.array([1, 2])
    right = delta_decode(tokens, states, positions, places, backend="xla")
    found = delta_decode(tokens, states, positions, places, backend="triton", interpret=True)
    np.testing.assert_allclose(found[0], right[0], rtol=2e-5, atol=2e-5)
    for mine, others in zip(found[1], right[1], strict=True):
        np.testing.assert_allclose(mine, others, rtol=2e-5, atol=2e-5)


@RULES
def test_a_state_has_the_same_bits_whatever_the_chunks_between_blocks_and_whatever_runs_beside_it(
    rule: str, backend: str
) -> None:
    length = 4 * BLOCK
    seqs = [drawn(length, 5, rule), drawn(length, 6, rule)]
    tokens, of_step, _ = step_of(seqs, [(0, 0, length)])
    whole, at_once = extend(tokens, stale(rule), of_step, backend=backend)
    states, parts = stale(rule), []
    for first, count in ((0, BLOCK), (BLOCK, 2 * BLOCK), (3 * BLOCK, BLOCK)):
        tokens, of_step, offsets = step_of(seqs, [(1, 0, 29), (0, first, count)])
        out, states = extend(tokens, states, of_step, backend=backend)
        parts.append(np.asarray(out)[offsets[1] : offsets[1] + count])
    np.testing.assert_array_equal(np.concatenate(parts), whole[:length])
    for found, right in zip(states, at_once, strict=True):
        np.testing.assert_array_equal(found[0], right[0])


def test_states_inside_a_chunk_are_kept_and_gone_on_from_like_those_at_its_end(backend: str) -> None:
    length = 4 * BLOCK
    seqs = [drawn(length, 8), drawn(length, 9)]
    tokens, of_step, _ = step_of(seqs, [(0, 0, length), (1, 0, 50)], kept=[(BLOCK, 4), (3 * BLOCK, 5)])
    whole, states = extend(tokens, stale(), of_step, backend=backend)
    for place, count in ((4, BLOCK), (5, 3 * BLOCK)):
        tokens, of_step, _ = step_of(seqs, [(0, 0, count)])
        _, alone = extend(tokens, stale(), of_step, backend=backend)
        for found, right in zip(states, alone, strict=True):
            np.testing.assert_array_equal(found[place], right[0])
        tokens, of_step, _ = step_of(seqs, [(0, count, length - count)])
        out, after = extend(tokens, states, of_step._replace(source=of_step.source.at[0].set(place)), backend=backend)
        np.testing.assert_array_equal(out[: length - count], whole[count:length])
        for found, right in zip(after, states, strict=True):
            np.testing.assert_array_equal(found[0], right[0])
            np.testing.assert_array_equal(found[place], right[place])


@RULES
def test_states_that_are_only_read_stay_as_they_are(rule: str, backend: str) -> None:
    """Of runs across the ends of blocks, a token alone, and one that begins."""
    seqs = [drawn(2 * BLOCK, seed, rule) for seed in range(3)]
    tokens, of_step, _ = step_of(seqs, [(0, 0, BLOCK - 3), (1, 0, 40)])
    _, states = extend(tokens, stale(rule), of_step, backend=backend)
    chunks = [(0, BLOCK - 3, 8), (1, 40, 1), (2, 0, 5)]
    tokens, of_step, offsets = step_of(seqs, chunks, kept=[(3, 4), (0, DUMMY)])
    out, after = run(tokens, states, of_step, backend=backend, moves=False)
    for (s, start, count), at in zip(chunks, offsets, strict=True):
        np.testing.assert_allclose(out[at : at + count], recur(seqs[s])[start : start + count], atol=ATOL)
    for found, before in zip(after, states, strict=True):
        np.testing.assert_array_equal(found, before)
    moved, after = run(tokens, states, of_step, backend=backend)
    np.testing.assert_array_equal(moved, extend(tokens, states, of_step, backend=backend)[0])
    assert not np.array_equal(after.matrices[0], states.matrices[0])


@RULES
def test_sequences_of_one_token_are_decoded_next_to_chunks_and_take_no_block(rule: str, backend: str) -> None:
    """One goes on and is kept, one begins; one begins at a kept state, and so takes a block."""
    seqs = [drawn(2 * BLOCK, seed, rule) for seed in range(4)]
    first = BLOCK - 1
    tokens, of_step, _ = step_of(seqs, [(0, 0, first), (2, 0, 30), (3, 0, BLOCK)], kept=[(0, DUMMY), (0, DUMMY)])
    _, states = extend(tokens, stale(rule), of_step, backend=backend)
    states = DeltaStates(*(each.at[5].set(each[3]).at[3].set(7.0) for each in states))
    chunks = [(0, first, 1), (1, 0, 1), (2, 30, 70), (3, BLOCK, 1)]
    tokens, of_step, offsets = step_of(seqs, chunks, kept=[(1, 4), (0, DUMMY)])
    of_step = of_step._replace(source=of_step.source.at[3].set(5))
    out, after = extend(tokens, states, of_step, backend=backend)
    for (s, start, count), at in zip(chunks, offsets, strict=True):
        np.testing.assert_allclose(out[at : at + count], recur(seqs[s])[start : start + count], atol=ATOL)
    for each, before in zip(after, states, strict=True):
        np.testing.assert_array_equal(each[4], each[0])
        np.testing.assert_array_equal(each[5], before[5])
    for i in range(1, 5):  # all go on, in a step without chunks
        tokens, of_step, offsets = step_of(seqs, [(s, start + count + i - 1, 1) for s, start, count in chunks])
        out, after = extend(tokens, after, of_step, backend=backend)
        for (s, start, count), at in zip(chunks, offsets, strict=True):
            np.testing.assert_allclose(out[at], recur(seqs[s])[start + count + i - 1], atol=ATOL)


@pytest.mark.parametrize("shape", daily(STATES[:3], every=2), ids=lambda shape: shape.rule)
def test_a_kernel_decodes_sequences_of_one_token_next_to_chunks_and_to_rows_without_tokens(shape: StateShape) -> None:
    tokens = state_tokens(jax.random.split(jax.random.key(4), 6), shape, 9, jnp.dtype("float32"))
    states = states_of(shape)
    rows = (np.array([0, 1, 7, 8, 8]), [63, 40, 5, 0], [0, 1, 2, DUMMY])
    offsets, starts, places = (jnp.asarray(each, jnp.int32) for each in rows)
    at, to = jnp.array([[1, 0, 0, 0]]), jnp.array([[4, DUMMY, DUMMY, DUMMY]])
    seqs = Sequences(offsets, starts, places, places, at, to)
    right = delta_extend(tokens, states, seqs, backend="xla")
    found = delta_extend(tokens, states, seqs, backend="triton", interpret=True)
    np.testing.assert_allclose(found[0][:8], right[0][:8], atol=ATOL)
    for mine, others in zip(found[1], right[1], strict=True):
        np.testing.assert_allclose(mine[:DUMMY], others[:DUMMY], atol=ATOL)


def test_no_call_of_a_library_waits_in_the_loop_over_blocks() -> None:
    """LAPACK's wait for threads of XLA's pool: devices that share a CPU's waited for each other, for ever."""
    tokens, of_step, _ = step_of([drawn(40, 0)], [(0, 0, 40)])
    text = extend.lower(tokens, stale(), of_step, backend="xla").as_text()
    assert "stablehlo.while" in text and "triangular_solve" not in text and "lapack" not in text
