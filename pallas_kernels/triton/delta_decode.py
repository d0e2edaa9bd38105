"""`delta_decode` as Pallas kernels for the Triton backend, which are called through `triton.BACKEND`.

A program takes one value head of one sequence, reads its state once, and writes it once, or twice where the state is
kept besides. `delta_step` is all of a decode between two products: a program reads the first as it is, whole or in
parts, convolves q, k and its v, makes a and b, moves its state, and normalizes and gates what it has read; the norm of
Mamba-2, which is over many programs' heads, is XLA's. The programs of a key head all convolve q and k; one of them
keeps the inputs. XLA has a dozen kernels for that, and copies kept states in a loop that the host steps. `delta_decode`
is the rule alone, for sequences of one token in a step that extends others.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.delta_tokens import L2_EPS, DeltaTokens, StateTokens
from pallas_kernels.parts import total
from pallas_kernels.triton.tiles import index_of, load_rows, store_rows

_NUMBERS_OF_WARP = 1024  # of a state: 32 in each thread, 16 warps for one of 128 x 128


def refuse_delta_decode(matrices: jax.Array) -> str | None:
    """Why this backend can't take states `[P, K, r, h, v]`, or None when it can."""
    key_size, value_size = matrices.shape[-2:]
    if any(size & (size - 1) or size < 16 for size in (key_size, value_size)):
        return f"states are {key_size} x {value_size}; it takes powers of two from 16"
    return None


def delta_step(
    tokens: StateTokens,
    matrices: jax.Array,
    inputs: jax.Array,
    positions: jax.Array,
    place: jax.Array,
    kept_to: jax.Array,
    interpret: bool,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """See `backend.DeltaStep`."""
    vectors = tokens.vectors
    if isinstance(tokens, DeltaTokens):
        small = _Small(vectors.taps, None, vectors.rates, tokens.vectors.scales)
    else:
        small = _Small(vectors.taps, tokens.vectors.bias, vectors.rates, None)
    rest = index_of(vectors.row), positions, place, kept_to, inputs, matrices
    return _step(tokens.product, small, *rest, tokens.dtype, vectors.eps, interpret)


class _Small(NamedTuple):
    """The small parameters of a layer, or refs to them; a delta-net has no bias, and Mamba-2 no scales."""

    taps: Any
    bias: Any
    rates: Any
    scales: Any


@functools.partial(jax.jit, static_argnames=("dtype", "eps", "interpret"))
def _step(
    product: jax.Array,
    small: _Small,
    layer: jax.Array,
    positions: jax.Array,
    place: jax.Array,
    kept_to: jax.Array,
    inputs: jax.Array,
    matrices: jax.Array,
    dtype: jnp.dtype,
    eps: float,
    interpret: bool,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    _, key_heads, group, _, value_size = matrices.shape
    num_seqs = len(positions)
    out, inputs, matrices = pl.pallas_call(
        functools.partial(_step_kernel, dtype=dtype, eps=eps),
        out_shape=(
            jax.ShapeDtypeStruct(
                (num_seqs, key_heads, group, value_size), jnp.float32 if small.scales is None else dtype
            ),
            jax.ShapeDtypeStruct(inputs.shape, inputs.dtype),
            jax.ShapeDtypeStruct(matrices.shape, matrices.dtype),
        ),
        grid=(num_seqs, key_heads * group),
        input_output_aliases={8: 1, 9: 2},
        compiler_params=plgpu.CompilerParams(num_warps=_num_warps(matrices)),
        interpret=interpret,
        name="delta_step",
    )(product, small, layer, positions, place, kept_to, inputs, matrices)
    return out, matrices, inputs


def _step_kernel(
    product_ref: Any,
    small: _Small,
    layer_ref: Any,
    position_ref: Any,
    place_ref: Any,
    kept_to_ref: Any,
    inputs: Any,
    states: Any,
    out_ref: Any,
    inputs_out: Any,
    states_out: Any,
    *,
    dtype: jnp.dtype,
    eps: float,
) -> None:
    _, _, group, key_size, value_size = states.shape
    corrects = small.scales is not None
    seq, key_head, of_group = _ids(group)
    layer, position = layer_ref[0], position_ref[seq]
    place, kept_to = place_ref[seq], kept_to_ref[seq]
    moves = _State(states, states_out, (place, key_head, of_group), kept_to, corrects)

    def fused(column: jax.Array) -> jax.Array:
        """The token's numbers at columns of the product, a vector or one, in float32."""
        if len(product_ref.shape) == 3:
            return _vector(product_ref, (seq, key_head), column).astype(jnp.float32)
        num_parts = product_ref.shape[0]
        if column.ndim > 0:
            whole = total((_vector(product_ref, (part, seq, key_head), column) for part in range(num_parts)), dtype)
        else:  # one after the other, the parts of single numbers would have `ptxas` spill next to a state
            part = jnp.arange(pl.next_power_of_2(num_parts), dtype=jnp.int32)
            where = jnp.broadcast_arrays(jnp.minimum(part, num_parts - 1), seq, key_head, column)
            numbers = plgpu.load(product_ref.at[tuple(where)], mask=part < num_parts, other=0)
            whole = jnp.sum(numbers, axis=0).astype(dtype)
        return whole.astype(jnp.float32)

    state = moves.load(position > 0)

    def convolved(first: int | jax.Array, width: int, is_mine: jax.Array) -> jax.Array:
        """Channels from `first` on after the convolution; the token's are kept, by the one program whose they are."""
        num_taps, channel = inputs.shape[1], first + jnp.arange(width, dtype=jnp.int32)
        at = [jnp.broadcast_to(each, channel.shape) for each in (layer, key_head)]

        def tap(back: int) -> jax.Array:
            return plgpu.load(small.taps.at[(*at, channel, jnp.full_like(channel, num_taps - 1 - back))])

        own = fused(channel)
        out = own * tap(0) if small.bias is None else own * tap(0) + plgpu.load(small.bias.at[(*at, channel)])
        slot = lax.rem(position, jnp.int32(num_taps))
        _store(inputs_out, (place, slot, key_head), channel, own, is_mine)
        is_kept = (kept_to >= 0) & is_mine
        _store(inputs_out, (jnp.maximum(kept_to, 0), slot, key_head), channel, own, is_kept)
        for back in range(1, num_taps):
            slot = lax.rem(position + num_taps - back, jnp.int32(num_taps))
            before = _vector(inputs, (place, slot, key_head), channel)
            _store(inputs_out, (jnp.maximum(kept_to, 0), slot, key_head), channel, before, is_kept)
            out += jnp.where(position >= back, before, 0) * tap(back)
        return out / (1 + jnp.exp(-out))

    q, k = (convolved(first, key_size, of_group == 0) for first in (0, key_size))
    v = convolved(2 * key_size + of_group * value_size, value_size, of_group >= 0)
    num_fused = product_ref.shape[-1]
    num_gates = 2 if corrects else 1
    *write, forget = (fused(num_fused - part * group + of_group) for part in range(num_gates, 0, -1))
    log_rate, bias, *skip = (small.rates[layer, key_head, row, of_group] for row in range(small.rates.shape[2]))
    time = _softplus(forget + bias)
    if corrects:
        q, k = _normalized(q) * key_size**-0.5, _normalized(k)
        beta = 1 / (1 + jnp.exp(-write[0]))
    else:
        beta = time
    read = moves.moved(state, q, k, v, jnp.exp(-jnp.exp(log_rate) * time), beta)

    column = jnp.arange(value_size, dtype=jnp.int32)
    gate = fused(num_fused - group * (value_size + num_gates) + of_group * value_size + column)
    if corrects:
        scale = _vector(small.scales, (layer,), column).astype(jnp.float32)
        read = read * lax.rsqrt(jnp.sum(read * read) / value_size + eps) * scale
    else:
        read = read + skip[0] * v
    _store(out_ref, (seq, key_head, of_group), column, (read * gate / (1 + jnp.exp(-gate))).astype(out_ref.dtype))


def _normalized(head: jax.Array) -> jax.Array:
    return head * lax.rsqrt(jnp.sum(head * head) + L2_EPS)


def _softplus(x: jax.Array) -> jax.Array:
    return jnp.maximum(x, 0) + jnp.log1p(jnp.exp(-jnp.abs(x)))


@functools.partial(jax.jit, static_argnames=("corrects", "interpret"))
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
    corrects: bool,
    interpret: bool,
) -> tuple[jax.Array, jax.Array]:
    """See `backend.DeltaDecode`."""
    num_seqs, key_heads, group, _ = v.shape
    out, matrices = pl.pallas_call(
        functools.partial(_decode_kernel, corrects=corrects),
        out_shape=(jax.ShapeDtypeStruct(v.shape, v.dtype), jax.ShapeDtypeStruct(matrices.shape, matrices.dtype)),
        grid=(num_seqs, key_heads * group),
        input_output_aliases={8: 1},
        compiler_params=plgpu.CompilerParams(num_warps=_num_warps(matrices)),
        interpret=interpret,
        name="delta_decode",
    )(q, k, v, decay, beta, place, has_state.astype(jnp.int32), kept_to, matrices)
    return out, matrices


def _decode_kernel(
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
    corrects: bool,
) -> None:
    _, _, group, key_size, value_size = states.shape
    seq, key_head, of_group = _ids(group)
    mine = seq, key_head, of_group
    row, column = (jnp.arange(size, dtype=jnp.int32) for size in (key_size, value_size))
    moves = _State(states, states_out, (place_ref[seq], key_head, of_group), kept_to_ref[seq], corrects)
    state = moves.load(has_state_ref[seq] != 0)
    q, k = (_vector(ref, (seq, key_head), row) for ref in (q_ref, k_ref))
    read = moves.moved(state, q, k, _vector(v_ref, mine, column), decay_ref[mine], beta_ref[mine])
    _store(out_ref, mine, column, read)


@dataclasses.dataclass(frozen=True)
class _State:
    """The state of a value head inside a kernel: where it comes from and goes to.

    Attributes:
      states, states_out: all of them, `[P, K, r, h, v]`.
      index: its place, key head and number in the group.
      kept_to: another place for it, if that is not -1.
      corrects: what is written is v less what the state reads at k.
    """

    states: Any
    states_out: Any
    index: tuple[Any, jax.Array, jax.Array]
    kept_to: jax.Array
    corrects: bool

    @property
    def _rows(self) -> jax.Array:
        return jnp.arange(self.states.shape[3], dtype=jnp.int32)

    def load(self, has_state: jax.Array) -> jax.Array:
        """`[h, v]`; zeros unless `has_state`."""
        rows = self._rows
        return load_rows(self.states, (*self.index, rows), jnp.broadcast_to(has_state, rows.shape))

    def moved(
        self, state: jax.Array, q: jax.Array, k: jax.Array, v: jax.Array, decay: jax.Array, beta: jax.Array
    ) -> jax.Array:
        """What is read of `state` after a token, `[v]`; the state after it is stored."""
        state = state * decay
        if self.corrects:
            v = v - jnp.sum(state * k[:, None], axis=0)
        state = state + k[:, None] * (v * beta)[None, :]
        rows, (_, *head) = self._rows, self.index
        store_rows(self.states_out, (*self.index, rows), jnp.full(rows.shape, True), state)
        is_kept = jnp.broadcast_to(self.kept_to >= 0, rows.shape)
        store_rows(self.states_out, (jnp.maximum(self.kept_to, 0), *head, rows), is_kept, state)
        return jnp.sum(state * q[:, None], axis=0)


def _ids(group: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The sequence, key head and number in the group of a program's value head."""
    head = pl.program_id(1)
    return pl.program_id(0), lax.div(head, jnp.int32(group)), lax.rem(head, jnp.int32(group))


def _num_warps(matrices: jax.Array) -> int:
    return min(max(matrices.shape[-2] * matrices.shape[-1] // _NUMBERS_OF_WARP, 1), 16)


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
