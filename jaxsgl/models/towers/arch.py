"""The shape of a tower: what its patches, layers, merger and tokens are like, a value for each.

Never knows parameters, images or config.json: `vision.py` and `hearing.py` read these values from it, `tower.py` and
the engine use them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from jaxsgl.requests.media import SoundShape

ROPE_THETA = 10000.0

# How patches have learned positions, see `Positioning`.
Positions: TypeAlias = Literal["none", "square", "edges", "cubic", "axes", "blurred"]
# What makes a token of a square of patches, see `MergerShape`.
Merging: TypeAlias = Literal[
    "mlp", "plain", "product", "projected", "pooled", "scaled", "gated", "square", "halved", "normed", "averaged"
]
# A norm divides by the root of the mean square, and has no biases; or by the deviation, and has them.
NormKind: TypeAlias = Literal["root", "deviation"]
# Over what queries, and keys, are normalized: those of each head before they turn, or those of all heads together.
HeadNorms: TypeAlias = Literal["each", "joint"]
# Where the decoder's tokens of an image see up to its end.
Ahead: TypeAlias = Literal["nowhere", "everywhere", "in windows"]


@dataclass(frozen=True)
class Pixels:
    """By which mean and deviation the values of each channel, from 0 to 1, are normalized."""

    mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    std: tuple[float, ...] = (0.5, 0.5, 0.5)


@dataclass(frozen=True)
class PatchShape:
    """What a patch of an image is, before the first layer.

    Attributes:
      size: pixels along its sides.
      frames: in it.
      channels: of a pixel.
      pixels: how these are normalized.
      bias: the product with pixels has one.
      norm: pixels pass a norm before that product.
      class_token: each image has one more patch in all layers, which is the same for all images, and becomes no token.
    """

    size: int
    frames: int
    channels: int
    pixels: Pixels = Pixels()
    bias: bool = True
    norm: bool = False
    class_token: bool = False

    @property
    def num_values(self) -> int:
        """C: channels, frames, rows and columns of pixels."""
        return self.channels * self.frames * self.size**2


@dataclass(frozen=True)
class Positioning:
    """How patches know where in the image they are: by learned positions, by angles, or by both.

    Attributes:
      learned: "square": positions are between those of a square that is spread over the image, corners on corners;
        "edges": the same with edges on edges; "blurred": that where fewer patches blur the square; "cubic": that by
        cubics; "axes": the sum of that of the column and that of the row; "none": none are learned.
      side: learned positions along the sides of an image.
      image_side: patches along the sides of an image, which has just so many; 0: images have any size.
      turns: they turn queries and keys.
      theta: base of the wavelengths.
      alternates: rows turn with the even ones of all frequencies, columns with the odd ones; else both with the even
        ones.
    """

    learned: Positions = "none"
    side: int = 0
    image_side: int = 0
    turns: bool = True
    theta: float = ROPE_THETA
    alternates: bool = False

    @property
    def num_learned(self) -> int:
        """Rows of the table of learned positions."""
        return 2 * self.side if self.learned == "axes" else self.side**2


@dataclass(frozen=True)
class Norms:
    """The norms of a tower but for those of its mergers; all layers have one before attention and one before the MLP.

    Attributes:
      kind: of all that say nothing else.
      eps: added to what they divide by.
      first, last: patches pass one before the first layer, or after the last one.
      first_last: the first one comes after learned positions, and class tokens pass it, too.
      sandwich: what attention and the MLP make passes one before it is added.
      heads: queries and keys pass root norms; None: they don't.
      values: each head's values pass a root norm without scales.
    """

    kind: NormKind = "deviation"
    eps: float = 1e-6
    first: bool = False
    first_last: bool = False
    last: bool = False
    sandwich: bool = False
    heads: HeadNorms | None = None
    values: bool = False


@dataclass(frozen=True)
class LayerShape:
    """The layers of a tower, which are alike; without any, other sizes mean nothing.

    Attributes:
      count: L.
      num_heads, head_dim, ffn_size: N, H, F.
      num_kv_heads: heads of keys and values, each for as many of queries; 0: one for each.
      activation: of the MLPs.
      gated: MLPs have a gate next to what they go through.
      bias: matrices have biases.
      qkv_bias: if so, those of queries, keys and values do, too.
      scales: what attention and the MLP make is scaled, number by number, before it is added.
      attention_scale: on q . k; None: 1 / sqrt(H).
      clips: inputs and outputs of each matrix are clipped to bounds of its own.
      window: tokens along the sides of a window; layers but those of `full` attend within windows. 0: all attend over
        a whole image.
      full: see `window`.
      taps: layers whose outputs become embeddings, too (deepstack); the j-th is added behind the decoder's layer j.
    """

    count: int
    num_heads: int
    head_dim: int
    ffn_size: int
    num_kv_heads: int = 0
    activation: str = "gelu_pytorch_tanh"
    gated: bool = False
    bias: bool = True
    qkv_bias: bool = True
    scales: bool = False
    attention_scale: float | None = None
    clips: bool = False
    window: int = 0
    full: tuple[int, ...] = ()
    taps: tuple[int, ...] = ()

    @property
    def kv_size(self) -> int:
        """Numbers of all keys of a patch, or of all values."""
        return (self.num_kv_heads or self.num_heads) * self.head_dim


@dataclass(frozen=True)
class MergerShape:
    """What makes a token of a square of patches, or of some patches of a sound.

    Attributes:
      kind: an MLP after a norm ("mlp"); one without a norm ("plain"); one after a norm and a product ("projected"); a
        product with their mean, which passes a norm before ("pooled") or is scaled by sqrt(M) and passes a norm without
        scales ("scaled"); an MLP with gates after two products, of which the first has a bias, and the second a norm
        and GELU after it ("gated"); a product alone ("product"); a norm of all numbers of the square, and an MLP whose
        width is D, as that of "plain" is ("square"); that norm, and an MLP of which the second half is the gate
        ("halved"); a norm without scales, and a product ("normed"); or the mean of positions of a sound, which passes a
        norm, and a product ("averaged").
      side: patches along the sides of the square; of a sound, those that become a token.
      num_axes: along which patches are merged: 1 of a sound.
      norm: the one with scales; None: the merger has no such norm.
      eps: of its norm.
      ffn_size: F of the MLP, of one with gates both halves together; 0: it follows from other sizes.
      bias: matrices have biases.
      standardizes: the mean of "scaled" has a shift and a factor, both learned.
      centred: what it makes loses its mean, which norms of the decoder would take away.
    """

    kind: Merging
    side: int
    num_axes: int = 2
    norm: NormKind | None = "deviation"
    eps: float = 1e-6
    ffn_size: int = 0
    bias: bool = True
    standardizes: bool = False
    centred: bool = False

    @property
    def num_patches(self) -> int:
        """Patches that become one token."""
        return int(self.side**self.num_axes)


@dataclass(frozen=True)
class TowerTokens:
    """What the decoder, and those who write its prompts, know of the tokens that a tower makes.

    Attributes:
      image_id, video_id: the placeholder tokens of images, or of sounds, and of video frames; -1: it takes no videos.
      pad_id: as what layers with embeddings of their own take a token of an image.
      most: tokens that an image has at most, as the model's processor scales it; 0: there is no such limit.
      has_lines: a token ends each line of an image, and another one the last line; positions are as of text.
      joins_tiles: tokens of a picture's tiles are joined to lines, each of which ends with a learned embedding.
      ahead: the decoder's layers in which tokens of an image see up to its end.
    """

    image_id: int
    video_id: int = -1
    pad_id: int = 0
    most: int = 0
    has_lines: bool = False
    joins_tiles: bool = False
    ahead: Ahead = "nowhere"

    @property
    def sees_ahead(self) -> bool:
        """Whether tokens of an image see up to its end in some layer of the decoder, so that it is extended whole."""
        return self.ahead != "nowhere"

    def sees_ahead_in(self, has_window: bool) -> bool:
        """Whether they do in a layer of the decoder with or without a window."""
        return self.ahead == "everywhere" or (self.ahead == "in windows" and has_window)


@dataclass(frozen=True)
class TowerArch:
    """The shape of a tower of Qwen2-VL to Qwen3.5, GLM-4.1V to GLM-OCR, Mistral 3 (Pixtral's), LLaVA (CLIP), Gemma 3
    (SigLIP) and 4, PaddleOCR-VL, EXAONE 4.5, Idefics 3, Aya Vision, Command A Vision, LFM2-VL, or InternVL; or of one
    that hears, Qwen2-Audio's or Voxtral's (Whisper).

    Attributes:
      hidden_size: M, numbers of a patch between layers.
      out_size: D of the decoder, whose tokens the tower makes.
      patches, positioning, norms, layers, merger, tokens: see their classes.
      sound: it hears: patches are frames of sound, which two convolutions make positions of; None: it sees.
      has_tower: whether it is loaded; what it makes comes from another server otherwise.
    """

    hidden_size: int
    out_size: int
    patches: PatchShape
    positioning: Positioning
    norms: Norms
    layers: LayerShape
    merger: MergerShape
    tokens: TowerTokens
    sound: SoundShape | None = None
    has_tower: bool = True

    @property
    def patch_len(self) -> int:
        """C, numbers of a patch of an image; bytes of a sound's."""
        return self.patches.num_values if self.sound is None else self.sound.patch_bytes

    @property
    def merged_size(self) -> int:
        """Numbers of the patches that become one token."""
        return self.hidden_size * self.merger.num_patches

    @property
    def table_len(self) -> int:
        """Rows of the table of positions."""
        return self.positioning.num_learned if self.sound is None else self.sound.num_patches

    @property
    def image_patches(self) -> int:
        """Patches of each image, or chunk of a sound; 0: they differ."""
        return self.positioning.image_side**2 if self.sound is None else self.sound.num_patches

    @property
    def row_len(self) -> int:
        """Numbers of a token's embedding and of what deepstack adds behind the first layers."""
        return self.out_size * (1 + len(self.layers.taps))
