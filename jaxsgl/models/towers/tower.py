"""Towers (Qwen's, GLM's, Mistral's, Gemma's, InternVL's, Whisper's): patches in, a row for each token out.

Images are packed one behind the other on one axis P, and segment ids tell them apart (`attention.py`). Images of one
size are attended to one by one; a class token may come before the patches of each. So are chunks of a sound, whose
patches are frames, and pass convolutions before the layers. The host says where each patch lies
(`batch/patches.py`). The parameters of all layers are stacked, so that a program has one body for them. Knows no
requests and no pool of embeddings; `engine/encoding.py` runs it.

Source: Qwen2-VL (arXiv 2409.12191), Qwen2.5-VL (windows, arXiv 2502.13923) and Qwen3-VL (arXiv 2511.21631) technical
reports; deepstack is arXiv 2406.04334. Pixtral 12B (arXiv 2410.07073). GLM-4.1V (arXiv 2507.01006). InternVL (arXiv
2312.14238).
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxsgl.models.matrix import Matrices
from jaxsgl.models.precision import product
from jaxsgl.models.towers.arch import TowerArch
from jaxsgl.models.towers.attention import Patches, Surroundings, rotate, segment_attention, surroundings
from jaxsgl.models.towers.merger import Merger
from jaxsgl.models.towers.parts import (
    ACTIVATIONS,
    OfName,
    declare_matrix,
    declare_norm,
    declare_numbers,
    normalized,
    numbers_of,
    root_norm,
    through,
)
from jaxsgl.requests.media import FRAMES_OF_PATCH
from pallas_kernels.norm import centred

TAPS = 3  # of convolutions over frames
JOINT_EPS = 1e-6  # of norms of all heads, for which config.json has no key
# Matrices of a layer whose inputs and outputs have bounds: least and most input, least and most output of each.
_BOUNDED = ("q", "k", "v", "o", "gate", "fc1", "fc2")


class Tower(Matrices):
    """The parameters of a tower, those of its layers stacked, and what it computes."""

    def __init__(self, arch: TowerArch, dtype: jnp.dtype, activations: jnp.dtype) -> None:
        self.arch, self.activations = arch, activations
        m, out, kind = arch.hidden_size, arch.out_size, arch.norms.kind
        if arch.sound is None:
            declare_matrix(self, "patches", (m, arch.patch_len), dtype, has_bias=arch.patches.bias)
        else:
            declare_matrix(self, "frames", (m, TAPS * arch.sound.bins), dtype)
            declare_matrix(self, "patches", (m, TAPS * m), dtype)
        if arch.table_len:
            self.declare("positions", (arch.table_len, m), (None, None), dtype, None, fan_in=m)
        if arch.patches.class_token:
            declare_numbers(self, "class_token", (m,), dtype, mean=0.0)
            declare_numbers(self, "class_place", (m,), dtype, mean=0.0)
        if arch.patches.norm:
            declare_norm(self, "pixel_norm", (arch.patch_len,), dtype, kind)
        if arch.tokens.joins_tiles:
            declare_numbers(self, "line_end", (out,), dtype, mean=0.0)
        for name, is_there in (("norm0", arch.norms.first), ("norm3", arch.norms.last)):
            if is_there:
                declare_norm(self, name, (m,), dtype, kind)
        if arch.layers.count:
            self._declare_layers(dtype)
        of_square = arch.merger.kind in ("square", "halved")
        self.merger = Merger(arch.merger, m, out, dtype, None, normalizes_squares=of_square)
        taps = len(arch.layers.taps)
        self.deepstack = Merger(arch.merger, m, out, dtype, taps, normalizes_squares=True) if taps else None

    def _declare_layers(self, dtype: jnp.dtype) -> None:
        m, norms, shape = self.arch.hidden_size, self.arch.norms, self.arch.layers
        layers, f = shape.count, shape.ffn_size
        for name in ("norm1", "norm2", *(("norm1_out", "norm2_out") if norms.sandwich else ())):
            declare_norm(self, name, (layers, m), dtype, norms.kind)
        if norms.heads is not None:
            for name in ("q_norm", "k_norm"):
                declare_norm(self, name, (layers, shape.head_dim if norms.heads == "each" else m), dtype, "root")
        if shape.scales:
            declare_numbers(self, "attention_scales", (layers, m), dtype, mean=1.0)
            declare_numbers(self, "mlp_scales", (layers, m), dtype, mean=1.0)
        if shape.clips:
            bounds = jnp.zeros((layers, len(_BOUNDED), 4), dtype)
            self.bounds = nnx.Param(bounds, axes=(None,) * 3, mean=0.0, std=0.0)
        matrices = {"qkv": (m + 2 * shape.kv_size, m), "o": (m, m), "gate": (f, m), "fc1": (f, m), "fc2": (m, f)}
        for name, sizes in matrices.items():
            if shape.gated or name != "gate":
                has_bias = shape.bias and (shape.qkv_bias or name != "qkv")
                declare_matrix(self, name, (layers, *sizes), dtype, has_bias)

    def __call__(self, patches: Patches) -> jax.Array:
        """Rows `[P / 4, (1 + J) D]`: each token's embedding, then what deepstack adds behind the first J layers."""
        arch, taps = self.arch, self.arch.layers.taps
        x_PM = self.embed(patches)
        around = self.surroundings(patches)
        rows: list[jax.Array] = []
        first = 0
        for index, tapped in enumerate((*taps, arch.layers.count - 1)):
            x_PM = self._layers(x_PM, first, tapped + 1, around)
            first = tapped + 1
            if index < len(taps):
                assert self.deepstack is not None
                rows.append(self.deepstack(x_PM, index))
        return jnp.concatenate([self.tokens(x_PM), *rows], axis=-1)

    def surroundings(self, patches: Patches) -> Surroundings:
        """What attention must know of the patches, whose pixels don't count here."""
        return surroundings(patches, self.arch.positioning, self.arch.layers.head_dim)

    def tokens(self, x_PM: jax.Array) -> jax.Array:
        """The embeddings `[P / 4, D]` that the last layer's output makes."""
        if self.arch.patches.class_token:
            x_PM = self._by_image(x_PM)[:, 1:].reshape(-1, self.arch.hidden_size)
        if self.arch.norms.last:
            x_PM = normalized(self, "norm3", x_PM, self._of, self.arch.norms.eps)
        made = self.merger(x_PM)
        return centred(made, made.dtype) if self.arch.merger.centred else made

    def joined(self, made_PD: jax.Array, taps: jax.Array, weights: jax.Array) -> jax.Array:
        """Tokens `[T, D]` of pictures, from those of their tiles; see `EncodeInputs.rows`."""
        made = jnp.concatenate([made_PD, numbers_of(self, "line_end")[None].astype(made_PD.dtype)])
        out = jnp.zeros((len(taps), made.shape[1]), jnp.float32)
        for tap in range(taps.shape[1]):
            out += made.at[taps[:, tap]].get(mode="promise_in_bounds").astype(jnp.float32) * weights[:, tap, None]
        return out.astype(made_PD.dtype)

    def embed(self, patches: Patches) -> jax.Array:
        """`[P, M]` of pixels and learned positions; with class tokens one more for each image, before its patches."""
        x_PM = self._with_class_tokens(self._embed_patches(patches))
        return normalized(self, "norm0", x_PM, self._of, self.arch.norms.eps) if self.arch.norms.first_last else x_PM

    def _with_class_tokens(self, x_PM: jax.Array) -> jax.Array:
        if not self.arch.patches.class_token:
            return x_PM
        of_class = numbers_of(self, "class_token").astype(x_PM.dtype) + numbers_of(self, "class_place").astype(
            x_PM.dtype
        )
        x_IPM = x_PM.reshape(-1, self.arch.image_patches, self.arch.hidden_size)
        first = jnp.broadcast_to(of_class, (len(x_IPM), 1, len(of_class)))
        return jnp.concatenate([first, x_IPM], axis=1).reshape(-1, self.arch.hidden_size)

    def _by_image(self, x: jax.Array) -> jax.Array:
        """What each patch has, class tokens included, by images, all of which have one size."""
        return x.reshape(-1, self.arch.patches.class_token + self.arch.image_patches, *x.shape[1:])

    def _embed_frames(self, patches: Patches) -> jax.Array:
        """`[P, M]` of frames `[2 P, bins]`, by a convolution over them and one over every second of what that makes."""
        assert self.arch.sound is not None
        bits = patches.pixels.reshape(-1, self.arch.sound.bins, np.dtype(np.float32).itemsize)
        frames = jax.lax.bitcast_convert_type(bits, jnp.float32).astype(self.activations)
        places, gelu = self.arch.image_patches, partial(jax.nn.gelu, approximate=False)
        wide = gelu(through(self, "frames", _with_neighbours(frames, FRAMES_OF_PATCH * places, 1), self._of))
        read = _with_neighbours(wide, FRAMES_OF_PATCH * places, FRAMES_OF_PATCH)
        made = gelu(through(self, "patches", read, self._of)).reshape(-1, places, self.arch.hidden_size)
        return (made + numbers_of(self, "positions").astype(made.dtype)).reshape(-1, self.arch.hidden_size)

    def _embed_patches(self, patches: Patches) -> jax.Array:
        if self.arch.sound is not None:
            return self._embed_frames(patches)
        norms, pixels = self.arch.norms, self._scaled_pixels(patches.pixels)
        if self.arch.patches.norm:
            pixels = normalized(self, "pixel_norm", pixels, self._of, norms.eps)
        x_PM = through(self, "patches", pixels, self._of)
        if norms.first and not norms.first_last:
            x_PM = normalized(self, "norm0", x_PM, self._of, norms.eps)
        return x_PM if self.arch.positioning.learned == "none" else self._with_learned(x_PM, patches)

    def _scaled_pixels(self, pixels_PC: jax.Array) -> jax.Array:
        """`[P, C]`, less the mean and by the deviation of their channels."""
        shape, own = self.arch.patches, self.arch.patches.pixels
        per_channel, std = shape.num_values // shape.channels, np.asarray(own.std, np.float64)
        scale = np.repeat(1 / (255 * std), per_channel).astype(np.float32)
        shift = np.repeat(np.asarray(own.mean, np.float64) / std, per_channel).astype(np.float32)
        return (pixels_PC.astype(jnp.float32) * scale - shift).astype(self.activations)

    def _with_learned(self, x_PM: jax.Array, patches: Patches) -> jax.Array:
        """`x` and learned positions."""
        table = numbers_of(self, "positions")
        if self.arch.positioning.learned == "blurred":
            of_rows = jax.lax.bitcast_convert_type(patches.taps, jnp.float32)
            shares = (of_rows[:, :, None] * patches.weights[:, None, :]).reshape(len(x_PM), -1)
            blurred = jnp.dot(shares, table.astype(jnp.float32), precision=jax.lax.Precision.HIGHEST)
            return x_PM + blurred.astype(x_PM.dtype)
        learned = jnp.zeros(x_PM.shape, jnp.float32)
        for tap in range(patches.taps.shape[1]):  # one by one, so that no array of all of them stands in memory
            rows = table.at[patches.taps[:, tap]].get(mode="promise_in_bounds").astype(jnp.float32)
            learned += rows * patches.weights[:, tap, None]
        return x_PM + learned.astype(x_PM.dtype)

    def _of(self, name: str) -> jax.Array:
        return numbers_of(self, name)

    def _layers(self, x_PM: jax.Array, first: int, stop: int, around: Surroundings) -> jax.Array:
        """`x` behind the layers first .. stop - 1."""
        if first == stop:
            return x_PM
        x_PM = jax.lax.fori_loop(first, stop, lambda layer, x_PM: self.layer(layer, x_PM, around), x_PM)
        return x_PM

    def layer(self, layer: jax.Array, x_PM: jax.Array, around: Surroundings) -> jax.Array:
        """`x` behind the layer of that number."""
        norms, shape = self.arch.norms, self.arch.layers

        def of(name: str) -> jax.Array:
            return jax.lax.dynamic_index_in_dim(numbers_of(self, name), layer, keepdims=False)

        q, k, v = self._heads(normalized(self, "norm1", x_PM, of, norms.eps), of)
        if norms.heads == "each":
            q, k = (root_norm(each, of(name), norms.eps) for each, name in ((q, "q_norm"), (k, "k_norm")))
        if norms.values:
            v = root_norm(v, None, norms.eps)
        q, k = (rotate(each, around.cos, around.sin) if self.arch.positioning.turns else each for each in (q, k))
        out = self._attention(layer, q, k, v, around)
        made = self._bounded("o", out.reshape(len(x_PM), -1), of)
        made = normalized(self, "norm1_out", made, of, norms.eps) if norms.sandwich else made
        x_PM = x_PM + (made * of("attention_scales") if shape.scales else made)
        read = normalized(self, "norm2", x_PM, of, norms.eps)
        wide = self._bounded("fc1", read, of)
        activated = ACTIVATIONS[shape.activation]
        wide = activated(self._bounded("gate", read, of)) * wide if shape.gated else activated(wide)
        made = self._bounded("fc2", wide, of)
        made = normalized(self, "norm2_out", made, of, norms.eps) if norms.sandwich else made
        return x_PM + (made * of("mlp_scales") if shape.scales else made)

    def _heads(self, read_PM: jax.Array, of: OfName) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Queries, keys and values `[P, N, H]`."""
        m, shape = self.arch.hidden_size, self.arch.layers
        if shape.clips:
            parts = zip("qkv", jnp.split(of("qkv"), 3), strict=True)
            made = [self._bounded(name, read_PM, of, weights) for name, weights in parts]
        else:
            stops = (m, m + shape.kv_size)
            made = jnp.split(through(self, "qkv", read_PM, of), stops, axis=-1)
        if self.arch.norms.heads == "joint":
            made[:2] = [root_norm(each, of(f"{name}_norm"), JOINT_EPS) for each, name in zip(made, "qk", strict=False)]
        q, k, v = (each.reshape(len(read_PM), -1, shape.head_dim) for each in made)
        if shape.num_kv_heads:
            k, v = (jnp.repeat(each, shape.num_heads // shape.num_kv_heads, axis=1) for each in (k, v))
        return q, k, v

    def _bounded(self, name: str, x: jax.Array, of: OfName, weights: jax.Array | None = None) -> jax.Array:
        """`x` behind a matrix of the layer, `weights` or that of the name; both are clipped, if the tower does that."""
        if not self.arch.layers.clips:
            return through(self, name, x, of)
        low, high, least, most = of("bounds")[_BOUNDED.index(name)].astype(x.dtype)
        read = jnp.clip(x, low, high)
        made = through(self, name, read, of) if weights is None else product(read, weights)
        return jnp.clip(made, least, most)

    def _attention(self, layer: jax.Array, q: jax.Array, k: jax.Array, v: jax.Array, around: Surroundings) -> jax.Array:
        """`[P, N, H]`, over whole images or, in most layers of a tower with windows, within these."""
        arch, shape = self.arch, self.arch.layers
        scale = shape.attention_scale

        def within_image(qkv: tuple[jax.Array, ...]) -> jax.Array:
            q, k, v = qkv
            return segment_attention(q, k, v, jnp.zeros(len(q), jnp.int32), scale=scale)

        def within_chunk(of_chunk: tuple[jax.Array, ...]) -> jax.Array:
            q, k, v, segments = of_chunk
            return segment_attention(q, k, v, segments, scale=scale)

        def within_images() -> jax.Array:
            if arch.sound is not None:
                by_chunk = tuple(map(self._by_image, (q, k, v, around.segments)))
                heard: jax.Array = jax.lax.map(within_chunk, by_chunk)
                return heard.reshape(q.shape)
            if arch.positioning.image_side:
                out: jax.Array = jax.lax.map(within_image, tuple(map(self._by_image, (q, k, v))))
                return out.reshape(q.shape)
            return segment_attention(q, k, v, around.segments, scale=scale)

        def within_windows() -> jax.Array:
            most = (shape.window * arch.merger.side) ** 2
            return segment_attention(q, k, v, around.windows, most, scale)

        if not shape.window:
            return within_images()
        is_full = np.isin(np.arange(shape.count), shape.full)
        out: jax.Array = jax.lax.cond(jnp.asarray(is_full)[layer], within_images, within_windows)
        return out


def _with_neighbours(x: jax.Array, of_chunk: int, stride: int) -> jax.Array:
    """Every `stride`-th of the places `[n, N]`, with the ones before and after it, `[n / stride, 3 N]`.

    Outside of a chunk, which has `of_chunk` places, they are zeros.
    """
    padded = jnp.pad(x.reshape(-1, of_chunk, x.shape[1]), ((0, 0), (1, 1), (0, 0)))
    taps = [padded[:, tap : tap + of_chunk : stride] for tap in range(TAPS)]
    return jnp.concatenate(taps, axis=-1).reshape(-1, TAPS * x.shape[1])
