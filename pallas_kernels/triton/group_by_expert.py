"""`group_by_expert` as a Pallas kernel for the Triton backend: a counting sort. Called through `triton.BACKEND`.

A program takes one expert, and one more those places that have none. It reads the choices of all tokens, counts those
of the experts before its own, which is where its places begin, and gives each of its own the next place. So programs
need nothing of each other, and each writes what `grouped_product` needs of its expert: tokens, size, and tiles of rows.
XLA makes a sort, two scatters and three sums of it, each a kernel.

Tiles of all experts lie in one array, and no program knows how many tiles the experts before its own have. But an
expert whose places are `begin .. end - 1` has at most `end // R - begin // R + 1` tiles of R rows: so the tiles of
expert e are kept from `begin // R + e` on, where those of expert e + 1 don't begin before they end; gaps become tiles
of no rows. With fewer places than that takes, tiles are kept at their own first place.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.experts import Groups, RowTiles, most_tiles, sort_by_expert
from pallas_kernels.triton.common import MIN_DOT, tile_rows_for

_MOST_ROWS = 128
_CHUNK = 4096  # choices that a program holds at once, 16 in a thread
_MOST_PLACES = 1 << 16  # of which each program reads all


def rows_of_tiles(num_places: int, num_experts: int) -> int:
    """R of `grouped_product`: at most twice the rows that an expert has on average."""
    average = -(-num_places // num_experts)
    return tile_rows_for(min(max(pl.next_power_of_2(average), MIN_DOT), _MOST_ROWS))


@functools.partial(jax.jit, static_argnames=("num_experts", "interpret"))
def group_by_expert(experts: jax.Array, num_experts: int, is_token: jax.Array | None, interpret: bool) -> Groups:
    """See `backend.GroupByExpert`. More choices than programs can read in a short time are sorted by XLA."""
    num_tokens, num_choices = experts.shape
    num_places = num_tokens * num_choices
    if num_places > _MOST_PLACES:
        return sort_by_expert(experts, num_experts, is_token)
    num_rows = rows_of_tiles(num_places, num_experts)
    by_place, by_tile = num_places, most_tiles(num_places, num_experts, num_rows)
    sizes = by_place, by_place, num_experts, num_experts + 1, by_place, by_tile, by_tile, by_tile
    tokens, of_place, counts, starts, place_of, *tiles = pl.pallas_call(
        functools.partial(_kernel, num_choices=num_choices, num_experts=num_experts, num_rows=num_rows),
        out_shape=tuple(jax.ShapeDtypeStruct((size,), jnp.int32) for size in sizes),
        grid=(num_experts + 1,),
        compiler_params=plgpu.CompilerParams(num_warps=8 if num_places > _CHUNK // 4 else 4),
        interpret=interpret,
        name="group_by_expert",
    )(experts.reshape(-1), *([] if is_token is None else [is_token.astype(jnp.int32)]))
    places = place_of.reshape(num_tokens, num_choices)
    return Groups(tokens, of_place, counts, places, RowTiles(*tiles), starts, num_rows)


def _kernel(choices_ref: Any, *refs: Any, num_choices: int, num_experts: int, num_rows: int) -> None:
    (
        *is_token_refs,
        tokens_ref,
        of_place_ref,
        counts_ref,
        starts_ref,
        place_of_ref,
        experts_ref,
        begins_ref,
        ends_ref,
    ) = refs
    (num_places,) = choices_ref.shape
    expert = pl.program_id(0)
    chunk = min(pl.next_power_of_2(num_places), _CHUNK)
    num_chunks = pl.cdiv(num_places, chunk)

    def load(number: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Choices by their numbers, E where a choice is no expert, and E + 1 after the last one."""
        index = number * chunk + jnp.arange(chunk, dtype=jnp.int32)
        is_real = index < num_places
        chosen = plgpu.load(choices_ref.at[index], mask=is_real, other=0)
        is_one = (chosen >= 0) & (chosen < num_experts)
        for ref in is_token_refs:
            is_one &= plgpu.load(ref.at[lax.div(index, jnp.int32(num_choices))], mask=is_real, other=0) != 0
        return index, jnp.where(is_real, jnp.where(is_one, chosen, num_experts), num_experts + 1)

    def count(number: jax.Array, counts: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        _, chosen = load(number)
        return counts[0] + _count(chosen < expert), counts[1] + _count(chosen == expert)

    begin, size = lax.fori_loop(0, num_chunks, count, (jnp.int32(0), jnp.int32(0)))

    def place(number: jax.Array, begin: jax.Array) -> jax.Array:
        index, chosen = load(number)
        is_mine = chosen == expert
        # Others get places after the end, which are masked too: interpreters write what a mask hides.
        mine = jnp.where(is_mine, begin + jnp.cumsum(is_mine.astype(jnp.int32)) - 1, num_places + index)
        plgpu.store(tokens_ref.at[mine], lax.div(index, jnp.int32(num_choices)), mask=is_mine)
        plgpu.store(of_place_ref.at[mine], jnp.full((chunk,), expert, jnp.int32), mask=is_mine)
        plgpu.store(place_of_ref.at[index], mine, mask=is_mine)
        return begin + _count(is_mine)

    lax.fori_loop(0, num_chunks, place, begin)
    starts_ref[expert] = begin

    @pl.when(expert < num_experts)
    def _() -> None:
        counts_ref[expert] = size

    _store_tiles((experts_ref, begins_ref, ends_ref), expert, begin, begin + size, num_places, num_rows)


def _store_tiles(
    refs: tuple[Any, ...], expert: jax.Array, begin: jax.Array, end: jax.Array, num_places: int, num_rows: int
) -> None:
    """The tiles of the expert whose places are `begin .. end - 1`, and tiles of no rows up to the next expert's."""
    rows = jnp.int32(num_rows)
    if refs[0].shape[0] == num_places:
        number = jnp.arange(pl.next_power_of_2(num_places), dtype=jnp.int32)
        index, is_mine = begin + number, begin + number < end
        begins = jnp.where(lax.rem(number, rows) == 0, index, end)
    else:
        number = jnp.arange(pl.next_power_of_2(num_places // num_rows + 2), dtype=jnp.int32)
        index = lax.div(begin, rows) + expert + number
        is_mine = index <= lax.div(end, rows) + expert
        begins = jnp.minimum(begin + number * rows, end)
    values = jnp.full(number.shape, expert, jnp.int32), begins, jnp.minimum(begins + rows, end)
    for ref, value in zip(refs, values, strict=True):
        plgpu.store(ref.at[index], value, mask=is_mine)


def _count(mask: jax.Array) -> jax.Array:
    return jnp.sum(mask.astype(jnp.int32))
