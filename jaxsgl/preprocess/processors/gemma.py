"""Gemma's processors: pictures of one size (3), and pictures and frames that fill a number of tokens (4)."""

from __future__ import annotations

import math

from jaxsgl.preprocess.processors.files import HALF, ProcessorFiles, normalized
from jaxsgl.preprocess.settings import BILINEAR, PixelSettings, ProcessorSettings


def read_gemma3(files: ProcessorFiles) -> ProcessorSettings:
    """Pictures alone, all of one size."""
    config = files.config
    side, patch_size = files.tower.get("image_size", 224), files.tower.get("patch_size", 16)
    size = {"height": side, "width": side}
    files.check_image({"size": size, "do_pan_and_scan": False, "resample": BILINEAR})
    with files.understood():
        pixels = normalized(files.image, 1, side**2, HALF, HALF)
        return ProcessorSettings(
            patch_size=patch_size,
            merge_size=side // patch_size // math.isqrt(config.get("mm_tokens_per_image") or 256),
            image=pixels,
            video=pixels,
            image_token_id=files.image_token_id(262_144),
            vision_start_token_id=config.get("boi_token_index", 255_999),
            vision_end_token_id=config.get("eoi_token_index", 256_000),
            fixed_side=side,
            resample=BILINEAR,
            written="start",
        )


def read_gemma4(files: ProcessorFiles) -> ProcessorSettings:
    """Pictures and frames that fill a number of tokens; the tower normalizes. Without layers, a token is a patch."""
    config = files.config
    patch_size, merge = files.tower.get("patch_size", 16), files.tower.get("pooling_kernel_size", 3)
    same = {"patch_size": patch_size, "pooling_kernel_size": merge}
    for check, values in ((files.check_image, files.image), (files.check_video, files.video)):
        told = values.get("do_normalize")
        changes_nothing = {} if told is False else {"image_mean": [0.0] * 3, "image_std": [1.0] * 3}
        check(same | changes_nothing | {"do_normalize": told})
    square = (patch_size * merge) ** 2
    with files.understood():
        pixels, frame = (
            PixelSettings(square, int(values.get("max_soft_tokens") or tokens) * square, HALF, HALF)
            for values, tokens in ((files.image, 280), (files.video, 70))
        )
        is_free = files.model_type == "gemma4_unified"
        return ProcessorSettings(
            patch_size=patch_size * merge if is_free else patch_size,
            merge_size=1 if is_free else merge,
            image=pixels,
            video=frame,
            image_token_id=config.get("image_token_id", 258_880),
            video_token_id=config.get("video_token_id", 258_884),
            vision_start_token_id=config.get("boi_token_id", 255_999),
            vision_end_token_id=config.get("eoi_token_id", 258_882),
            num_frames=int(files.video.get("num_frames") or 32),
            fills=True,
            written="image",
            times="minutes",
        )
