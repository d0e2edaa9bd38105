"""States of gated delta-nets and Mamba-2, and convolutions, in C++ (`states.cc`) for x86 processors. Called through
`native.backend`.

XLA reads and writes a decode's states several times, and goes through prompts in blocks, of which each small product is
packed anew (docs/kernels/native.md). It computes what lies around the states: gates, and norms of what is read.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.delta_tokens import SelectiveTokens, Sequences, StateTokens
from pallas_kernels.native import library

_MOST_KEYS, _KEY_STEP, _VALUE_STEP, _MOST_TAPS = 256, 8, 16, 8


def refuse_states(tokens: StateTokens, matrices: jax.Array, inputs: jax.Array) -> str | None:
    """Why this backend can't take the states, because of the arrays or of this machine; or None."""
    if isinstance(tokens, SelectiveTokens):
        return "each number of a state decays by itself; it takes a decay of a value head, or of a row"
    *_, key_size, value_size = matrices.shape
    num_taps = inputs.shape[1]
    if tokens.dtype != jnp.float32:
        return f"it takes tokens in float32, not {tokens.dtype}"
    if key_size % _KEY_STEP or key_size > _MOST_KEYS or value_size % _VALUE_STEP or num_taps > _MOST_TAPS:
        return (
            f"states are {key_size} x {value_size}, with convolutions of {num_taps} tokens; it takes multiples of "
            f"{_KEY_STEP} x {_VALUE_STEP}, up to {_MOST_KEYS} rows, and {_MOST_TAPS} tokens"
        )
    return library.load(library.STATES)


def refuse_convolution(mixed: jax.Array, inputs: jax.Array) -> str | None:
    """The same of a layer that only convolves."""
    num_taps, channels = inputs.shape[1], inputs.shape[-1]
    if channels % _VALUE_STEP or num_taps > _MOST_TAPS:
        return (
            f"a group has {channels} channels, with convolutions of {num_taps} tokens; it takes multiples of "
            f"{_VALUE_STEP}, and {_MOST_TAPS} tokens"
        )
    return library.load(library.STATES)


def scan(
    tokens: StateTokens, matrices: jax.Array, inputs: jax.Array, seqs: Sequences, interpret: bool
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """See `backend.DeltaScan`. Tokens without a sequence read zeros."""
    activated, inputs = _convolved(tokens.fused, tokens.taps, tokens.bias, inputs, seqs, activates=True)
    heads = tokens.heads(activated)
    numbers = heads.q, heads.k, heads.v, jnp.exp(heads.log_decay), heads.beta
    read, matrices = _call(
        library.MOVE_STATES, heads.v.shape, (*numbers, *_places(seqs)), matrices, corrects=tokens.corrects
    )
    return tokens.gated(read, heads.v), matrices, inputs


def convolve(
    mixed: jax.Array, taps: jax.Array, inputs: jax.Array, seqs: Sequences, interpret: bool
) -> tuple[jax.Array, jax.Array]:
    """See `backend.Convolve`. Tokens without a sequence yield zeros."""
    return _convolved(mixed, taps, None, inputs, seqs, activates=False)


def _convolved(
    rows: jax.Array, taps: jax.Array, bias: jax.Array | None, inputs: jax.Array, seqs: Sequences, *, activates: bool
) -> tuple[jax.Array, jax.Array]:
    """The first C numbers of each of `rows [T, K, ..]` convolved, or silu of that, and the kept inputs."""
    taps = jnp.moveaxis(taps, -1, 0)
    bias = jnp.zeros(taps.shape[1:], jnp.float32) if bias is None else bias
    shape = *rows.shape[:2], inputs.shape[-1]
    return _call(library.CONVOLVE_TOKENS, shape, (rows, taps, bias, *_places(seqs)), inputs, activates=activates)


def _places(seqs: Sequences) -> list[jax.Array]:
    return [each.astype(jnp.int32) for each in seqs]


def _call(
    target: str, shape: tuple[int, ...], arguments: tuple[jax.Array, ...], kept: jax.Array, **attributes: bool
) -> tuple[jax.Array, jax.Array]:
    """A result of this shape, and what becomes of the kept array, in its place."""
    results = jax.ShapeDtypeStruct(shape, jnp.float32), jax.ShapeDtypeStruct(kept.shape, jnp.float32)
    call = jax.ffi.ffi_call(target, results, input_output_aliases={len(arguments): 1})
    result, after = call(*arguments, kept, **attributes)
    return result, after
