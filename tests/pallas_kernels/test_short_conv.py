"""Short convolutions by XLA and in C++, in chunks and token by token, against a convolution of the whole sequence."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.delta_tokens import Sequences
from pallas_kernels.short_conv import ConvStates, ConvTokens, conv_decode, conv_extend, conv_run
from tests.plain_model import plain_recur

GROUPS, CHANNELS, TAPS = 2, 16, 3
PLACES, DUMMY, NUM_TOKENS, NUM_SEQS = 6, 5, 64, 4
ALL_TAPS = jnp.asarray(np.random.default_rng(99).standard_normal((2, GROUPS, CHANNELS, TAPS)), jnp.float32)

extend = jax.jit(conv_extend, static_argnames=("backend",))
run = jax.jit(conv_run, static_argnames=("backend", "moves"))
decode = jax.jit(conv_decode, static_argnames=("backend",))


@pytest.fixture(params=["xla", "native"])
def backend(request: pytest.FixtureRequest) -> str:
    if request.param == "native":
        request.getfixturevalue("native_runs_here")
    return str(request.param)


def tokens_of(product: np.ndarray | jax.Array) -> ConvTokens:
    return ConvTokens(jnp.asarray(product, jnp.float32), ALL_TAPS, 1, jnp.dtype("float32"))


def drawn(length: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((length, GROUPS, 3 * CHANNELS)).astype(np.float32)


def whole(sequence: np.ndarray) -> np.ndarray:
    return np.asarray(plain_recur(0, tokens_of(sequence)))


def stale() -> ConvStates:
    """Inputs that no sequence may begin with."""
    return ConvStates(jnp.full((PLACES, TAPS, GROUPS, CHANNELS), 7.0))


def step_of(
    sequences: Sequence[np.ndarray],
    chunks: Sequence[tuple[int, int, int]],
    kept: tuple[int, int] = (0, DUMMY),
    source: int | None = None,
) -> tuple[ConvTokens, Sequences, list[int]]:
    """Chunks (sequence, first token, tokens), padded; sequence s is at place s, and the first begins at `source`."""
    parts = [sequences[s][first : first + count] for s, first, count in chunks]
    offsets = np.cumsum([0, *map(len, parts)])
    rest = np.full((NUM_TOKENS - offsets[-1], GROUPS, 3 * CHANNELS), 3.0, np.float32)
    padding = NUM_SEQS - len(chunks)
    places = np.array([*(s for s, *_ in chunks), *[DUMMY] * padding])
    starts = np.array([*(first for _, first, _ in chunks), *[0] * padding])
    sources = places.copy()
    sources[0] = places[0] if source is None else source
    at, to = np.zeros((1, NUM_SEQS), int), np.full((1, NUM_SEQS), DUMMY)
    at[0, 0], to[0, 0] = kept
    ends = np.concatenate([offsets, np.full(padding, offsets[-1])])
    seqs = Sequences(*(jnp.asarray(each, jnp.int32) for each in (ends, starts, sources, places, at, to)))
    return tokens_of(np.concatenate([*parts, rest])), seqs, offsets[:-1].tolist()


def test_chunks_of_several_sequences_are_the_convolution_of_each(backend: str) -> None:
    rng, lengths = np.random.default_rng(1), (1, 2, 40, 23)
    sequences = [drawn(length, seed) for seed, length in enumerate(lengths)]
    found: list[list[np.ndarray]] = [[] for _ in sequences]
    done, states = [0] * len(sequences), stale()
    while any(left := [length - n for length, n in zip(lengths, done, strict=True)]):
        chunks = [(s, done[s], min(int(rng.integers(1, 9)), left[s])) for s in range(len(sequences)) if left[s]]
        tokens, seqs, offsets = step_of(sequences, chunks)
        out, states = extend(tokens, states, seqs, backend=backend)
        for (s, _, count), at in zip(chunks, offsets, strict=True):
            found[s].append(np.asarray(out)[at : at + count])
            done[s] += count
    for sequence, parts in zip(sequences, found, strict=True):
        np.testing.assert_allclose(np.concatenate(parts), whole(sequence), rtol=1e-5, atol=1e-5)
    assert (np.asarray(states.inputs[4]) == 7.0).all(), "a place of no sequence was written"


def test_decoding_goes_on_where_a_prompt_ended_and_from_nothing_at_position_0(backend: str) -> None:
    sequences = [drawn(20, 0), drawn(20, 1)]
    tokens, seqs, _ = step_of(sequences, [(0, 0, 17)])
    _, states = extend(tokens, stale(), seqs, backend=backend)
    dummy, first = np.asarray(states.inputs[DUMMY]), np.array([17, 0])
    for i in range(3):
        one = tokens_of(np.stack([each[n + i] for each, n in zip(sequences, first, strict=True)]))
        kept_to = jnp.array([-1, 4 if i == 1 else -1])
        out, states = decode(one, states, jnp.asarray(first + i), jnp.array([0, 1]), kept_to, backend=backend)
        if i == 1:
            kept = np.asarray(states.inputs[1])
        for row, (sequence, n) in enumerate(zip(sequences, first, strict=True)):
            np.testing.assert_allclose(out[row], whole(sequence)[n + i], rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(states.inputs[4], kept)
    np.testing.assert_array_equal(states.inputs[DUMMY], dummy)


def test_a_decode_that_keeps_inputs_has_no_loop() -> None:
    """The host of a GPU would step it, in each layer."""
    at = jnp.array([17, 0]), jnp.array([0, 1]), jnp.array([-1, 4])
    text = decode.lower(tokens_of(drawn(2, 0)), stale(), *at, backend="xla").as_text()
    assert "scatter" in text and "while" not in text


def test_inputs_inside_a_chunk_are_kept_and_gone_on_from(backend: str) -> None:
    sequences = [drawn(40, 3), drawn(8, 4)]
    tokens, seqs, _ = step_of(sequences, [(0, 0, 40), (1, 0, 8)], kept=(16, 4))
    at_once, states = extend(tokens, stale(), seqs, backend=backend)
    tokens, seqs, _ = step_of(sequences, [(0, 16, 24)], source=4)
    out, after = extend(tokens, states, seqs, backend=backend)
    np.testing.assert_array_equal(out[:24], at_once[16:40])
    np.testing.assert_array_equal(after.inputs[0], states.inputs[0])
    np.testing.assert_array_equal(after.inputs[4], states.inputs[4])


def test_inputs_that_are_only_read_stay_as_they_are(backend: str) -> None:
    sequences = [drawn(20, 0), drawn(20, 1)]
    tokens, seqs, _ = step_of(sequences, [(0, 0, 9)])
    _, states = extend(tokens, stale(), seqs, backend=backend)
    tokens, seqs, offsets = step_of(sequences, [(0, 9, 6), (1, 0, 4)], kept=(3, 4))
    out, after = run(tokens, states, seqs, backend=backend, moves=False)
    for sequence, start, at, count in zip(sequences, (9, 0), offsets, (6, 4), strict=True):
        right = whole(sequence)[start : start + count]
        np.testing.assert_allclose(out[at : at + count], right, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(after.inputs, states.inputs)


@pytest.mark.parametrize(
    ("channels", "taps", "named"),
    [(24, 3, "24 channels, with convolutions of 3 tokens; it takes multiples of 16"), (16, 9, "of 9 tokens")],
)
def test_other_sizes_are_xlas(channels: int, taps: int, named: str, native_runs_here: None) -> None:
    tokens = ConvTokens(jnp.ones((1, 1, 3 * channels)), jnp.ones((1, 1, channels, taps)), 0, jnp.dtype("float32"))
    states, at = ConvStates(jnp.ones((2, taps, 1, channels))), jnp.ones(1, int)
    with pytest.raises(ValueError, match=named):
        conv_decode(tokens, states, at, at, backend="native")
    np.testing.assert_allclose(conv_decode(tokens, states, at, at)[0], 2.0)  # positions 0 and 1
