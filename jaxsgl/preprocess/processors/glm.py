"""The processors of GLM-4.1V to 4.6V and GLM-OCR: Qwen's sizes, with frames as pictures before their times."""

from __future__ import annotations

import re
from pathlib import Path

from jaxsgl.errors import CheckpointError
from jaxsgl.preprocess.processors.files import (
    CLIP,
    OfModel,
    ProcessorFiles,
    check_normalization,
    normalization,
    pixels_between,
)
from jaxsgl.preprocess.settings import ProcessorSettings

_GLM4V = OfModel(14, (12544, 11_760_000), (12544, 47_040_000), *CLIP)
# By `model_type`, what config.json leaves out: the token of images, before that of videos, and what begins an image,
# before its end.
TOKENS = {
    "glm4v": (151_343, 151_339),
    "glm4v_moe": (151_363, 151_339),
    "glm46v": (151_343, 151_339),
    "glm_ocr": (59_280, 59_256),
}
_CLASS = re.compile(r"(Glm4v|Glm46V)(?:Image|Video)?Processor(?:Fast|Pil)?")


def read_glm4v(files: ProcessorFiles) -> ProcessorSettings:
    """A picture counts as two frames; frames of a video are pictures within its tokens, each before its time."""
    config, vision, image, video = files.config, files.tower, files.image, files.video
    sizes = {
        "patch_size": vision.get("patch_size", 14),
        "temporal_patch_size": vision.get("temporal_patch_size", 2),
        "merge_size": vision.get("spatial_merge_size", 2),
    }
    files.check_image(sizes)
    files.check_video(sizes)
    told = [each.get("processor_class") for each in (files.both, image, video, files.tokenizer())]
    writes = _class_of(files.folder, [*told, "Glm46VProcessor" if files.model_type == "glm46v" else None])
    samples = _class_of(files.folder, [video.get("video_processor_type"), image.get("image_processor_type"), writes])
    first, start = TOKENS[files.model_type]
    with files.understood():
        settings = ProcessorSettings(
            **sizes,
            image=pixels_between(image, _GLM4V.image, _GLM4V.mean, _GLM4V.std),
            video=pixels_between(video or normalization(image), _GLM4V.video, _GLM4V.mean, _GLM4V.std),
            image_token_id=config.get("image_token_id", first),
            video_token_id=config.get("video_token_id", first + 1),
            vision_start_token_id=config.get("image_start_token_id", start),
            vision_end_token_id=config.get("image_end_token_id", start + 1),
            video_fps=float(video.get("fps") or 2),
            sampling="by length" if samples.startswith("Glm46V") else "steps",
            max_duration_s=float(video.get("max_duration") or 300),
            counts_frames=True,
            times="seconds after" if writes.startswith("Glm46V") else "whole seconds after",
            frame_token_id=config.get("image_token_id", first),
        )
    check_normalization(files.folder, settings)
    return settings


def _class_of(folder: Path, told: list[str | None]) -> str:
    """The first of the processors' classes that are told; GLM-4.1V's, if none is. Raises `CheckpointError`."""
    name = next(filter(None, told), "Glm4vProcessor")
    if not isinstance(name, str) or _CLASS.fullmatch(name) is None:
        raise CheckpointError(
            f"{folder} names the processor {name}, but of GLM's models only Glm4v's and Glm46V's are supported"
        )
    return name
