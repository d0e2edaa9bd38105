"""Random quantized weights that use the range of their format, for cases of products."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels import packed
from pallas_kernels.packed import PackedMatrix
from pallas_kernels.scaled import ScaledMatrix
from pallas_kernels.selftest.batches import normal


def scaled_weights(
    shape: tuple[int, ...], numbers: str, group: int, has_zeros: bool, seed: int = 9, block_outputs: int = 1
) -> ScaledMatrix:
    """Of `[..., O, I]`, whose groups of inputs share scales, and so many outputs, which divide O."""
    keys = jax.random.split(jax.random.key(seed), 3)
    groups = (*shape[:-1], -(-shape[-1] // group))
    if jnp.issubdtype(jnp.dtype(numbers), jnp.integer):
        most = jnp.iinfo(jnp.dtype(numbers)).max
        drawn = jax.random.randint(keys[0], shape, -most, most + 1).astype(numbers)
    else:
        drawn = normal(keys[0], 1.0, shape=shape, dtype=jnp.dtype(numbers))
    blocks = (*groups[:-2], groups[-2] // block_outputs, groups[-1])
    scale = jnp.repeat(jax.random.uniform(keys[1], blocks, jnp.float32, 0.5, 1.5), block_outputs, axis=-2)
    zero = jax.random.randint(keys[2], groups, -8, 8).astype(jnp.int8) if has_zeros else None
    return ScaledMatrix(drawn, scale, zero, group, block_outputs)


def packed_weights(packing: str, shape: tuple[int, ...], group: int, has_zeros: bool, seed: int = 9) -> PackedMatrix:
    """Of `[..., O, I]`, packed for GPUs or TPUs."""
    if packing == packed.FRAGMENTS:
        return packed.fragments_of(scaled_weights(shape, "int4", group, has_zeros, seed))
    keys = jax.random.split(jax.random.key(seed))
    pairs = jax.random.bits(keys[0], (*shape[:-1], shape[-1] // 2), jnp.uint8)
    scale = jax.random.randint(keys[1], (*shape[:-1], shape[-1] // packed.MXFP4_GROUP), 125, 129)
    make = packed.mxfp4_codes_of if packing == packed.MXFP4_CODES else packed.mxfp4_fragments_of
    return make(pairs, scale.astype(jnp.uint8))
