"""Attention of packed patches, in float32: full within an image, or within a window of it.

It takes queries in blocks, so that scores of all pairs never stand in memory at once. The patches of a window follow
each other, so that a block of queries looks at few keys around it. Knows no parameters; `tower.py` calls it.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxsgl.models.towers.arch import Positioning
from pallas_kernels.dots import dot_precision

BLOCK = 256  # queries whose scores stand in memory at once
FAR = -1e30  # in the place of scores between segments: no minus infinity, so that padding yields no NaN


class Patches(NamedTuple):
    """Packed patches, in the order of the model's merges; padding lies behind them.

    Attributes:
      pixels: `[P, C]` uint8; of sounds the bytes of float32.
      places: `[P, 2]` int32, row and column in the image.
      taps: `[P, 4]` int32, learned positions around the patch; `[P, 16]` for cubics.
      weights: the same in float32, of the taps. Where positions are "blurred", `taps` has the bits of weights of rows,
        `[P, side]`, and this one those of columns.
      windows: `[P]` int32, which window of all images; of towers without windows it means nothing.
      segments: `[P]` int32, which image; -1 for padding, here and above, and for what is not heard.
    """

    pixels: jax.Array
    places: jax.Array
    taps: jax.Array
    weights: jax.Array
    windows: jax.Array
    segments: jax.Array


class Surroundings(NamedTuple):
    """What attention must know of the patches: the same in all layers.

    Attributes:
      cos, sin: `[P, 1, H / 2]` float32 of their angles.
      windows, segments: see `Patches`.
    """

    cos: jax.Array
    sin: jax.Array
    windows: jax.Array
    segments: jax.Array


def surroundings(patches: Patches, how: Positioning, head_dim: int) -> Surroundings:
    """What attention must know of the patches, whose pixels don't count here."""
    return Surroundings(*rope_tables(patches.places, how, head_dim), patches.windows, patches.segments)


def rope_tables(places: jax.Array, how: Positioning, head_dim: int) -> tuple[jax.Array, jax.Array]:
    """Cosines and sines `[P, 1, H / 2]` float32: half of the pairs turns with rows, half with columns."""
    frequencies = (how.theta ** -(np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)).astype(np.float32)
    by_axis = np.stack([frequencies[::2], frequencies[1::2] if how.alternates else frequencies[::2]])
    angles = (places[:, :, None].astype(jnp.float32) * by_axis).reshape(len(places), 1, -1)
    return jnp.cos(angles), jnp.sin(angles)


def rotate(x_PNH: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Queries or keys, turned in float32."""
    first, second = jnp.split(x_PNH.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x_PNH.dtype)


def segment_attention(
    q_PNH: jax.Array,
    k_PNH: jax.Array,
    v_PNH: jax.Array,
    segments: jax.Array,
    most: int | None = None,
    scale: float | None = None,
) -> jax.Array:
    """`[P, N, H]`: softmax of q . k times `scale` over keys of the same segment `[P]`, in float32, times v.

    `most`: patches of a segment, which follow each other; None: a segment may have all. `scale`: None is 1 / sqrt(H).
    """
    count, num_heads, head_dim = q_PNH.shape
    scale = head_dim**-0.5 if scale is None else scale
    block = min(BLOCK, count)
    span = count if most is None else min(block + 2 * (most - 1), count)
    last = count - block  # where the last block begins, whose first queries may be those of the one before, too

    def of_block(number: jax.Array) -> jax.Array:
        start = jnp.minimum(number * block, last)
        queries = jax.lax.dynamic_slice_in_dim(q_PNH, start, block)
        of_queries = jax.lax.dynamic_slice_in_dim(segments, start, block)
        first = jnp.clip(start - (span - block) // 2, 0, count - span)
        keys, values, of_keys = (jax.lax.dynamic_slice_in_dim(each, first, span) for each in (k_PNH, v_PNH, segments))
        precision = dot_precision(queries)
        scores = jnp.einsum("qnh,knh->nqk", queries, keys, precision=precision, preferred_element_type=jnp.float32)
        scores = scores * scale
        shares = jax.nn.softmax(jnp.where(of_queries[:, None] == of_keys, scores, FAR), axis=-1)
        return jnp.einsum("nqk,knh->qnh", shares.astype(values.dtype), values, precision=precision)

    if count == block:
        return of_block(jnp.int32(0))
    whole, rest = divmod(count, block)
    out = jax.lax.map(of_block, jnp.arange(whole + (rest > 0))).reshape(-1, num_heads, head_dim)
    return jnp.concatenate([out[: count - rest], out[len(out) - rest :]]) if rest else out
