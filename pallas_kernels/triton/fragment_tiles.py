"""Tiles of packed weights as the left operand of a product, from memory into the registers that multiply them.

Owns which thread reads which word, and how four bits become a float. Never knows rows or sums. Called by kernels of
products.

A tile is read as a tensor of many axes, in an order in which Triton gives each warp the blocks that it multiplies
(`fragments`): axes of repetitions, of blocks along the inputs, of warps, and within a block. Transposing and reshaping
it to a matrix then renames registers, and moves nothing.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import triton as plgpu
from jax.typing import DTypeLike

from pallas_kernels import fragments
from pallas_kernels.packed import MXFP4_FACTOR, MXFP4_FRAGMENTS

# Of 16-bit floats whose last bits count integers: the number whose bits are these, and no more are set.
_BASES = {"bfloat16": (128.0, 0x4300), "float16": (1024.0, 0x6400)}


# Of two e2m1 in a word: their bits where bfloat16 has them, signs and others, and those that the fourth number moves
# by different ways. What makes a float16 of such a bfloat16.
_E2M1, _SIGNS, _OTHERS = 0x81C081C0, 0x80008000, 0x01C001C0
_FIRST_OF_FOURTH, _REST_OF_FOURTH = 0x01000100, 0x80C080C0
_SHIFT_TO_FLOAT16, _FACTOR_OF_FLOAT16 = 3, MXFP4_FACTOR / 2.0**112


@dataclasses.dataclass(frozen=True)
class PackedRefs:
    """A `PackedMatrix` of `FRAGMENTS` or `MXFP4_FRAGMENTS` in a kernel: refs of `[..., O / 16, ..]`."""

    numbers: Any
    scale: Any
    zero: Any | None
    group: int
    packing: str
    lead: tuple[Any, ...] = ()
    """Which matrix of a stack."""

    @property
    def has_floats(self) -> bool:
        """Whether numbers are e2m1."""
        return self.packing == MXFP4_FRAGMENTS

    @property
    def halves(self) -> int:
        """Groups of a block: 2 of half a block each, or 1."""
        return max(1, fragments.INPUTS // self.group)


@dataclasses.dataclass(frozen=True)
class TileShape:
    """So many outputs x inputs, by so many warps. Each warp has whole blocks of outputs."""

    outputs: int
    inputs: int
    warps: int

    @property
    def _axes(self) -> tuple[int, int, int]:
        """Repetitions, blocks along the inputs, warps."""
        return self.outputs // (fragments.OUTPUTS * self.warps), self.inputs // fragments.INPUTS, self.warps

    def numbers(self, refs: PackedRefs, tile: Any, block: Any, dtype: DTypeLike) -> list[jax.Array]:
        """The tile with that number, of inputs from that block on, for each group of them: `[outputs, inputs of it]`.

        Numbers less their zeros, exact in 16 bits. Groups of half a block make two of a tile's one block.
        """
        words = self._words(refs, tile, block)
        base, bits = _BASES[jnp.dtype(dtype).name]
        offset = jnp.full((*self._axes, 8, 1, 2, refs.halves), base + fragments.MIDDLE, jnp.float32)
        if refs.zero is not None:
            offset += self._zeros(refs, refs.zero, tile, block)  # small enough to stay exact
        offset = offset.astype(dtype)
        if refs.halves == 1:
            return [self._matrix(self._pairs(words, offset, bits))]
        of_words, of_offsets = (lax.split(each, (1, 1), axis=-1) for each in (words, offset))
        halves = zip(of_words, of_offsets, strict=True)
        return [self._matrix(self._pairs(half, less, bits)) for half, less in halves]

    def scales(self, refs: PackedRefs, tile: Any, block: Any) -> tuple[jax.Array, ...]:
        """Those of `numbers`, each `[outputs]`."""
        output = tile * self.outputs + jnp.arange(self.outputs, dtype=jnp.int32)
        strip = jnp.minimum(lax.div(output, jnp.int32(fragments.OUTPUTS)), refs.scale.shape[-2] - 1)
        lead = tuple(jnp.broadcast_to(each, output.shape) for each in refs.lead)

        def of_half(half: int) -> jax.Array:
            group = lax.div(block * fragments.INPUTS + half * fragments.HALF, jnp.int32(refs.group))
            at = group * fragments.OUTPUTS + lax.rem(output, jnp.int32(fragments.OUTPUTS))
            return plgpu.load(refs.scale.at[(*lead, strip, at)])

        return tuple(of_half(half) for half in range(refs.halves))

    def floats(self, refs: PackedRefs, tile: Any, block: Any, dtype: DTypeLike) -> jax.Array:
        """`[outputs, inputs]` of the tile with that number, of inputs from that block on, of e2m1: scaled.

        That is exact where `dtype` has the product. As bfloat16 weights are `MXFP4_FACTOR` times too small.
        """
        words = self._words(refs, tile, block)
        scale = self._scales_of_floats(refs, tile, block)
        if jnp.dtype(dtype) != jnp.bfloat16:
            scale = (scale.astype(jnp.float32) * _FACTOR_OF_FLOAT16).astype(dtype)
        rotated = _shifted_right(words, 4) | (words << 28)
        first_of_fourth = _shifted_right(words, 6) & jnp.uint32(_FIRST_OF_FOURTH)
        pairs = []
        # No number is converted: its bits are moved to where `dtype` has them.
        for both in (
            words & jnp.uint32(_E2M1),
            (words << 6) & jnp.uint32(_E2M1),
            rotated & jnp.uint32(_E2M1),
            (words << 2) & jnp.uint32(_REST_OF_FOURTH) | first_of_fourth,
        ):
            placed = both
            if jnp.dtype(dtype) != jnp.bfloat16:
                placed = (both & jnp.uint32(_SIGNS)) | ((both & jnp.uint32(_OTHERS)) << _SHIFT_TO_FLOAT16)
            low, high = _halves_as(placed, dtype)
            upper = high * scale  # in the order of `_pairs`
            lower = low * scale
            pairs.append(_side_by_side(lower, upper))
        return self._matrix(pairs)

    def _pairs(self, words: jax.Array, offset: jax.Array, bits: int) -> list[jax.Array]:
        """Four times two neighbours of each word `[rep, block, warp, g, t, h, c]`, on a last axis of their own."""
        pairs = []
        for number in range(4):
            both = _shifted_right(words, 4 * number)
            # No number is converted: its bits become the last ones of the base.
            low, high = _halves_as((both & jnp.uint32(0x000F000F)) | jnp.uint32(bits * 0x10001), offset.dtype)
            # Computed in this order, both are one instruction of two halves for ptxas: the other way round it swaps
            # the halves before and after.
            upper = high - offset
            lower = low - offset
            pairs.append(_side_by_side(lower, upper))
        return pairs

    def _words(self, refs: PackedRefs, tile: Any, block: Any) -> jax.Array:
        """`[rep, block, warp, g, t, h, c]`: 16 bytes side by side for a thread, 512 for a warp."""
        shape = (*self._axes, 8, 4, 4)
        rep, along, warp, g, t, word = _places(shape)
        at = (block + along) * fragments.WORDS + (g * 4 + t) * 4 + word
        where = self._where(refs.numbers, refs.lead, tile, rep, warp, at)
        return plgpu.load(refs.numbers.at[where]).reshape(*self._axes, 8, 4, 2, 2)

    def _zeros(self, refs: PackedRefs, ref: Any, tile: Any, block: Any) -> jax.Array:
        """`[rep, block, warp, g, 1, h, c]`, with one c where both have the same."""
        rep, along, warp, h, g, c = _places((*self._axes, 2, 8, refs.halves))
        input_ = (block + along) * fragments.INPUTS + c * fragments.HALF
        at = lax.div(input_, jnp.int32(refs.group)) * fragments.OUTPUTS + h * 8 + g
        loaded = plgpu.load(ref.at[self._where(ref, refs.lead, tile, rep, warp, at)])
        return loaded.transpose(0, 1, 2, 4, 3, 5).reshape(*self._axes, 8, 1, 2, refs.halves)

    def _scales_of_floats(self, refs: PackedRefs, tile: Any, block: Any) -> jax.Array:
        """Two in a word, bfloat16 `[rep, block, warp, g, 1, h, c]`."""
        rep, along, warp, h, g = _places((*self._axes, 2, 8))
        at = (block + along) * fragments.OUTPUTS + h * 8 + g
        words = plgpu.load(refs.scale.at[self._where(refs.scale, refs.lead, tile, rep, warp, at)])
        low, high = _halves_as(words.transpose(0, 1, 2, 4, 3), jnp.bfloat16)
        return _side_by_side(low, high).reshape(*self._axes, 8, 1, 2, 2)

    def _where(self, ref: Any, lead: tuple[Any, ...], tile: Any, rep: Any, warp: Any, at: Any) -> tuple[Any, ...]:
        strip = tile * (self.outputs // fragments.OUTPUTS) + rep * self.warps + warp
        # The last strip is read in the place of those that don't exist, which needs no mask.
        strip = jnp.minimum(strip, ref.shape[-2] - 1)
        return (*(jnp.broadcast_to(each, at.shape) for each in lead), strip, at)

    def _matrix(self, pairs: list[jax.Array]) -> jax.Array:
        """Four pairs `[rep, block, warp, g, t, h, c, l]` of a and b as `[outputs, inputs]`."""
        by_b = [_side_by_side(pairs[b], pairs[2 + b]) for b in range(2)]
        whole = _side_by_side(*by_b)
        rep, along, warp, g, t, h, c, low, a, b = range(whole.ndim)
        return whole.transpose(rep, warp, h, g, along, c, a, b, t, low).reshape(self.outputs, -1)


def _shifted_right(words: jax.Array, bits: int) -> jax.Array:
    return lax.shift_right_logical(words, jnp.uint32(bits)) if bits else words


def _halves_as(words: jax.Array, dtype: DTypeLike) -> tuple[jax.Array, jax.Array]:
    """The low and the high half of each word as a number of `dtype`."""
    low, high = words.astype(jnp.uint16), _shifted_right(words, 16).astype(jnp.uint16)
    return lax.bitcast_convert_type(low, dtype), lax.bitcast_convert_type(high, dtype)


def _places(shape: tuple[int, ...]) -> list[jax.Array]:
    return [lax.broadcasted_iota(jnp.int32, shape, axis) for axis in range(len(shape))]


def _side_by_side(first: jax.Array, second: jax.Array) -> jax.Array:
    return jnp.concatenate([first[..., None], second[..., None]], axis=-1)
