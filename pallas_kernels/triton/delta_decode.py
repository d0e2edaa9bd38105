"""`delta_decode` as two Pallas kernels for the Triton backend, which are called through `triton.BACKEND`.

`delta_inputs` makes what that takes of a layer's product, which it reads as it is: a program takes a key head of a
sequence with its values, reads the inputs before the token, moves them on by one, and makes q, k, v, a and b. XLA has
ten kernels for that.

`delta_decode` is one pass over the states: a program takes one value head of one sequence, reads its state once, and
writes it once, or twice where the state is kept besides; and normalizes and gates what it has read. XLA gathers states,
computes, scatters them, and copies those that are kept in a loop that the host steps.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.backend import L2_EPS
from pallas_kernels.delta_tokens import DeltaTokens
from pallas_kernels.triton.tiles import index_of, load_rows, store_rows

_NUMBERS_OF_WARP = 1024  # of a state: 32 in each thread, 16 warps for one of 128 x 128
_WARPS_OF_INPUTS = 1  # 4 channels of a head of 128 in each thread


def refuse_delta_decode(matrices: jax.Array) -> str | None:
    """Why this backend can't take states `[P, K, r, h, v]`, or None when it can."""
    key_size, value_size = matrices.shape[-2:]
    if any(size & (size - 1) or size < 16 for size in (key_size, value_size)):
        return f"states are {key_size} x {value_size}; it takes powers of two from 16"
    return None


def delta_inputs(
    tokens: DeltaTokens,
    inputs: jax.Array,
    place: jax.Array,
    has_state: jax.Array,
    kept_to: jax.Array,
    interpret: bool,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array, jax.Array]:
    """See `backend.DeltaInputs`."""
    vectors = tokens.vectors
    of_layer = vectors.taps, vectors.rates, index_of(vectors.row)
    return _inputs(tokens.fused, *of_layer, inputs, place, has_state, kept_to, tokens.sizes, interpret)


@functools.partial(jax.jit, static_argnames=("sizes", "interpret"))
def _inputs(
    fused: jax.Array,
    taps: jax.Array,
    rates: jax.Array,
    layer: jax.Array,
    inputs: jax.Array,
    place: jax.Array,
    has_state: jax.Array,
    kept_to: jax.Array,
    sizes: tuple[int, int, int],
    interpret: bool,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array, jax.Array]:
    num_seqs, key_heads, _ = fused.shape
    key_size, group, value_size = sizes
    key = jax.ShapeDtypeStruct((num_seqs, key_heads, key_size), jnp.float32)
    value = jax.ShapeDtypeStruct((num_seqs, key_heads, group, value_size), jnp.float32)
    of_group = jax.ShapeDtypeStruct((num_seqs, key_heads, group), jnp.float32)
    q, k, v, decay, beta, inputs = pl.pallas_call(
        _inputs_kernel,
        out_shape=(key, key, value, of_group, of_group, jax.ShapeDtypeStruct(inputs.shape, inputs.dtype)),
        grid=(num_seqs, key_heads),
        input_output_aliases={7: 5},
        compiler_params=plgpu.CompilerParams(num_warps=_WARPS_OF_INPUTS),
        interpret=interpret,
        name="delta_inputs",
    )(fused, taps, rates, layer, place, has_state.astype(jnp.int32), kept_to, inputs)
    return q, k, v, decay, beta, inputs


def _inputs_kernel(
    fused_ref: Any,
    taps_ref: Any,
    rates_ref: Any,
    layer_ref: Any,
    place_ref: Any,
    has_state_ref: Any,
    kept_to_ref: Any,
    inputs: Any,
    q_ref: Any,
    k_ref: Any,
    v_ref: Any,
    decay_ref: Any,
    beta_ref: Any,
    inputs_out: Any,
) -> None:
    seq, head = pl.program_id(0), pl.program_id(1)
    *_, group, value_size = v_ref.shape
    key_size, num_kept = q_ref.shape[-1], inputs.shape[1]
    place, kept_to, has_state = place_ref[seq], kept_to_ref[seq], has_state_ref[seq] != 0
    layer = layer_ref[0]

    def convolved(first: int, width: int) -> jax.Array:
        """Channels from `first` on after the convolution, whose inputs are moved on by one."""
        channel = first + jnp.arange(width, dtype=jnp.int32)
        before = [_vector(inputs, (place, i, head), channel, has_state) for i in range(num_kept)]
        window = [*before, _vector(fused_ref, (seq, head), channel).astype(jnp.float32)]
        of_head = [jnp.broadcast_to(each, channel.shape) for each in (layer, head)]
        taps = [plgpu.load(taps_ref.at[(*of_head, channel, jnp.full_like(channel, i))]) for i in range(num_kept + 1)]
        for i, moved in enumerate(window[1:]):
            _store(inputs_out, (place, i, head), channel, moved)
            _store(inputs_out, (jnp.maximum(kept_to, 0), i, head), channel, moved, kept_to >= 0)
        out = functools.reduce(jnp.add, (each * tap for each, tap in zip(window, taps, strict=True)))
        return out / (1 + jnp.exp(-out))

    row, column = (jnp.arange(size, dtype=jnp.int32) for size in (key_size, value_size))
    for number, (ref, scale) in enumerate(((q_ref, key_size**-0.5), (k_ref, 1.0))):
        of_head = convolved(number * key_size, key_size)
        _store(ref, (seq, head), row, of_head * (lax.rsqrt(jnp.sum(of_head * of_head) + L2_EPS) * scale))
    for i in range(group):
        _store(v_ref, (seq, head, i), column, convolved(2 * key_size + i * value_size, value_size))
        write = fused_ref[seq, head, fused_ref.shape[-1] - 2 * group + i].astype(jnp.float32)
        forget = fused_ref[seq, head, fused_ref.shape[-1] - group + i].astype(jnp.float32)
        beta_ref[seq, head, i] = 1 / (1 + jnp.exp(-write))
        decay_ref[seq, head, i] = _decay(forget + rates_ref[layer, head, 1, i], rates_ref[layer, head, 0, i])


def _decay(logit: jax.Array, log_rate: jax.Array) -> jax.Array:
    """exp(-exp(`log_rate`) softplus(`logit`))."""
    softplus = jnp.maximum(logit, 0) + jnp.log1p(jnp.exp(-jnp.abs(logit)))
    return jnp.exp(-jnp.exp(log_rate) * softplus)


def delta_decode(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    decay: jax.Array,
    beta: jax.Array,
    matrices: jax.Array,
    place: jax.Array,
    has_state: jax.Array,
    kept_to: jax.Array,
    tokens: DeltaTokens | None,
    interpret: bool,
) -> tuple[jax.Array, jax.Array]:
    """See `backend.DeltaDecode`."""
    heads, where = (q, k, v, decay, beta), (place, has_state.astype(jnp.int32), kept_to)
    if tokens is None:
        return _decode(heads, matrices, where, (), 0.0, v.dtype, interpret)
    vectors = tokens.vectors
    gates = tokens.fused, vectors.scales, index_of(vectors.row)
    return _decode(heads, matrices, where, gates, vectors.eps, tokens.fused.dtype, interpret)


@functools.partial(jax.jit, static_argnames=("eps", "dtype", "interpret"))
def _decode(
    heads: tuple[jax.Array, ...],
    matrices: jax.Array,
    where: tuple[jax.Array, ...],
    gates: tuple[jax.Array, ...],
    eps: float,
    dtype: jnp.dtype,
    interpret: bool,
) -> tuple[jax.Array, jax.Array]:
    """With `gates`, the fused product, the norms' scales and the layer `[1]`, what is read is normalized and gated."""
    _, _, value, *_ = heads
    num_seqs, key_heads, group, _ = value.shape
    numbers = matrices.shape[-2] * matrices.shape[-1]
    operands = (*heads, *where, *gates, matrices)
    out, matrices = pl.pallas_call(
        functools.partial(_kernel, eps=eps),
        out_shape=(jax.ShapeDtypeStruct(value.shape, dtype), jax.ShapeDtypeStruct(matrices.shape, matrices.dtype)),
        grid=(num_seqs, key_heads * group),
        input_output_aliases={len(operands) - 1: 1},
        compiler_params=plgpu.CompilerParams(num_warps=min(max(numbers // _NUMBERS_OF_WARP, 1), 16)),
        interpret=interpret,
        name="delta_decode",
    )(*operands)
    return out, matrices


def _kernel(
    q_ref: Any,
    k_ref: Any,
    v_ref: Any,
    decay_ref: Any,
    beta_ref: Any,
    place_ref: Any,
    has_state_ref: Any,
    kept_to_ref: Any,
    *refs: Any,
    eps: float,
) -> None:
    *gates, states, out_ref, states_out = refs
    _, _, group, key_size, value_size = states.shape
    seq, head = pl.program_id(0), pl.program_id(1)
    key_head, of_group = lax.div(head, jnp.int32(group)), lax.rem(head, jnp.int32(group))
    row, column = (jnp.arange(size, dtype=jnp.int32) for size in (key_size, value_size))
    place, kept_to = place_ref[seq], kept_to_ref[seq]
    has_state = jnp.broadcast_to(has_state_ref[seq] != 0, (key_size,))
    is_kept = jnp.broadcast_to(kept_to >= 0, (key_size,))

    state = load_rows(states, (place, key_head, of_group, row), has_state)
    k = _vector(k_ref, (seq, key_head), row)[:, None]
    q = _vector(q_ref, (seq, key_head), row)[:, None]
    v = _vector(v_ref, (seq, key_head, of_group), column)
    state = state * decay_ref[seq, key_head, of_group]
    change = (v - jnp.sum(state * k, axis=0)) * beta_ref[seq, key_head, of_group]
    state = state + k * change[None, :]
    every = jnp.full((key_size,), True)
    store_rows(states_out, (place, key_head, of_group, row), every, state)
    store_rows(states_out, (jnp.maximum(kept_to, 0), key_head, of_group, row), is_kept, state)
    read = jnp.sum(state * q, axis=0)
    if gates:
        fused_ref, scales_ref, layer_ref = gates
        first = fused_ref.shape[-1] - group * (value_size + 2) + of_group * value_size
        gate = _vector(fused_ref, (seq, key_head), first + column).astype(jnp.float32)
        scale = _vector(scales_ref, (layer_ref[0],), column).astype(jnp.float32)
        read = read * lax.rsqrt(jnp.sum(read * read) * (1 / value_size) + eps) * scale
        read = read * gate / (1 + jnp.exp(-gate))
    _store(out_ref, (seq, key_head, of_group), column, read.astype(out_ref.dtype))


def _vector(ref: Any, index: tuple[Any, ...], column: jax.Array, is_there: jax.Array | None = None) -> jax.Array:
    """The numbers of the last axis at `column`; zeros unless `is_there`."""
    where = ref.at[_along(index, column)]
    if is_there is None:
        return plgpu.load(where)
    return plgpu.load(where, mask=jnp.broadcast_to(is_there, column.shape), other=0)


def _store(
    ref: Any, index: tuple[Any, ...], column: jax.Array, numbers: jax.Array, is_due: jax.Array | None = None
) -> None:
    """Writes the last axis at `column`, if that is due."""
    mask = None if is_due is None else jnp.broadcast_to(is_due, column.shape)
    plgpu.store(ref.at[_along(index, column)], numbers, mask=mask)


def _along(index: tuple[Any, ...], column: jax.Array) -> tuple[jax.Array, ...]:
    return (*(jnp.broadcast_to(jnp.int32(each), column.shape) for each in index), column)
