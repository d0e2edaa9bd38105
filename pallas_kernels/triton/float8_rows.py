"""`float8_rows` as a Pallas kernel for the Triton backend: a program per token and some groups of its numbers.

Called through `triton.BACKEND`. `add_and_norm` rounds by the same function what it has normalized.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.experts import ACTIVATIONS
from pallas_kernels.paged_kv import FLOAT8
from pallas_kernels.scaled import LARGEST_FLOAT8, ROW_GROUP, SMALLEST_TOP, ScaledRows

_MOST_GROUPS = 8  # of a program: 8 numbers a thread of 4 warps


@functools.partial(jax.jit, static_argnames=("activation", "interpret"))
def float8_rows(x: jax.Array, activation: str | None, interpret: bool) -> ScaledRows:
    """See `backend.Float8Rows`."""
    num_rows, num_columns = x.shape[0], x.shape[-1]
    num_groups = num_columns // ROW_GROUP
    at_once = min(num_groups & -num_groups, _MOST_GROUPS)
    numbers, scale = pl.pallas_call(
        functools.partial(_kernel, activation=activation, at_once=at_once),
        out_shape=(
            jax.ShapeDtypeStruct((num_rows, num_columns), FLOAT8),
            jax.ShapeDtypeStruct((num_groups, num_rows), jnp.float32),
        ),
        grid=(num_rows, num_groups // at_once),
        compiler_params=plgpu.CompilerParams(num_warps=max(at_once // 2, 1)),
        interpret=interpret,
        name="float8_rows",
    )(x)
    return ScaledRows(numbers, scale, x.dtype)


def _kernel(x_ref: Any, numbers_ref: Any, scale_ref: Any, *, activation: str | None, at_once: int) -> None:
    row, first = pl.program_id(0), pl.program_id(1) * at_once
    column = first * ROW_GROUP + jnp.arange(at_once * ROW_GROUP, dtype=jnp.int32)

    def load(*index: Any) -> jax.Array:
        return plgpu.load(x_ref.at[(row, *index, column)]).astype(jnp.float32)

    values = load() if activation is None else ACTIVATIONS[activation](load(0)) * load(1)
    if activation is not None:  # rounded first, as if the gated unit were an array
        values = values.astype(x_ref.dtype).astype(jnp.float32)
    numbers, scale = rounded_groups(values)
    plgpu.store(numbers_ref.at[row, column], numbers)
    plgpu.store(scale_ref.at[first + jnp.arange(at_once, dtype=jnp.int32), row], scale)


def rounded_groups(values: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Values `[C]` float32 of whole groups: numbers `[C]` float8 and scales `[C / ROW_GROUP]`, inside a kernel."""
    groups = values.reshape(-1, ROW_GROUP)
    top = jnp.maximum(jnp.max(jnp.abs(groups), axis=1), SMALLEST_TOP)
    numbers = (groups * lax.div(jnp.float32(LARGEST_FLOAT8), top)[:, None]).astype(FLOAT8)
    return numbers.reshape(values.shape), top / LARGEST_FLOAT8
