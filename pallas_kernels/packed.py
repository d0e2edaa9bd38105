"""Matrices of small numbers as the C++ kernels take them: in memory as small as they are published.

`INT4`: two numbers in a byte, 16 outputs side by side. A matrix `[..., O, I]` becomes bytes `[..., O / 16, 8 * I]`:
lines of 64 bytes for eight inputs, in which bytes 4 o .. 4 o + 3 are output o's, inputs 0 to 3 in their low halves and
4 to 7 in their high ones, plus 8. What groups of inputs share, `[..., O, G]`, becomes `[..., O / 16, 16 * G]`, 16
outputs of a group side by side.

`MXFP4`: as checkpoints store it (OCP Microscaling formats 1.0), bytes `[..., O, I / 2]`, the first of two numbers in
the low half, with a byte s for each 32 inputs that stands for 2 ** (s - 127).

`FLOAT8`: float8_e4m3fn `[..., O, I]` with float32 scales.

All have as many axes as a matrix that isn't packed, so a part of the outputs, 16 by 16, is a part of an axis. Called by
who loads weights, by models and by backends.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.scaled import widened

INT4, MXFP4, FLOAT8 = "int4", "mxfp4", "float8"
SIDE = 16  # outputs of INT4 side by side
INPUTS = 8  # of a line
MIDDLE = 8  # added to INT4's numbers, so that they have no sign
OUT_STEPS = {INT4: 32, MXFP4: 16, FLOAT8: 16}  # packed matrices have multiples of these
IN_STEP = 32
MOST_IN_GROUP = 512  # of INT4
MXFP4_GROUP = 32
MXFP4_DOUBLED = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)  # e2m1 numbers by their codes
MXFP4_BIAS = 127


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PackedMatrix:
    """Matrices of O outputs and I inputs, whose inputs are in G groups."""

    numbers: jax.Array
    scale: jax.Array
    zero: jax.Array | None
    """Of INT4, int8 as `scale`; or None for 0."""
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
        return self.scale.shape[-1] // (SIDE if self.packing == INT4 else 1)

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
        """Numbers `[..., O, I]` of a byte, scales `[..., O, G]` float32 and zeros `[..., O, G]` int8 or None."""
        if self.packing == INT4:
            zero = None if self.zero is None else unpack_groups(self.zero)
            return unpack_int4(self.numbers), unpack_groups(self.scale), zero
        if self.packing == FLOAT8:
            return self.numbers, self.scale, None
        codes = jnp.stack([self.numbers & 15, self.numbers >> 4], axis=-1).reshape(self.shape)
        exponents = jnp.where(self.scale > 1, self.scale - 1, 0).astype(jnp.int32)  # of a half, by float32's bias
        halves = jax.lax.bitcast_convert_type(exponents << 23, jnp.float32)
        return jnp.asarray(MXFP4_DOUBLED, jnp.int8)[codes.astype(jnp.int32)], halves, None

    def widened(self, dtype: DTypeLike) -> jax.Array:
        """The weights `[..., O, I]`, rounded once, from float32."""
        return widened(*self.unpacked(), self.group, dtype)


def refuse(packing: str, shape: tuple[int, ...], group: int) -> str | None:
    """Why a matrix `[..., O, I]` in groups of so many inputs can't be packed so, or None."""
    num_out, num_in = shape[-2:]
    steps = (OUT_STEPS[packing], IN_STEP)
    if num_out % steps[0] or num_in % steps[1]:
        return f"the weights are {(num_out, num_in)}; {packing} takes multiples of {steps}"
    if group < num_in and (group % IN_STEP or (packing == INT4 and group > MOST_IN_GROUP)):
        return f"groups have {group} inputs; {packing} takes multiples of {IN_STEP}, int4 up to {MOST_IN_GROUP}"
    return None


def part_shape(packing: str, part: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of packed "numbers" `[..., O, I]`, an "order" `[I]`, or another part of a matrix, `[..., O, G]`."""
    if part == "order":
        return shape
    *lead, num_out, width = shape
    if packing == INT4:
        return (*lead, num_out // SIDE, width * (INPUTS if part == "numbers" else SIDE))
    return (*lead, num_out, width // 2) if packing == MXFP4 and part == "numbers" else shape


def unpacked_shape(packing: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """`[..., O, I]` of the shape of packed numbers."""
    *lead, rows, width = shape
    if packing == INT4:
        return (*lead, rows * SIDE, width // INPUTS)
    return (*lead, rows, width * 2) if packing == MXFP4 else shape


def pack_int4(numbers: jax.Array) -> jax.Array:
    """Numbers `[..., O, I]` from -8 to 7 as uint8 `[..., O / 16, 8 * I]`."""
    *lead, num_out, num_in = numbers.shape
    shape = (*lead, num_out // SIDE, SIDE, num_in // INPUTS, 2, INPUTS // 2)
    halves = jnp.moveaxis((numbers.astype(jnp.int8) + MIDDLE).astype(jnp.uint8).reshape(shape), -4, -3)
    low, high = halves[..., 0, :], halves[..., 1, :]  # [..., O / 16, I / 8, 16, 4]
    return (low | high << 4).reshape(*lead, num_out // SIDE, num_in * INPUTS)


def unpack_int4(numbers: jax.Array) -> jax.Array:
    """What `pack_int4` has packed, int8 `[..., O, I]`."""
    *lead, strips, width = numbers.shape
    lines = numbers.reshape(*lead, strips, width // 64, SIDE, 1, INPUTS // 2)
    halves = jnp.concatenate([lines & 15, lines >> 4], axis=-2)  # [..., O / 16, I / 8, 16, 2, 4]
    return jnp.moveaxis(halves, -4, -3).reshape(*lead, strips * SIDE, width // INPUTS).astype(jnp.int8) - MIDDLE


def pack_groups(of_groups: jax.Array) -> jax.Array:
    """Scales or zero points `[..., O, G]` of INT4 as `[..., O / 16, 16 * G]`."""
    *lead, num_out, groups = of_groups.shape
    sides = of_groups.reshape(*lead, num_out // SIDE, SIDE, groups)
    return sides.swapaxes(-1, -2).reshape(*lead, num_out // SIDE, SIDE * groups)


def unpack_groups(of_groups: jax.Array) -> jax.Array:
    """What `pack_groups` has packed, `[..., O, G]`."""
    *lead, strips, width = of_groups.shape
    sides = of_groups.reshape(*lead, strips, width // SIDE, SIDE)
    return sides.swapaxes(-1, -2).reshape(*lead, strips * SIDE, width // SIDE)
