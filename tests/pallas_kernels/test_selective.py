"""The rule of Mamba in XLA, as `test_delta.py` has the others."""

from __future__ import annotations

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.delta import DeltaStates, delta_decode
from pallas_kernels.delta_tokens import BLOCK, SelectiveTokens, SelectiveVectors
from tests.pallas_kernels.test_delta import ATOL, DUMMY, PLACES, TAPS, decode, extend, recur, run, step_of

CHANNELS, NUMBERS, RANK = 24, 8, 5


def drawn(num_tokens: int, seed: int) -> SelectiveTokens:
    rng, small = np.random.default_rng(seed), np.random.default_rng(99)
    channels = small.standard_normal((CHANNELS, TAPS + 3))
    channels[:, -2] -= 2  # so that some of a state is left after a block
    rates = small.uniform(-6, 1, (NUMBERS, CHANNELS))
    low, norms = small.standard_normal((RANK + 2 * NUMBERS, CHANNELS)), small.standard_normal(RANK + 2 * NUMBERS)
    steps, product = small.standard_normal((CHANNELS, RANK)), rng.standard_normal((num_tokens, 1, 2 * CHANNELS))
    p, c, r, m, n, s = (jnp.asarray(each, jnp.float32) for each in (product, channels, rates, low, norms, steps))
    return SelectiveTokens(p, SelectiveVectors(c, r, m, n, s, 1e-6), NUMBERS, p.dtype)


def stale() -> DeltaStates:
    matrices = jnp.full((PLACES, 1, 1, NUMBERS, CHANNELS), 7.0)
    return DeltaStates(matrices, jnp.full((PLACES, TAPS, 1, CHANNELS), 7.0))


def test_ragged_chunks_and_tokens_alone_are_each_sequences_recurrence() -> None:
    rng, lengths = np.random.default_rng(1), (1, 11, 150, 2 * BLOCK + 1)
    seqs = [drawn(length, seed) for seed, length in enumerate(lengths)]
    found: list[list[np.ndarray]] = [[] for _ in seqs]
    done, states = [0] * len(seqs), stale()
    while any(left := [length - n for length, n in zip(lengths, done, strict=True)]):
        chunks = [(s, done[s], min(int(rng.integers(1, 60)), left[s])) for s in range(len(seqs)) if left[s]]
        tokens, of_step, offsets = step_of(seqs, chunks)
        out, states = extend(tokens, states, of_step, backend="auto")
        for (s, _, count), first in zip(chunks, offsets, strict=True):
            found[s].append(np.asarray(out)[first : first + count])
            done[s] += count
    for seq, parts in zip(seqs, found, strict=True):
        np.testing.assert_allclose(np.concatenate(parts), recur(seq), rtol=1e-5, atol=ATOL)
    one = replace(seqs[0], product=jnp.concatenate([seqs[2].fused[:1], seqs[1].fused[:1]]))
    out, _ = decode(one, states, jnp.zeros(2, int), jnp.array([5, 6]), jnp.array([-1, -1]), backend="auto")
    for row, seq in enumerate((seqs[2], seqs[1])):
        np.testing.assert_allclose(out[row], recur(seq)[0], atol=ATOL)


def test_a_state_has_the_same_bits_whatever_the_chunks_between_blocks_and_stays_where_it_is_only_read() -> None:
    length = 3 * BLOCK
    seqs = [drawn(length, 5), drawn(length, 6)]
    tokens, of_step, _ = step_of(seqs, [(0, 0, length)], kept=[(BLOCK, 4), (0, DUMMY)])
    whole, at_once = extend(tokens, stale(), of_step, backend="xla")
    states, parts = stale(), []
    for first, count in ((0, BLOCK), (BLOCK, 2 * BLOCK)):
        tokens, of_step, offsets = step_of(seqs, [(1, 0, 29), (0, first, count)])
        out, states = extend(tokens, states, of_step, backend="xla")
        parts.append(np.asarray(out)[offsets[1] : offsets[1] + count])
        if first == 0:
            np.testing.assert_array_equal(states.matrices[0], at_once.matrices[4])
    np.testing.assert_array_equal(np.concatenate(parts), whole[:length])
    np.testing.assert_array_equal(states.matrices[0], at_once.matrices[0])
    tokens, of_step, _ = step_of(seqs, [(1, 29, 5)])
    out, after = run(tokens, states, of_step, backend="xla", moves=False)
    np.testing.assert_allclose(out[:5], recur(seqs[1])[29:34], atol=ATOL)
    for found, before in zip(after, states, strict=True):
        np.testing.assert_array_equal(found, before)


@pytest.mark.parametrize(
    ("backend", "named"), [("triton", "24 channels .* multiples of 32"), ("native", "takes a decay")]
)
def test_kernels_refuse_numbers_of_channels_and_c_decays_of_each_number(backend: str, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        delta_decode(drawn(1, 0), stale(), jnp.zeros(1, int), jnp.zeros(1, int), backend=backend, interpret=True)
