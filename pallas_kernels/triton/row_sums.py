"""Sums of rows as a Pallas kernel for the Triton backend, whose order depends on a row's length alone.

A program has a block of rows and adds block after block of their columns. Called by `pallas_kernels.sums` for programs
in fixed order.
"""

import functools
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

What: TypeAlias = Literal["sum", "squares"]

_NUMBERS = 4096  # of a program's block, 32 of them in a thread
_MOST_ROWS = 16


@functools.partial(jax.jit, static_argnames=("what", "interpret"))
def sums_of_rows(x: jax.Array, what: What, interpret: bool) -> jax.Array:
    """The sums over the last axis of x `[.., n]` float32, or those of its squares: `[..]` float32."""
    rows = x.reshape(-1, x.shape[-1])
    width = min(pl.next_power_of_2(rows.shape[1]), _NUMBERS)
    block = min(_NUMBERS // width, _MOST_ROWS)
    out: jax.Array = pl.pallas_call(
        functools.partial(_kernel, what=what, block=block, width=width),
        out_shape=jax.ShapeDtypeStruct((len(rows),), jnp.float32),
        grid=(pl.cdiv(len(rows), block),),
        compiler_params=plgpu.CompilerParams(num_warps=4),
        interpret=interpret,
        name="sums_of_rows",
    )(rows)
    return out.reshape(x.shape[:-1])


def _kernel(x_ref: Any, out_ref: Any, *, what: What, block: int, width: int) -> None:
    num_rows, size = x_ref.shape
    row = pl.program_id(0) * block + jnp.arange(block, dtype=jnp.int32)
    is_row = row < num_rows

    def add(step: jax.Array, sums: jax.Array) -> jax.Array:
        column = step * width + jnp.arange(width, dtype=jnp.int32)
        index = tuple(jnp.broadcast_to(each, (block, width)) for each in (row[:, None], column[None, :]))
        numbers = plgpu.load(x_ref.at[index], mask=is_row[:, None] & (column < size)[None, :], other=0.0)
        return sums + jnp.sum(numbers * numbers if what == "squares" else numbers, axis=1)

    sums = lax.fori_loop(jnp.int32(0), jnp.int32(pl.cdiv(size, width)), add, jnp.zeros((block,), jnp.float32))
    plgpu.store(out_ref.at[row], sums, mask=is_row)
