"""`delta_decode` as two Pallas kernels for the Triton backend, which are called through `triton.BACKEND`.

`delta_inputs` makes what that takes of a layer's product, which it reads as it is: a program takes a key head of a
sequence with its values, reads the inputs before the token, moves them on by one, and makes q, k, v, a and b. XLA has
ten kernels for that.

`delta_decode` is one pass over the states. The columns of a state don't depend on each other: a program takes a few of
one value head of one sequence, reads them once, and writes them once, or twice where the state is kept besides. XLA
gathers states, computes, scatters them, and copies those that are kept in a loop that the host steps.
"""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.backend import L2_EPS
from pallas_kernels.triton.tiles import load_rows, store_rows, widths_of

_COLUMNS = 32  # of a state: 4 KiB of each 32 rows, 16 numbers of a state of 128 rows in each thread
_WARPS = 8
_WARPS_OF_INPUTS = 1  # 4 channels of a head of 128 in each thread


def refuse_delta_decode(matrices: jax.Array) -> str | None:
    """Why this backend can't take states `[P, K, r, h, v]`, or None when it can."""
    key_size, value_size = matrices.shape[-2:]
    if key_size & (key_size - 1) or key_size < 16 or value_size % 16:
        return f"states are {key_size} x {value_size}; it takes a power of two from 16, by a multiple of 16"
    return None


@functools.partial(jax.jit, static_argnames=("sizes", "interpret"))
def delta_inputs(
    fused: jax.Array,
    taps: jax.Array,
    rates: jax.Array,
    inputs: jax.Array,
    place: jax.Array,
    has_state: jax.Array,
    kept_to: jax.Array,
    sizes: tuple[int, int, int],
    interpret: bool,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array, jax.Array]:
    """See `backend.DeltaInputs`."""
    num_seqs, key_heads, _ = fused.shape
    key_size, group, value_size = sizes
    key = jax.ShapeDtypeStruct((num_seqs, key_heads, key_size), jnp.float32)
    value = jax.ShapeDtypeStruct((num_seqs, key_heads, group, value_size), jnp.float32)
    of_group = jax.ShapeDtypeStruct((num_seqs, key_heads, group), jnp.float32)
    q, k, v, decay, beta, inputs = pl.pallas_call(
        _inputs_kernel,
        out_shape=(key, key, value, of_group, of_group, jax.ShapeDtypeStruct(inputs.shape, inputs.dtype)),
        grid=(num_seqs, key_heads),
        input_output_aliases={6: 5},
        compiler_params=plgpu.CompilerParams(num_warps=_WARPS_OF_INPUTS),
        interpret=interpret,
        name="delta_inputs",
    )(fused, taps, rates, place, has_state.astype(jnp.int32), kept_to, inputs)
    return q, k, v, decay, beta, inputs


def _inputs_kernel(
    fused_ref: Any,
    taps_ref: Any,
    rates_ref: Any,
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

    def convolved(first: int, width: int) -> jax.Array:
        """Channels from `first` on after the convolution, whose inputs are moved on by one."""
        channel = first + jnp.arange(width, dtype=jnp.int32)
        before = [_vector(inputs, (place, i, head), channel, has_state) for i in range(num_kept)]
        window = [*before, _vector(fused_ref, (seq, head), channel).astype(jnp.float32)]
        at = jnp.broadcast_to(head, channel.shape)
        taps = [plgpu.load(taps_ref.at[(at, channel, jnp.full_like(channel, i))]) for i in range(num_kept + 1)]
        for i, moved in enumerate(window[1:]):
            _store(inputs_out, (place, i, head), channel, moved)
            _store(inputs_out, (jnp.maximum(kept_to, 0), i, head), channel, moved, kept_to >= 0)
        out = functools.reduce(jnp.add, (each * tap for each, tap in zip(window, taps, strict=True)))
        return out / (1 + jnp.exp(-out))

    row, widths = jnp.arange(key_size, dtype=jnp.int32), widths_of(value_size)
    for number, (ref, scale) in enumerate(((q_ref, key_size**-0.5), (k_ref, 1.0))):
        of_head = convolved(number * key_size, key_size)
        _store(ref, (seq, head), row, of_head * (lax.rsqrt(jnp.sum(of_head * of_head) + L2_EPS) * scale))
    for i in range(group):
        for first, width in zip(itertools.accumulate(widths, initial=0), widths, strict=False):
            value = convolved(2 * key_size + i * value_size + first, width)
            _store(v_ref, (seq, head, i), first + jnp.arange(width, dtype=jnp.int32), value)
        write = fused_ref[seq, head, fused_ref.shape[-1] - 2 * group + i].astype(jnp.float32)
        forget = fused_ref[seq, head, fused_ref.shape[-1] - group + i].astype(jnp.float32)
        beta_ref[seq, head, i] = 1 / (1 + jnp.exp(-write))
        decay_ref[seq, head, i] = _decay(forget + rates_ref[head, 1, i], rates_ref[head, 0, i])


def _decay(logit: jax.Array, log_rate: jax.Array) -> jax.Array:
    """exp(-exp(`log_rate`) softplus(`logit`))."""
    softplus = jnp.maximum(logit, 0) + jnp.log1p(jnp.exp(-jnp.abs(logit)))
    return jnp.exp(-jnp.exp(log_rate) * softplus)


@functools.partial(jax.jit, static_argnames="interpret")
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
    interpret: bool,
) -> tuple[jax.Array, jax.Array]:
    """See `backend.DeltaDecode`."""
    num_seqs, key_heads, group, value_size = v.shape
    columns = _COLUMNS if value_size % _COLUMNS == 0 else 16
    out, matrices = pl.pallas_call(
        functools.partial(_kernel, columns=columns),
        out_shape=(jax.ShapeDtypeStruct(v.shape, v.dtype), jax.ShapeDtypeStruct(matrices.shape, matrices.dtype)),
        grid=(num_seqs, key_heads * group, value_size // columns),
        input_output_aliases={8: 1},
        compiler_params=plgpu.CompilerParams(num_warps=_WARPS),
        interpret=interpret,
        name="delta_decode",
    )(q, k, v, decay, beta, place, has_state.astype(jnp.int32), kept_to, matrices)
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
    states: Any,
    out_ref: Any,
    states_out: Any,
    *,
    columns: int,
) -> None:
    _, _, group, key_size, _ = states.shape
    seq, head = pl.program_id(0), pl.program_id(1)
    key_head, of_group = lax.div(head, jnp.int32(group)), lax.rem(head, jnp.int32(group))
    first = pl.program_id(2) * columns
    row = jnp.arange(key_size, dtype=jnp.int32)
    column = first + jnp.arange(columns, dtype=jnp.int32)
    place, kept_to = place_ref[seq], kept_to_ref[seq]
    has_state = jnp.broadcast_to(has_state_ref[seq] != 0, (key_size,))
    is_kept = jnp.broadcast_to(kept_to >= 0, (key_size,))

    state = load_rows(states, (place, key_head, of_group, row), has_state, (first, columns))
    k = _vector(k_ref, (seq, key_head), row)[:, None]
    q = _vector(q_ref, (seq, key_head), row)[:, None]
    v = _vector(v_ref, (seq, key_head, of_group), column)
    state = state * decay_ref[seq, key_head, of_group]
    change = (v - jnp.sum(state * k, axis=0)) * beta_ref[seq, key_head, of_group]
    state = state + k * change[None, :]
    _store(out_ref, (seq, key_head, of_group), column, jnp.sum(state * q, axis=0))
    every = jnp.full((key_size,), True)
    store_rows(states_out, (place, key_head, of_group, row), every, state, (first, columns))
    kept = jnp.maximum(kept_to, 0), key_head, of_group, row
    store_rows(states_out, kept, is_kept, state, (first, columns))


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
