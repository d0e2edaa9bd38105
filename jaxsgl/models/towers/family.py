"""What the name of an architecture may imply of its tower, beyond what config.json says.

Owns the differences between towers that there are, a field for each. Never knows which family has which
(`families/towers.py`, `families/hearing.py`). Read by `vision.py` and `hearing.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from jaxsgl.models.towers.arch import Ahead, Merging, Norms, Pixels, Positions

_USUAL_NORMS, _USUAL_PIXELS = Norms(), Pixels()


@dataclass(frozen=True)
class MergerFamily:
    """How a family merges patches, and what its config.json calls the sizes.

    Attributes:
      kind: see `MergerShape`. Of "projected", "product", "halved" and "pooled" keys stand beside the tower's object.
        Of the last three, and with class tokens, all images have `image_size`.
      norm: of "halved" and "square", that the norm is there.
      norm_key: the key beside the tower's object that says it; None: it holds as told here.
      eps: see `MergerShape`; None: it follows from the kind.
      ffn_key: the key of a "gated" merger's F; None: it is the decoder's size for each channel of pixels.
      ffn_beside: the key beside the tower's object of F of "halved" and "square"; None: it follows from others.
      out_size_told: of "mlp" and "gated", that the tower's object says the decoder's size.
    """

    kind: Merging = "mlp"
    norm: bool = True
    norm_key: str | None = None
    eps: float | None = None
    ffn_key: str | None = "intermediate_size"
    ffn_beside: str | None = None
    out_size_told: bool = True


@dataclass(frozen=True)
class VisionFamily:
    """What the name of an architecture implies of its tower that sees.

    Attributes:
      image_token_id, video_token_id: see `TowerTokens`, where config.json leaves them out; as the next one.
      taps: see `LayerShape`; None: there is no deepstack, nor a key for it.
      sections: see `RopeParams`; None: tokens of images have positions as text.
      takes_turns: pairs of the three positions take turns; else they stand in order.
      activations: that the tower's MLPs may have; the first one is that of config.json without the key.
      gated, layer_scales, attention_scale: see `LayerShape`.
      norms: see `Norms`, whose `eps` config.json may say.
      norm_key: the key that says "rms_norm" if norms are root norms, or "layer_norm"; None: they are as told here.
      joint_norms_key: the key that says whether queries, and keys, of all heads have norms; None: it is as told here.
      layer_bias: matrices of layers have biases.
      layer_bias_key: the key that says whether `layer_bias` holds; None: it does.
      qkv_bias_key: the key that says whether q, k and v have biases; None: they do if `layer_bias` holds.
      kv_heads_key: the key of the number of heads of keys and values; None: there are as many as of queries.
      positions: see `Positioning.learned`.
      turns, alternates: see `Positioning`.
      windows: all layers but those of `fullatt_block_indexes` have windows of `window_size` pixels.
      merger: see `MergerFamily`.
      feature_layer: the layer whose output the model reads, where the key `vision_feature_layer` beside the tower's
        object is missing: -1 for the last one, -2 for the one before it. None: there is no key, and it is the last.
      required, required_beside: what keys of the tower's object, and those beside it, must say, where they are there,
        since nothing else is built; a list of that one value will do, too.
      has_lines, joins_tiles, ahead: see `TowerTokens`.
      ahead_key: the decoder's key that says "vision" if `ahead` holds; None: it does.
      ahead_told: what it says where it is missing.
      encoder_free: there are no layers. A patch is a whole square, whose pixels pass a norm before their product.
      frames: in a patch, where config.json doesn't say it.
      frames_told: config.json may say it; else what it says means nothing.
      patch_bias: the product with pixels has a bias.
      class_token: see `PatchShape`.
      pixels: see `Pixels`, if the folder's processor doesn't say it.
      own_pixels: these are the tower's own, and the folder's processor does not normalize.
      keys: what keys of the tower are called, if not as in Qwen3-VL, by their names there.
      ffn_key: the key of F; None: it is `mlp_ratio` times M.
      defaults: values of keys that `vision_config` may leave out.
      defaults_beside: values of keys beside the tower's object that config.json may leave out.
    """

    image_token_id: int
    video_token_id: int | None = None
    taps: tuple[int, ...] | None = None
    sections: tuple[int, int, int] | None = None
    takes_turns: bool = True
    activations: tuple[str, ...] = ("gelu_pytorch_tanh",)
    gated: bool = False
    layer_scales: bool = False
    attention_scale: float | None = None
    norms: Norms = _USUAL_NORMS
    norm_key: str | None = None
    joint_norms_key: str | None = None
    layer_bias: bool = True
    layer_bias_key: str | None = None
    qkv_bias_key: str | None = None
    kv_heads_key: str | None = None
    positions: Positions = "square"
    turns: bool = True
    alternates: bool = False
    windows: bool = False
    merger: MergerFamily = MergerFamily()
    feature_layer: int | None = None
    has_lines: bool = False
    joins_tiles: bool = False
    ahead: Ahead = "nowhere"
    ahead_key: str | None = None
    ahead_told: str | None = None
    encoder_free: bool = False
    frames: int = 2
    frames_told: bool = True
    patch_bias: bool = True
    class_token: bool = False
    pixels: Pixels = _USUAL_PIXELS
    own_pixels: bool = False
    required: Mapping[str, bool | float | str] = field(default_factory=dict)
    required_beside: Mapping[str, bool | float | str] = field(default_factory=dict)
    keys: Mapping[str, str] = field(default_factory=dict)
    ffn_key: str | None = "intermediate_size"
    defaults: Mapping[str, Any] = field(
        default_factory=lambda: {"depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "patch_size": 16}
    )
    defaults_beside: Mapping[str, Any] = field(default_factory=dict)

    @property
    def has_one_size(self) -> bool:
        """Whether all images have `image_size`."""
        return self.class_token or self.joins_tiles or self.merger.kind in ("pooled", "product", "halved")


@dataclass(frozen=True)
class HearingFamily:
    """What the name of an architecture implies of its tower that hears, which is Whisper's encoder (arXiv 2212.04356).

    Attributes:
      audio_token_key: the key of the placeholder of sounds.
      audio_token_id: which one it is where config.json doesn't say it.
      merger: see `MergerShape`: of "square" an MLP without biases reads as many positions as make the tower's F
        numbers, of "averaged" two positions.
      hears_all: see `SoundShape`.
      keys: what keys of the tower are called, if not as in Qwen2-Audio, by their names there.
      required_beside: see `VisionFamily`.
      defaults: values of keys that `audio_config` may leave out, by the names that it has.
    """

    audio_token_key: str
    audio_token_id: int
    merger: Literal["square", "averaged"]
    hears_all: bool
    keys: Mapping[str, str] = field(default_factory=dict)
    required_beside: Mapping[str, bool | float | str] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
