"""`delta_run` as a Pallas kernel for the Triton backend, which is called through `triton.BACKEND`.

A program takes one value head of one sequence, reads its state once, and goes with it from token to token of a run, as
`delta_step` goes over one: it convolves, moves the state in registers, and normalizes and gates what it has read. So a
run of drafts takes little longer than a token; in blocks of 64 tokens nearly all would be padding, and XLA has forty
kernels around them. Kept inputs are read alone: programs of a key head read the same ones, in any order.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.delta_tokens import SelectiveTokens, Sequences, StateTokens
from pallas_kernels.target import target_device
from pallas_kernels.triton.delta_common import (
    Head,
    Small,
    decayed,
    ids_of,
    kind_of,
    normalized,
    num_warps_for,
    small_of,
    store,
    vector,
)
from pallas_kernels.triton.selective import selective_run
from pallas_kernels.triton.tiles import index_of, load_rows, store_rows


def delta_run(
    tokens: StateTokens, matrices: jax.Array, inputs: jax.Array, seqs: Sequences, interpret: bool
) -> tuple[jax.Array, jax.Array]:
    """See `backend.DeltaRun`."""
    if isinstance(tokens, SelectiveTokens):
        return selective_run(tokens, matrices, inputs, seqs, interpret)
    rest = index_of(tokens.vectors.row), seqs, inputs, matrices
    return _run(tokens.fused, small_of(tokens), *rest, kind_of(tokens), tokens.dtype, tokens.vectors.eps, interpret)


@functools.partial(jax.jit, static_argnames=("kind", "dtype", "eps", "interpret"))
def _run(
    product: jax.Array,
    small: Small,
    layer: jax.Array,
    seqs: Sequences,
    inputs: jax.Array,
    matrices: jax.Array,
    kind: type[Head],
    dtype: jnp.dtype,
    eps: float,
    interpret: bool,
) -> tuple[jax.Array, jax.Array]:
    _, key_heads, group, _, value_size = matrices.shape
    # Of more threads each has fewer registers, of fewer more numbers. By the compilers for both, without a device: an
    # A100's code spills with 16 warps of a state of 128 x 128 and not with 8, a Hopper's the other way round.
    num_warps = min(num_warps_for(matrices), 16 if target_device().is_hopper else 8)
    # Zeros, so that padding has numbers.
    out = jnp.zeros((len(product), key_heads, group, value_size), jnp.float32 if small.scales is None else dtype)
    others = len(jax.tree.leaves((product, small, layer, seqs, inputs)))
    after: tuple[jax.Array, jax.Array] = pl.pallas_call(
        functools.partial(_kernel, kind=kind, eps=eps),
        out_shape=[jax.ShapeDtypeStruct(each.shape, each.dtype) for each in (out, matrices)],
        grid=(len(seqs.place), key_heads * group),
        input_output_aliases={others: 0, others + 1: 1},
        compiler_params=plgpu.CompilerParams(num_warps=num_warps),
        interpret=interpret,
        name="delta_run",
    )(product, small, layer, seqs, inputs, out, matrices)
    return after


def _kernel(
    product_ref: Any,
    small: Small,
    layer_ref: Any,
    seqs: Sequences,
    inputs: Any,
    _out: Any,
    states: Any,
    out_ref: Any,
    states_out: Any,
    *,
    kind: type[Head],
    eps: float,
) -> None:
    _, _, group, key_size, value_size = states.shape
    corrects = small.scales is not None
    seq, key_head, of_group = ids_of(group)
    layer, offset, start = layer_ref[0], seqs.query_offsets[seq], seqs.starts[seq]
    count, source = seqs.query_offsets[seq + 1] - offset, seqs.source[seq]
    rows = jnp.arange(key_size, dtype=jnp.int32)

    def keep(place: jax.Array, state: jax.Array, is_due: jax.Array) -> None:
        where = jnp.maximum(place, 0), key_head, of_group, rows
        store_rows(states_out, where, jnp.broadcast_to(is_due, rows.shape), state)

    def convolved(token: jax.Array, first: int | jax.Array, width: int) -> jax.Array:
        """Channels of a token from `first` on, after the convolution and silu."""
        num_taps, channel = inputs.shape[1], first + jnp.arange(width, dtype=jnp.int32)
        at = [jnp.broadcast_to(each, channel.shape) for each in (layer, key_head)]
        out = jnp.zeros(width, jnp.float32) if small.bias is None else plgpu.load(small.bias.at[(*at, channel)])
        for back in range(num_taps):
            tap = plgpu.load(small.taps.at[(*at, channel, jnp.full_like(channel, num_taps - 1 - back))])
            is_early = (token < back) & (start + token >= back)  # before the run, but not before the sequence
            slot = lax.rem(start + token + (num_taps - back), jnp.int32(num_taps))
            late = vector(product_ref, (offset + jnp.maximum(token - back, 0), key_head), channel, token >= back)
            early = vector(inputs, (source, slot, key_head), channel, is_early)
            out += (late.astype(jnp.float32) + early) * tap
        return out / (1 + jnp.exp(-out))

    def one(token: jax.Array, state: jax.Array) -> jax.Array:
        def fused(column: jax.Array) -> jax.Array:
            return vector(product_ref, (offset + token, key_head), column).astype(jnp.float32)

        q, k = (convolved(token, first, key_size) for first in (0, key_size))
        v = convolved(token, 2 * key_size + of_group * value_size, value_size)
        if corrects:
            q, k = normalized(q) * key_size**-0.5, normalized(k)
        head = kind(fused, product_ref.shape[-1], small, layer, key_head, of_group, group)
        decay, beta = head.decay_and_beta()
        state = decayed(state, decay)
        written = v - jnp.sum(state * k[:, None], axis=0) if corrects else v
        state = state + k[:, None] * (written * beta)[None, :]
        read = jnp.sum(state * q[:, None], axis=0)
        column = jnp.arange(value_size, dtype=jnp.int32)
        store(
            out_ref,
            (offset + token, key_head, of_group),
            column,
            head.gated(read, v, eps, column, value_size).astype(out_ref.dtype),
        )
        for number in range(seqs.kept_at.shape[0]):
            is_due = seqs.kept_at[number, seq] == token + 1
            # A branch, so that its addresses take no registers from all tokens.
            pl.when(is_due)(functools.partial(keep, seqs.kept_to[number, seq], state, is_due))
        return state

    has_state = jnp.broadcast_to((start > 0) & (count > 0), rows.shape)
    state = load_rows(states, (source, key_head, of_group, rows), has_state)
    state = lax.fori_loop(jnp.int32(0), count, one, state)
    keep(seqs.place[seq], state, (count > 0) & (seqs.place[seq] >= 0))
