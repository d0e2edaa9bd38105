"""The shape of a vision tower, read from the object `vision_config` of a model's config.json.

Owns its numbers and which values are refused. Never knows parameters or images. `models/arch.py` reads it, `tower.py`
and the engine use it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path

from jaxsgl.errors import CheckpointError
from jaxsgl.models.config_file import ConfigFile
from jaxsgl.models.family import VisionFamily
from jaxsgl.requests.media import CHANNELS

ROPE_THETA = 10000.0


@dataclass(frozen=True)
class VisionArch:
    """The shape of a tower of Qwen3-VL or Qwen3.5.

    Attributes:
      num_layers, hidden_size, num_heads, ffn_size: L, M, N, F.
      out_size: D of the decoder, whose tokens the tower makes.
      patch_size: pixels along the sides of a patch.
      temporal_patch_size: frames in a patch.
      channels: of a pixel.
      merge_size: patches along the sides of the square that becomes one token.
      table_side: learned positions along the sides of an image.
      deepstack_layers: layers whose outputs become embeddings, too; the j-th is added behind the decoder's layer j.
      rope_theta: base of the wavelengths.
      mean, std: of the channels' values from 0 to 1, by which pixels are normalized.
      image_token_id, video_token_id: the placeholder tokens of images, and of video frames.
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
    rope_theta: float = ROPE_THETA
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    std: tuple[float, ...] = (0.5, 0.5, 0.5)
    has_tower: bool = True

    @property
    def head_dim(self) -> int:
        """H."""
        return self.hidden_size // self.num_heads

    @property
    def patch_len(self) -> int:
        """C, numbers of a patch: channels, frames, rows and columns of pixels."""
        return self.channels * self.temporal_patch_size * self.patch_size**2

    @property
    def merged_size(self) -> int:
        """Numbers of a square of patches that becomes one token."""
        return self.hidden_size * self.merge_size**2

    @property
    def row_len(self) -> int:
        """Numbers of a token's embedding and of what deepstack adds behind the first layers."""
        return self.out_size * (1 + len(self.deepstack_layers))


def read_vision(whole: ConfigFile, family: VisionFamily, hidden_size: int) -> VisionArch | None:
    """The tower that goes with a decoder of `hidden_size`; None: config.json describes none, as of text alone.

    Raises `CheckpointError` for what isn't supported.
    """
    config = whole.section("vision_config")
    if config is None:
        return None
    activation = config.get("hidden_act", "gelu_pytorch_tanh")
    if activation != "gelu_pytorch_tanh":
        raise CheckpointError(f"{config.path}: vision_config.hidden_act is {activation}, but must be gelu_pytorch_tanh")
    rope = config.section("rope_parameters")
    rope_type = "axial" if rope is None else rope.get("rope_type", "axial")
    if rope_type not in ("axial", "default"):
        raise CheckpointError(f"{config.path}: vision_config.rope_parameters.rope_type is {rope_type}, not axial")
    side = math.isqrt(positions := config.count("num_position_embeddings", 2304))
    if side * side != positions:
        raise CheckpointError(f"{config.path}: vision_config.num_position_embeddings is {positions}, not a square")
    depth = config.count("depth", 27)
    deepstack = tuple(config.get("deepstack_visual_indexes", family.deepstack_layers))
    if list(deepstack) != sorted(set(deepstack)) or not all(type(i) is int and 0 <= i < depth for i in deepstack):
        raise CheckpointError(
            f"{config.path}: vision_config.deepstack_visual_indexes is {list(deepstack)}, but must be ascending "
            f"numbers of layers below {depth}"
        )
    arch = VisionArch(
        num_layers=depth,
        hidden_size=config.count("hidden_size", 1152),
        num_heads=config.count("num_heads", 16),
        ffn_size=config.count("intermediate_size", 4304),
        out_size=config.count("out_hidden_size", 3584),
        patch_size=config.count("patch_size", 16),
        temporal_patch_size=config.count("temporal_patch_size", 2),
        channels=config.count("in_channels", 3),
        merge_size=config.count("spatial_merge_size", 2),
        table_side=side,
        deepstack_layers=deepstack,
        image_token_id=whole.count("image_token_id", family.image_token_id),
        video_token_id=whole.count("video_token_id", family.video_token_id),
        rope_theta=ROPE_THETA if rope is None else rope.number("rope_theta", ROPE_THETA),
    )
    _check(arch, config, hidden_size)
    return _normalized(arch, whole.path.parent)


def _normalized(arch: VisionArch, folder: Path) -> VisionArch:
    """The tower with the mean and deviation by which the folder's image processor normalizes."""
    for name, section in (("preprocessor_config.json", None), ("processor_config.json", "image_processor")):
        path = folder / name
        if not path.is_file():
            continue
        processor = ConfigFile(path)
        values = processor if section is None else processor.section(section)
        if values is None:
            continue
        mean, std = (_per_channel(values, key, arch.channels) for key in ("image_mean", "image_std"))
        return replace(arch, mean=mean, std=std)
    return arch


def _per_channel(values: ConfigFile, key: str, channels: int) -> tuple[float, ...]:
    told = values.get(key, [0.5] * channels)
    if not isinstance(told, list) or len(told) != channels or not all(isinstance(each, int | float) for each in told):
        raise CheckpointError(f"{values.path}: {key} is {told}, but must be {channels} numbers, one for each channel")
    return tuple(map(float, told))


def _check(arch: VisionArch, config: ConfigFile, hidden_size: int) -> None:
    if arch.out_size != hidden_size:
        raise CheckpointError(
            f"{config.path}: vision_config.out_hidden_size is {arch.out_size}, but the decoder's hidden size is "
            f"{hidden_size}"
        )
    if arch.channels != CHANNELS:
        raise CheckpointError(
            f"{config.path}: vision_config.in_channels is {arch.channels}, but images have {CHANNELS}"
        )
    if arch.hidden_size % arch.num_heads or arch.head_dim % 4:
        raise CheckpointError(
            f"{config.path}: vision_config has {arch.num_heads} heads in a hidden size of {arch.hidden_size}, but "
            "needs heads whose size is a multiple of 4"
        )
