"""`delta_blocks` as a Pallas kernel for the Triton backend, which is called through `triton.BACKEND`.

A program takes some columns of one value head's state of one sequence, and goes through the sequence's blocks of 64
tokens with them: it reads the state once, writes it once and where it is kept besides, and what tokens read as they
come. So a prompt is one launch; XLA's loop over blocks is one of small kernels that the host steps. What corrects
values inside a block depends on no state: XLA computes it for all blocks at once, and hands it over; where each row of
a state decays by itself, also what queries find of the block's keys, and queries and keys as they have decayed.

Factors of products are in the dtype of q and k, sums and states in float32: in bfloat16 where a model is, as in the
code that such models were trained with.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.delta_tokens import BLOCK, Heads, Sequences, Solved, SolvedByChannel
from pallas_kernels.target import target_device
from pallas_kernels.triton.delta_common import vector
from pallas_kernels.triton.tiles import load_rows, store_rows

# The largest tiles of a state with which `ptxas` spills nothing, for states of 128 x 64 and of 128 x 128: columns of a
# program, and rows of the parts that it computes products with.
_TILE, _TILE_BEFORE_HOPPER = (32, 128), (16, 64)
_NUM_WARPS = 8


@functools.partial(jax.jit, static_argnames="interpret")
def delta_blocks(
    heads: Heads | None,
    solved: Solved | SolvedByChannel | None,
    matrices: jax.Array,
    read: jax.Array,
    seqs: Sequences,
    counts: jax.Array,
    interpret: bool,
) -> tuple[jax.Array, jax.Array]:
    """See `backend.DeltaBlocks`."""
    _, key_heads, group, _, value_size = matrices.shape
    most_columns, most_rows = _TILE if target_device().is_hopper else _TILE_BEFORE_HOPPER
    columns = min(value_size, most_columns)
    grid = len(counts), key_heads * group, value_size // columns
    others = len(jax.tree.leaves((heads, solved, seqs, counts)))
    after: tuple[jax.Array, jax.Array] = pl.pallas_call(
        functools.partial(_kernel, columns=columns, most_rows=most_rows),
        out_shape=[jax.ShapeDtypeStruct(each.shape, each.dtype) for each in (read, matrices)],
        grid=grid,
        input_output_aliases={others: 0, others + 1: 1},
        compiler_params=plgpu.CompilerParams(num_warps=_NUM_WARPS, num_stages=1),
        interpret=interpret,
        name="delta_blocks",
    )(heads, solved, seqs, counts, read, matrices)
    return after


def _kernel(
    heads: Heads | None,
    solved: Solved | SolvedByChannel | None,
    seqs: Sequences,
    counts_ref: Any,
    _read: Any,
    states: Any,
    read_ref: Any,
    states_out: Any,
    *,
    columns: int,
    most_rows: int,
) -> None:
    group, key_size = states.shape[2:4]
    seq, head = pl.program_id(0), pl.program_id(1)
    key_head, of_group = lax.div(head, jnp.int32(group)), lax.rem(head, jnp.int32(group))
    mine = (pl.program_id(2) * columns, columns)
    height = min(key_size, most_rows)
    parts = tuple((first, height) for first in range(0, key_size, height))
    tokens, state_rows = jnp.arange(BLOCK, dtype=jnp.int32), jnp.arange(height, dtype=jnp.int32)
    offset, start, count = seqs.query_offsets[seq], seqs.starts[seq], counts_ref[seq]

    dtype = solved.queries.dtype if isinstance(solved, SolvedByChannel) else _given(heads).q.dtype

    def dot(a: jax.Array, b: jax.Array, **transposed: bool) -> jax.Array:
        precision = lax.Precision.HIGHEST if dtype == jnp.float32 else None
        product: jax.Array = plgpu.dot(a.astype(dtype), b.astype(dtype), precision=precision, **transposed)
        return product

    def store(place: jax.Array, state: tuple[jax.Array, ...], is_due: jax.Array) -> None:
        is_real = jnp.broadcast_to(is_due, state_rows.shape)
        for (first, _), part in zip(parts, state, strict=True):
            store_rows(states_out, (place, key_head, of_group, first + state_rows), is_real, part, mine)

    has_state, source = jnp.broadcast_to((start > 0) & (count > 0), state_rows.shape), seqs.source[seq]
    state = tuple(
        load_rows(states, (source, key_head, of_group, first + state_rows), has_state, mine) for first, _ in parts
    )
    in_first = lax.rem(start, jnp.int32(BLOCK))  # positions of the first block that lie before the step

    def corrected(solved: Solved, place: tuple[Any, ...], state: tuple[jax.Array, ...]) -> jax.Array:
        written = load_rows(solved.values, place, None, mine)
        for columns_of_part, part in zip(parts, state, strict=True):
            written -= dot(load_rows(solved.keys, place, None, columns_of_part), part)
        return written

    def by_head(
        heads: Heads, solved: Solved | None, block: jax.Array, rows: jax.Array, is_mine: jax.Array, state: Any
    ) -> tuple[jax.Array, ...]:
        def of_head(ref: Any) -> jax.Array:
            where = tuple(jnp.broadcast_to(each, rows.shape) for each in (rows, key_head, of_group))
            return plgpu.load(ref.at[where], mask=is_mine, other=0)

        decay = of_head(heads.log_decay)
        lower = tokens[:, None] >= tokens[None, :]
        total = jnp.sum(jnp.where(lower, decay[None, :], 0), axis=1)
        all_of_it = jnp.sum(decay)
        if solved is None:
            written = load_rows(heads.v, (rows, key_head, of_group), is_mine, mine) * of_head(heads.beta)[:, None]
        else:
            written = corrected(solved, (solved.first[seq] + block, key_head, of_group, tokens), state)
        scores, read = jnp.zeros((BLOCK, BLOCK), jnp.float32), jnp.zeros((BLOCK, columns), jnp.float32)
        for of_part, part in zip(parts, state, strict=True):
            q, k = (load_rows(ref, (rows, key_head), is_mine, of_part) for ref in (heads.q, heads.k))
            scores += dot(q, k, trans_b=True)
            read += dot(q, part)
        since = jnp.exp(jnp.where(lower, total[:, None] - total[None, :], -jnp.inf))
        read = read * jnp.exp(total)[:, None] + dot(scores * since, written)
        store_rows(read_ref, (rows, key_head, of_group), is_mine, read, mine)
        written *= jnp.exp(all_of_it - total)[:, None]
        return tuple(
            part * jnp.exp(all_of_it)
            + dot(load_rows(heads.k, (rows, key_head), is_mine, of_part), written, trans_a=True)
            for of_part, part in zip(parts, state, strict=True)
        )

    def by_channel(
        given: SolvedByChannel, block: jax.Array, rows: jax.Array, is_mine: jax.Array, state: Any
    ) -> tuple[jax.Array, ...]:
        number = given.solved.first[seq] + block
        place = number, key_head, of_group, tokens
        written = corrected(given.solved, place, state)
        read = dot(load_rows(given.scores, place, None), written)
        for of_part, part in zip(parts, state, strict=True):
            read += dot(load_rows(given.queries, place, None, of_part), part)
        store_rows(read_ref, (rows, key_head, of_group), is_mine, read, mine)

        def after(of_part: tuple[int, int], part: jax.Array) -> jax.Array:
            decay = vector(given.decay, (number, key_head, of_group), of_part[0] + state_rows)
            return part * decay[:, None] + dot(load_rows(given.left, place, None, of_part), written, trans_a=True)

        return tuple(after(of_part, part) for of_part, part in zip(parts, state, strict=True))

    def one(block: jax.Array, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        begin = block * BLOCK - in_first  # of the block, in the sequence's tokens
        is_mine = (begin + tokens >= 0) & (begin + tokens < count)
        rows = offset + begin + BLOCK + tokens  # in the padded arrays
        if isinstance(solved, SolvedByChannel):
            state = by_channel(solved, block, rows, is_mine, state)
        else:
            state = by_head(_given(heads), solved, block, rows, is_mine, state)
        for number in range(seqs.kept_at.shape[0]):
            is_due = seqs.kept_at[number, seq] == jnp.minimum(begin + BLOCK, count)
            # A branch, so that its addresses take no registers from all blocks.
            pl.when(is_due)(functools.partial(store, seqs.kept_to[number, seq], state, is_due))
        return state

    num_blocks = jnp.where(count > 0, lax.div(in_first + count + (BLOCK - 1), jnp.int32(BLOCK)), 0)
    state = lax.fori_loop(jnp.int32(0), num_blocks, one, state)
    store(seqs.place[seq], state, count > 0)


def _given(heads: Heads | None) -> Heads:
    """Those that are given unless states decay by channel."""
    assert heads is not None
    return heads
