"""The vision tower of Qwen3-VL: patches of several images in, one row for each of the decoder's tokens out.

Images are packed one behind the other on one axis P, and segment ids tell them apart: attention is full within an
image, and takes queries in blocks, so that scores of all pairs never stand in memory at once. The host says where each
patch lies (`batch/vision.py`). The parameters of all layers are stacked, so that a program has one body for them. Knows
no requests and no pool of embeddings; `engine/encoding.py` runs it.

Source: Qwen3-VL technical report (arXiv 2511.21631); deepstack is arXiv 2406.04334.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxsgl.models.matrix import Matrices
from jaxsgl.models.precision import product
from jaxsgl.models.vision.arch import VisionArch

NORM_EPS = 1e-6


class Patches(NamedTuple):
    """Packed patches, in the order of the model's merges; padding lies behind them.

    Attributes:
      pixels: `[P, C]` uint8.
      places: `[P, 2]` int32, row and column in the image.
      taps: `[P, 4]` int32, learned positions around the patch.
      weights: `[P, 4]` float32, of the taps.
      segments: `[P]` int32, which image; -1 for padding.
    """

    pixels: jax.Array
    places: jax.Array
    taps: jax.Array
    weights: jax.Array
    segments: jax.Array


class Merger(Matrices):
    """Squares of patches to rows of the decoder's size; `count` of them stacked, or one without that axis.

    Args:
      arch: of the tower.
      dtype: of the parameters.
      count: how many; None: one.
      normalizes_squares: the norm is over a whole square, not over each patch.
    """

    def __init__(self, arch: VisionArch, dtype: jnp.dtype, count: int | None, normalizes_squares: bool) -> None:
        wide, out = arch.merged_size, arch.out_size
        self._normalized = wide if normalizes_squares else arch.hidden_size
        self._wide = wide
        stack = () if count is None else (count,)
        self.norm, self.norm_bias = _norm((*stack, self._normalized), dtype)
        _linear(self, "fc1", (*stack, wide, wide), dtype)
        _linear(self, "fc2", (*stack, out, wide), dtype)

    def __call__(self, x_PM: jax.Array, index: int | jax.Array | None = None) -> jax.Array:
        """`[P, M]` to `[P / 4, D]`, by the merger `index` of the stack."""

        def of(array: jax.Array) -> jax.Array:
            return array if index is None else array[index]

        x = x_PM.reshape(-1, self._normalized)
        x = layer_norm(x, of(self.norm[...]), of(self.norm_bias[...])).reshape(-1, self._wide)
        x = product(x, of(_array(self, "fc1"))) + of(_array(self, "fc1_bias"))
        x = jax.nn.gelu(x, approximate=False)
        return product(x, of(_array(self, "fc2"))) + of(_array(self, "fc2_bias"))


class Tower(Matrices):
    """The parameters of a tower, those of its layers stacked, and what it computes."""

    def __init__(self, arch: VisionArch, dtype: jnp.dtype, activations: jnp.dtype) -> None:
        self.arch, self.activations = arch, activations
        layers, m, f = arch.num_layers, arch.hidden_size, arch.ffn_size
        _linear(self, "patches", (m, arch.patch_len), dtype)
        self.declare("positions", (arch.table_side**2, m), (None, None), dtype, None, fan_in=m)
        self.norm1, self.norm1_bias = _norm((layers, m), dtype)
        _linear(self, "qkv", (layers, 3 * m, m), dtype)
        _linear(self, "o", (layers, m, m), dtype)
        self.norm2, self.norm2_bias = _norm((layers, m), dtype)
        _linear(self, "fc1", (layers, f, m), dtype)
        _linear(self, "fc2", (layers, m, f), dtype)
        self.merger = Merger(arch, dtype, None, normalizes_squares=False)
        taps = len(arch.deepstack_layers)
        self.deepstack = Merger(arch, dtype, taps, normalizes_squares=True) if taps else None

    def __call__(self, patches: Patches) -> jax.Array:
        """Rows `[P / 4, (1 + J) D]`: each token's embedding, then what deepstack adds behind the first J layers."""
        arch = self.arch
        x_PM = self.embed(patches)
        cos, sin = rope_tables(patches.places, arch)
        rows: list[jax.Array] = []
        first = 0
        for index, tapped in enumerate((*arch.deepstack_layers, arch.num_layers - 1)):
            x_PM = self._layers(x_PM, first, tapped + 1, cos, sin, patches.segments)
            first = tapped + 1
            if index < len(arch.deepstack_layers):
                assert self.deepstack is not None
                rows.append(self.deepstack(x_PM, index))
        return jnp.concatenate([self.merger(x_PM), *rows], axis=-1)

    def embed(self, patches: Patches) -> jax.Array:
        """`[P, M]` of pixels and learned positions."""
        arch, per_channel = self.arch, self.arch.patch_len // self.arch.channels
        std = np.asarray(arch.std, np.float64)
        scale = np.repeat(1 / (255 * std), per_channel).astype(np.float32)
        shift = np.repeat(np.asarray(arch.mean, np.float64) / std, per_channel).astype(np.float32)
        pixels = patches.pixels.astype(jnp.float32) * scale - shift
        x_PM = product(pixels.astype(self.activations), _array(self, "patches")) + _array(self, "patches_bias")
        table = _array(self, "positions").at[patches.taps].get(mode="promise_in_bounds").astype(jnp.float32)
        return x_PM + jnp.sum(table * patches.weights[:, :, None], axis=1).astype(x_PM.dtype)

    def _layers(
        self, x_PM: jax.Array, first: int, stop: int, cos: jax.Array, sin: jax.Array, segments: jax.Array
    ) -> jax.Array:
        """`x` behind the layers first .. stop - 1."""

        def one(layer: jax.Array, x_PM: jax.Array) -> jax.Array:
            return self.layer(layer, x_PM, cos, sin, segments)

        x_PM = jax.lax.fori_loop(first, stop, one, x_PM)
        return x_PM

    def layer(
        self, layer: jax.Array, x_PM: jax.Array, cos: jax.Array, sin: jax.Array, segments: jax.Array
    ) -> jax.Array:
        """`x` behind the layer of that number."""
        arch = self.arch

        def of(name: str) -> jax.Array:
            return jax.lax.dynamic_index_in_dim(_array(self, name), layer, keepdims=False)

        def linear(x: jax.Array, name: str) -> jax.Array:
            return product(x, of(name)) + of(f"{name}_bias")

        read = layer_norm(x_PM, of("norm1"), of("norm1_bias"))
        q, k, v = jnp.moveaxis(linear(read, "qkv").reshape(len(x_PM), 3, arch.num_heads, arch.head_dim), 1, 0)
        out = segment_attention(rotate(q, cos, sin), rotate(k, cos, sin), v, segments)
        x_PM = x_PM + linear(out.reshape(len(x_PM), -1), "o")
        read = layer_norm(x_PM, of("norm2"), of("norm2_bias"))
        return x_PM + linear(jax.nn.gelu(linear(read, "fc1"), approximate=True), "fc2")


def rope_tables(places: jax.Array, arch: VisionArch) -> tuple[jax.Array, jax.Array]:
    """Cosines and sines `[P, 1, H / 2]` float32: half of the pairs turns with rows, half with columns."""
    turned = arch.head_dim // 2
    inverse = (arch.rope_theta ** -(np.arange(0, turned, 2, dtype=np.float64) / turned)).astype(np.float32)
    angles = (places[:, :, None].astype(jnp.float32) * inverse).reshape(len(places), 1, -1)
    return jnp.cos(angles), jnp.sin(angles)


def rotate(x_PNH: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Queries or keys, turned in float32."""
    first, second = jnp.split(x_PNH.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x_PNH.dtype)


def layer_norm(x: jax.Array, scale: jax.Array, bias: jax.Array) -> jax.Array:
    """LayerNorm (arXiv 1607.06450) of the last axis, in float32."""
    wide = x.astype(jnp.float32)
    centred = wide - jnp.mean(wide, axis=-1, keepdims=True)
    inverse = jax.lax.rsqrt(jnp.mean(centred * centred, axis=-1, keepdims=True) + NORM_EPS)
    return (centred * inverse * scale.astype(jnp.float32) + bias.astype(jnp.float32)).astype(x.dtype)


def _norm(shape: tuple[int, ...], dtype: jnp.dtype) -> tuple[nnx.Param[jax.Array], nnx.Param[jax.Array]]:
    """Declares a norm's scales and biases."""
    axes = (None,) * len(shape)
    scale = nnx.Param(jnp.zeros(shape, dtype), axes=axes, mean=1.0, std=0.0)
    return scale, nnx.Param(jnp.zeros(shape, dtype), axes=axes, mean=0.0, std=0.0)


def _linear(module: Matrices, name: str, shape: tuple[int, ...], dtype: jnp.dtype) -> None:
    """Declares a matrix `[..., out, in]`, on every device as it is, and its bias `[..., out]`."""
    module.declare(name, shape, (None,) * len(shape), dtype, None, fan_in=shape[-1])
    bias = nnx.Param(jnp.zeros(shape[:-1], dtype), axes=(None,) * (len(shape) - 1), mean=0.0, std=0.0)
    setattr(module, f"{name}_bias", bias)


def _array(module: Matrices, name: str) -> jax.Array:
    array: jax.Array = getattr(module, name)[...]
    return array


BLOCK = 256  # queries whose scores stand in memory at once
FAR = -1e30  # in the place of scores between images: no minus infinity, so that padding yields no NaN


def segment_attention(q_PNH: jax.Array, k_PNH: jax.Array, v_PNH: jax.Array, segments: jax.Array) -> jax.Array:
    """`[P, N, H]`: softmax of q . k / sqrt(H) over keys of the same segment `[P]`, in float32, times v."""
    count, num_heads, head_dim = q_PNH.shape
    scale = head_dim**-0.5
    block = BLOCK if count % BLOCK == 0 else count

    def of_block(part: tuple[jax.Array, jax.Array]) -> jax.Array:
        queries, of_queries = part
        scores = jnp.einsum("qnh,knh->nqk", queries, k_PNH, preferred_element_type=jnp.float32) * scale
        shares = jax.nn.softmax(jnp.where(of_queries[:, None] == segments, scores, FAR), axis=-1)
        return jnp.einsum("nqk,knh->qnh", shares.astype(v_PNH.dtype), v_PNH)

    blocks = q_PNH.reshape(-1, block, num_heads, head_dim), segments.reshape(-1, block)
    out: jax.Array = jax.lax.map(of_block, blocks) if count > block else of_block((q_PNH, segments))[None]
    return out.reshape(count, num_heads, head_dim)
