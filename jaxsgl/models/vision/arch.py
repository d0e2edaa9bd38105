"""The shape of a tower, of one that sees read from the object `vision_config` of a model's config.json.

Owns its numbers and which values are refused. Never knows parameters or images. `models/arch_file.py` reads it,
`tower.py` and the engine use it. `hearing.py` reads towers that hear.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jaxsgl.errors import CheckpointError
from jaxsgl.models.config_file import ConfigFile
from jaxsgl.models.family import Ahead, Merging, Positions, VisionFamily
from jaxsgl.requests.media import CHANNELS, SoundShape

ROPE_THETA = 10000.0
FULL_LAYERS = (7, 15, 23, 31)  # of a tower with windows, where config.json lists none
# Patches along the sides of an image whose places transformers rounds to others in Idefics 3; published are 26, 27, 32.
ROUNDED_SIDES = frozenset((19, 25, 29, 31, 38, 40, 41, 43, 47, 49, 50, 54, 55, 58, 59, 61, 62))
SOFT_TOKENS = 280  # of a picture at most, where the folder's processor doesn't say it
MERGER_EPS = 1e-5  # of norms of mergers for which config.json has no key


@dataclass(frozen=True)
class VisionArch:
    """The shape of a tower of Qwen2-VL to Qwen3.5, GLM-4.1V to GLM-OCR, Mistral 3 (Pixtral's), LLaVA (CLIP), Gemma 3
    (SigLIP) and 4, PaddleOCR-VL, EXAONE 4.5, Idefics 3, Aya Vision, Command A Vision, LFM2-VL, or InternVL; or of one
    that hears, Qwen2-Audio's or Voxtral's (Whisper).

    Attributes:
      num_layers, hidden_size, num_heads, ffn_size: L, M, N, F. Without layers N and F mean nothing.
      out_size: D of the decoder, whose tokens the tower makes.
      patch_size: pixels along the sides of a patch.
      temporal_patch_size: frames in a patch.
      channels: of a pixel.
      merge_size: patches along the sides of the square that becomes one token.
      table_side: learned positions along the sides of an image; 0: patches have none.
      positions: how patches have them: "square", between those of a square that is spread over the image, corners on
        corners; "edges", the same with edges on edges; "blurred", that where fewer patches blur the square; "cubic",
        that by cubics; "axes", the sum of that of the column and that of the row.
      deepstack_layers: layers whose outputs become embeddings, too; the j-th is added behind the decoder's layer j.
      activation: of the MLPs.
      gated: MLPs have a gate next to what they go through.
      root_norms: norms divide by the root of the mean square, and have no biases; else by the deviation, and have them.
      patch_bias, layer_bias, merger_bias: the product with pixels has a bias; those of layers; those of the merger.
      pixel_norm: pixels of a patch pass a norm before their product.
      first_norm, last_norm: patches pass a norm before the first layer, or after the last one.
      first_norm_last: the first one comes after learned positions, and class tokens pass it, too.
      sandwich: what attention and the MLP make passes a norm before it is added.
      head_norms, value_norms: each head's queries and keys pass norms before they turn; its values one without scales.
      joint_norms: queries of all heads pass one norm together, and keys another one.
      num_kv_heads: heads of keys and values, each for as many of queries; 0: one for each.
      qkv_bias: queries, keys and values have biases, if those of layers are there.
      class_token: each image has one more patch in all layers, which is the same for all images, and becomes no token.
      layer_scales: what attention and the MLP make is scaled, number by number, before it is added.
      attention_scale: on q . k; None: 1 / sqrt(H).
      clips: inputs and outputs of each matrix of a layer are clipped to bounds of its own.
      norm_eps, merger_eps: epsilons of the layers' norms, and of the merger's.
      rope_alternates: rows turn with the even ones of all frequencies, columns with the odd ones; else both with the
        even ones.
      turns: patches have places, which turn queries and keys; else they have learned positions alone.
      merger: what makes tokens of squares of patches: an MLP after a norm; ("plain") one without a norm; one after a
        norm and a product; a product with their mean, which passes a norm before or ("scaled") is scaled by sqrt(M) and
        passes a norm without scales; ("gated") an MLP with gates after two products, of which the first has a bias, and
        the second a norm and GELU after it; ("product") a product alone; or ("square") a norm of all numbers of the
        square, and an MLP whose width is D, as that of "plain" is; ("halved") that norm, and an MLP of which the second
        half is the gate; ("normed") a norm without scales, and a product; or ("averaged") the mean of positions
        of a sound, which passes a norm, and a product.
      merger_norm: of "halved" and "square", that the norm is there.
      merger_ffn_size: F of the MLP, of one with gates both halves together; 0: it follows from other sizes.
      centred: what the merger makes loses its mean, which norms of the decoder would take away.
      standardizes: that mean has a shift and a factor, both learned.
      image_side: patches along the sides of an image, which has just so many; 0: images have any size.
      image_tokens: that an image has at most, as the model's processor scales it; 0: there is no such limit.
      has_lines: a token ends each line of an image, and another one the last line; positions are as of text.
      joins_tiles: tokens of a picture's tiles are joined to lines, each of which ends with a learned embedding.
      ahead: the decoder's layers in which tokens of an image see up to its end.
      pad_token_id: as what layers with embeddings of their own take a token of an image.
      window: tokens along the sides of a window; layers but those of `full_layers` attend within windows. 0: all attend
        over a whole image.
      full_layers: see `window`.
      rope_theta: base of the wavelengths.
      mean, std: of the channels' values from 0 to 1, by which pixels are normalized.
      image_token_id, video_token_id: the placeholder tokens of images, or of sounds, and of video frames; -1: it takes
        no videos.
      sound: it hears: patches are frames of sound, which two convolutions make positions of; None: it sees.
      has_tower: whether it is loaded; what it makes comes from another server otherwise.
    """

    num_layers: int
    hidden_size: int
    num_heads: int
    ffn_size: int
    out_size: int
    patch_size: int
    temporal_patch_size: int
    channels: int
    merge_size: int
    table_side: int
    deepstack_layers: tuple[int, ...]
    image_token_id: int
    video_token_id: int
    positions: Positions = "square"
    activation: str = "gelu_pytorch_tanh"
    gated: bool = False
    root_norms: bool = False
    patch_bias: bool = True
    layer_bias: bool = True
    merger_bias: bool = True
    pixel_norm: bool = False
    first_norm: bool = False
    first_norm_last: bool = False
    last_norm: bool = False
    sandwich: bool = False
    head_norms: bool = False
    joint_norms: bool = False
    num_kv_heads: int = 0
    qkv_bias: bool = True
    class_token: bool = False
    layer_scales: bool = False
    value_norms: bool = False
    attention_scale: float | None = None
    clips: bool = False
    norm_eps: float = 1e-6
    merger_eps: float = 1e-6
    rope_alternates: bool = False
    turns: bool = True
    merger: Merging = "mlp"
    merger_norm: bool = True
    merger_ffn_size: int = 0
    centred: bool = False
    standardizes: bool = False
    image_side: int = 0
    image_tokens: int = 0
    has_lines: bool = False
    joins_tiles: bool = False
    ahead: Ahead = "nowhere"
    pad_token_id: int = 0
    window: int = 0
    full_layers: tuple[int, ...] = ()
    rope_theta: float = ROPE_THETA
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    std: tuple[float, ...] = (0.5, 0.5, 0.5)
    sound: SoundShape | None = None
    has_tower: bool = True

    @property
    def head_dim(self) -> int:
        """H."""
        return self.hidden_size // self.num_heads

    @property
    def kv_size(self) -> int:
        """Numbers of all keys of a patch, or of all values."""
        return (self.num_kv_heads or self.num_heads) * self.head_dim

    @property
    def patch_len(self) -> int:
        """C, numbers of a patch: channels, frames, rows and columns of pixels; bytes of a sound's."""
        if self.sound is not None:
            return self.sound.patch_bytes
        return self.channels * self.temporal_patch_size * self.patch_size**2

    @property
    def merged_size(self) -> int:
        """Numbers of a square of patches that becomes one token."""
        return self.hidden_size * (self.merge_size**2 if self.sound is None else self.sound.merge)

    @property
    def table_len(self) -> int:
        """Rows of the table of learned positions."""
        if self.sound is not None:
            return self.sound.num_patches
        return 2 * self.table_side if self.positions == "axes" else self.table_side**2

    @property
    def image_patches(self) -> int:
        """Patches of each image, or chunk of a sound; 0: they differ."""
        return self.image_side**2 if self.sound is None else self.sound.num_patches

    @property
    def sees_ahead(self) -> bool:
        """Whether tokens of an image see up to its end in some layer of the decoder, so that it is extended whole."""
        return self.ahead != "nowhere"

    def sees_ahead_in(self, has_window: bool) -> bool:
        """Whether they do in a layer of the decoder with or without a window."""
        return self.ahead == "everywhere" or (self.ahead == "in windows" and has_window)

    @property
    def row_len(self) -> int:
        """Numbers of a token's embedding and of what deepstack adds behind the first layers."""
        return self.out_size * (1 + len(self.deepstack_layers))


def read_vision(whole: ConfigFile, family: VisionFamily, hidden_size: int, rms_norm_eps: float) -> VisionArch | None:
    """The tower that goes with a decoder of `hidden_size`; None: config.json describes none, as of text alone.

    `rms_norm_eps` is the decoder's. Raises `CheckpointError` for what isn't supported.
    """
    config = whole.section("vision_config")
    if config is None:
        return None
    config.defaults = family.defaults
    whole.defaults = {**family.defaults_beside, **whole.defaults}
    _check_required(config, "vision_config.", family.required)
    _check_required(whole, "", family.required_beside)

    def count(key: str, default: int | None = None) -> int:
        return config.count(family.keys.get(key, key), default)

    depth, width = 0 if family.encoder_free else count("depth"), count("hidden_size")
    patch_size = _read_patch_size(config, family)
    image_side = _read_side(config, "image_size") // patch_size if family.has_one_size else 0
    if family.merger == "pooled":
        merge_size = _read_pooled(whole, image_side)
    elif family.merger == "plain" or family.encoder_free:
        merge_size = 1
    else:
        merge_key = family.keys.get("spatial_merge_size", "spatial_merge_size")
        is_beside = family.merger == "projected" or merge_key in ("scale_factor", "downsample_factor")
        merge_size = (whole if is_beside else config).count(merge_key, 2)
    window = _read_window(config, patch_size * merge_size) if family.windows else 0
    arch = VisionArch(
        num_layers=_read_num_layers(whole, family, depth),
        hidden_size=width,
        num_heads=1 if family.encoder_free else count("num_heads", 16),
        ffn_size=_read_ffn(config, family, width),
        out_size=_read_out_size(config, family, hidden_size),
        patch_size=patch_size,
        temporal_patch_size=config.count("temporal_patch_size", family.frames) if family.frames_told else family.frames,
        channels=count("in_channels", config.count("in_chans", CHANNELS)),
        merge_size=merge_size,
        table_side=image_side or _read_table_side(config, family),
        positions=family.positions,
        deepstack_layers=_read_layers(config, "deepstack_visual_indexes", family.deepstack_layers, depth),
        image_token_id=whole.count("image_token_id", whole.count("image_token_index", family.image_token_id)),
        video_token_id=-1 if family.video_token_id is None else whole.count("video_token_id", family.video_token_id),
        activation=_read_activation(config, family),
        gated=family.gated,
        root_norms=_read_root_norms(config, family),
        patch_bias=family.patch_bias,
        layer_bias=family.layer_bias
        and (family.layer_bias_key is None or bool(config.get(family.layer_bias_key, True))),
        merger_bias=_has_merger_bias(whole, family),
        pixel_norm=family.encoder_free,
        first_norm=family.first_norm,
        first_norm_last=family.first_norm_last,
        last_norm=family.last_norm,
        sandwich=family.sandwich,
        head_norms=family.head_norms,
        joint_norms=family.joint_norms_key is not None and bool(config.get(family.joint_norms_key, False)),
        num_kv_heads=0 if family.kv_heads_key is None else config.count(family.kv_heads_key),
        qkv_bias=family.qkv_bias_key is None or bool(config.get(family.qkv_bias_key, False)),
        class_token=family.class_token,
        layer_scales=family.layer_scales,
        value_norms=family.value_norms,
        attention_scale=family.attention_scale,
        clips=family.merger == "scaled" and bool(config.get("use_clipped_linears", False)),
        norm_eps=(norm_eps := config.number(family.keys.get("layer_norm_eps", "layer_norm_eps"), family.norm_eps)),
        merger_eps=family.merger_eps or _merger_eps(whole, config, family, rms_norm_eps, norm_eps),
        rope_alternates=family.rope_alternates,
        turns=family.turns,
        merger=family.merger,
        merger_norm=family.merger_norm
        and (family.merger_norm_key is None or bool(whole.get(family.merger_norm_key, True))),
        merger_ffn_size=_read_merger_ffn(whole, config, family, hidden_size),
        standardizes=family.merger == "scaled" and bool(config.get("standardize", False)),
        image_side=image_side,
        image_tokens=0 if family.joins_tiles else (image_side // merge_size) ** 2,
        has_lines=family.has_lines,
        joins_tiles=family.joins_tiles,
        ahead=_read_ahead(whole, family),
        pad_token_id=_of_decoder(whole, "pad_token_id") or 0,
        window=window,
        full_layers=_read_layers(config, "fullatt_block_indexes", FULL_LAYERS, depth) if window else (),
        rope_theta=_read_theta(config) if family.turns else ROPE_THETA,
        mean=family.mean,
        std=family.std,
    )
    _check(arch, config, family.keys.get("out_hidden_size", "out_hidden_size"), hidden_size)
    return _as_processed(arch, family, whole.path.parent)


def _read_out_size(config: ConfigFile, family: VisionFamily, hidden_size: int) -> int:
    if family.merger not in ("mlp", "gated") or not family.out_size_told:
        return hidden_size
    return config.count(family.keys.get("out_hidden_size", "out_hidden_size"), 3584)


def _read_patch_size(config: ConfigFile, family: VisionFamily) -> int:
    """Pixels along the sides of a patch."""
    side = _read_side(config, "patch_size")
    return side * config.count(family.keys["spatial_merge_size"]) if family.encoder_free else side


def _read_ffn(config: ConfigFile, family: VisionFamily, width: int) -> int:
    if family.encoder_free:
        return 0
    return config.count(family.ffn_key) if family.ffn_key else int(width * config.number("mlp_ratio", 4))


def _merger_eps(
    whole: ConfigFile, config: ConfigFile, family: VisionFamily, of_decoder: float, of_layers: float
) -> float:
    if family.merger == "normed":
        return config.number("rms_norm_eps", 1e-6)
    if family.merger == "halved":
        return whole.number("adapter_layer_norm_eps", 1e-6)
    return {"projected": of_decoder, "gated": MERGER_EPS, "square": MERGER_EPS}.get(family.merger, of_layers)


def _read_merger_ffn(whole: ConfigFile, config: ConfigFile, family: VisionFamily, hidden_size: int) -> int:
    if family.merger_ffn_beside is not None:
        return whole.count(family.merger_ffn_beside, hidden_size)
    if family.merger != "gated":
        return 0
    return hidden_size * CHANNELS if family.merger_ffn_key is None else config.count(family.merger_ffn_key)


def _read_ahead(whole: ConfigFile, family: VisionFamily) -> Ahead:
    if family.ahead_key is None or _of_decoder(whole, family.ahead_key, family.ahead_told) == "vision":
        return family.ahead
    return "nowhere"


def _of_decoder(whole: ConfigFile, key: str, default: Any = None) -> Any:
    """A value of the object that describes the decoder, which others read."""
    return (whole.get("text_config") or {}).get(key, default)


def _read_theta(config: ConfigFile) -> float:
    rope = config.section("rope_parameters")
    theta = config.number("rope_theta", ROPE_THETA)
    if rope is None:
        return theta
    rope_type = rope.get("rope_type", "axial")
    if rope_type not in ("axial", "default"):
        raise CheckpointError(f"{config.path}: vision_config.rope_parameters.rope_type is {rope_type}, not axial")
    return rope.number("rope_theta", theta)


def _read_pooled(whole: ConfigFile, image_side: int) -> int:
    """Patches along the sides of a square whose mean is a token."""
    side = math.isqrt(tokens := whole.count("mm_tokens_per_image", 256))
    if side * side != tokens or image_side % side:
        raise CheckpointError(
            f"{whole.path}: mm_tokens_per_image is {tokens}, which can't be squares of {image_side} x {image_side} "
            "patches"
        )
    return image_side // side


def _read_num_layers(whole: ConfigFile, family: VisionFamily, depth: int) -> int:
    """The layers up to that whose output the model reads."""
    if family.feature_layer is None:
        return depth
    told = whole.get("vision_feature_layer", family.feature_layer)
    layer = told[0] if isinstance(told, list) and len(told) == 1 else told
    if type(layer) is not int or not -depth <= layer <= -1:
        raise CheckpointError(
            f"{whole.path}: vision_feature_layer is {told}, but must be a layer from the end, -1 to {-depth}"
        )
    return depth + 1 + layer


def _has_merger_bias(whole: ConfigFile, family: VisionFamily) -> bool:
    """Whether what brings the tower's output to the decoder's size has biases."""
    if family.merger in ("projected", "plain"):
        return bool(whole.get("multimodal_projector_bias", family.merger == "plain"))
    return family.merger in ("mlp", "square", "halved")


def _check_required(config: ConfigFile, within: str, required: Mapping[str, bool | float | str]) -> None:
    for key, needed in required.items():
        if config.get(key, needed) not in (needed, [needed]):
            raise CheckpointError(f"{config.path}: {within}{key} is {config.get(key)}, but must be {needed}")


def _read_side(config: ConfigFile, key: str) -> int:
    """A number of pixels, which may be told for both sides."""
    sides = config.get(key)
    return sides[0] if isinstance(sides, list) and len(sides) == 2 and sides[0] == sides[1] else config.count(key)


def _read_root_norms(config: ConfigFile, family: VisionFamily) -> bool:
    if family.norm_key is None:
        return family.root_norms
    told = config.get(family.norm_key, "layer_norm")
    if told not in ("layer_norm", "rms_norm"):
        raise CheckpointError(
            f"{config.path}: vision_config.{family.norm_key} is {told}, but must be layer_norm or rms_norm"
        )
    return bool(told == "rms_norm")


def _read_activation(config: ConfigFile, family: VisionFamily) -> str:
    key = family.keys.get("hidden_act", "hidden_act")
    activation = str(config.get(key, family.activations[0]))
    if activation not in family.activations:
        allowed = " or ".join(family.activations)
        raise CheckpointError(f"{config.path}: vision_config.{key} is {activation}, but must be {allowed}")
    return activation


def _read_table_side(config: ConfigFile, family: VisionFamily) -> int:
    """Learned positions along the sides of an image; 0: there are none."""
    if family.positions == "none":
        return 0
    if family.positions == "axes":
        return config.count(family.keys.get("position_embedding_size", "position_embedding_size"))
    if family.positions in ("edges", "cubic"):
        return config.count("image_size") // config.count("patch_size")
    key = family.keys.get("num_position_embeddings", "num_position_embeddings")
    side = math.isqrt(positions := config.count(key, 2304))
    if side * side != positions:
        raise CheckpointError(f"{config.path}: vision_config.{key} is {positions}, not a square")
    return side


def _read_window(config: ConfigFile, unit: int) -> int:
    """Tokens along the sides of a window, each of `unit` pixels."""
    window = config.count("window_size", 112)
    if window < unit:
        raise CheckpointError(
            f"{config.path}: vision_config.window_size is {window}, but a token has sides of {unit} pixels"
        )
    return window // unit


def _read_layers(config: ConfigFile, key: str, of_family: tuple[int, ...] | None, num_layers: int) -> tuple[int, ...]:
    """The numbers of layers that `key` lists; none, if the family has no such key."""
    if of_family is None:
        return ()
    layers = tuple(config.get(key, of_family))
    if list(layers) != sorted(set(layers)) or not all(type(i) is int and 0 <= i < num_layers for i in layers):
        raise CheckpointError(
            f"{config.path}: vision_config.{key} is {list(layers)}, but must be ascending numbers of layers below "
            f"{num_layers}"
        )
    return layers


def _as_processed(arch: VisionArch, family: VisionFamily, folder: Path) -> VisionArch:
    """The tower with what the folder's image processor says: mean and deviation, or how many tokens a picture gets."""
    values = _processor(folder, "preprocessor_config.json", "image_processor")
    if family.own_pixels:
        of_frames = _processor(folder, "video_preprocessor_config.json", "video_processor")
        told = SOFT_TOKENS if values is None else values.count("max_soft_tokens", SOFT_TOKENS)
        frame = 1 if of_frames is None else of_frames.count("max_soft_tokens", 1)
        return replace(arch, image_tokens=max(told, frame))
    if values is None:
        return arch
    mean = _per_channel(values, "image_mean", arch.mean)
    return replace(arch, mean=mean, std=_per_channel(values, "image_std", arch.std))


def _processor(folder: Path, own_file: str, own_section: str) -> ConfigFile | None:
    for name, section in ((own_file, None), ("processor_config.json", own_section)):
        path = folder / name
        if not path.is_file():
            continue
        processor = ConfigFile(path)
        values = processor if section is None else processor.section(section)
        if values is not None:
            return values
    return None


def _per_channel(values: ConfigFile, key: str, of_family: tuple[float, ...]) -> tuple[float, ...]:
    told, channels = values.get(key, list(of_family)), len(of_family)
    if not isinstance(told, list) or len(told) != channels or not all(isinstance(each, int | float) for each in told):
        raise CheckpointError(f"{values.path}: {key} is {told}, but must be {channels} numbers, one for each channel")
    return tuple(map(float, told))


def _check(arch: VisionArch, config: ConfigFile, out_key: str, hidden_size: int) -> None:
    if arch.out_size != hidden_size:
        raise CheckpointError(
            f"{config.path}: vision_config.{out_key} is {arch.out_size}, but the decoder's hidden size is {hidden_size}"
        )
    if arch.channels != CHANNELS:
        raise CheckpointError(
            f"{config.path}: vision_config.in_channels is {arch.channels}, but images have {CHANNELS}"
        )
    if arch.image_side % arch.merge_size:
        raise CheckpointError(
            f"{config.path}: vision_config has images of {arch.image_side} x {arch.image_side} patches, but needs a "
            f"multiple of {arch.merge_size}"
        )
    if arch.merger == "product" and arch.image_side in ROUNDED_SIDES:
        raise CheckpointError(
            f"{config.path}: vision_config has images of {arch.image_side} x {arch.image_side} patches, whose places "
            "transformers rounds, and is not served"
        )
    if arch.merger == "normed" and (read := config.get("output_proj_dims", arch.hidden_size)) != arch.hidden_size:
        raise CheckpointError(
            f"{config.path}: vision_config.output_proj_dims is {read}, but must be mm_embed_dim, {arch.hidden_size}"
        )
    if arch.merger == "scaled":
        of_heads = {"head_dim": arch.head_dim, "num_key_value_heads": arch.num_heads, "attention_bias": False}
        for key, needed in of_heads.items():
            if config.get(key, needed) != needed:
                raise CheckpointError(f"{config.path}: vision_config.{key} is {config.get(key)}, but must be {needed}")
    if arch.num_layers and (arch.hidden_size % arch.num_heads or arch.head_dim % 4):
        raise CheckpointError(
            f"{config.path}: vision_config has {arch.num_heads} heads in a hidden size of {arch.hidden_size}, but "
            "needs heads whose size is a multiple of 4"
        )
    if arch.num_kv_heads and arch.num_heads % arch.num_kv_heads:
        raise CheckpointError(
            f"{config.path}: {arch.num_heads} heads of vision_config can't share {arch.num_kv_heads} kv heads evenly"
        )
