"""Qwen's processors, whose limits are numbers of pixels, and others of that form."""

from __future__ import annotations

from typing import NamedTuple

from jaxsgl.preprocess.processors.files import (
    CLIP,
    HALF,
    OfModel,
    ProcessorFiles,
    check_normalization,
    normalization,
    pixels_between,
)
from jaxsgl.preprocess.settings import ProcessorSettings

_QWEN3_VL = OfModel(16, (65536, 16777216), (4096, 25165824), HALF, HALF)
_QWEN2_VL = OfModel(14, (3136, 1003520), (100352, 602112), *CLIP, by_frame=True)
# By `model_type` of config.json; others are as Qwen3-VL.
_MODELS = {"qwen2_vl": _QWEN2_VL, "qwen2_5_vl": _QWEN2_VL._replace(positions_per_s=4.0)}


class _Alone(NamedTuple):
    """What holds of a model that takes pictures alone, where its folder says nothing.

    Attributes:
      of_model: limits of pixels, and normalization.
      temporal_patch_size: times that a picture stands in a patch.
      image_token_id, start_token_id, end_token_id: the placeholder, and what stands around it; -1: nothing does.
      lifts: see `ProcessorSettings`.
    """

    of_model: OfModel
    temporal_patch_size: int
    image_token_id: int
    start_token_id: int = -1
    end_token_id: int = -1
    lifts: bool = False


_PADDLE_OCR = OfModel(14, (384 * 384, 1536 * 1536), (384 * 384, 1536 * 1536), *CLIP)
# By `model_type`, too.
_ALONE = {
    "exaone4_5": _Alone(_QWEN2_VL, 2, 67),
    "paddleocr_vl": _Alone(_PADDLE_OCR, 1, 100_295, 101_305, 101_306, lifts=True),
}


def read_qwen_vl(files: ProcessorFiles) -> ProcessorSettings:
    """Pictures and videos of Qwen2-VL to Qwen3-VL."""
    config, vision, image, video = files.config, files.tower, files.image, files.video
    of_model = _MODELS.get(files.model_type, _QWEN3_VL)
    sizes = {
        "patch_size": vision.get("patch_size", of_model.patch_size),
        "temporal_patch_size": vision.get("temporal_patch_size", 2),
        "merge_size": vision.get("spatial_merge_size", 2),
    }
    files.check_image(sizes)
    files.check_video(sizes)
    with files.understood():
        settings = ProcessorSettings(
            **sizes,
            image=pixels_between(image, of_model.image, of_model.mean, of_model.std),
            video=pixels_between(video or normalization(image), of_model.video, of_model.mean, of_model.std),
            image_token_id=config["image_token_id"],
            video_token_id=config["video_token_id"],
            vision_start_token_id=config["vision_start_token_id"],
            vision_end_token_id=config["vision_end_token_id"],
            video_fps=float(video.get("fps") or 2),
            min_frames=video.get("min_frames") or 4,
            max_frames=video.get("max_frames") or 768,
            caps_frames=bool(video.get("cap_pixels_per_frame", of_model.by_frame)),
            max_frame_tokens=video.get("max_video_tokens") or 768,
            by_frame=of_model.by_frame,
            positions_per_s=of_model.positions_per_s and vision.get("tokens_per_second", of_model.positions_per_s),
            max_video_tokens=video.get("max_video_tokens") or 128_000,
            takes_pixels=True,
        )
    check_normalization(files.folder, settings)
    return settings


def read_pictures(files: ProcessorFiles) -> ProcessorSettings:
    """Pictures alone, scaled as Qwen2-VL's."""
    alone = _ALONE[files.model_type]
    of_model, config = alone.of_model, files.config
    sizes = {
        "patch_size": files.tower.get("patch_size", 14),
        "temporal_patch_size": alone.temporal_patch_size,
        "merge_size": files.tower.get("spatial_merge_size", 2),
    }
    files.check_image(sizes)
    with files.understood():
        pixels = pixels_between(files.image, of_model.image, of_model.mean, of_model.std)
        return ProcessorSettings(
            **sizes,
            image=pixels,
            video=pixels,
            image_token_id=config.get("image_token_id", alone.image_token_id),
            vision_start_token_id=config.get("vision_start_token_id", alone.start_token_id),
            vision_end_token_id=config.get("vision_end_token_id", alone.end_token_id),
            lifts=alone.lifts,
        )
