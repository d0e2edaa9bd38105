"""`delta_decode` as a Pallas kernel for the Triton backend: one pass over the states. Called through `triton.BACKEND`.

The columns of a state don't depend on each other: a program takes a few of one value head of one sequence, reads them
once, and writes them once, or twice where the state is kept besides. XLA gathers states, computes, scatters them, and
copies those that are kept in a loop that the host steps.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.triton.tiles import load_rows, store_rows

_COLUMNS = 32  # of a state: 4 KiB of each 32 rows, 16 numbers of a state of 128 rows in each thread
_WARPS = 8


def refuse_delta_decode(matrices: jax.Array) -> str | None:
    """Why this backend can't take states `[P, K, r, h, v]`, or None when it can."""
    key_size, value_size = matrices.shape[-2:]
    if key_size & (key_size - 1) or key_size < 16 or value_size % 16:
        return f"states are {key_size} x {value_size}; it takes a power of two from 16, by a multiple of 16"
    return None


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
    out_at = tuple(jnp.broadcast_to(each, column.shape) for each in (seq, key_head, of_group))
    plgpu.store(out_ref.at[(*out_at, column)], jnp.sum(state * q, axis=0))
    every = jnp.full((key_size,), True)
    store_rows(states_out, (place, key_head, of_group, row), every, state, (first, columns))
    kept = jnp.maximum(kept_to, 0), key_head, of_group, row
    store_rows(states_out, kept, is_kept, state, (first, columns))


def _vector(ref: Any, index: tuple[jax.Array, ...], column: jax.Array) -> jax.Array:
    """The numbers of the last axis at `column`."""
    return plgpu.load(ref.at[(*(jnp.broadcast_to(each, column.shape) for each in index), column)])
