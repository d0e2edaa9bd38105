"""A float8_e4m3fn cache as 32-bit words, and its numbers unpacked by integer arithmetic.

Owns the packing and what it does to the order of an array's last axis. Never knows pages or attention. Called by the
Triton kernels, which can't take float8 as it is: GPUs before Ada lack its conversions.

A word holds the elements 4j .. 4j + 3 of a row. Unpacked words are four *planes*, plane i the elements 4j + i, because
splitting a word costs nothing while putting neighbours side by side again would. A dot product over the row is the
sum of those over the planes, so that only queries and outputs change their order, once each.
"""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.paged_kv import FLOAT8

PLANES = 4
# `unpack` yields the numbers of the cache divided by this.
UNPACKED_SCALE = 2.0**8


def as_words(array: jax.Array) -> jax.Array:
    """float8 `[..., H]` as uint32 `[..., H / 4]`; moves no data."""
    return lax.bitcast_convert_type(array.reshape(*array.shape[:-1], -1, PLANES), jnp.uint32)


def from_words(words: jax.Array) -> jax.Array:
    """The opposite of `as_words`."""
    return lax.bitcast_convert_type(words, FLOAT8).reshape(*words.shape[:-1], -1)


def pack(planes: tuple[jax.Array, ...]) -> jax.Array:
    """uint32 words of four planes of float32 numbers; the opposite of `unpack`, rounded as `astype` rounds."""
    words = jnp.zeros(planes[0].shape, jnp.uint32)
    for i, plane in enumerate(planes):
        words |= _code(plane) << (8 * i)
    return words


def _code(x: jax.Array) -> jax.Array:
    """The nearest float8_e4m3fn of each float32, as uint32; what it can't hold becomes its largest number."""
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    magnitude = jnp.minimum(bits & jnp.uint32(0x7FFFFFFF), jnp.uint32(0x43E00000))  # 448
    # Half a unit of the last place that stays, less one bit unless that place is odd: ties go to even.
    rounded = magnitude + jnp.uint32(0x7FFFF) + ((magnitude >> 20) & jnp.uint32(1))
    normal = (rounded >> 20) - jnp.uint32((127 - 7) << 3)
    # Below 2**-6 the places have a fixed value, 2**-9: adding 2**23 of them rounds to whole ones, in the lowest bits.
    fixed = lax.bitcast_convert_type(magnitude, jnp.float32) * 512.0 + 2.0**23
    subnormal = lax.bitcast_convert_type(fixed, jnp.uint32) & jnp.uint32(0xF)
    code = jnp.where(magnitude < jnp.uint32(0x3C800000), subnormal, normal)
    is_nan = (bits & jnp.uint32(0x7FFFFFFF)) > jnp.uint32(0x7F800000)
    return jnp.where(is_nan, jnp.uint32(0x7F), code) | ((bits >> 24) & jnp.uint32(0x80))


def planes_first(array: jax.Array) -> jax.Array:
    """`[..., H]` in the order of planes: the elements 0, 4, 8, ..., then 1, 5, 9, ..."""
    return jnp.swapaxes(array.reshape(*array.shape[:-1], -1, PLANES), -1, -2).reshape(array.shape)


def planes_last(array: jax.Array) -> jax.Array:
    """The opposite of `planes_first`."""
    return jnp.swapaxes(array.reshape(*array.shape[:-1], PLANES, -1), -1, -2).reshape(array.shape)


def unpack(words: jax.Array) -> tuple[jax.Array, ...]:
    """The four planes of uint32 words as float16, divided by `UNPACKED_SCALE`: exact for every code, NaN included.

    Sign, exponent and mantissa move to their places in a float16, two bytes of a word at a time. Its exponent's bias
    is 15 where float8_e4m3fn has 7, hence the scale; subnormal numbers come out right by themselves.
    """
    magnitude = words & jnp.uint32(0x7F7F7F7F)
    # NaN is the magnitude 0x7F. Adding 1 carries into the place of the sign, which becomes the exponent's top bit.
    magnitude |= (magnitude + jnp.uint32(0x01010101)) & jnp.uint32(0x80808080)
    odd = ((magnitude & jnp.uint32(0xFF00FF00)) >> 1) | (words & jnp.uint32(0x80008000))
    even = ((magnitude & jnp.uint32(0x00FF00FF)) << 7) | ((words & jnp.uint32(0x00800080)) << 8)
    halves = (even, odd, even >> 16, odd >> 16)
    return tuple(lax.bitcast_convert_type(half.astype(jnp.uint16), jnp.float16) for half in halves)
