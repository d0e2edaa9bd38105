"""The places of a row's largest numbers as a Pallas kernel for the Triton backend: a program per row.

A program finds the smallest of the numbers that it takes digit by digit, from the highest: it counts how many numbers
are at least as large as each value that the digit may have. One more pass over the row writes the places of those above
it, and of as many equal ones as are missing, in ascending order. That reads a row ten times, most of them from the L2
cache, where a sort moves it, with its places, some thirty times. Called by `index_scores`.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.target import target_device

_DIGIT, _BITS = 4, 32
# Numbers that a program looks at together, and its warps: of many rows, or of fewer than multiprocessors.
_NARROW, _WIDE = (512, 4), (1024, 8)
_LEAST = -(1 << 31)  # below all numbers
_FEW_ROWS, _LONG = 16, 1 << 15  # fewer rows of more numbers are sorted: a program each would take longer


@functools.partial(jax.jit, static_argnames=("count", "interpret"))
def best_places(rows: jax.Array, ends: jax.Array, count: int, interpret: bool) -> jax.Array:
    """Places `[N, count]` int32 of the largest numbers of `rows [N, L]` float32; -1 follows where there are fewer.

    Of each row the first `ends [N]` numbers count, of equal ones the earlier. None is NaN. Places ascend, but those of
    few long rows follow the numbers.
    """
    if len(rows) < _FEW_ROWS and rows.shape[1] > _LONG:
        return _by_sorting(rows, ends, count)
    is_wide = len(rows) < target_device().num_cores and rows.shape[1] > _NARROW[0]
    block, num_warps = _WIDE if is_wide else _NARROW
    out: jax.Array = pl.pallas_call(
        functools.partial(_kernel, block=block, count=count),
        out_shape=jax.ShapeDtypeStruct((len(rows), count), jnp.int32),
        grid=(len(rows),),
        compiler_params=plgpu.CompilerParams(num_warps=num_warps, num_stages=2),
        interpret=interpret,
        name="best_places",
    )(rows, ends)
    return out


def _by_sorting(rows: jax.Array, ends: jax.Array, count: int) -> jax.Array:
    is_there = jnp.arange(rows.shape[1]) < ends[:, None]
    best, places = lax.top_k(jnp.where(is_there, rows, -jnp.inf), count)
    return jnp.where(best > -jnp.inf, places.astype(jnp.int32), -1)


def _kernel(rows_ref: Any, ends_ref: Any, out_ref: Any, *, block: int, count: int) -> None:
    row, lane = pl.program_id(0), jnp.arange(block, dtype=jnp.int32)
    end = ends_ref[row]
    num_blocks = lax.div(end + block - 1, jnp.int32(block))

    def keys(i: jax.Array) -> jax.Array:
        """Integers in the order of a block's numbers."""
        at = i * block + lane
        numbers = plgpu.load(rows_ref.at[row, at], mask=at < end, other=0.0)
        bits = lax.bitcast_convert_type(jnp.where(numbers == 0, 0.0, numbers), jnp.int32)  # -0 is 0
        ordered = bits ^ ((bits >> 31) & jnp.int32(0x7FFFFFFF))
        return jnp.where(at < end, ordered, jnp.int32(_LEAST))

    def in_all(add: Any, start: jax.Array) -> jax.Array:
        found: jax.Array = lax.fori_loop(0, num_blocks, lambda i, sums: sums + add(keys(i)).astype(jnp.int32), start)
        return found

    def narrow(step: jax.Array, least: jax.Array) -> jax.Array:
        """The least key with one more of its digits."""
        place = jnp.int32(_BITS - _DIGIT) - step * _DIGIT
        digits = jnp.arange(1 << _DIGIT, dtype=jnp.int32)
        bounds = least + (digits << place)
        reached = in_all(lambda keys: keys[:, None] >= bounds, jnp.zeros((block, 1 << _DIGIT), jnp.int32))
        is_enough = (jnp.sum(reached, axis=0) >= count) & (digits > 0)
        return least + (jnp.sum(is_enough.astype(jnp.int32)) << place)

    least = lax.fori_loop(0, _BITS // _DIGIT, narrow, jnp.int32(_LEAST))
    above = jnp.sum(in_all(lambda keys: keys > least, jnp.zeros((block,), jnp.int32)))
    missing = count - above

    def write(i: jax.Array, before: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        taken, equal = before
        of_block, at = keys(i), i * block + lane
        is_equal = ((of_block == least) & (at < end)).astype(jnp.int32)
        is_mine = (of_block > least) | ((is_equal > 0) & (equal + jnp.cumsum(is_equal) <= missing))
        # What isn't taken has a place of its own after all others, where the mask keeps it from.
        places = jnp.where(is_mine, taken + jnp.cumsum(is_mine.astype(jnp.int32)) - 1, count + lane)
        plgpu.store(out_ref.at[row, places], at, mask=is_mine)
        return taken + jnp.sum(is_mine.astype(jnp.int32)), equal + jnp.sum(is_equal)

    taken, _ = lax.fori_loop(0, num_blocks, write, (jnp.int32(0), jnp.int32(0)))

    def fill(i: jax.Array, _: None) -> None:
        at = i * block + lane
        plgpu.store(out_ref.at[row, at], jnp.full((block,), -1, jnp.int32), mask=(at >= taken) & (at < count))

    lax.fori_loop(lax.div(taken, jnp.int32(block)), pl.cdiv(count, block), fill, None)
