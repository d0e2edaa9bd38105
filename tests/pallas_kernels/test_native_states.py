"""States in C++: sizes as models have them, other processors, what is refused. `test_delta.py` has the behaviour."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.delta import DeltaStates, delta_decode, delta_extend, delta_run
from pallas_kernels.delta_tokens import (
    ChannelTokens,
    DeltaTokens,
    DeltaVectors,
    MambaTokens,
    MambaVectors,
    Sequences,
    StateTokens,
)
from pallas_kernels.native import library

pytestmark = pytest.mark.usefixtures("native_runs_here")

PLACES = 8
TARGETS = ("MOVE_STATES", "CONVOLVE_TOKENS")


@pytest.fixture(params=["as here", "narrow"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Compiled for this machine, or for one with AVX2 only."""
    if request.param == "narrow":
        suffix = request.getfixturevalue("narrow_kernels")
        for name in TARGETS:
            monkeypatch.setattr(library, name, getattr(library, name) + suffix)
    return str(request.param)


def some(*dims: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng([seed, *dims]).standard_normal(dims) / 2, jnp.float32)


def layer(
    kind: str, num_tokens: int, heads: int, group: int, key: int, value: int, taps: int
) -> tuple[StateTokens, DeltaStates]:
    channels = 2 * key + group * value
    tokens: StateTokens
    if kind == "delta":
        of_delta = DeltaVectors(some(2, heads, channels, taps), some(2, heads, 2, group), some(2, value), 1, 1e-6)
        row = channels + group * (value + 2)
        tokens = DeltaTokens(some(num_tokens, heads, row), of_delta, key, jnp.dtype("float32"))
    elif kind == "by channel":
        of_delta = DeltaVectors(some(2, heads, channels, taps), some(2, heads, 2, key), some(2, value), 1, 1e-6)
        row = channels + 1 + value + key
        tokens = ChannelTokens(some(num_tokens, heads, row), of_delta, key, jnp.dtype("float32"))
    else:
        bias, scales = some(2, heads, channels), some(2, heads, group * value)
        of_mamba = MambaVectors(some(2, heads, channels, taps), bias, some(2, heads, 3, group), scales, 1, 1e-6)
        tokens = MambaTokens(
            some(num_tokens, heads, channels + group * (value + 1)), of_mamba, key, jnp.dtype("float32")
        )
    return tokens, DeltaStates(some(PLACES, heads, group, key, value), some(PLACES, taps, heads, channels))


def assert_equal(found: tuple[jax.Array, DeltaStates], right: tuple[jax.Array, DeltaStates], count: int) -> None:
    np.testing.assert_allclose(found[0][:count], right[0][:count], rtol=2e-4, atol=2e-4)
    for mine, others in zip(found[1], right[1], strict=True):
        np.testing.assert_allclose(mine, others, rtol=2e-4, atol=2e-4)


# Of a group and a head, of widths that take registers of several numbers, and as models have them.
SIZES = [
    ("delta", 2, 2, 8, 16, 4),
    ("delta", 1, 3, 24, 80, 2),
    ("delta", 2, 1, 128, 128, 4),
    ("by channel", 2, 1, 24, 80, 4),
    ("mamba", 1, 4, 128, 64, 4),
    ("mamba", 3, 2, 16, 48, 8),
]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_prompts_and_decodes_are_those_of_xla(sizes: tuple[str, int, int, int, int, int], way: str) -> None:
    """A prompt that goes on from another place, one that begins, a token that goes on, and padding."""
    tokens, states = layer(sizes[0], 80, *sizes[1:])
    offsets, starts = jnp.array([0, 40, 75, 76, 76]), jnp.array([64, 0, 9, 0])
    source, place = jnp.array([5, 1, 2, 7]), jnp.array([0, 1, 2, 7])
    seqs = Sequences(offsets, starts, source, place, jnp.array([[0, 35, 1, 0]]), jnp.array([[7, 4, 3, 7]]))
    right = jax.jit(functools.partial(delta_extend, backend="xla"))(tokens, states, seqs)
    found = jax.jit(functools.partial(delta_extend, backend="native"))(tokens, states, seqs)
    left_alone = right[1].matrices.at[7].set(found[1].matrices[7]), right[1].inputs.at[7].set(found[1].inputs[7])
    assert_equal(found, (right[0], DeltaStates(*left_alone)), 76)
    few = replace(tokens, product=tokens.product[:3])
    at = jnp.array([9, 0, 12]), jnp.array([3, 1, 2]), jnp.array([6, -1, -1])
    right = jax.jit(functools.partial(delta_decode, backend="xla"))(few, states, *at)
    assert_equal(jax.jit(functools.partial(delta_decode, backend="native"))(few, states, *at), right, 3)


@pytest.mark.parametrize(("kind", "group"), [("delta", 2), ("mamba", 2), ("by channel", 1)])
def test_a_run_of_tokens_has_the_bits_of_its_tokens_one_by_one(kind: str, group: int, way: str) -> None:
    """So drafts change no answer: they are verified as a run, whatever is next to it."""
    tokens, states = layer(kind, 9, 2, group, 128, 128, 4)
    rows = jnp.array([1, 2, 2, 2])
    seqs = Sequences(jnp.array([0, 6, 9, 9, 9]), jnp.array([40, 7, 0, 0]), rows, rows, *jnp.zeros((2, 1, 4), int))
    run = jax.jit(delta_run, static_argnames=("moves", "backend"))
    read, _ = run(tokens, states, seqs, moves=False, backend="native")
    moved, after = run(tokens, states, seqs, backend="native")
    decode = jax.jit(functools.partial(delta_decode, backend="native"))
    for i in range(6):
        one = replace(tokens, product=tokens.product[i : i + 1])
        out, states = decode(one, states, jnp.array([40 + i]), jnp.array([1]))
        np.testing.assert_array_equal(out[0], read[i])
        np.testing.assert_array_equal(out[0], moved[i])
    np.testing.assert_array_equal(states.matrices[1], after.matrices[1])


def test_what_stood_at_the_place_of_a_new_sequence_is_not_read(way: str) -> None:
    tokens, states = layer("mamba", 2, 1, 2, 8, 16, 4)
    spoilt = DeltaStates(*(jnp.full_like(each, jnp.nan) for each in states))
    out, after = delta_decode(tokens, spoilt, jnp.zeros(2, int), jnp.array([1, 3]), backend="native")
    assert jnp.isfinite(out).all() and jnp.isfinite(after.matrices[jnp.array([1, 3])]).all()


def test_a_place_that_there_is_not_ends_the_call(way: str) -> None:
    tokens, states = layer("delta", 2, 1, 1, 8, 16, 4)
    with pytest.raises(jax.errors.JaxRuntimeError, match="there is no place 8 of states"):
        jax.block_until_ready(delta_decode(tokens, states, jnp.array([3, 4]), jnp.array([1, PLACES]), backend="native"))


@pytest.mark.parametrize(
    ("sizes", "changes", "named"),
    [
        ((1, 1, 12, 16, 4), {}, "states are 12 x 16, with convolutions of 4 tokens; it takes multiples of 8 x 16"),
        ((1, 1, 8, 24, 4), {}, "states are 8 x 24"),
        ((1, 1, 264, 16, 4), {}, "up to 256 rows"),
        ((1, 1, 8, 16, 9), {}, "convolutions of 9 tokens"),
        ((1, 1, 8, 16, 4), {"dtype": jnp.dtype("bfloat16")}, "it takes tokens in float32, not bfloat16"),
    ],
)
def test_other_sizes_are_xlas(sizes: tuple[int, ...], changes: dict[str, Any], named: str) -> None:
    tokens, states = layer("delta", 1, *sizes)
    tokens = replace(tokens, **changes)
    at = jnp.ones(1, int), jnp.ones(1, int)
    with pytest.raises(ValueError, match=named):
        delta_decode(tokens, states, *at, backend="native")
    delta_decode(tokens, states, *at)
