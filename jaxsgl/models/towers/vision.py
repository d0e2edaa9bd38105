"""The shape of a tower that sees, read from the object `vision_config` of a model's config.json.

Owns which values are refused. Never knows parameters or images. `models/arch_file.py` calls it; `hearing.py` reads
towers that hear.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from jaxsgl.errors import CheckpointError
from jaxsgl.models.config_file import ConfigFile
from jaxsgl.models.towers.arch import (
    ROPE_THETA,
    Ahead,
    LayerShape,
    MergerShape,
    NormKind,
    Norms,
    PatchShape,
    Pixels,
    Positioning,
    TowerArch,
    TowerTokens,
)
from jaxsgl.models.towers.family import VisionFamily
from jaxsgl.requests.media import CHANNELS

FULL_LAYERS = (7, 15, 23, 31)  # of a tower with windows, where config.json lists none
# Patches along the sides of an image whose places transformers rounds to others in Idefics 3; published are 26, 27, 32.
ROUNDED_SIDES = frozenset((19, 25, 29, 31, 38, 40, 41, 43, 47, 49, 50, 54, 55, 58, 59, 61, 62))
SOFT_TOKENS = 280  # of a picture at most, where the folder's processor doesn't say it
MERGER_EPS = 1e-5  # of norms of mergers for which config.json has no key


def read_vision(whole: ConfigFile, family: VisionFamily, hidden_size: int, rms_norm_eps: float) -> TowerArch | None:
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
    width = config.count(family.keys.get("hidden_size", "hidden_size"))
    patches, norms = _read_patches(config, family), _read_norms(config, family)
    image_side = _read_side(config, "image_size") // patches.size if family.has_one_size else 0
    merger = MergerShape(
        family.merger.kind,
        side=_read_merged_side(whole, config, family, image_side),
        norm=_read_merger_norm(whole, family, norms.kind),
        eps=_read_merger_eps(whole, config, family, rms_norm_eps, norms.eps),
        ffn_size=_read_merger_ffn(whole, config, family, hidden_size),
        bias=_has_merger_bias(whole, family),
        standardizes=family.merger.kind == "scaled" and bool(config.get("standardize", False)),
    )
    arch = TowerArch(
        hidden_size=width,
        out_size=_read_out_size(config, family, hidden_size),
        patches=patches,
        positioning=_read_positioning(config, family, image_side),
        norms=norms,
        layers=_read_layers(whole, config, family, width, patches.size * merger.side),
        merger=merger,
        tokens=_read_tokens(whole, family, 0 if family.joins_tiles else (image_side // merger.side) ** 2),
    )
    _check(arch, config, family.keys.get("out_hidden_size", "out_hidden_size"), hidden_size)
    return _as_processed(arch, family, whole.path.parent)


def _read_out_size(config: ConfigFile, family: VisionFamily, hidden_size: int) -> int:
    if family.merger.kind not in ("mlp", "gated") or not family.merger.out_size_told:
        return hidden_size
    return config.count(family.keys.get("out_hidden_size", "out_hidden_size"), 3584)


def _read_patches(config: ConfigFile, family: VisionFamily) -> PatchShape:
    size = _read_side(config, "patch_size")
    return PatchShape(
        size * config.count(family.keys["spatial_merge_size"]) if family.encoder_free else size,
        frames=config.count("temporal_patch_size", family.frames) if family.frames_told else family.frames,
        channels=config.count(family.keys.get("in_channels", "in_channels"), config.count("in_chans", CHANNELS)),
        pixels=family.pixels,
        bias=family.patch_bias,
        norm=family.encoder_free,
        class_token=family.class_token,
    )


def _read_positioning(config: ConfigFile, family: VisionFamily, image_side: int) -> Positioning:
    return Positioning(
        family.positions,
        side=image_side or _read_table_side(config, family),
        image_side=image_side,
        turns=family.turns,
        theta=_read_theta(config) if family.turns else ROPE_THETA,
        alternates=family.alternates,
    )


def _read_norms(config: ConfigFile, family: VisionFamily) -> Norms:
    is_joint = family.joint_norms_key is not None and bool(config.get(family.joint_norms_key, False))
    return replace(
        family.norms,
        kind=_read_norm_kind(config, family),
        eps=config.number(family.keys.get("layer_norm_eps", "layer_norm_eps"), family.norms.eps),
        heads="joint" if is_joint else family.norms.heads,
    )


def _read_layers(
    whole: ConfigFile, config: ConfigFile, family: VisionFamily, width: int, token_pixels: int
) -> LayerShape:
    """The layers, each of `width` numbers; `token_pixels` are along the sides of a token."""
    if family.encoder_free:
        return LayerShape(count=0, num_heads=1, head_dim=width, ffn_size=0, activation=_read_activation(config, family))
    depth = config.count(family.keys.get("depth", "depth"))
    num_heads = config.count(family.keys.get("num_heads", "num_heads"), 16)
    window = _read_window(config, token_pixels) if family.windows else 0
    return LayerShape(
        count=_read_num_layers(whole, family, depth),
        num_heads=num_heads,
        head_dim=width // num_heads,
        ffn_size=config.count(family.ffn_key) if family.ffn_key else int(width * config.number("mlp_ratio", 4)),
        num_kv_heads=0 if family.kv_heads_key is None else config.count(family.kv_heads_key),
        activation=_read_activation(config, family),
        gated=family.gated,
        bias=family.layer_bias and (family.layer_bias_key is None or bool(config.get(family.layer_bias_key, True))),
        qkv_bias=family.qkv_bias_key is None or bool(config.get(family.qkv_bias_key, False)),
        scales=family.layer_scales,
        attention_scale=family.attention_scale,
        clips=family.merger.kind == "scaled" and bool(config.get("use_clipped_linears", False)),
        window=window,
        full=_read_indices(config, "fullatt_block_indexes", FULL_LAYERS, depth) if window else (),
        taps=_read_indices(config, "deepstack_visual_indexes", family.taps, depth),
    )


def _read_tokens(whole: ConfigFile, family: VisionFamily, most: int) -> TowerTokens:
    """`most`: tokens of an image, 0 if there is no such limit."""
    return TowerTokens(
        image_id=whole.count("image_token_id", whole.count("image_token_index", family.image_token_id)),
        video_id=-1 if family.video_token_id is None else whole.count("video_token_id", family.video_token_id),
        pad_id=_of_decoder(whole, "pad_token_id") or 0,
        most=most,
        has_lines=family.has_lines,
        joins_tiles=family.joins_tiles,
        ahead=_read_ahead(whole, family),
    )


def _read_merged_side(whole: ConfigFile, config: ConfigFile, family: VisionFamily, image_side: int) -> int:
    """Patches along the sides of the square that becomes one token."""
    if family.merger.kind == "pooled":
        return _read_pooled(whole, image_side)
    if family.merger.kind == "plain" or family.encoder_free:
        return 1
    key = family.keys.get("spatial_merge_size", "spatial_merge_size")
    is_beside = family.merger.kind == "projected" or key in ("scale_factor", "downsample_factor")
    return (whole if is_beside else config).count(key, 2)


def _read_merger_norm(whole: ConfigFile, family: VisionFamily, of_layers: NormKind) -> NormKind | None:
    own = family.merger
    if own.kind in ("plain", "product", "scaled", "normed") or not own.norm:
        return None
    if own.norm_key is not None and not whole.get(own.norm_key, True):
        return None
    if own.kind == "pooled":
        return "root"
    return "deviation" if own.kind in ("square", "gated") else of_layers


def _read_merger_eps(
    whole: ConfigFile, config: ConfigFile, family: VisionFamily, of_decoder: float, of_layers: float
) -> float:
    kind = family.merger.kind
    if family.merger.eps is not None:
        return family.merger.eps
    if kind == "normed":
        return config.number("rms_norm_eps", 1e-6)
    if kind == "halved":
        return whole.number("adapter_layer_norm_eps", 1e-6)
    return {"projected": of_decoder, "gated": MERGER_EPS, "square": MERGER_EPS}.get(kind, of_layers)


def _read_merger_ffn(whole: ConfigFile, config: ConfigFile, family: VisionFamily, hidden_size: int) -> int:
    own = family.merger
    if own.ffn_beside is not None:
        return whole.count(own.ffn_beside, hidden_size)
    if own.kind != "gated":
        return 0
    return hidden_size * CHANNELS if own.ffn_key is None else config.count(own.ffn_key)


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
    kind = family.merger.kind
    if kind in ("projected", "plain"):
        return bool(whole.get("multimodal_projector_bias", kind == "plain"))
    return kind in ("mlp", "square", "halved")


def _check_required(config: ConfigFile, within: str, required: Mapping[str, bool | float | str]) -> None:
    for key, needed in required.items():
        if config.get(key, needed) not in (needed, [needed]):
            raise CheckpointError(f"{config.path}: {within}{key} is {config.get(key)}, but must be {needed}")


def _read_side(config: ConfigFile, key: str) -> int:
    """A number of pixels, which may be told for both sides."""
    sides = config.get(key)
    return sides[0] if isinstance(sides, list) and len(sides) == 2 and sides[0] == sides[1] else config.count(key)


def _read_norm_kind(config: ConfigFile, family: VisionFamily) -> NormKind:
    if family.norm_key is None:
        return family.norms.kind
    told = config.get(family.norm_key, "layer_norm")
    if told not in ("layer_norm", "rms_norm"):
        raise CheckpointError(
            f"{config.path}: vision_config.{family.norm_key} is {told}, but must be layer_norm or rms_norm"
        )
    return "root" if told == "rms_norm" else "deviation"


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


def _read_indices(config: ConfigFile, key: str, of_family: tuple[int, ...] | None, num_layers: int) -> tuple[int, ...]:
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


def _as_processed(arch: TowerArch, family: VisionFamily, folder: Path) -> TowerArch:
    """The tower with what the folder's image processor says: mean and deviation, or how many tokens a picture gets."""
    values = _processor(folder, "preprocessor_config.json", "image_processor")
    if family.own_pixels:
        of_frames = _processor(folder, "video_preprocessor_config.json", "video_processor")
        told = SOFT_TOKENS if values is None else values.count("max_soft_tokens", SOFT_TOKENS)
        frame = 1 if of_frames is None else of_frames.count("max_soft_tokens", 1)
        return replace(arch, tokens=replace(arch.tokens, most=max(told, frame)))
    if values is None:
        return arch
    mean = _per_channel(values, "image_mean", family.pixels.mean)
    std = _per_channel(values, "image_std", family.pixels.std)
    return replace(arch, patches=replace(arch.patches, pixels=Pixels(mean, std)))


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


def _check(arch: TowerArch, config: ConfigFile, out_key: str, hidden_size: int) -> None:
    if arch.out_size != hidden_size:
        raise CheckpointError(
            f"{config.path}: vision_config.{out_key} is {arch.out_size}, but the decoder's hidden size is {hidden_size}"
        )
    if arch.patches.channels != CHANNELS:
        raise CheckpointError(
            f"{config.path}: vision_config.in_channels is {arch.patches.channels}, but images have {CHANNELS}"
        )
    kind, image_side = arch.merger.kind, arch.positioning.image_side
    if image_side % arch.merger.side:
        raise CheckpointError(
            f"{config.path}: vision_config has images of {image_side} x {image_side} patches, but needs a multiple of "
            f"{arch.merger.side}"
        )
    if kind == "product" and image_side in ROUNDED_SIDES:
        raise CheckpointError(
            f"{config.path}: vision_config has images of {image_side} x {image_side} patches, whose places "
            "transformers rounds, and is not served"
        )
    if kind == "normed" and (read := config.get("output_proj_dims", arch.hidden_size)) != arch.hidden_size:
        raise CheckpointError(
            f"{config.path}: vision_config.output_proj_dims is {read}, but must be mm_embed_dim, {arch.hidden_size}"
        )
    _check_heads(arch, config)


def _check_heads(arch: TowerArch, config: ConfigFile) -> None:
    layers = arch.layers
    if arch.merger.kind == "scaled":
        of_heads = {"head_dim": layers.head_dim, "num_key_value_heads": layers.num_heads, "attention_bias": False}
        for key, needed in of_heads.items():
            if config.get(key, needed) != needed:
                raise CheckpointError(f"{config.path}: vision_config.{key} is {config.get(key)}, but must be {needed}")
    if layers.count and (arch.hidden_size % layers.num_heads or layers.head_dim % 4):
        raise CheckpointError(
            f"{config.path}: vision_config has {layers.num_heads} heads in a hidden size of {arch.hidden_size}, but "
            "needs heads whose size is a multiple of 4"
        )
    if layers.num_kv_heads and layers.num_heads % layers.num_kv_heads:
        raise CheckpointError(
            f"{config.path}: {layers.num_heads} heads of vision_config can't share {layers.num_kv_heads} kv heads "
            "evenly"
        )
