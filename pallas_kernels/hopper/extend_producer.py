"""The copying warpgroup of the Hopper extend kernel: TMA copies of queries and pages, ahead of the consumers.

Owns the filling of shared memory. Never knows softmax. Called by `extend`.

The tiles that it hands over are clean and of the queries' dtype. Places of a V tile that no query of the item sees may
hold NaN, which a weight of zero would not silence: a tile with such places is copied, awaited and cleared here before
the consumers see it. A float8 tile is copied beside the stages and converted into one.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper.common import in_layout, iota, on_one_warp
from pallas_kernels.hopper.extend_plan import Item, Plan, Refs, for_each_item

# Rows and columns that are changed at once: 16 registers of a thread.
_BLOCK = 64
# Places of K and V in the fields of Refs that come in pairs.
_K, _V = 0, 1


def produce(plan: Plan, refs: Refs) -> None:
    """Fill shared memory for all items of this program, then wait until the consumers have read it all."""

    def visit(item: Item, done: jax.Array) -> None:
        bring = _convert_item if plan.converts else _copy_item
        pl.when(item.num_steps > 0)(lambda: bring(plan, refs, item, done))

    done = for_each_item(plan, refs.tiles, visit)

    def wait_for_stage(turn: jax.Array, _: None) -> None:
        for which in (_K, _V):
            plgpu.barrier_wait(refs.free.at[plan.barrier_of(turn, which)])

    def wait_for_consumers() -> None:
        lax.fori_loop(lax.max(done - plan.num_stages, 0), done, wait_for_stage, None)
        plgpu.barrier_wait(refs.free.at[2 * plan.num_stages])

    wait = wait_for_consumers if plan.converts else lambda: on_one_warp(wait_for_consumers)
    pl.when(done > 0)(wait)


def _copy_item(plan: Plan, refs: Refs, item: Item, done: jax.Array) -> None:
    """Copy an item's queries and KV tiles straight from the pages.

    One warp does it, and it alone waits for free memory. At a V tile that must be cleared it stops, and all four warps
    clear that tile; only the item's last tile may be such, and with a window its first one too.
    """

    def copy_until_unclean(begin: jax.Array, end: jax.Array, *, is_first: bool) -> None:
        position = (item.first_tile + end - 1) * plan.tile_tokens

        def copy() -> None:
            if is_first:
                _bring_queries(plan, refs, item, done)
            lax.fori_loop(begin, end, lambda step, _: _fill(plan, refs, item, step, done + step), None)

        def clear() -> None:
            plgpu.barrier_wait(refs.raw_arrived.at[_V])
            v_tile = refs.v_tiles.at[lax.rem(done + end - 1, plan.num_stages)]
            _rewrite(plan, v_tile, v_tile, item.low - position, item.last - position)
            for _ in range(plan.copies_per_tile):  # as many arrivals as the copies would have made
                plgpu.barrier_arrive(refs.arrived.at[plan.barrier_of(done + end - 1, _V)])

        on_one_warp(copy)
        pl.when(jnp.logical_not(_is_clean(plan, item, position)))(clear)

    if plan.options.sliding_window is None:
        copy_until_unclean(jnp.int32(0), item.num_steps, is_first=True)
    else:
        copy_until_unclean(jnp.int32(0), jnp.int32(1), is_first=True)
        pl.when(item.num_steps > 1)(lambda: copy_until_unclean(jnp.int32(1), item.num_steps, is_first=False))


def _convert_item(plan: Plan, refs: Refs, item: Item, done: jax.Array) -> None:
    """Copy an item's queries, and convert its KV tiles."""
    _bring_queries(plan, refs, item, done)
    _start_raw(plan, refs, item, jnp.int32(0), _K)
    _start_raw(plan, refs, item, jnp.int32(0), _V)
    lax.fori_loop(0, item.num_steps, lambda step, _: _fill_converted(plan, refs, item, step, done + step), None)


def _bring_queries(plan: Plan, refs: Refs, item: Item, done: jax.Array) -> None:
    pl.when(done > 0)(lambda: plgpu.barrier_wait(refs.free.at[2 * plan.num_stages]))
    _copy_queries(plan, refs, item)


def _copy_queries(plan: Plan, refs: Refs, item: Item) -> None:
    first_row = item.first_row(plan)
    for warpgroup, row, group, first, count in plan.query_pieces():
        source = refs.q.at[pl.ds(first_row + first, count), item.kv_head * plan.num_groups + group]
        plgpu.copy_gmem_to_smem(source, refs.q_tile.at[warpgroup, pl.ds(row, count)], refs.q_arrived)


def _wait_until_free(plan: Plan, refs: Refs, turn: jax.Array, which: int) -> None:
    # The first num_stages tiles find the stages empty.
    pl.when(turn >= plan.num_stages)(lambda: plgpu.barrier_wait(refs.free.at[plan.barrier_of(turn, which)]))


def _fill(plan: Plan, refs: Refs, item: Item, step: jax.Array, turn: jax.Array) -> None:
    """Copy K and V of an item's KV tile; `turn` counts the tiles of this program."""
    stage = lax.rem(turn, plan.num_stages)
    position = (item.first_tile + step) * plan.tile_tokens
    pages = _pages_of_tile(plan, refs, item, position)
    _wait_until_free(plan, refs, turn, _K)
    _start_copies(plan, item, refs.k_pages, pages, refs.k_tiles.at[stage], refs.arrived.at[plan.barrier_of(turn, _K)])
    _wait_until_free(plan, refs, turn, _V)
    copy_v = functools.partial(_start_copies, plan, item, refs.v_pages, pages, refs.v_tiles.at[stage])
    is_clean = _is_clean(plan, item, position)
    pl.when(is_clean)(lambda: copy_v(refs.arrived.at[plan.barrier_of(turn, _V)]))
    pl.when(jnp.logical_not(is_clean))(lambda: copy_v(refs.raw_arrived.at[_V]))


def _fill_converted(plan: Plan, refs: Refs, item: Item, step: jax.Array, turn: jax.Array) -> None:
    """Convert the raw tiles of an item's KV tile; copies for the next step start as soon as they are read."""
    stage = lax.rem(turn, plan.num_stages)
    position = (item.first_tile + step) * plan.tile_tokens
    low, last = item.low - position, item.last - position
    for which, tile in ((_K, refs.k_tiles.at[stage]), (_V, refs.v_tiles.at[stage])):
        _wait_until_free(plan, refs, turn, which)
        plgpu.barrier_wait(refs.raw_arrived.at[which])
        _rewrite(plan, refs.raw_tiles.at[which], tile, low, last)
        plgpu.barrier_arrive(refs.arrived.at[plan.barrier_of(turn, which)])

        def start_next(which: int = which) -> None:
            _start_raw(plan, refs, item, step + 1, which)

        pl.when(step + 1 < item.num_steps)(start_next)


def _start_raw(plan: Plan, refs: Refs, item: Item, step: jax.Array, which: int) -> None:
    pages = _pages_of_tile(plan, refs, item, (item.first_tile + step) * plan.tile_tokens)
    pages_ref = refs.k_pages if which == _K else refs.v_pages
    _start_copies(plan, item, pages_ref, pages, refs.raw_tiles.at[which], refs.raw_arrived.at[which])


def _is_clean(plan: Plan, item: Item, position: jax.Array) -> jax.Array:
    return (position >= item.low) & (position + plan.tile_tokens <= item.last + 1)


def _pages_of_tile(plan: Plan, refs: Refs, item: Item, tile_position: jax.Array) -> list[tuple[jax.Array, jax.Array]]:
    """Page and first token in it, for each copy of a tile.

    A tile is always copied whole, so that its barrier always expects the same. What lies outside of low..last is
    replaced by the nearest tokens inside, so that unused entries of the table are never read.
    """
    pages = []
    for copy in range(plan.copies_per_tile):
        position = lax.max(lax.min(tile_position + copy * plan.copy_tokens, item.last), item.low)
        page, offset = lax.div(position, plan.page_size), lax.rem(position, plan.page_size)
        offset = lax.div(offset, plan.copy_tokens) * plan.copy_tokens
        pages.append((refs.page_table[item.seq, page], offset))
    return pages


def _start_copies(
    plan: Plan, item: Item, pages_ref: Any, pages: list[tuple[jax.Array, jax.Array]], tile: Any, arrived: Any
) -> None:
    for copy, (page, offset) in enumerate(pages):
        source = pages_ref.at[page, item.kv_head, pl.ds(offset, plan.copy_tokens)]
        plgpu.copy_gmem_to_smem(source, tile.at[pl.ds(copy * plan.copy_tokens, plan.copy_tokens)], arrived)


def _rewrite(plan: Plan, source: Any, target: Any, low: jax.Array, last: jax.Array) -> None:
    """Write source to target: zeros in rows outside of low..last, the others converted; visible to `wgmma` on return.

    Loops instead of unrolled code kept a register of the whole kernel from being spilled.
    """

    def rewrite_rows(i: jax.Array, _: None) -> None:
        row = i * _BLOCK

        def rewrite_block(j: jax.Array, _: None) -> None:
            block = (pl.ds(row, _BLOCK), pl.ds(j * _BLOCK, _BLOCK))
            values = _read_block(plan, source, block, target.dtype)
            token = row + iota((_BLOCK, _BLOCK), 0, plgpu.Layout.WGMMA, interpret=plan.interpret)
            target[block] = jnp.where((token >= low) & (token <= last), values, jnp.zeros_like(values))

        def rewrite() -> None:
            lax.fori_loop(0, plan.head_dim // _BLOCK, rewrite_block, None)

        if plan.converts:
            rewrite()
        else:
            pl.when((low > row) | (last < row + _BLOCK - 1))(rewrite)

    lax.fori_loop(0, plan.tile_tokens // _BLOCK, rewrite_rows, None)
    plgpu.commit_smem()


def _read_block(plan: Plan, source: Any, block: tuple[Any, Any], dtype: Any) -> jax.Array:
    values = in_layout(source[block], plgpu.Layout.WGMMA, interpret=plan.interpret)
    # Through float16, the only type that the chip converts float8 to.
    return values if source.dtype == dtype else values.astype(jnp.float16).astype(dtype)
