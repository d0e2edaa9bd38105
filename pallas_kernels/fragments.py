"""Numbers of 4 bits in the order in which a GPU's matrix units take their left operand from registers.

Owns that order. A block has 16 outputs and 64 inputs, 128 words of 32 bits. A warp reads it at once, 16 bytes a thread,
and each thread then holds just the numbers that it hands to four products of 16 x 16 (`mma.m16n8k16` and `wgmma` have
the same order; Frantar et al., "Marlin", 2024, pack so too). Nothing is moved between threads, nor through shared
memory.

Thread 4 g + t has outputs g and g + 8 of a block, and of each two words, for 32 inputs. The word of inputs from 32 c on
holds input 32 c + 16 a + 8 b + 2 t + l in its bits 16 l + 8 a + 4 b .. + 3: two neighbours lie 16 bits apart, so one
shift and one mask make both.

Floats of 4 bits (e2m1) have the same words, but their bits are strewn over half a word: so that one shift at most, and
one mask, move the sign and the others of two of them to where a bfloat16 has them (see `E2M1_PLACES`).

What groups of inputs share lies side by side for the 16 outputs of a block. Called by `packed` and by kernels.
"""

import jax
import jax.numpy as jnp
import numpy as np

OUTPUTS, INPUTS = 16, 64  # of a block
WORDS = OUTPUTS * INPUTS // 8
HALF = INPUTS // 2  # inputs of a word of each thread that shares an output
MIDDLE = 8  # is added to a number, so that none is negative
# Where an e2m1 of an even input has its sign, two bits of exponent and one of mantissa, for (a, b) = (0, 0), (0, 1),
# (1, 0), (1, 1); that of the odd input 16 further, around the end of the word. The first is where a bfloat16 has them,
# the second has to be shifted by 6 and the third rotated by 4. No arrangement needs less for the fourth than two masks.
E2M1_PLACES = ((15, 8, 7, 6), (9, 2, 1, 0), (19, 12, 11, 10), (13, 14, 5, 4))


def pack_numbers(numbers: jax.Array) -> jax.Array:
    """Numbers from -8 to 7 `[..., O, I]` as uint32 `[..., O / 16, 2 I]`, block by block."""
    codes = _by_word((numbers.astype(jnp.int8) + jnp.int8(MIDDLE)).astype(jnp.uint8))
    return _joined(codes.astype(jnp.uint32) << _shifts())


def unpack_numbers(words: jax.Array) -> jax.Array:
    """What `pack_numbers` has packed, int8 `[..., O, I]`."""
    return _by_output(_of_blocks(words) >> _shifts() & jnp.uint32(15)).astype(jnp.int8) - jnp.int8(MIDDLE)


def pack_e2m1(codes: jax.Array) -> jax.Array:
    """Codes from 0 to 15 `[..., O, I]` as uint32 `[..., O / 16, 2 I]`, block by block."""
    parts = _by_word(codes.astype(jnp.uint8)).astype(jnp.uint32)
    bits = jnp.stack([(parts >> 3 - bit & 1) << place for bit, place in enumerate(_places_of_bits())])
    return _joined(jnp.sum(bits, axis=0, dtype=jnp.uint32))


def unpack_e2m1(words: jax.Array) -> jax.Array:
    """What `pack_e2m1` has packed, uint8 `[..., O, I]`."""
    blocks = _of_blocks(words)
    bits = [(blocks >> place & jnp.uint32(1)) << 3 - bit for bit, place in enumerate(_places_of_bits())]
    return _by_output(jnp.sum(jnp.stack(bits), axis=0)).astype(jnp.uint8)


def _shifts() -> jax.Array:
    """Of integers, `[l, a, b]`."""
    return 4 * jnp.arange(8, dtype=jnp.uint32).reshape(2, 2, 2)


def _places_of_bits() -> list[jax.Array]:
    """Of each bit of an e2m1, `[l, a, b]`."""
    places = np.asarray(E2M1_PLACES).reshape(2, 2, 4)
    return [jnp.asarray(np.stack([places, places + 16])[..., bit] % 32, jnp.uint32) for bit in range(4)]


def _by_word(codes: jax.Array) -> jax.Array:
    """`[..., O, I]` as `[..., O / 16, I / 64, g, t, h, c, l, a, b]`."""
    *lead, num_out, num_in = codes.shape
    # Output 8 h + g and input 32 c + 16 a + 8 b + 2 t + l of a block.
    blocks = codes.reshape(*lead, num_out // OUTPUTS, 2, 8, num_in // INPUTS, 2, 2, 2, 4, 2)
    strip, h, g, block, c, a, b, t, low = range(len(lead), blocks.ndim)
    return blocks.transpose(*range(len(lead)), strip, block, g, t, h, c, low, a, b)


def _joined(parts: jax.Array) -> jax.Array:
    """Words `[..., O / 16, 2 I]` of their parts, as `_by_word` arranges them."""
    *lead, _, _, _, _, _, _, _, _ = parts.shape
    return jnp.sum(parts, axis=(-3, -2, -1), dtype=jnp.uint32).reshape(*lead, -1)


def _of_blocks(words: jax.Array) -> jax.Array:
    """Words `[..., O / 16, 2 I]` as `[..., O / 16, I / 64, g, t, h, c, 1, 1, 1]`."""
    *lead, width = words.shape
    return words.reshape(*lead, width // WORDS, 8, 4, 2, 2, 1, 1, 1)


def _by_output(codes: jax.Array) -> jax.Array:
    """The opposite of `_by_word`."""
    *lead, strips, blocks = codes.shape[:-7]
    strip, block, g, t, h, c, low, a, b = range(len(lead), codes.ndim)
    outputs = codes.transpose(*range(len(lead)), strip, h, g, block, c, a, b, t, low)
    return outputs.reshape(*lead, strips * OUTPUTS, blocks * INPUTS)
