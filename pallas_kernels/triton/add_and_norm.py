"""`add_and_norm` as a Pallas kernel for the Triton backend: a program per token. Called through `triton.BACKEND`.

XLA makes two kernels of it, since it fuses no sum that has two readers into a norm: docs/kernels/triton.md.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.experts import Choices
from pallas_kernels.norm import Addend, Biased, Finished
from pallas_kernels.paged_kv import FLOAT8
from pallas_kernels.scaled import ROW_GROUP, ScaledRows
from pallas_kernels.triton.float8_rows import rounded_groups
from pallas_kernels.triton.tiles import index_of

# A program holds a row in registers, 32 numbers of it in a thread of 16 warps.
_MAX_SIZE = 1 << 14


def refuse_add_and_norm(x: jax.Array, update: Addend) -> str | None:
    """Why this backend can't take the call, or None when it can."""
    if x.shape[-1] > _MAX_SIZE:
        return f"rows have {x.shape[-1]} numbers; it takes at most {_MAX_SIZE}"
    return None


def add_and_norm(
    x: jax.Array,
    update: Addend,
    scales: jax.Array,
    row: int,
    eps: float,
    biases: jax.Array | None,
    in_float8: bool,
    interpret: bool,
) -> tuple[jax.Array, jax.Array | ScaledRows]:
    """See `backend.AddAndNorm`."""
    if isinstance(update, Finished):  # its rows are found as that of the norm
        rows = (update.row, update.stream_row)
        own_row, stream_row = (None if each is None else jnp.full((1,), each, jnp.int32) for each in rows)
        update = dataclasses.replace(update, row=own_row, stream_row=stream_row)
    return _of_any_row(x, update, scales, index_of(row), eps, biases, in_float8, interpret)


@functools.partial(jax.jit, static_argnames=("eps", "in_float8", "interpret"))
def _of_any_row(
    x: jax.Array,
    update: Addend,
    scales: jax.Array,
    row: jax.Array,
    eps: float,
    biases: jax.Array | None,
    in_float8: bool,
    interpret: bool,
) -> tuple[jax.Array, jax.Array | ScaledRows]:
    """The same with the scales of row `[1]`."""
    width = pl.next_power_of_2(x.shape[1])
    leaves, tree = jax.tree.flatten((update, scales, biases))
    out = jax.ShapeDtypeStruct(x.shape, x.dtype)
    groups = (x.shape[1] // ROW_GROUP, x.shape[0])
    rounded = jax.ShapeDtypeStruct(x.shape, FLOAT8), jax.ShapeDtypeStruct(groups, jnp.float32)
    total, *normed = pl.pallas_call(
        functools.partial(_kernel, tree=tree, eps=eps, width=width, in_float8=in_float8),
        out_shape=(out, *(rounded if in_float8 else (out,))),
        grid=(x.shape[0],),
        compiler_params=plgpu.CompilerParams(num_warps=min(max(width // 256, 1), 16)),  # 8 numbers a thread
        interpret=interpret,
        name="add_and_norm",
    )(row, x, *leaves)
    return total, ScaledRows(normed[0], normed[1], x.dtype) if in_float8 else normed[0]


def _kernel(
    row_ref: Any, x_ref: Any, *refs: Any, tree: jax.tree_util.PyTreeDef, eps: float, width: int, in_float8: bool
) -> None:
    """`refs` are the leaves of the update, the scales and the biases, then the results."""
    num_results = 3 if in_float8 else 2
    update, scales_ref, biases_ref = jax.tree.unflatten(tree, refs[:-num_results])
    total_ref, *normed_refs = refs[-num_results:]
    finished: Any = update if isinstance(update, Finished) else Finished((update,))  # of references
    row = row_ref[0]  # first: the scales wait for it while the sum is computed
    own_row = None if finished.row is None else finished.row[0]
    stream_row = None if finished.stream_row is None else finished.stream_row[0]
    token = pl.program_id(0)
    size = x_ref.shape[1]
    column = jnp.arange(width, dtype=jnp.int32)
    is_real = column < size

    def load(ref: Any, *index: Any) -> jax.Array:
        return plgpu.load(ref.at[(*index, column)], mask=is_real, other=0).astype(jnp.float32)

    stream = load(x_ref, token)  # before many parts: after them `ptxas` spills 16 bytes

    # Rounded before a bias or the stream is added, and the sum before it is normalized, as if each were an array of its
    # own.
    dtype = x_ref.dtype

    def rounded(rows: jax.Array) -> jax.Array:
        return rows.astype(dtype).astype(jnp.float32)

    def normalized(rows: jax.Array, scales_ref: Any, row: jax.Array, eps: float) -> jax.Array:
        return rows * lax.rsqrt(jnp.sum(rows * rows) / size + eps) * load(scales_ref, row)

    if finished.centred or len(finished.updates) > 1:
        whole = functools.reduce(jnp.add, (_summed(each, token, load, lambda rows: rows) for each in finished.updates))
        added = rounded(jnp.where(is_real, whole - jnp.sum(whole) / size, 0) if finished.centred else whole)
    else:
        added = rounded(_summed(finished.updates[0], token, load, rounded))
    if own_row is not None:
        added = rounded(normalized(added, finished.scales, own_row, finished.eps))
    if finished.factor is not None:
        added = rounded(added * finished.factor)
    total = rounded(stream + added)
    if stream_row is not None:
        total = rounded(total * finished.stream_factors[stream_row, 0].astype(jnp.float32))
    normed = normalized(total, scales_ref, row, eps)
    if biases_ref is not None:
        normed = rounded(normed) + load(biases_ref, row)
    plgpu.store(total_ref.at[token, column], total.astype(dtype), mask=is_real)
    if not in_float8:
        plgpu.store(normed_refs[0].at[token, column], normed.astype(dtype), mask=is_real)
        return
    numbers_ref, scale_ref = normed_refs
    numbers, scale = rounded_groups(rounded(normed))
    group = jnp.arange(len(scale), dtype=jnp.int32)
    plgpu.store(numbers_ref.at[token, column], numbers, mask=is_real)
    plgpu.store(scale_ref.at[group, token], scale, mask=group < scale_ref.shape[0])


def _summed(
    update: Any, token: jax.Array, load: Callable[..., jax.Array], rounded: Callable[[jax.Array], jax.Array]
) -> jax.Array:
    """Row `token` `[width]` float32 of an update whose leaves are references; `rounded` before a bias is added."""
    if isinstance(update, Biased):
        return rounded(_summed(update.product, token, load, rounded)) + load(update.bias)
    if isinstance(update, Choices):
        choices = range(update.place_of.shape[1])
        terms = [update.shares[token, each] * load(update.rows, update.place_of[token, each]) for each in choices]
    elif len(update.shape) == 2:
        return load(update, token)
    else:
        terms = [load(update, part, token) for part in range(update.shape[0])]
    return functools.reduce(jnp.add, terms)
