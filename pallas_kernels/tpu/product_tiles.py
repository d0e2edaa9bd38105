"""The kernel of `products`: one tile of rows times a tile of one expert's outputs, with all inputs.

Owns how numbers become weights in VMEM. Scales of 128 inputs and more multiply the sums of their groups, which is
exact. Smaller groups share 128 lanes: their scales are spread over the lanes and multiply the weights, which are
rounded to the rows' format. Scales lie `[G, O]`, as XLA keeps them in memory for this order.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.tpu.common import LANES

# Rows of what says which expert meets which tile, `[4, visits]` int32: the expert, the tile, and the first of all rows
# that are the expert's and the first that is not.
EXPERT, TILE, BEGIN, END = range(4)


def multiply_tile(
    visits_ref: Any,
    x_ref: Any,
    numbers_ref: Any,
    *refs: Any,
    num_of_groups: int,
    group: int,
    are_codes: bool,
    depth: int,
) -> None:
    """Writes the rows of one expert in a tile `[R, O]` of the result.

    Args:
        visits_ref: see above.
        x_ref: `[R, I]`.
        numbers_ref: `[1, O, I]`.
        refs: of groups scales and zeros `[1, G, O]`, as far as there are some; the result; scratch: for groups of less
            than the lanes `[O, G]` float32 for each of these, G rounded up to lanes, for others `[G, O]` for zeros.
        num_of_groups: how many of these there are, 0 to 2.
        group: inputs that share a scale.
        are_codes: the numbers are codes of e2m1 and the scales bytes, as `packed.MXFP4_CODES` has them.
        depth: inputs that are multiplied at once.
    """
    of_groups, out_ref, scratch = refs[:num_of_groups], refs[num_of_groups], refs[num_of_groups + 1 :]
    part: _Part
    if group < LANES:
        for ref, turned in zip(of_groups, scratch, strict=True):
            values = _halves(ref[0]) if are_codes else ref[0].astype(jnp.float32)
            turned[:, : len(values)] = values.T
        part = _ScaledWeights(x_ref, numbers_ref, scratch, group, _doubled if are_codes else _as_they_are)
    else:
        for ref, widened in zip(of_groups[1:], scratch, strict=True):
            widened[...] = ref[0].astype(jnp.float32)
        part = _ScaledSums(x_ref, numbers_ref, (*of_groups[:1], *scratch), group)

    def add(step: jax.Array, sums: jax.Array) -> jax.Array:
        return sums + part(pl.multiple_of(step * depth, LANES), depth)

    num_inputs = x_ref.shape[1]
    num_steps = num_inputs // depth
    sums = lax.fori_loop(0, num_steps, add, jnp.zeros(out_ref.shape, jnp.float32))
    if num_inputs % depth:
        sums += part(num_steps * depth, num_inputs % depth)
    visit = pl.program_id(1)
    row = visits_ref[TILE, visit] * out_ref.shape[0] + lax.broadcasted_iota(jnp.int32, out_ref.shape, 0)
    is_mine = (row >= visits_ref[BEGIN, visit]) & (row < visits_ref[END, visit])
    out_ref[...] = jnp.where(is_mine, sums, out_ref[...].astype(jnp.float32)).astype(out_ref.dtype)


_Part = Callable[[Any, int], jax.Array]  # of the first of some inputs and their number, their products `[R, O]`


@dataclasses.dataclass(frozen=True)
class _ScaledSums:
    """Some inputs of one group: their products are scaled. Without scales they are the result."""

    x_ref: Any
    numbers_ref: Any
    of_groups: Sequence[Any]
    """Scales `[1, G, O]`, zeros `[G, O]`, as far as there are some."""
    group: int

    def __call__(self, first: Any, depth: int) -> jax.Array:
        x = self.x_ref[:, pl.ds(first, depth)]
        sums = _dot(x, self.numbers_ref[0, :, pl.ds(first, depth)].astype(x.dtype))
        if not self.of_groups:
            return sums
        scale, *zeros = self.of_groups
        row = pl.ds(first // self.group, 1)
        for zero in zeros:
            sums -= jnp.sum(x.astype(jnp.float32), axis=1, keepdims=True) * zero[row, :]
        return sums * scale[0, row, :]


@dataclasses.dataclass(frozen=True)
class _ScaledWeights:
    """Some inputs of several groups: their weights are scaled, those of 128 inputs at a time."""

    x_ref: Any
    numbers_ref: Any
    turned: Sequence[Any]
    """Scales `[O, G]`, and zeros if there are some."""
    group: int
    read: Callable[[jax.Array], jax.Array]
    """Makes float32 of what is stored."""

    def __call__(self, first: Any, depth: int) -> jax.Array:
        total = jnp.zeros((self.x_ref.shape[0], self.numbers_ref.shape[1]), jnp.float32)
        for begin in range(0, depth, LANES):
            width = min(LANES, depth - begin)
            at = pl.ds(first + begin, width)
            x = self.x_ref[:, at]
            weights = self.read(self.numbers_ref[0, :, at])
            scale, *zeros = (self._spread(ref, first + begin)[:, :width] for ref in self.turned)
            for zero in zeros:
                weights -= zero
            total += _dot(x, (weights * scale).astype(x.dtype))
        return total

    def _spread(self, turned: Any, first: Any) -> jax.Array:
        """Of `[O, G]`, `[O, 128]`: those of 128 inputs, one for each."""
        first_group = first // self.group
        window = turned[:, pl.ds(pl.multiple_of(first_group // LANES * LANES, LANES), LANES)]
        lane = lax.broadcasted_iota(jnp.int32, window.shape, 1)
        return jnp.take_along_axis(window, first_group % LANES + lane // self.group, axis=1)


def _as_they_are(numbers: jax.Array) -> jax.Array:
    return numbers.astype(jnp.float32)


def _doubled(codes: jax.Array) -> jax.Array:
    """Twice the numbers of codes of e2m1: those up to 4 stand for themselves, 5, 6 and 7 for 6, 8 and 12."""
    wide = codes.astype(jnp.int32)
    code = wide & 7
    number = code + jnp.maximum(code - 4, 0) + 2 * jnp.maximum(code - 6, 0)
    return jnp.where(wide < 0, -number, number).astype(jnp.float32)


def _halves(scales: jax.Array) -> jax.Array:
    """Half of what bytes of scales stand for, whose exponents are biased as those of float32 are."""
    return lax.bitcast_convert_type(jnp.maximum(scales.astype(jnp.int32) - 1, 0) << 23, jnp.float32)


def _dot(x: jax.Array, weights: jax.Array) -> jax.Array:
    """`[R, I]` times `[O, I]` in float32; exact where x is."""
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return lax.dot_general(
        x, weights, (((1,), (1,)), ((), ())), precision=precision, preferred_element_type=jnp.float32
    )
