"""Towers (Qwen's, GLM's, Mistral's, Gemma's, InternVL's, Whisper's): patches in, a row for each token out.

Images are packed one behind the other on one axis P, and segment ids tell them apart: attention is full within an
image, or within a window of it, and takes queries in blocks, so that scores of all pairs never stand in memory at once.
The patches of a window follow each other, so that a block of queries looks at few keys around it. Images of one size
are attended to one by one; a class token may come before the patches of each. So are chunks of a sound, whose patches
are frames, and pass convolutions before the layers. The host says where each patch lies
(`batch/patches.py`). The parameters of all layers are stacked, so that a program has one body for them. Knows no
requests and no pool of embeddings; `engine/encoding.py` runs it.

Source: Qwen2-VL (arXiv 2409.12191), Qwen2.5-VL (windows, arXiv 2502.13923) and Qwen3-VL (arXiv 2511.21631) technical
reports; deepstack is arXiv 2406.04334. Pixtral 12B (arXiv 2410.07073). GLM-4.1V (arXiv 2507.01006). InternVL (arXiv
2312.14238).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxsgl.models.matrix import Matrices
from jaxsgl.models.precision import product
from jaxsgl.models.vision.arch import VisionArch
from jaxsgl.requests.media import FRAMES_OF_PATCH
from pallas_kernels.dots import dot_precision
from pallas_kernels.norm import centred


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
        self._wide, self._how, self._eps = wide, arch.merger, arch.merger_eps
        stack = () if count is None else (count,)
        if arch.merger == "gated":
            self._declare_gated(arch, dtype, stack)
            return
        if arch.merger_norm and arch.merger not in ("plain", "product", "scaled", "normed"):
            is_root = arch.merger == "pooled" or (arch.root_norms and arch.merger != "square")
            _norm(self, "norm", (*stack, self._normalized), dtype, is_root)
        if arch.standardizes:
            _vector(self, "shift", (arch.hidden_size,), dtype, mean=0.0)
            _vector(self, "factor", (arch.hidden_size,), dtype, mean=1.0)
        if arch.merger == "projected":
            _linear(self, "merge", (*stack, arch.hidden_size, wide), dtype, has_bias=False)
        read = wide if arch.merger in ("mlp", "product", "square", "halved") else arch.hidden_size
        units = arch.merger_ffn_size or (wide if arch.merger == "mlp" else out)
        _linear(self, "fc1", (*stack, units, read), dtype, arch.merger_bias)
        if arch.merger not in ("pooled", "product", "scaled", "normed", "averaged"):
            _linear(self, "fc2", (*stack, out, units // (1 + (arch.merger == "halved"))), dtype, arch.merger_bias)

    def _declare_gated(self, arch: VisionArch, dtype: jnp.dtype, stack: tuple[int, ...]) -> None:
        wide, out, units = arch.merged_size, arch.out_size, arch.merger_ffn_size
        _linear(self, "merge", (*stack, out, wide), dtype)
        _norm(self, "norm", (*stack, out), dtype, is_root=False)
        for name, shape in {"mix": (out, out), "gate": (units, out), "fc1": (units, out), "fc2": (out, units)}.items():
            _linear(self, name, (*stack, *shape), dtype, has_bias=False)

    def __call__(self, x_PM: jax.Array, index: int | jax.Array | None = None) -> jax.Array:
        """`[P, M]` to `[P / 4, D]`, by the merger `index` of the stack."""

        def of(name: str) -> jax.Array:
            array = _array(self, name)
            return array if index is None else array[index]

        if self._how in ("pooled", "scaled", "averaged"):
            squares = x_PM.reshape(-1, self._wide // x_PM.shape[1], x_PM.shape[1]).astype(jnp.float32)
            mean = jnp.mean(squares, axis=1)
            if self._how == "scaled":
                normed = root_norm(self._scaled(mean).astype(x_PM.dtype), None, self._eps)
            else:
                normed = _normalized(self, "norm", mean.astype(x_PM.dtype), of, self._eps)
            return _through(self, "fc1", normed, of)
        if self._how == "gated":
            mixed = _through(self, "mix", _through(self, "merge", x_PM.reshape(-1, self._wide), of), of)
            read = jax.nn.gelu(_normalized(self, "norm", mixed, of, self._eps), approximate=False)
            return _through(
                self, "fc2", jax.nn.silu(_through(self, "gate", read, of)) * _through(self, "fc1", read, of), of
            )
        if self._how == "normed":
            return _through(self, "fc1", root_norm(x_PM, None, self._eps), of)
        if self._how == "product":
            return _through(self, "fc1", x_PM.reshape(-1, self._wide), of)
        x = x_PM.reshape(-1, self._normalized)
        x = _normalized(self, "norm", x, of, self._eps) if hasattr(self, "norm") else x
        x = x.reshape(-1, self._wide)
        x = _through(self, "merge", x, of) if self._how == "projected" else x
        x = _through(self, "fc1", x, of)
        if self._how == "halved":
            half, gate = jnp.split(x, 2, axis=-1)
            return _through(self, "fc2", jax.nn.silu(gate) * half, of)
        x = jax.nn.gelu(x, approximate=False)
        return _through(self, "fc2", x, of)

    def _scaled(self, mean_TM: jax.Array) -> jax.Array:
        """Means `[T, M]` float32, times sqrt(M), less the shift, times the factor."""
        scaled = mean_TM * math.sqrt(mean_TM.shape[1])
        if not hasattr(self, "shift"):
            return scaled
        shift, factor = (_array(self, name).astype(jnp.float32) for name in ("shift", "factor"))
        return (scaled - shift) * factor


class Tower(Matrices):
    """The parameters of a tower, those of its layers stacked, and what it computes."""

    def __init__(self, arch: VisionArch, dtype: jnp.dtype, activations: jnp.dtype) -> None:
        self.arch, self.activations = arch, activations
        layers, m = arch.num_layers, arch.hidden_size
        if arch.sound is None:
            _linear(self, "patches", (m, arch.patch_len), dtype, has_bias=arch.patch_bias)
        else:
            _linear(self, "frames", (m, TAPS * arch.sound.bins), dtype)
            _linear(self, "patches", (m, TAPS * m), dtype)
        if arch.table_side or arch.sound is not None:
            self.declare("positions", (arch.table_len, m), (None, None), dtype, None, fan_in=m)
        if arch.class_token:
            _vector(self, "class_token", (m,), dtype, mean=0.0)
            _vector(self, "class_place", (m,), dtype, mean=0.0)
        if arch.pixel_norm:
            _norm(self, "pixel_norm", (arch.patch_len,), dtype, arch.root_norms)
        if arch.joins_tiles:
            _vector(self, "line_end", (arch.out_size,), dtype, mean=0.0)
        for name, is_there in (("norm0", arch.first_norm), ("norm3", arch.last_norm)):
            if is_there:
                _norm(self, name, (m,), dtype, arch.root_norms)
        if layers:
            self._declare_layers(dtype)
        self.merger = Merger(arch, dtype, None, normalizes_squares=arch.merger in ("square", "halved"))
        taps = len(arch.deepstack_layers)
        self.deepstack = Merger(arch, dtype, taps, normalizes_squares=True) if taps else None

    def _declare_layers(self, dtype: jnp.dtype) -> None:
        arch = self.arch
        layers, m, f = arch.num_layers, arch.hidden_size, arch.ffn_size
        _norm(self, "norm1", (layers, m), dtype, arch.root_norms)
        _norm(self, "norm2", (layers, m), dtype, arch.root_norms)
        if arch.sandwich:
            _norm(self, "norm1_out", (layers, m), dtype, arch.root_norms)
            _norm(self, "norm2_out", (layers, m), dtype, arch.root_norms)
        if arch.head_norms:
            _norm(self, "q_norm", (layers, arch.head_dim), dtype, is_root=True)
            _norm(self, "k_norm", (layers, arch.head_dim), dtype, is_root=True)
        if arch.joint_norms:
            _norm(self, "q_norm", (layers, m), dtype, is_root=True)
            _norm(self, "k_norm", (layers, m), dtype, is_root=True)
        if arch.layer_scales:
            _vector(self, "attention_scales", (layers, m), dtype, mean=1.0)
            _vector(self, "mlp_scales", (layers, m), dtype, mean=1.0)
        if arch.clips:
            bounds = jnp.zeros((layers, len(_BOUNDED), 4), dtype)
            self.bounds = nnx.Param(bounds, axes=(None,) * 3, mean=0.0, std=0.0)
        shapes = {"qkv": (m + 2 * arch.kv_size, m), "o": (m, m), "gate": (f, m), "fc1": (f, m), "fc2": (m, f)}
        for name, shape in shapes.items():
            if arch.gated or name != "gate":
                _linear(self, name, (layers, *shape), dtype, arch.layer_bias and (arch.qkv_bias or name != "qkv"))

    def __call__(self, patches: Patches) -> jax.Array:
        """Rows `[P / 4, (1 + J) D]`: each token's embedding, then what deepstack adds behind the first J layers."""
        arch = self.arch
        x_PM = self.embed(patches)
        around = surroundings(patches, arch)
        rows: list[jax.Array] = []
        first = 0
        for index, tapped in enumerate((*arch.deepstack_layers, arch.num_layers - 1)):
            x_PM = self._layers(x_PM, first, tapped + 1, around)
            first = tapped + 1
            if index < len(arch.deepstack_layers):
                assert self.deepstack is not None
                rows.append(self.deepstack(x_PM, index))
        return jnp.concatenate([self.tokens(x_PM), *rows], axis=-1)

    def tokens(self, x_PM: jax.Array) -> jax.Array:
        """The embeddings `[P / 4, D]` that the last layer's output makes."""
        if self.arch.class_token:
            x_PM = self._by_image(x_PM)[:, 1:].reshape(-1, self.arch.hidden_size)
        if self.arch.last_norm:
            x_PM = _normalized(self, "norm3", x_PM, self._of, self.arch.norm_eps)
        made = self.merger(x_PM)
        return centred(made, made.dtype) if self.arch.centred else made

    def joined(self, made_PD: jax.Array, taps: jax.Array, weights: jax.Array) -> jax.Array:
        """Tokens `[T, D]` of pictures, from those of their tiles; see `EncodeInputs.rows`."""
        made = jnp.concatenate([made_PD, _array(self, "line_end")[None].astype(made_PD.dtype)])
        out = jnp.zeros((len(taps), made.shape[1]), jnp.float32)
        for tap in range(taps.shape[1]):
            out += made.at[taps[:, tap]].get(mode="promise_in_bounds").astype(jnp.float32) * weights[:, tap, None]
        return out.astype(made_PD.dtype)

    def embed(self, patches: Patches) -> jax.Array:
        """`[P, M]` of pixels and learned positions; with class tokens one more for each image, before its patches."""
        x_PM = self._with_class_tokens(self._embed_patches(patches))
        return _normalized(self, "norm0", x_PM, self._of, self.arch.norm_eps) if self.arch.first_norm_last else x_PM

    def _with_class_tokens(self, x_PM: jax.Array) -> jax.Array:
        if not self.arch.class_token:
            return x_PM
        of_class = _array(self, "class_token").astype(x_PM.dtype) + _array(self, "class_place").astype(x_PM.dtype)
        x_IPM = x_PM.reshape(-1, self.arch.image_patches, self.arch.hidden_size)
        first = jnp.broadcast_to(of_class, (len(x_IPM), 1, len(of_class)))
        return jnp.concatenate([first, x_IPM], axis=1).reshape(-1, self.arch.hidden_size)

    def _by_image(self, x: jax.Array) -> jax.Array:
        """What each patch has, class tokens included, by images, all of which have one size."""
        return x.reshape(-1, self.arch.class_token + self.arch.image_patches, *x.shape[1:])

    def _embed_frames(self, patches: Patches) -> jax.Array:
        """`[P, M]` of frames `[2 P, bins]`, by a convolution over them and one over every second of what that makes."""
        assert self.arch.sound is not None
        bits = patches.pixels.reshape(-1, self.arch.sound.bins, np.dtype(np.float32).itemsize)
        frames = jax.lax.bitcast_convert_type(bits, jnp.float32).astype(self.activations)
        places, gelu = self.arch.image_patches, partial(jax.nn.gelu, approximate=False)
        wide = gelu(_through(self, "frames", _with_neighbours(frames, FRAMES_OF_PATCH * places, 1), self._of))
        read = _with_neighbours(wide, FRAMES_OF_PATCH * places, FRAMES_OF_PATCH)
        made = gelu(_through(self, "patches", read, self._of)).reshape(-1, places, self.arch.hidden_size)
        return (made + _array(self, "positions").astype(made.dtype)).reshape(-1, self.arch.hidden_size)

    def _embed_patches(self, patches: Patches) -> jax.Array:
        if self.arch.sound is not None:
            return self._embed_frames(patches)
        arch, per_channel = self.arch, self.arch.patch_len // self.arch.channels
        std = np.asarray(arch.std, np.float64)
        scale = np.repeat(1 / (255 * std), per_channel).astype(np.float32)
        shift = np.repeat(np.asarray(arch.mean, np.float64) / std, per_channel).astype(np.float32)
        pixels = (patches.pixels.astype(jnp.float32) * scale - shift).astype(self.activations)
        if arch.pixel_norm:
            pixels = _normalized(self, "pixel_norm", pixels, self._of, arch.norm_eps)
        x_PM = _through(self, "patches", pixels, self._of)
        if arch.first_norm and not arch.first_norm_last:
            x_PM = _normalized(self, "norm0", x_PM, self._of, arch.norm_eps)
        if not arch.table_side:
            return x_PM
        table = _array(self, "positions")
        if arch.positions == "blurred":
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
        return _array(self, name)

    def _layers(self, x_PM: jax.Array, first: int, stop: int, around: Surroundings) -> jax.Array:
        """`x` behind the layers first .. stop - 1."""
        if first == stop:
            return x_PM
        x_PM = jax.lax.fori_loop(first, stop, lambda layer, x_PM: self.layer(layer, x_PM, around), x_PM)
        return x_PM

    def layer(self, layer: jax.Array, x_PM: jax.Array, around: Surroundings) -> jax.Array:
        """`x` behind the layer of that number."""
        arch = self.arch

        def of(name: str) -> jax.Array:
            return jax.lax.dynamic_index_in_dim(_array(self, name), layer, keepdims=False)

        q, k, v = self._heads(_normalized(self, "norm1", x_PM, of, arch.norm_eps), of)
        if arch.head_norms:
            q, k = (root_norm(each, of(name), arch.norm_eps) for each, name in ((q, "q_norm"), (k, "k_norm")))
        if arch.value_norms:
            v = root_norm(v, None, arch.norm_eps)
        q, k = (rotate(each, around.cos, around.sin) if arch.turns else each for each in (q, k))
        out = self._attention(layer, q, k, v, around)
        made = self._bounded("o", out.reshape(len(x_PM), -1), of)
        made = _normalized(self, "norm1_out", made, of, arch.norm_eps) if arch.sandwich else made
        x_PM = x_PM + (made * of("attention_scales") if arch.layer_scales else made)
        read = _normalized(self, "norm2", x_PM, of, arch.norm_eps)
        wide = self._bounded("fc1", read, of)
        activated = _ACTIVATIONS[arch.activation]
        wide = activated(self._bounded("gate", read, of)) * wide if arch.gated else activated(wide)
        made = self._bounded("fc2", wide, of)
        made = _normalized(self, "norm2_out", made, of, arch.norm_eps) if arch.sandwich else made
        return x_PM + (made * of("mlp_scales") if arch.layer_scales else made)

    def _heads(self, read_PM: jax.Array, of: OfName) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Queries, keys and values `[P, N, H]`."""
        arch = self.arch
        if arch.clips:
            parts = zip("qkv", jnp.split(of("qkv"), 3), strict=True)
            made = [self._bounded(name, read_PM, of, weights) for name, weights in parts]
        else:
            stops = (arch.hidden_size, arch.hidden_size + arch.kv_size)
            made = jnp.split(_through(self, "qkv", read_PM, of), stops, axis=-1)
        if arch.joint_norms:
            made[:2] = [root_norm(each, of(f"{name}_norm"), JOINT_EPS) for each, name in zip(made, "qk", strict=False)]
        q, k, v = (each.reshape(len(read_PM), -1, arch.head_dim) for each in made)
        if arch.num_kv_heads:
            k, v = (jnp.repeat(each, arch.num_heads // arch.num_kv_heads, axis=1) for each in (k, v))
        return q, k, v

    def _bounded(self, name: str, x: jax.Array, of: OfName, weights: jax.Array | None = None) -> jax.Array:
        """`x` behind a matrix of the layer, `weights` or that of the name; both are clipped, if the tower does that."""
        if not self.arch.clips:
            return _through(self, name, x, of)
        low, high, least, most = of("bounds")[_BOUNDED.index(name)].astype(x.dtype)
        read = jnp.clip(x, low, high)
        made = _through(self, name, read, of) if weights is None else product(read, weights)
        return jnp.clip(made, least, most)

    def _attention(self, layer: jax.Array, q: jax.Array, k: jax.Array, v: jax.Array, around: Surroundings) -> jax.Array:
        """`[P, N, H]`, over whole images or, in most layers of a tower with windows, within these."""
        arch = self.arch

        def within_image(qkv: tuple[jax.Array, ...]) -> jax.Array:
            q, k, v = qkv
            return segment_attention(q, k, v, jnp.zeros(len(q), jnp.int32), scale=arch.attention_scale)

        def within_chunk(of_chunk: tuple[jax.Array, ...]) -> jax.Array:
            q, k, v, segments = of_chunk
            return segment_attention(q, k, v, segments, scale=arch.attention_scale)

        def within_images() -> jax.Array:
            if arch.sound is not None:
                by_chunk = tuple(map(self._by_image, (q, k, v, around.segments)))
                heard: jax.Array = jax.lax.map(within_chunk, by_chunk)
                return heard.reshape(q.shape)
            if arch.image_side:
                out: jax.Array = jax.lax.map(within_image, tuple(map(self._by_image, (q, k, v))))
                return out.reshape(q.shape)
            return segment_attention(q, k, v, around.segments, scale=arch.attention_scale)

        def within_windows() -> jax.Array:
            most = (arch.window * arch.merge_size) ** 2
            return segment_attention(q, k, v, around.windows, most, arch.attention_scale)

        if not arch.window:
            return within_images()
        is_full = np.isin(np.arange(arch.num_layers), arch.full_layers)
        out: jax.Array = jax.lax.cond(jnp.asarray(is_full)[layer], within_images, within_windows)
        return out


def _with_neighbours(x: jax.Array, of_chunk: int, stride: int) -> jax.Array:
    """Every `stride`-th of the places `[n, N]`, with the ones before and after it, `[n / stride, 3 N]`.

    Outside of a chunk, which has `of_chunk` places, they are zeros.
    """
    padded = jnp.pad(x.reshape(-1, of_chunk, x.shape[1]), ((0, 0), (1, 1), (0, 0)))
    taps = [padded[:, tap : tap + of_chunk : stride] for tap in range(TAPS)]
    return jnp.concatenate(taps, axis=-1).reshape(-1, TAPS * x.shape[1])


def surroundings(patches: Patches, arch: VisionArch) -> Surroundings:
    """What attention must know of the patches, whose pixels don't count here."""
    return Surroundings(*rope_tables(patches.places, arch), patches.windows, patches.segments)


def rope_tables(places: jax.Array, arch: VisionArch) -> tuple[jax.Array, jax.Array]:
    """Cosines and sines `[P, 1, H / 2]` float32: half of the pairs turns with rows, half with columns."""
    size = arch.head_dim
    frequencies = (arch.rope_theta ** -(np.arange(0, size, 2, dtype=np.float64) / size)).astype(np.float32)
    by_axis = np.stack([frequencies[::2], frequencies[1::2] if arch.rope_alternates else frequencies[::2]])
    angles = (places[:, :, None].astype(jnp.float32) * by_axis).reshape(len(places), 1, -1)
    return jnp.cos(angles), jnp.sin(angles)


def rotate(x_PNH: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Queries or keys, turned in float32."""
    first, second = jnp.split(x_PNH.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x_PNH.dtype)


def layer_norm(x: jax.Array, scale: jax.Array, bias: jax.Array, eps: float) -> jax.Array:
    """LayerNorm (arXiv 1607.06450) of the last axis, in float32."""
    wide = x.astype(jnp.float32)
    centred = wide - jnp.mean(wide, axis=-1, keepdims=True)
    inverse = jax.lax.rsqrt(jnp.mean(centred * centred, axis=-1, keepdims=True) + eps)
    return (centred * inverse * scale.astype(jnp.float32) + bias.astype(jnp.float32)).astype(x.dtype)


def root_norm(x: jax.Array, scale: jax.Array | None, eps: float) -> jax.Array:
    """RMSNorm (arXiv 1910.07467) of the last axis, in float32; without a scale, if that is None."""
    wide = x.astype(jnp.float32)
    normed = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return (normed if scale is None else normed * scale.astype(jnp.float32)).astype(x.dtype)


def quick_gelu(x: jax.Array) -> jax.Array:
    """x * sigmoid(1.702 x), an approximation of GELU (arXiv 1606.08415)."""
    return x * jax.nn.sigmoid(1.702 * x)


_ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "gelu": partial(jax.nn.gelu, approximate=False),
    "gelu_pytorch_tanh": partial(jax.nn.gelu, approximate=True),
    "quick_gelu": quick_gelu,
    "silu": jax.nn.silu,
}

# Matrices of a layer whose inputs and outputs have bounds: least and most input, least and most output of each.
_BOUNDED = ("q", "k", "v", "o", "gate", "fc1", "fc2")

OfName: TypeAlias = Callable[[str], jax.Array]  # the numbers of a parameter, by its name in the module


def _normalized(module: Matrices, name: str, x: jax.Array, of: OfName, eps: float) -> jax.Array:
    """`x` behind a norm of the module: with a bias, it is a LayerNorm."""
    bias = f"{name}_bias"
    return layer_norm(x, of(name), of(bias), eps) if hasattr(module, bias) else root_norm(x, of(name), eps)


def _through(module: Matrices, name: str, x: jax.Array, of: OfName) -> jax.Array:
    """`x` behind a matrix of the module and its bias, if it has one."""
    bias = f"{name}_bias"
    out = product(x, of(name))
    return out + of(bias) if hasattr(module, bias) else out


def _norm(module: Matrices, name: str, shape: tuple[int, ...], dtype: jnp.dtype, is_root: bool) -> None:
    """Declares a norm's scales, and its biases unless it is one of mean squares."""
    _vector(module, name, shape, dtype, mean=1.0)
    if not is_root:
        _vector(module, f"{name}_bias", shape, dtype, mean=0.0)


def _vector(module: Matrices, name: str, shape: tuple[int, ...], dtype: jnp.dtype, mean: float) -> None:
    """Declares numbers that every device has."""
    setattr(module, name, nnx.Param(jnp.zeros(shape, dtype), axes=(None,) * len(shape), mean=mean, std=0.0))


def _linear(module: Matrices, name: str, shape: tuple[int, ...], dtype: jnp.dtype, has_bias: bool = True) -> None:
    """Declares a matrix `[..., out, in]`, on every device as it is, and its bias `[..., out]`."""
    module.declare(name, shape, (None,) * len(shape), dtype, None, fan_in=shape[-1])
    if has_bias:
        _vector(module, f"{name}_bias", shape[:-1], dtype, mean=0.0)


def _array(module: Matrices, name: str) -> jax.Array:
    array: jax.Array = getattr(module, name)[...]
    return array


TAPS = 3  # of convolutions over frames
JOINT_EPS = 1e-6  # of norms of all heads, for which config.json has no key
BLOCK = 256  # queries whose scores stand in memory at once
FAR = -1e30  # in the place of scores between segments: no minus infinity, so that padding yields no NaN


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
