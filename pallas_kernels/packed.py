"""Matrices of small numbers as kernels take them: in memory as small as they are published.

`FRAGMENTS`: for GPUs, int4 as `pallas_kernels.fragments` orders it: uint32 `[..., O / 16, 2 I]`. What groups share is
float32, `[..., O / 16, 16 * G]`, 16 outputs of a group side by side. `MXFP4_FRAGMENTS`: e2m1 in such words. A uint32
holds the scales of a block's two groups, the first in its low half, as bfloat16 that `MXFP4_FACTOR` describes:
`[..., O / 16, 16 * I / 64]`. `MXFP4_CODES`, for TPUs: the codes of
e2m1 as int4 `[..., O, I]`, those from 8 on negative, with the bytes of scales that checkpoints have. The others are for
C++:

`INT4` and `INT8`: 32 outputs side by side. A matrix `[..., O, I]` becomes bytes `[..., O / 32, B * I]`, B the bytes of
32 numbers: 128 bytes for eight or four inputs, in which bytes 4 o .. 4 o + 3 are output o's. INT4's numbers plus 8 of
inputs 0 to 3 stand in the low halves, those of 4 to 7 in the high ones; INT8's, plus 128, are a byte each. What groups
of inputs share, `[..., O, G]`, becomes `[..., O / 32, 32 * G]`, 32 outputs of a group side by side.

`MXFP4`: as checkpoints store it (OCP Microscaling formats 1.0), bytes `[..., O, I / 2]`, the first of two numbers in
the low half, with a byte s for each 32 inputs that stands for 2 ** (s - 127).

`FLOAT8`: float8_e4m3fn `[..., O, I]` with float32 scales.

All have as many axes as a matrix that isn't packed, so a part of the outputs, 32 by 32 (16 by 16 of fragments), or of
the inputs, is a part of an axis. Called by who loads weights, by models and by backends.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels import fragments
from pallas_kernels.scaled import ScaledMatrix, widened

INT4, INT8, MXFP4, FLOAT8 = "int4", "int8", "mxfp4", "float8"
FRAGMENTS, MXFP4_FRAGMENTS, MXFP4_CODES = "int4_fragments", "mxfp4_fragments", "mxfp4_codes"
ON_GPUS = (FRAGMENTS, MXFP4_FRAGMENTS)
ON_ACCELERATORS = (*ON_GPUS, MXFP4_CODES)
SIDE_BY_SIDE = {INT4: 4, INT8: 8}  # packings in C++ with outputs side by side, and the bits of a number
SIDE = 32  # outputs side by side in C++
SIDES = {INT4: SIDE, INT8: SIDE, FRAGMENTS: fragments.OUTPUTS, MXFP4_FRAGMENTS: fragments.OUTPUTS}
OUT_STEPS = {**SIDES, MXFP4: 16, FLOAT8: 16, MXFP4_CODES: 1}  # packed matrices have multiples of these
IN_STEP = 32
MOST_IN_GROUP = 512  # of outputs side by side in C++
MXFP4_GROUP = 32
MXFP4_DOUBLED = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)  # e2m1 numbers by their codes
MXFP4_BIAS = 127
# An e2m1 whose bits stand where a bfloat16 has them is 2 ** 126 times too small. The scale makes that good, but for
# MXFP4_FACTOR, which would be too much for a bfloat16 and by which a kernel multiplies its sums: s is kept as
# 2 ** (s - 127 + 126 - 32), whose exponent in a bfloat16 is s + 94.
MXFP4_FACTOR = 2.0**32
_EXPONENT_ADDED, _MANTISSA_BITS = 94, 7
MXFP4_MOST_SCALE = 254 - _EXPONENT_ADDED


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PackedMatrix:
    """Matrices of O outputs and I inputs, whose inputs are in G groups."""

    numbers: jax.Array
    scale: jax.Array
    zero: jax.Array | None
    """Of outputs side by side, as `scale`, int8 in C++; or None for 0."""
    group: int = dataclasses.field(metadata={"static": True})
    """How many inputs share a scale; the last group may be cut."""
    packing: str = dataclasses.field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        """`(..., O, I)`."""
        return unpacked_shape(self.packing, self.numbers.shape)

    @property
    def num_groups(self) -> int:
        """G."""
        of_words = 2 if self.packing == MXFP4_FRAGMENTS else 1
        return self.scale.shape[-1] * of_words // SIDES.get(self.packing, 1)

    def stacked(self, lead: int) -> "PackedMatrix":
        """The same with `lead` axes and one of outputs."""

        def flat(part: jax.Array) -> jax.Array:
            return part.reshape(*part.shape[:lead], -1, part.shape[-1])

        return dataclasses.replace(
            self,
            numbers=flat(self.numbers),
            scale=flat(self.scale),
            zero=None if self.zero is None else flat(self.zero),
        )

    def unpacked(self) -> tuple[jax.Array, jax.Array, jax.Array | None]:
        """Numbers `[..., O, I]` of a byte, scales `[..., O, G]` float32, zeros `[..., O, G]` of any dtype or None."""
        if self.packing == MXFP4_FRAGMENTS:
            halves = unpack_groups(self.packing, self.scale)
            return _doubled(fragments.unpack_e2m1(self.numbers)), halves, None
        if self.packing in SIDES:
            zero = None if self.zero is None else unpack_groups(self.packing, self.zero)
            return unpack_numbers(self.packing, self.numbers), unpack_groups(self.packing, self.scale), zero
        if self.packing == FLOAT8:
            return self.numbers, self.scale, None
        if self.packing == MXFP4_CODES:
            return _doubled(self.numbers.astype(jnp.int32) & 15), _halves(self.scale.astype(jnp.int32)), None
        return _doubled(_codes_of(self.numbers)), _halves(self.scale.astype(jnp.int32)), None

    def as_scaled(self) -> ScaledMatrix:
        """A single matrix with numbers of a byte."""
        return ScaledMatrix(*self.unpacked(), self.group)

    def of_outputs(self, ids: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array | None]:
        """`unpacked` of the outputs `ids [T]`, clipped to them: `[T, I]`, `[T, G]`. Of a single matrix of INT8."""
        assert self.packing == INT8 and self.numbers.ndim == 2, "they are looked up where they lie"
        ids = jnp.clip(ids, 0, self.shape[0] - 1)

        def taken(part: jax.Array, width: int) -> jax.Array:
            sides = part.reshape(len(part), -1, SIDE, width)
            return sides[ids // SIDE, :, ids % SIDE].reshape(len(ids), -1)

        numbers = (taken(self.numbers, 4) - 128).astype(jnp.int8)
        return numbers, taken(self.scale, 1), None if self.zero is None else taken(self.zero, 1)

    def widened(self, dtype: DTypeLike) -> jax.Array:
        """The weights `[..., O, I]`, rounded once, from float32."""
        return widened(*self.unpacked(), self.group, dtype)


def fragments_of(weights: ScaledMatrix) -> PackedMatrix:
    """A matrix of int4 as `FRAGMENTS`."""
    numbers, scale = pack_numbers(FRAGMENTS, weights.numbers), pack_groups(FRAGMENTS, weights.scale)
    zero = None if weights.zero is None else pack_groups(FRAGMENTS, weights.zero)
    return PackedMatrix(numbers, scale, zero, weights.group, FRAGMENTS)


def mxfp4_fragments_of(numbers: jax.Array, scale: jax.Array) -> PackedMatrix:
    """A matrix in `MXFP4`, bytes `[..., O, I / 2]` and `[..., O, I / 32]`, as `MXFP4_FRAGMENTS`."""
    words, scales = pack_numbers(MXFP4_FRAGMENTS, numbers), pack_groups(MXFP4_FRAGMENTS, scale)
    return PackedMatrix(words, scales, None, MXFP4_GROUP, MXFP4_FRAGMENTS)


def mxfp4_codes_of(numbers: jax.Array, scale: jax.Array) -> PackedMatrix:
    """The same matrix as `MXFP4_CODES`."""
    return PackedMatrix(pack_numbers(MXFP4_CODES, numbers), scale, None, MXFP4_GROUP, MXFP4_CODES)


def is_arranged(packing: str, part: str) -> bool:
    """Whether a part of a matrix, such as "numbers", is another array than checkpoints have or quantizing makes."""
    return part != "order" and (packing in SIDES or (packing == MXFP4_CODES and part == "numbers"))


def mxfp4_pair(scale: int) -> int:
    """The word of two equal scales of `MXFP4`, as `MXFP4_FRAGMENTS` keeps them."""
    return (scale + _EXPONENT_ADDED << _MANTISSA_BITS) * 0x10001


def _codes_of(numbers: jax.Array) -> jax.Array:
    """Of bytes `[..., O, I / 2]` of `MXFP4`, uint8 `[..., O, I]`."""
    return jnp.stack([numbers & 15, numbers >> 4], axis=-1).reshape(*numbers.shape[:-1], -1)


def _doubled(codes: jax.Array) -> jax.Array:
    """Twice the numbers of e2m1's codes, int8."""
    return jnp.asarray(MXFP4_DOUBLED, jnp.int8)[codes.astype(jnp.int32)]


def _halves(scale: jax.Array) -> jax.Array:
    """Half of what scales of `MXFP4` stand for, float32."""
    exponents = jnp.where(scale > 1, scale - 1, 0)  # by float32's bias, which is theirs
    return jax.lax.bitcast_convert_type(exponents << 23, jnp.float32)


def refuse(packing: str, shape: tuple[int, ...], group: int, parts: int = 1) -> str | None:
    """Why a matrix `[..., O, I]` in groups of so many inputs can't be packed so, or None.

    So many devices may each have a part of its outputs or inputs.
    """
    num_out, num_in = shape[-2:]
    steps = (OUT_STEPS[packing] * parts, (fragments.INPUTS if packing in ON_GPUS else IN_STEP) * parts)
    if num_out % steps[0] or num_in % steps[1]:
        return f"the weights are {(num_out, num_in)}; {packing} takes multiples of {steps}"
    if packing == FRAGMENTS:
        fits = group == num_in or group == fragments.HALF or group % fragments.INPUTS == 0
        return (
            None if fits else f"groups have {group} inputs; {packing} takes {fragments.HALF}, or {fragments.INPUTS} n"
        )
    if group < num_in and (group % IN_STEP or (packing in SIDES and group > MOST_IN_GROUP)):
        return f"groups have {group} inputs; {packing} takes multiples of {IN_STEP}, integers up to {MOST_IN_GROUP}"
    return None


def part_shape(packing: str, part: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of packed "numbers" `[..., O, I]`, an "order" `[I]`, or another part of a matrix, `[..., O, G]`."""
    if part == "order":
        return shape
    *lead, num_out, width = shape
    if packing in SIDES:
        side = SIDES[packing]
        of_group = side // 2 if packing == MXFP4_FRAGMENTS else side
        return (*lead, num_out // side, width * (_width_of_input(packing) if part == "numbers" else of_group))
    return (*lead, num_out, width // 2) if packing == MXFP4 and part == "numbers" else shape


def unpacked_shape(packing: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """`[..., O, I]` of the shape of packed numbers."""
    *lead, rows, width = shape
    if packing in SIDES:
        return (*lead, rows * SIDES[packing], width // _width_of_input(packing))
    return (*lead, rows, width * 2) if packing == MXFP4 else shape


def pack_numbers(packing: str, numbers: jax.Array) -> jax.Array:
    """Numbers `[..., O, I]` of 4 or 8 bits, outputs side by side: in C++ uint8 `[..., O / 32, B * I]`.

    Those of `MXFP4_FRAGMENTS` and `MXFP4_CODES` are bytes of `MXFP4`.
    """
    if packing == FRAGMENTS:
        return fragments.pack_numbers(numbers)
    if packing == MXFP4_FRAGMENTS:
        return fragments.pack_e2m1(_codes_of(numbers))
    if packing == MXFP4_CODES:
        return ((_codes_of(numbers).astype(jnp.int8) ^ 8) - 8).astype(jnp.int4)
    *lead, num_out, num_in = numbers.shape
    bits = SIDE_BY_SIDE[packing]
    shape = (*lead, num_out // SIDE, SIDE, num_in * bits // 32, 8 // bits, 4)
    without_sign = (numbers.astype(jnp.int8) ^ jnp.int8(-128)).astype(jnp.uint8) - (128 - (1 << bits - 1))
    fours = jnp.moveaxis(without_sign.reshape(shape), -4, -3)  # [..., O / 32, I / 4 or 8, 32, fours of a byte, 4]
    made = fours[..., 0, :] if bits == 8 else fours[..., 0, :] | fours[..., 1, :] << 4
    return made.reshape(*lead, num_out // SIDE, -1)


def unpack_numbers(packing: str, numbers: jax.Array) -> jax.Array:
    """What `pack_numbers` has packed, int8 `[..., O, I]`."""
    if packing == FRAGMENTS:
        return fragments.unpack_numbers(numbers)
    *lead, strips, width = numbers.shape
    lines = numbers.reshape(*lead, strips, width // (4 * SIDE), SIDE, 1, 4)
    fours = lines if packing == INT8 else jnp.concatenate([lines & 15, lines >> 4], axis=-2)
    outputs = jnp.moveaxis(fours, -4, -3).reshape(*lead, strips * SIDE, width // _width_of_input(packing))
    return (outputs - (1 << SIDE_BY_SIDE[packing] - 1)).astype(jnp.int8)


def _width_of_input(packing: str) -> int:
    """Bytes, or words of fragments, of an input's numbers for all outputs side by side."""
    return fragments.WORDS // fragments.INPUTS if packing in ON_GPUS else SIDE * SIDE_BY_SIDE[packing] // 8


def pack_groups(packing: str, of_groups: jax.Array) -> jax.Array:
    """Scales or zero points `[..., O, G]` of S outputs side by side as `[..., O / S, S * G]`; of fragments float32.

    Those of `MXFP4_FRAGMENTS` are bytes of `MXFP4`, up to `MXFP4_MOST_SCALE`, and become half as many words.
    """
    if packing == MXFP4_FRAGMENTS:
        halves = of_groups.astype(jnp.uint32) + _EXPONENT_ADDED << _MANTISSA_BITS
        of_groups = halves[..., ::2] | halves[..., 1::2] << 16
    *lead, num_out, groups = of_groups.shape
    side = SIDES[packing]
    sides = of_groups.reshape(*lead, num_out // side, side, groups)
    made = sides.swapaxes(-1, -2).reshape(*lead, num_out // side, side * groups)
    return made.astype(jnp.float32) if packing == FRAGMENTS else made


def unpack_groups(packing: str, of_groups: jax.Array) -> jax.Array:
    """What `pack_groups` has packed, `[..., O, G]`; of `MXFP4_FRAGMENTS` halves of scales, float32."""
    *lead, strips, width = of_groups.shape
    side = SIDES[packing]
    sides = of_groups.reshape(*lead, strips, width // side, side)
    found = sides.swapaxes(-1, -2).reshape(*lead, strips * side, width // side)
    if packing != MXFP4_FRAGMENTS:
        return found
    pairs = jnp.stack([found & jnp.uint32(0xFFFF), found >> 16], axis=-1).reshape(*lead, strips * side, -1)
    return _halves((pairs >> _MANTISSA_BITS).astype(jnp.int32) - _EXPONENT_ADDED)
