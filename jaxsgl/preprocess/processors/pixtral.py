"""The processors of models with Pixtral's tower: pictures alone, scaled down by their longer side."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from jaxsgl.preprocess.processors.files import ProcessorFiles, normalized
from jaxsgl.preprocess.settings import ProcessorSettings


class _Tower(NamedTuple):
    """What differs between models of this tower.

    Attributes:
      patch_size: pixels along the sides of a patch, where the folder says nothing.
      merge_size: patches along the sides of a token.
      image_token_id: the placeholder, where the folder says nothing.
    """

    patch_size: int
    merge_size: int
    image_token_id: int


def read_mistral3(files: ProcessorFiles) -> ProcessorSettings:
    """Lines of a picture end with a token."""
    tower = _Tower(14, files.config.get("spatial_merge_size", 2), 10)
    return _with_lines(files, _read(files, tower, files.tower.get("patch_size", tower.patch_size)))


def read_llava_pixtral(files: ProcessorFiles) -> ProcessorSettings:
    """The same, but patches are not merged."""
    tower = _Tower(16, 1, 32_000)
    return _with_lines(files, _read(files, tower, files.tower.get("patch_size", tower.patch_size)))


def read_light_on_ocr(files: ProcessorFiles) -> ProcessorSettings:
    """No ends of lines. Where sides were no multiples of a token's, the model would drop the rest."""
    tower = _Tower(14, files.config.get("spatial_merge_size", 2), 151_655)
    return _read(files, tower, files.tower.get("patch_size", tower.patch_size) * tower.merge_size)


def _read(files: ProcessorFiles, tower: _Tower, told_patch_size: int) -> ProcessorSettings:
    """Reads all but the ends of lines; `told_patch_size` is that of the image processor."""
    patch_size, told = files.tower.get("patch_size", tower.patch_size), files.image.get("patch_size")
    if isinstance(told, dict):
        told = told["height"] if told.get("height") == told.get("width") else told
    files.check_image({"patch_size": told_patch_size}, {**files.image, "patch_size": told})
    files.check_both({"patch_size": patch_size, "spatial_merge_size": tower.merge_size})
    with files.understood():
        size = files.image.get("size") or {}
        longest = int(size.get("longest_edge") or files.tower.get("image_size") or 1540)
        pixels = normalized(files.image, 1, longest**2)
        return ProcessorSettings(
            patch_size=patch_size,
            merge_size=tower.merge_size,
            image=pixels,
            video=pixels,
            image_token_id=files.image_token_id(tower.image_token_id),
            longest_side=longest,
        )


def _with_lines(files: ProcessorFiles, settings: ProcessorSettings) -> ProcessorSettings:
    """The settings with the tokens that end lines."""
    ids = files.added_tokens()
    with files.understood():
        end, last = (ids[files.both.get(f"image_{of}_token", f"[IMG_{of.upper()}]")] for of in ("break", "end"))
    return replace(settings, line_ends=(end, last))
