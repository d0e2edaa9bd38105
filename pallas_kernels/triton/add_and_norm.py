"""`add_and_norm` as a Pallas kernel for the Triton backend: a program per token. Called through `triton.BACKEND`.

XLA makes two kernels of it, since it fuses no sum that has two readers into a norm: docs/kernels/triton.md.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.norm import Update
from pallas_kernels.paged_kv import FLOAT8
from pallas_kernels.scaled import ROW_GROUP, ScaledRows
from pallas_kernels.triton.float8_rows import rounded_groups
from pallas_kernels.triton.tiles import index_of

# A program holds a row in registers, 32 numbers of it in a thread of 16 warps.
_MAX_SIZE = 1 << 14


def refuse_add_and_norm(x: jax.Array, update: Update) -> str | None:
    """Why this backend can't take the call, or None when it can."""
    if x.shape[-1] > _MAX_SIZE:
        return f"rows have {x.shape[-1]} numbers; it takes at most {_MAX_SIZE}"
    return None


def add_and_norm(
    x: jax.Array, update: Update, scales: jax.Array, row: int, eps: float, in_float8: bool, interpret: bool
) -> tuple[jax.Array, jax.Array | ScaledRows]:
    """See `backend.AddAndNorm`."""
    return _of_any_row(x, update, scales, index_of(row), eps, in_float8, interpret)


@functools.partial(jax.jit, static_argnames=("eps", "in_float8", "interpret"))
def _of_any_row(
    x: jax.Array, update: Update, scales: jax.Array, row: jax.Array, eps: float, in_float8: bool, interpret: bool
) -> tuple[jax.Array, jax.Array | ScaledRows]:
    """The same with the scales of row `[1]`."""
    width = pl.next_power_of_2(x.shape[1])
    out = jax.ShapeDtypeStruct(x.shape, x.dtype)
    groups = (x.shape[1] // ROW_GROUP, x.shape[0])
    rounded = jax.ShapeDtypeStruct(x.shape, FLOAT8), jax.ShapeDtypeStruct(groups, jnp.float32)
    total, *normed = pl.pallas_call(
        functools.partial(_kernel, eps=eps, width=width, in_float8=in_float8),
        out_shape=(out, *(rounded if in_float8 else (out,))),
        grid=(x.shape[0],),
        compiler_params=plgpu.CompilerParams(num_warps=min(max(width // 256, 1), 16)),  # 8 numbers a thread
        interpret=interpret,
        name="add_and_norm",
    )(row, x, *jax.tree.leaves(update), scales)
    return total, ScaledRows(normed[0], normed[1], x.dtype) if in_float8 else normed[0]


def _kernel(row_ref: Any, x_ref: Any, *refs: Any, eps: float, width: int, in_float8: bool) -> None:
    num_results = 3 if in_float8 else 2
    (*update_refs, scales_ref), (total_ref, *normed_refs) = refs[:-num_results], refs[-num_results:]
    row = row_ref[0]  # first: the scales wait for it while the sum is computed
    token = pl.program_id(0)
    size = x_ref.shape[1]
    column = jnp.arange(width, dtype=jnp.int32)
    is_real = column < size

    def load(ref: Any, *index: Any) -> jax.Array:
        return plgpu.load(ref.at[(*index, column)], mask=is_real, other=0).astype(jnp.float32)

    update_ref, *others = update_refs
    if len(others) == 2:
        place_of_ref, shares_ref = others
        choices = range(place_of_ref.shape[1])
        terms = [shares_ref[token, each] * load(update_ref, place_of_ref[token, each]) for each in choices]
    elif len(update_ref.shape) == 2:
        terms = [load(update_ref, token)]
    else:
        terms = [load(update_ref, part, token) for part in range(update_ref.shape[0])]
    # Rounded before a bias or the stream is added, and the sum before it is normalized, as if each were an array of its
    # own.
    dtype = x_ref.dtype
    update = functools.reduce(jnp.add, terms).astype(dtype)
    if len(others) == 1:
        update = (update.astype(jnp.float32) + load(others[0])).astype(dtype)
    total = (load(x_ref, token) + update.astype(jnp.float32)).astype(dtype)
    total32 = total.astype(jnp.float32)
    inverse_rms = lax.rsqrt(jnp.sum(total32 * total32) / size + eps)
    normed = total32 * inverse_rms * load(scales_ref, row)
    plgpu.store(total_ref.at[token, column], total, mask=is_real)
    if not in_float8:
        plgpu.store(normed_refs[0].at[token, column], normed.astype(dtype), mask=is_real)
        return
    numbers_ref, scale_ref = normed_refs
    numbers, scale = rounded_groups(normed.astype(dtype).astype(jnp.float32))
    group = jnp.arange(len(scale), dtype=jnp.int32)
    plgpu.store(numbers_ref.at[token, column], numbers, mask=is_real)
    plgpu.store(scale_ref.at[group, token], scale, mask=group < scale_ref.shape[0])
