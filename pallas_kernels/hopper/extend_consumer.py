"""The computing warpgroups of the Hopper extend kernel: softmax(q k) v of 64 rows each, in registers.

Owns the running softmax and the writing of the output. Never knows pages: tiles of K and V appear in shared memory.
Called by `extend`.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper.common import WGMMA_ROWS, in_layout, iota, matmul, overlapped, store_plain
from pallas_kernels.hopper.extend_plan import Item, Plan, Refs, for_each_item
from pallas_kernels.hopper.scores import LOWEST, shape_scores, to_matrix
from pallas_kernels.partition import LOG2_E

_ROWS = plgpu.Layout.WGMMA.reduce(1)


def consume(plan: Plan, refs: Refs, warpgroup: jax.Array) -> None:
    """Compute this warpgroup's rows of all items of this program."""

    def visit(item: Item, done: jax.Array) -> None:
        def attend_and_write() -> None:
            _write(plan, refs, warpgroup, item, _attend(plan, refs, warpgroup, item, done))

        pl.when(item.num_queries > 0)(attend_and_write)

    # The first turn is consumer 0's. It also takes the last one, which is given for a step that doesn't come.
    pl.when(warpgroup == 1)(lambda: plgpu.barrier_arrive(refs.turn.at[0]))
    for_each_item(plan, refs.tiles, visit)
    pl.when(warpgroup == 0)(lambda: plgpu.barrier_wait(refs.turn.at[0]))
    plgpu.wait_smem_to_gmem(0)


def _attend(plan: Plan, refs: Refs, warpgroup: jax.Array, item: Item, done: jax.Array) -> jax.Array:
    """float32 `[64, H]`: this warpgroup's rows of the item; rows without a query hold anything."""
    row = iota((WGMMA_ROWS,), 0, _ROWS, interpret=plan.interpret) + warpgroup * WGMMA_ROWS
    # Where the lowest row stands, counted from the first KV tile: few scalars should live through the loop.
    origin = item.first_tile * plan.tile_tokens
    lowest = item.position - item.begin + item.first_row(plan) - origin
    place = lax.rem(row, plan.tile_queries) + lowest
    last = item.last - origin
    # A wait for V that ends the softmax keeps ptxas from moving the softmax behind the wait for the product before.
    # With one stage this V comes only after that product.
    waits_early = plan.num_stages > 1
    give_turn = functools.partial(plgpu.barrier_arrive, refs.turn.at[1 - warpgroup])

    def operands(turn: jax.Array) -> tuple[jax.Array, jax.Array]:
        # Opaque, so that the addresses of the tiles' parts are computed in each step: kept over the loop they cost so
        # many registers that others were spilled.
        mine, stage = lax.optimization_barrier((warpgroup, lax.rem(turn, plan.num_stages)))
        return refs.q_tile.at[mine], refs.k_tiles.at[stage]

    def wait_for_k_and_turn(turn: jax.Array) -> None:
        plgpu.barrier_wait(refs.arrived.at[plan.barrier_of(turn, 0)])
        plgpu.barrier_wait(refs.turn.at[warpgroup])

    def weigh(step: jax.Array, top: jax.Array, total: jax.Array, scores: jax.Array) -> tuple[jax.Array, ...]:
        plgpu.barrier_arrive(refs.free.at[plan.barrier_of(done + step, 0)])
        scores, factor = shape_scores(plan.options, plan.head_dim, scores)
        scores = _hide(plan, step * plan.tile_tokens, (lowest, last), place, scores)
        new_top = jnp.maximum(top, jnp.max(scores, axis=1) * factor)
        weights = jnp.exp2(scores * factor - to_matrix(new_top, plan.tile_tokens))
        shrink = jnp.exp2(top - new_top)
        total = total * shrink + jnp.sum(weights, axis=1)
        new_top, total, shrink, weights = lax.optimization_barrier((new_top, total, shrink, weights))
        if waits_early:
            plgpu.barrier_wait(refs.arrived.at[plan.barrier_of(done + step, 1)])
        return new_top, total, shrink, weights

    def add_tile(step: jax.Array, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        """Scores and weights of a KV tile, beside the output of the tile before."""
        top, total, weights, acc = state
        turn = done + step
        v_barrier = plan.barrier_of(turn - 1, 1)
        if not waits_early:
            plgpu.barrier_wait(refs.arrived.at[v_barrier])
        wait_for_k_and_turn(turn)
        v_stage = lax.optimization_barrier(lax.rem(turn - 1, plan.num_stages))
        (top, total, shrink, weights), acc = overlapped(
            operands(turn),
            (weights, refs.v_tiles.at[v_stage], acc),
            started=give_turn,
            between=functools.partial(weigh, step, top, total),
            interpret=plan.interpret,
        )
        plgpu.barrier_arrive(refs.free.at[v_barrier])
        return top, total, weights.astype(refs.v_tiles.dtype), acc * to_matrix(shrink, plan.head_dim)

    def attend() -> tuple[jax.Array, jax.Array]:
        plgpu.barrier_wait(refs.q_arrived)
        wait_for_k_and_turn(done)
        q_tile, k_tile = operands(done)
        scores = matmul(q_tile, k_tile, transpose_b=True, meanwhile=give_turn, interpret=plan.interpret)
        first = (_full(plan, LOWEST, None), _full(plan, 0.0, None))
        top, total, _, weights = weigh(jnp.int32(0), *first, scores)
        state = (top, total, weights.astype(refs.v_tiles.dtype), _full(plan, 0.0, plan.head_dim))
        top, total, weights, acc = lax.fori_loop(1, item.num_steps, add_tile, state)
        plgpu.barrier_arrive(refs.free.at[2 * plan.num_stages])
        turn = done + item.num_steps - 1
        v_barrier = plan.barrier_of(turn, 1)
        if not waits_early:
            plgpu.barrier_wait(refs.arrived.at[v_barrier])
        stage = lax.rem(turn, plan.num_stages)
        acc = matmul(weights, refs.v_tiles.at[stage], acc, interpret=plan.interpret)
        plgpu.barrier_arrive(refs.free.at[v_barrier])
        if refs.sinks is not None:
            total = total + jnp.exp2(_sinks_of_rows(plan, refs, warpgroup, item) - top)
        return total, acc

    def nothing() -> tuple[jax.Array, jax.Array]:
        return _full(plan, 0.0, None), _full(plan, 0.0, plan.head_dim)

    total, acc = lax.cond(item.num_steps > 0, attend, nothing)
    # A row that sees anything has a total of at least 1, the weight of its top score; without steps acc is 0.
    return acc * to_matrix(1.0 / jnp.maximum(total, jnp.ones_like(total)), plan.head_dim)


def _sinks_of_rows(plan: Plan, refs: Refs, warpgroup: jax.Array, item: Item) -> jax.Array:
    """`[64]`: the sinks of the query heads of this warpgroup's rows, times log2(e)."""
    row = iota((WGMMA_ROWS,), 0, _ROWS, interpret=plan.interpret) + warpgroup * WGMMA_ROWS
    sinks = _full(plan, 0.0, None)
    for group in range(plan.num_groups):  # the rows of a group follow those of the one before
        sink = refs.sinks[item.kv_head * plan.num_groups + group] * LOG2_E
        sinks = jnp.where(row >= group * plan.tile_queries, _full(plan, sink, None), sinks)
    return sinks


def _hide(
    plan: Plan, tile_begin: jax.Array, places: tuple[jax.Array, jax.Array], place: jax.Array, scores: jax.Array
) -> jax.Array:
    """Set what a row doesn't see to -inf; tiles that all rows see whole are left alone.

    `place` says where each row's query stands, `places` the lowest and the highest of them.
    """
    window = plan.options.sliding_window
    is_border = tile_begin + plan.tile_tokens > places[0]
    if window is not None:
        is_border |= tile_begin + window <= places[1]

    def hide(scores: jax.Array) -> jax.Array:
        column = iota(scores.shape, 1, plgpu.Layout.WGMMA, interpret=plan.interpret)
        limit = to_matrix(place - tile_begin, plan.tile_tokens)
        is_seen = column <= limit
        if window is not None:
            is_seen &= column > limit - window
        return jnp.where(is_seen, scores, -jnp.inf)

    return lax.cond(is_border, hide, lambda scores: scores, scores)


def _write(plan: Plan, refs: Refs, warpgroup: jax.Array, item: Item, acc: jax.Array) -> None:
    """Write the rows of acc that hold queries of the item to their places, through shared memory."""
    begin_row = warpgroup * WGMMA_ROWS
    for column in range(0, plan.head_dim, plan.staging_columns):
        columns = pl.ds(column, plan.staging_columns)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # earlier copies have read out_tile
        block = acc if plan.staging_columns == plan.head_dim else acc[:, column : column + plan.staging_columns]
        store_plain(refs.out_tile.at[pl.ds(begin_row, WGMMA_ROWS)], block.astype(refs.out_tile.dtype))
        plgpu.commit_smem()
        write_group = functools.partial(_write_group, plan, refs, item, begin_row, columns)
        lax.fori_loop(0, plan.num_groups, write_group, None)


def _write_group(
    plan: Plan, refs: Refs, item: Item, begin_row: jax.Array, columns: Any, group: jax.Array, _: None
) -> None:
    """Write this warpgroup's rows of one query head.

    The tile may reach past its queries, into rows that other programs write. TMA copies a fixed number of rows, so
    a count is put together from powers of two, the largest first.
    """
    token_of_row_0 = item.first_row(plan) - group * plan.tile_queries
    first = lax.max(item.begin - token_of_row_0, begin_row)
    end = lax.min(item.begin + item.num_queries - token_of_row_0, begin_row + WGMMA_ROWS)
    count = lax.max(end - first, 0)
    head = item.kv_head * plan.num_groups + group
    # Opaque, so that the compiler makes nothing of them before the loop over KV tiles: with heads of 256 it spilled.
    token_of_row_0, first, count, head = lax.optimization_barrier((token_of_row_0, first, count, head))
    size = 1 << (min(plan.tile_queries, WGMMA_ROWS).bit_length() - 1)
    while size:

        def copy(size: int = size) -> None:
            row = first + lax.div(count, 2 * size) * (2 * size)
            target = refs.out.at[pl.ds(token_of_row_0 + row, size), head, columns]
            plgpu.copy_smem_to_gmem(refs.out_tile.at[pl.ds(row, size)], target)

        pl.when((count & size) != 0)(copy)
        size //= 2


def _full(plan: Plan, value: Any, width: int | None) -> jax.Array:
    """A constant: one per row, or `[64, width]`."""
    shape, layout = ((WGMMA_ROWS,), _ROWS) if width is None else ((WGMMA_ROWS, width), plgpu.Layout.WGMMA)
    return in_layout(jnp.full(shape, value, jnp.float32), layout, interpret=plan.interpret)
