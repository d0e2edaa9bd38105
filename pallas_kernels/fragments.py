"""Numbers of 4 bits in the order in which a GPU's matrix units take their left operand from registers.

Owns that order. A block has 16 outputs and 64 inputs, 128 words of 32 bits. A warp reads it at once, 16 bytes a thread,
and each thread then holds just the numbers that it hands to four products of 16 x 16 (`mma.m16n8k16` and `wgmma` have
the same order; Frantar et al., "Marlin", 2024, pack so too). Nothing is moved between threads, nor through shared
memory.

Thread 4 g + t has outputs g and g + 8 of a block, and of each two words, for 32 inputs. The word of inputs from 32 c on
holds input 32 c + 16 a + 8 b + 2 t + l in its bits 16 l + 8 a + 4 b .. + 3: two neighbours lie 16 bits apart, so one
shift and one mask make both.

What groups of inputs share lies side by side for the 16 outputs of a block. Called by `packed` and by kernels.
"""

import jax
import jax.numpy as jnp

OUTPUTS, INPUTS = 16, 64  # of a block
WORDS = OUTPUTS * INPUTS // 8
HALF = INPUTS // 2  # inputs of a word of each thread that shares an output
MIDDLE = 8  # is added to a number, so that none is negative


def pack_numbers(numbers: jax.Array) -> jax.Array:
    """Numbers from -8 to 7 `[..., O, I]` as uint32 `[..., O / 16, 2 I]`, block by block."""
    *lead, num_out, num_in = numbers.shape
    codes = (numbers.astype(jnp.int8) + jnp.int8(MIDDLE)).astype(jnp.uint32)
    # Output 8 h + g and input 32 c + 16 a + 8 b + 2 t + l of a block.
    blocks = codes.reshape(*lead, num_out // OUTPUTS, 2, 8, num_in // INPUTS, 2, 2, 2, 4, 2)
    strip, h, g, block, c, a, b, t, low = range(len(lead), blocks.ndim)
    words = blocks.transpose(*range(len(lead)), strip, block, g, t, h, c, low, a, b)
    shifts = 4 * jnp.arange(8, dtype=jnp.uint32).reshape(2, 2, 2)
    return jnp.sum(words << shifts, axis=(-3, -2, -1), dtype=jnp.uint32).reshape(*lead, num_out // OUTPUTS, -1)


def unpack_numbers(words: jax.Array) -> jax.Array:
    """What `pack_numbers` has packed, int8 `[..., O, I]`."""
    *lead, strips, width = words.shape
    shifts = 4 * jnp.arange(8, dtype=jnp.uint32).reshape(2, 2, 2)
    codes = words.reshape(*lead, strips, width // WORDS, 8, 4, 2, 2, 1, 1, 1) >> shifts & jnp.uint32(15)
    strip, block, g, t, h, c, low, a, b = range(len(lead), codes.ndim)
    outputs = codes.transpose(*range(len(lead)), strip, h, g, block, c, a, b, t, low)
    numbers = outputs.reshape(*lead, strips * OUTPUTS, width // WORDS * INPUTS)
    return numbers.astype(jnp.int8) - jnp.int8(MIDDLE)
