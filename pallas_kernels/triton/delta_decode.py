"""`delta_decode` as Pallas kernels for the Triton backend, which are called through `triton.BACKEND`.

A program takes one value head of one sequence, or some of its values (`num_value_parts`), reads its state once, and
writes it once, or twice where the state is kept besides. `delta_step` is all of a decode between two products: a
program reads the first as it is, whole or in parts, convolves q, k and its v, makes a and b, moves its state, and
normalizes and gates what it has read; the norm of Mamba-2, which is over many programs' heads, is XLA's. The programs
of a key head all convolve q and k; one of them keeps the inputs. XLA has a dozen kernels for that, and copies kept
states in a loop that the host steps. `delta_decode` is the rule alone, for sequences of one token in a step that
extends others.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.delta_tokens import SelectiveTokens, StateTokens
from pallas_kernels.parts import total
from pallas_kernels.triton.delta_common import (
    Head,
    Small,
    decayed,
    ids_of,
    kind_of,
    normalized,
    num_value_parts,
    num_warps_for,
    small_of,
    store,
    vector,
)
from pallas_kernels.triton.selective import refuse_selective, selective_step
from pallas_kernels.triton.tiles import index_of, load_rows, store_rows


def refuse_delta_decode(tokens: StateTokens, matrices: jax.Array) -> str | None:
    """Why this backend can't take the tokens, or states `[P, K, r, h, v]`, or None when it can."""
    if isinstance(tokens, SelectiveTokens):
        return refuse_selective(matrices)
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
    if isinstance(tokens, SelectiveTokens):
        return selective_step(tokens, matrices, inputs, positions, place, kept_to, interpret)
    rest = index_of(tokens.vectors.row), positions, place, kept_to, inputs, matrices
    return _step(tokens.product, small_of(tokens), *rest, kind_of(tokens), tokens.dtype, tokens.vectors.eps, interpret)


@functools.partial(jax.jit, static_argnames=("kind", "dtype", "eps", "interpret"))
def _step(
    product: jax.Array,
    small: Small,
    layer: jax.Array,
    positions: jax.Array,
    place: jax.Array,
    kept_to: jax.Array,
    inputs: jax.Array,
    matrices: jax.Array,
    kind: type[Head],
    dtype: jnp.dtype,
    eps: float,
    interpret: bool,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    _, key_heads, group, _, value_size = matrices.shape
    num_seqs, num_parts = len(positions), num_value_parts(matrices, small.scales is not None)
    out, inputs, matrices = pl.pallas_call(
        functools.partial(_step_kernel, kind=kind, dtype=dtype, eps=eps, num_parts=num_parts),
        out_shape=(
            jax.ShapeDtypeStruct(
                (num_seqs, key_heads, group, value_size), jnp.float32 if small.scales is None else dtype
            ),
            jax.ShapeDtypeStruct(inputs.shape, inputs.dtype),
            jax.ShapeDtypeStruct(matrices.shape, matrices.dtype),
        ),
        grid=_grid(num_seqs, key_heads * group, num_parts),
        input_output_aliases={8: 1, 9: 2},
        compiler_params=plgpu.CompilerParams(num_warps=num_warps_for(matrices)),
        interpret=interpret,
        name="delta_step",
    )(product, small, layer, positions, place, kept_to, inputs, matrices)
    return out, matrices, inputs


def _step_kernel(
    product_ref: Any,
    small: Small,
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
    kind: type[Head],
    dtype: jnp.dtype,
    eps: float,
    num_parts: int,
) -> None:
    _, _, group, key_size, value_size = states.shape
    first_value, num_values = _values_of(value_size, num_parts)
    corrects = small.scales is not None
    seq, key_head, of_group = ids_of(group)
    layer, position = layer_ref[0], position_ref[seq]
    place, kept_to = place_ref[seq], kept_to_ref[seq]
    columns = (first_value, num_values)
    moves = _State(states, states_out, (place, key_head, of_group), kept_to, corrects, columns)

    def fused(column: jax.Array) -> jax.Array:
        """The token's numbers at columns of the product, a vector or one, in float32."""
        if len(product_ref.shape) == 3:
            return vector(product_ref, (seq, key_head), column).astype(jnp.float32)
        num_parts = product_ref.shape[0]
        if column.ndim > 0:
            whole = total((vector(product_ref, (part, seq, key_head), column) for part in range(num_parts)), dtype)
        else:  # one after the other, the parts of single numbers would have `ptxas` spill next to a state
            part = jnp.arange(pl.next_power_of_2(num_parts), dtype=jnp.int32)
            where = jnp.broadcast_arrays(jnp.minimum(part, num_parts - 1), seq, key_head, column)
            numbers = plgpu.load(product_ref.at[tuple(where)], mask=part < num_parts, other=0)
            whole = jnp.sum(numbers, axis=0).astype(dtype)
        return whole.astype(jnp.float32)

    head = kind(fused, product_ref.shape[-1], small, layer, key_head, of_group, group)
    # Next to a state `ptxas` spills 16 bytes where one decay of a delta-net is made late, or any other early.
    early = head.decay_and_beta() if corrects and kind is Head else None
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
        store(inputs_out, (place, slot, key_head), channel, own, is_mine)
        is_kept = (kept_to >= 0) & is_mine
        store(inputs_out, (jnp.maximum(kept_to, 0), slot, key_head), channel, own, is_kept)
        for back in range(1, num_taps):
            slot = lax.rem(position + num_taps - back, jnp.int32(num_taps))
            before = vector(inputs, (place, slot, key_head), channel)
            store(inputs_out, (jnp.maximum(kept_to, 0), slot, key_head), channel, before, is_kept)
            out += jnp.where(position >= back, before, 0) * tap(back)
        return out / (1 + jnp.exp(-out))

    # v first: after q and k, `ptxas` spills 16 bytes of a row alone whose product is four parts.
    v = convolved(2 * key_size + of_group * value_size + first_value, num_values, of_group >= 0)
    is_mine = of_group == 0 if num_parts == 1 else (of_group == 0) & (first_value == 0)
    q, k = (convolved(first, key_size, is_mine) for first in (0, key_size))
    if corrects:
        q, k = normalized(q) * key_size**-0.5, normalized(k)
    read = moves.moved(state, q, k, v, *(early or head.decay_and_beta()))
    column = first_value + jnp.arange(num_values, dtype=jnp.int32)
    gated = head.gated(read, v, eps, column, value_size)
    store(out_ref, (seq, key_head, of_group), column, gated.astype(out_ref.dtype))


def _grid(num_seqs: int, num_heads: int, num_parts: int) -> tuple[int, ...]:
    return (num_seqs, num_heads) if num_parts == 1 else (num_seqs, num_heads, num_parts)


def _values_of(value_size: int, num_parts: int) -> tuple[int | jax.Array, int]:
    """The first of a program's values, and how many it has."""
    num_values = value_size // num_parts
    return 0 if num_parts == 1 else pl.program_id(2) * num_values, num_values


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
    num_parts = num_value_parts(matrices, corrects)
    out, matrices = pl.pallas_call(
        functools.partial(_decode_kernel, corrects=corrects, num_parts=num_parts),
        out_shape=(jax.ShapeDtypeStruct(v.shape, v.dtype), jax.ShapeDtypeStruct(matrices.shape, matrices.dtype)),
        grid=_grid(num_seqs, key_heads * group, num_parts),
        input_output_aliases={8: 1},
        compiler_params=plgpu.CompilerParams(num_warps=num_warps_for(matrices)),
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
    num_parts: int,
) -> None:
    _, _, group, key_size, value_size = states.shape
    first_value, num_values = _values_of(value_size, num_parts)
    seq, key_head, of_group = ids_of(group)
    mine = seq, key_head, of_group
    row, column = (jnp.arange(size, dtype=jnp.int32) for size in (key_size, num_values))
    column = first_value + column
    index, columns = (place_ref[seq], key_head, of_group), (first_value, num_values)
    moves = _State(states, states_out, index, kept_to_ref[seq], corrects, columns)
    state = moves.load(has_state_ref[seq] != 0)
    q, k = (vector(ref, (seq, key_head), row) for ref in (q_ref, k_ref))
    decay = decay_ref[mine] if len(decay_ref.shape) == 3 else vector(decay_ref, mine, row)
    read = moves.moved(state, q, k, vector(v_ref, mine, column), decay, beta_ref[mine])
    store(out_ref, mine, column, read)


@dataclasses.dataclass(frozen=True)
class _State:
    """The state of a value head inside a kernel: where it comes from and goes to.

    Attributes:
      states, states_out: all of them, `[P, K, r, h, v]`.
      index: its place, key head and number in the group.
      kept_to: another place for it, if that is not -1.
      corrects: what is written is v less what the state reads at k.
      columns: the first value and the number of values that are here.
    """

    states: Any
    states_out: Any
    index: tuple[Any, jax.Array, jax.Array]
    kept_to: jax.Array
    corrects: bool
    columns: tuple[int | jax.Array, int]

    @property
    def _rows(self) -> jax.Array:
        return jnp.arange(self.states.shape[3], dtype=jnp.int32)

    def load(self, has_state: jax.Array) -> jax.Array:
        """`[h, v]`; zeros unless `has_state`."""
        rows = self._rows
        return load_rows(self.states, (*self.index, rows), jnp.broadcast_to(has_state, rows.shape), self.columns)

    def moved(
        self, state: jax.Array, q: jax.Array, k: jax.Array, v: jax.Array, decay: jax.Array, beta: jax.Array
    ) -> jax.Array:
        """What is read of `state` after a token, `[v]`; the state after it is stored."""
        state = decayed(state, decay)
        if self.corrects:
            v = v - jnp.sum(state * k[:, None], axis=0)
        state = state + k[:, None] * (v * beta)[None, :]
        rows, (_, *head) = self._rows, self.index
        store_rows(self.states_out, (*self.index, rows), jnp.full(rows.shape, True), state, self.columns)
        is_kept = jnp.broadcast_to(self.kept_to >= 0, rows.shape)
        store_rows(self.states_out, (jnp.maximum(self.kept_to, 0), *head, rows), is_kept, state, self.columns)
        return jnp.sum(state * q[:, None], axis=0)
