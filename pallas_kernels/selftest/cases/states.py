"""Cases of gated delta-nets, Mamba-2 and Mamba: sequences that decode, by themselves and next to chunks.

Owns their positions and where their states go.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp

from pallas_kernels.choice import XLA
from pallas_kernels.delta import DeltaStates, delta_decode, delta_extend, delta_run
from pallas_kernels.delta_tokens import (
    ChannelTokens,
    DeltaTokens,
    DeltaVectors,
    MambaTokens,
    MambaVectors,
    SelectiveTokens,
    SelectiveVectors,
    Sequences,
    StateTokens,
)
from pallas_kernels.selftest.batches import normal
from pallas_kernels.selftest.case import TOLERANCE, Case
from pallas_kernels.selftest.cases.arguments import NUM_PARTS, in_parts_of
from pallas_kernels.selftest.shapes import KernelShapes, StateShape

CHUNKS = (130, 1, 69)  # tokens of sequences that are extended
CHUNKS_START, CHUNKS_SOURCE, CHUNKS_KEPT = (30, 7, 0), (4, 2, 3), (34, 0, 69)  # positions, places, kept after so many
RUNS, RUNS_START, RUNS_KEPT = (5, 1, 3), (61, 2, 0), (3, 0, 3)  # likewise of runs of drafts
STATE_POSITIONS, STATES_KEPT = (0, 7, 130, 1, 0), (-1, 8, -1, 7, 9)  # of rows that decode, and where they go besides


def state_cases(shapes: KernelShapes) -> Iterator[Case]:
    """Sequences with states and without, of which some are kept besides; other places must stay as they were."""
    for shape in shapes.states:
        keys = jax.random.split(jax.random.key(12), 6)
        heads, num_seqs = (shape.key_heads, shape.group), len(STATE_POSITIONS)
        channels = channels_of(shape)
        dtype = jnp.dtype(shapes.dtype)
        tokens = state_tokens(keys, shape, num_seqs, dtype)
        parts = NUM_PARTS, *tokens.product.shape
        product = normal(keys[0], 1.0, shape=parts, dtype=in_parts_of(dtype, (NUM_PARTS,)))
        in_parts = dataclasses.replace(tokens, product=product)
        states = DeltaStates(*(
            normal(key, 1.0, shape=(2 * num_seqs, *dims), dtype=jnp.dtype(jnp.float32))
            for key, dims in zip(
                keys[4:],
                ((*heads, shape.key_size, shape.value_size), (shape.taps, shape.key_heads, channels)),
                strict=True,
            )
        ))  # fmt: skip
        where = jnp.array(STATE_POSITIONS), jnp.arange(num_seqs)[::-1] + 1, jnp.array(STATES_KEPT)
        size = f"{shape.key_size} x {shape.value_size}"
        name = f"{num_seqs} rows, {shape.key_heads} x {shape.group} states of {size}, {shape.rule}"
        chunks = state_tokens(keys, shape, sum(CHUNKS), dtype)
        for which, run, of_step in (
            ("", _decoded_states, tokens),
            (", of parts", _decoded_states, in_parts),
            (", next to chunks", _extended_states, tokens),
            (", chunks", _states_of_chunks, chunks),
            (", runs", _states_of_runs, state_tokens(keys, shape, sum(RUNS), dtype)),
        ):
            yield Case(
                name + which,
                TOLERANCE[shapes.dtype],
                functools.partial(run, of_step, states, where),
                functools.partial(run, of_step, states, where, XLA, False),
            )


def channels_of(shape: StateShape) -> int:
    """C: what is convolved for each key head."""
    return shape.group * shape.value_size + (0 if shape.rule == "Mamba" else 2 * shape.key_size)


def state_tokens(keys: jax.Array, shape: StateShape, num_seqs: int, dtype: jnp.dtype) -> StateTokens:
    """Any tokens, and small parameters of two layers, of which the second is used."""
    k, r, h, v = shape.key_heads, shape.group, shape.key_size, shape.value_size
    channels, float32 = channels_of(shape), jnp.dtype(jnp.float32)
    if shape.rule == "Mamba":
        product = normal(keys[0], 1.0, shape=(num_seqs, 1, 2 * v), dtype=dtype)
        return SelectiveTokens(product, _selective_vectors(keys, shape, dtype), h, dtype)
    # Rows of a layer's product besides the channels, and shapes of rates and of a norm's scales.
    others, of_rates, of_norm = {
        "delta rule": (r * (v + 2), (2, r), (v,)),
        "delta rule by channel": (1 + v + h, (2, h), (v,)),
        "Mamba-2": (r * (v + 1), (3, r), (k, r * v)),
    }[shape.rule]
    taps = normal(keys[1], 1.0, shape=(2, k, channels, shape.taps), dtype=float32)
    rates = jax.random.uniform(keys[2], (2, k, *of_rates), minval=-2.0)
    scales = normal(keys[3], 1.0, shape=(2, *of_norm), dtype=float32)
    product = normal(keys[0], 1.0, shape=(num_seqs, k, channels + others), dtype=dtype)
    if shape.rule == "Mamba-2":
        return MambaTokens(product, MambaVectors(taps, taps[..., 0], rates, scales, 1, 1e-6), h, dtype)
    kind = DeltaTokens if shape.rule == "delta rule" else ChannelTokens
    return kind(product, DeltaVectors(taps, rates, scales, 1, 1e-6), h, dtype)


def _selective_vectors(keys: jax.Array, shape: StateShape, dtype: jnp.dtype) -> SelectiveVectors:
    """Small parameters with which steps are small, so that something is left of a state."""
    channels, low, float32 = shape.value_size, shape.rank + 2 * shape.key_size, jnp.dtype(jnp.float32)
    return SelectiveVectors(
        normal(keys[1], 1.0, shape=(channels, shape.taps + 3), dtype=float32),
        jax.random.uniform(keys[2], (shape.key_size, channels), minval=-4.0),
        normal(keys[3], channels**-0.5, shape=(low, channels), dtype=dtype),
        normal(keys[3], 1.0, shape=(low,), dtype=dtype),
        normal(keys[2], shape.rank**-0.5, shape=(channels, shape.rank), dtype=dtype),
        1e-6,
    )


def _decoded_states(
    tokens: StateTokens, states: DeltaStates, where: tuple[jax.Array, ...], backend: str, interpret: bool
) -> list[jax.Array]:
    out, after = _delta_jit(tokens, states, *where, backend=backend, interpret=interpret)
    return [each.reshape(len(each), -1) for each in (out, *after)]


def _extended_states(
    tokens: StateTokens, states: DeltaStates, where: tuple[jax.Array, ...], backend: str, interpret: bool
) -> list[jax.Array]:
    """The same in a step that extends: so sequences of one token are decoded by a kernel of their own."""
    positions, place, kept_to = where
    is_kept = kept_to >= 0
    kept = jnp.where(is_kept, kept_to, 0)[None]  # place 0 is no sequence's
    seqs = Sequences(jnp.arange(len(place) + 1), positions, place, place, is_kept[None].astype(jnp.int32), kept)
    out, after = _delta_extend_jit(tokens, states, seqs, backend=backend, interpret=interpret)
    return [each.reshape(len(each), -1) for each in (out, *(array[1:] for array in after))]


def _states_of_chunks(
    tokens: StateTokens, states: DeltaStates, where: tuple[jax.Array, ...], backend: str, interpret: bool
) -> list[jax.Array]:
    """Prompts of several blocks: one that begins inside a block at another's state, and one that begins."""
    offsets = jnp.cumsum(jnp.array((0, *CHUNKS)))
    places = jnp.arange(1, len(CHUNKS) + 1)
    at, to = jnp.array([CHUNKS_KEPT]), len(CHUNKS) + 1 + places
    seqs = Sequences(offsets, jnp.array(CHUNKS_START), jnp.array(CHUNKS_SOURCE), places, at, to[None])
    out, after = _delta_extend_jit(tokens, states, seqs, backend=backend, interpret=interpret)
    return [each.reshape(len(each), -1) for each in (out, *after)]


def _states_of_runs(
    tokens: StateTokens, states: DeltaStates, where: tuple[jax.Array, ...], backend: str, interpret: bool
) -> list[jax.Array]:
    """Drafts: once verified, with states that stay as they are, and once moved over, with one that is kept between."""
    offsets = jnp.cumsum(jnp.array((0, *RUNS)))
    places = jnp.arange(1, len(RUNS) + 1)
    at, to = jnp.array([RUNS_KEPT]), (len(RUNS) + 1 + places)[None]
    seqs = Sequences(offsets, jnp.array(RUNS_START), places, places, at, to)
    read, before = _delta_run_jit(tokens, states, seqs, moves=False, backend=backend, interpret=interpret)
    out, after = _delta_run_jit(tokens, states, seqs, backend=backend, interpret=interpret)
    return [each.reshape(len(each), -1) for each in (read, *before, out, *after)]


_delta_jit = jax.jit(delta_decode, static_argnames=("backend", "interpret"))
_delta_extend_jit = jax.jit(delta_extend, static_argnames=("backend", "interpret"))
_delta_run_jit = jax.jit(delta_run, static_argnames=("moves", "backend", "interpret"))
