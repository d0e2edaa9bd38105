"""The end of a decode over latents as one Pallas kernel for the Triton backend: splits are merged, and each head's
matrix makes its output of what it has read.

A program has some outputs of one head for a few sequences. The rows of its product are 16 lanes: all of one sequence
where it is alone, one of each of 16. A lane adds up every so manieth split of its sequence, weighted as `merge` does,
and products of the lanes of a sequence are added in the end, so that many splits are read at once whatever the batch.
Of few rows XLA makes two kernels more.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels import tuning
from pallas_kernels.latent import LatentHeads
from pallas_kernels.partition import EMPTY_LSE
from pallas_kernels.triton.common import MIN_DOT
from pallas_kernels.triton.tiles import load_rows, store_rows

_PART = {2: 128, 4: 32}  # columns that are multiplied at once, by the weights' bytes: few registers hold these
_SPLITS_AT_ONCE = 2  # of a lane


def refuse_merge(heads: LatentHeads) -> str | None:
    """Why this kernel can't take the matrices, or None when it can."""
    sizes = heads.latent_size, heads.num_outputs
    if any(size < MIN_DOT or size & (size - 1) for size in sizes):
        return f"latents have {sizes[0]} numbers and outputs {sizes[1]}; it takes powers of two from {MIN_DOT}"
    return None


def merge_latents(
    parts: jax.Array, lse: jax.Array, counts: jax.Array, heads: LatentHeads, shape: tuning.ShapeClass, dtype: Any,
    interpret: bool,
) -> jax.Array:  # fmt: skip
    """The outputs `[S, N, V]` of a decode's parts.

    Args:
        parts: `[max_splits, S, N, C or more]` float32, as `merge_splits` takes them.
        lse: `[max_splits, S, N]` float32, the same.
        counts: int32 `[S]` items of each sequence; one without any (a padding row) yields zeros.
        heads: N of them.
        shape: of the decode, for the table of sizes.
        dtype: of the result.
        interpret: runs the kernel in Pallas's interpreter.
    """
    blocks = tuning.blocks("merge_latents", "triton", shape)
    num_seqs, num_heads = parts.shape[1:3]
    seqs, outputs = min(MIN_DOT, pl.next_power_of_2(num_seqs)), min(blocks["tile_outputs"], heads.num_outputs)
    out: jax.Array = pl.pallas_call(
        functools.partial(_kernel, seqs=seqs, outputs=outputs, first=heads.num_absorbing),
        out_shape=jax.ShapeDtypeStruct((num_seqs, num_heads, heads.num_outputs), dtype),
        # Outputs first: programs that run side by side read the same parts.
        grid=(heads.num_outputs // outputs, num_heads, pl.cdiv(num_seqs, seqs)),
        compiler_params=plgpu.CompilerParams(num_warps=blocks["num_warps"]),
        interpret=interpret,
        name="merge_latents",
    )(parts, lse, counts, heads.weights)
    return out


def _kernel(
    parts_ref: Any, lse_ref: Any, counts_ref: Any, weights_ref: Any, out_ref: Any,
    *, seqs: int, outputs: int, first: int,
) -> None:  # fmt: skip
    (max_splits, num_seqs), size = parts_ref.shape[:2], weights_ref.shape[2]
    head, lanes = pl.program_id(1), MIN_DOT // seqs
    lane = jnp.arange(MIN_DOT, dtype=jnp.int32)
    seq, own = pl.program_id(2) * seqs + lax.div(lane, lanes), lax.rem(lane, lanes)
    count = plgpu.load(counts_ref.at[seq], mask=seq < num_seqs, other=0)

    def lses(split: jax.Array) -> jax.Array:
        shape = split.shape
        of_seq, most = (each if len(shape) == 1 else jnp.broadcast_to(each[:, None], shape) for each in (seq, count))
        return plgpu.load(lse_ref.at[split, of_seq, head], mask=split < most, other=EMPTY_LSE)

    splits = jnp.arange(pl.next_power_of_2(max_splits), dtype=jnp.int32)
    every = lses(jnp.broadcast_to(splits[None, :], (MIN_DOT, splits.shape[0])))
    top = jnp.max(every, axis=1)
    total = jnp.sum(jnp.where(every > EMPTY_LSE, jnp.exp2(every - top[:, None]), 0.0), axis=1)
    width = min(_PART[weights_ref.dtype.itemsize], size)
    columns = [(begin, width) for begin in range(0, size, width)]

    def add(turn: jax.Array, merged: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        for number in range(_SPLITS_AT_ONCE):
            split = (turn * _SPLITS_AT_ONCE + number) * lanes + own
            weight = jnp.where(split < count, jnp.exp2(lses(split) - top), 0.0)[:, None]
            loaded = [load_rows(parts_ref, (split, seq, head), split < count, each) for each in columns]
            merged = tuple(sums + weight * part for sums, part in zip(merged, loaded, strict=True))
        return merged

    turns = pl.cdiv(jnp.max(count), _SPLITS_AT_ONCE * lanes)
    zeros = tuple(jnp.zeros((MIN_DOT, width), jnp.float32) for _ in columns)
    merged = lax.fori_loop(0, turns, add, zeros)
    # Where anything is seen the total is at least 1, the weight of the top split.
    merged = tuple(part / jnp.maximum(total, 1.0)[:, None] for part in merged)
    row = first + pl.program_id(0) * outputs + jnp.arange(outputs, dtype=jnp.int32)
    products = []
    for part, each in zip(merged, columns, strict=True):
        weights = load_rows(weights_ref, (head, row), None, each)
        precision = lax.Precision.HIGHEST if weights.dtype == jnp.float32 else None
        products.append(
            lax.dot(part.astype(weights.dtype), weights.T, precision=precision, preferred_element_type=jnp.float32)
        )
    out = functools.reduce(jnp.add, products)
    if lanes > 1:
        out = jnp.sum(out.reshape(seqs, lanes, outputs), axis=1)
    seq = pl.program_id(2) * seqs + jnp.arange(seqs, dtype=jnp.int32)
    store_rows(out_ref, (seq, head), seq < num_seqs, out, (pl.program_id(0) * outputs, outputs))
