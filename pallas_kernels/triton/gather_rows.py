"""Rows of tokens copied to their places, as a Pallas kernel for the Triton backend: for kernels that copy neighbours.

XLA's gather copies those of places without an expert too, which are most where devices have whole experts each. Called
by `hopper.grouped_product`.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.experts import Groups, starts_of
from pallas_kernels.paged_kv import FLOAT8
from pallas_kernels.triton.tiles import load_rows, store_rows

_ROWS, _MOST_BYTES = 8, 2048  # of a program: 8 times 16 bytes a thread


@functools.partial(jax.jit, static_argnames=("interpret",))
def gather_rows(
    x: jax.Array, scale: jax.Array | None, groups: Groups, interpret: bool
) -> tuple[jax.Array, jax.Array | None]:
    """x `[T, I]` as `[M, I]`, and scales of groups of its numbers `[G, T]` as `[G, M]`; anything without an expert."""
    num_places, num_columns = groups.num_places, x.shape[1]
    width = min(num_columns & -num_columns, _MOST_BYTES // x.dtype.itemsize)
    scales = [] if scale is None else [scale]
    numbers = lax.bitcast_convert_type(x, jnp.uint8) if x.dtype == FLOAT8 else x  # masks of float8 don't lower
    out_shape = [jax.ShapeDtypeStruct((num_places, num_columns), numbers.dtype)]
    out_shape += [jax.ShapeDtypeStruct((len(each), num_places), each.dtype) for each in scales]
    rows, *of_rows = pl.pallas_call(
        functools.partial(_kernel, width=width),
        out_shape=out_shape,
        grid=(pl.cdiv(num_places, _ROWS), num_columns // width),
        compiler_params=plgpu.CompilerParams(num_warps=4),
        interpret=interpret,
        name="gather_rows",
    )(groups.tokens, starts_of(groups), numbers, *scales)
    return lax.bitcast_convert_type(rows, x.dtype), of_rows[0] if of_rows else None


def _kernel(tokens_ref: Any, starts_ref: Any, x_ref: Any, *refs: Any, width: int) -> None:
    place = pl.program_id(0) * _ROWS + jnp.arange(_ROWS, dtype=jnp.int32)
    is_real = place < starts_ref[starts_ref.shape[0] - 1]  # those without an expert come last
    token = plgpu.load(tokens_ref.at[place], mask=is_real, other=0)
    columns = pl.program_id(1) * width, width
    scale_ref, out_ref, scales_ref = refs if len(refs) == 3 else (None, *refs, None)
    store_rows(out_ref, (place,), is_real, load_rows(x_ref, (token,), is_real, columns), columns)
    if scale_ref is None or scales_ref is None:
        return

    def copy(group: jax.Array, _: None) -> None:
        of_group = plgpu.load(scale_ref.at[group, token], mask=is_real, other=0)
        plgpu.store(scales_ref.at[group, place], of_group, mask=is_real)

    @pl.when(pl.program_id(1) == 0)
    def _() -> None:
        lax.fori_loop(0, scale_ref.shape[0], copy, None)
