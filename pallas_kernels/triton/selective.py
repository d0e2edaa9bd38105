"""The rule of Mamba as a Pallas kernel for the Triton backend, which is called by `delta_step` and `delta_run` there.

A program takes some channels of one sequence, one for each thread, and goes from token to token with the numbers of
their states in registers: it moves them, reads them, and gates what it has read. A decode and a prompt are one kernel.
Numbers of the next tokens are loaded some turns ahead, since a turn is shorter than a load. The convolution before, and
the two products that steps, keys and queries are made of, are XLA's.

Kept inputs of the convolution are read and written as `convolution.py` does.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.convolution import convolve_decode, convolve_extend
from pallas_kernels.delta_tokens import SelectiveTokens, Sequences
from pallas_kernels.triton.delta_common import store, vector
from pallas_kernels.triton.tiles import load_rows, store_rows

_CHANNELS, _THREADS_OF_WARP = 128, 32  # of a program
_AHEAD = 4  # tokens


def refuse_selective(matrices: jax.Array) -> str | None:
    """Why the kernel can't take states `[P, 1, 1, h, C]`, or None when it can."""
    key_size, channels = matrices.shape[-2:]
    if key_size & (key_size - 1) or channels % _THREADS_OF_WARP:
        return (
            f"{channels} channels have states of {key_size} numbers; it takes multiples of {_THREADS_OF_WARP}, and "
            "powers of two"
        )
    return None


def selective_step(
    tokens: SelectiveTokens,
    matrices: jax.Array,
    inputs: jax.Array,
    positions: jax.Array,
    place: jax.Array,
    kept_to: jax.Array,
    interpret: bool,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """See `backend.DeltaStep`."""
    convolved, inputs = convolve_decode(tokens.mixed, tokens.taps, inputs, positions, place, kept_to)
    offsets = jnp.arange(len(place) + 1, dtype=jnp.int32)
    kept_at = (kept_to >= 0).astype(jnp.int32)
    seqs = Sequences(offsets, positions, place, place, kept_at[None], kept_to[None])
    return *_moved(tokens, convolved, matrices, seqs, interpret), inputs


def selective_run(
    tokens: SelectiveTokens, matrices: jax.Array, inputs: jax.Array, seqs: Sequences, interpret: bool
) -> tuple[jax.Array, jax.Array]:
    """See `backend.DeltaRun`."""
    convolved, _ = convolve_extend(tokens.mixed, tokens.taps, inputs, seqs)
    return _moved(tokens, convolved, matrices, seqs, interpret)


def _moved(
    tokens: SelectiveTokens, convolved: jax.Array, matrices: jax.Array, seqs: Sequences, interpret: bool
) -> tuple[jax.Array, jax.Array]:
    heads = tokens.heads(jax.nn.silu(convolved + tokens.bias))
    q, k = heads.q[:, 0], heads.k[:, 0]
    x, step = (each.reshape(len(q), -1) for each in (heads.v, heads.beta))
    vectors = tokens.vectors
    return _scan(q, k, x, step, tokens.fused, vectors.channels, vectors.rates, seqs, matrices, interpret)


@functools.partial(jax.jit, static_argnames="interpret")
def _scan(
    q: jax.Array,
    k: jax.Array,
    x: jax.Array,
    step: jax.Array,
    product: jax.Array,
    channels: jax.Array,
    rates: jax.Array,
    seqs: Sequences,
    matrices: jax.Array,
    interpret: bool,
) -> tuple[jax.Array, jax.Array]:
    """q and k `[T, h]`, x and its step `[T, C]`; the product has the gates, and `channels` what is added of x."""
    num_channels = matrices.shape[-1]
    width = min(num_channels & -num_channels, _CHANNELS)
    # Zeros, so that padding has numbers.
    out = jnp.zeros((len(q), 1, 1, num_channels), product.dtype)
    others = len(jax.tree.leaves((q, k, x, step, product, channels, rates, seqs)))
    after: tuple[jax.Array, jax.Array] = pl.pallas_call(
        functools.partial(_kernel, width=width),
        out_shape=[jax.ShapeDtypeStruct(each.shape, each.dtype) for each in (out, matrices)],
        grid=(len(seqs.place), num_channels // width),
        input_output_aliases={others: 0, others + 1: 1},
        compiler_params=plgpu.CompilerParams(num_warps=width // _THREADS_OF_WARP, num_stages=1),
        interpret=interpret,
        name="delta_scan",
    )(q, k, x, step, product, channels, rates, seqs, out, matrices)
    return after


def _kernel(
    q_ref: Any,
    k_ref: Any,
    x_ref: Any,
    step_ref: Any,
    product_ref: Any,
    channels_ref: Any,
    rates_ref: Any,
    seqs: Sequences,
    _out: Any,
    states: Any,
    out_ref: Any,
    states_out: Any,
    *,
    width: int,
) -> None:
    key_size, num_channels = states.shape[3:]
    seq, first = pl.program_id(0), pl.program_id(1) * width
    offset, start = seqs.query_offsets[seq], seqs.starts[seq]
    count = seqs.query_offsets[seq + 1] - offset
    rows, channel = jnp.arange(key_size, dtype=jnp.int32), first + jnp.arange(width, dtype=jnp.int32)
    rates = -jnp.exp(load_rows(rates_ref, (rows,), None, (first, width)))
    skip = plgpu.load(channels_ref.at[channel, jnp.full_like(channel, channels_ref.shape[1] - 1)])

    def keep(place: jax.Array, state: jax.Array, is_due: jax.Array) -> None:
        where = jnp.maximum(place, 0), 0, 0, rows
        store_rows(states_out, where, jnp.broadcast_to(is_due, rows.shape), state, (first, width))

    def loaded(token: jax.Array | int) -> tuple[jax.Array, ...]:
        """A token's x, step and gates, if it is there."""
        row, is_there = offset + token, token < count
        x, step = (vector(ref, (row,), channel, is_there) for ref in (x_ref, step_ref))
        return x, step, vector(product_ref, (row, 0), num_channels + channel, is_there).astype(jnp.float32)

    def one(token: jax.Array, carry: tuple[jax.Array, Any]) -> tuple[jax.Array, Any]:
        state, ((x, step, gate), *ahead) = carry
        ahead = (*ahead, loaded(token + _AHEAD))
        q, k = (vector(ref, (offset + token,), rows) for ref in (q_ref, k_ref))
        state = state * jnp.exp(rates * step[None, :]) + k[:, None] * (step * x)[None, :]
        read = jnp.sum(state * q[:, None], axis=0) + skip * x
        out = read * gate / (1 + jnp.exp(-gate))
        store(out_ref, (offset + token, 0, 0), channel, out.astype(out_ref.dtype))
        for number in range(seqs.kept_at.shape[0]):
            is_due = seqs.kept_at[number, seq] == token + 1
            # A branch, so that its addresses take no registers from all tokens.
            pl.when(is_due)(functools.partial(keep, seqs.kept_to[number, seq], state, is_due))
        return state, ahead

    has_state = jnp.broadcast_to((start > 0) & (count > 0), rows.shape)
    state = load_rows(states, (seqs.source[seq], 0, 0, rows), has_state, (first, width))
    state, _ = lax.fori_loop(jnp.int32(0), count, one, (state, tuple(map(loaded, range(_AHEAD)))))
    keep(seqs.place[seq], state, (count > 0) & (seqs.place[seq] >= 0))
