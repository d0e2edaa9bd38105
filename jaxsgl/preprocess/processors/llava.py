"""LLaVA's processors: the middle of a picture (1.5), and tiles whose tokens are joined (NeXT, OneVision)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from jaxsgl.errors import CheckpointError
from jaxsgl.preprocess.processors.files import CLIP, IMAGE_FILE, ProcessorFiles, normalized
from jaxsgl.preprocess.processors.pixtral import read_llava_pixtral
from jaxsgl.preprocess.settings import ProcessorSettings


class _Joined(NamedTuple):
    """What holds of a model whose tiles are joined, where its folder says nothing.

    Attributes:
      side: pixels along the sides of a tile.
      image_token_id: the placeholder.
      resolutions: see `ProcessorSettings`.
      size: what the image processor says of a tile, by its side.
      mean, std: of the normalization.
      shrinks: long lines are shrunk, as `vision_aspect_ratio` says, and several pictures are shown whole alone.
    """

    side: int
    image_token_id: int
    resolutions: tuple[tuple[int, int], ...]
    size: Callable[[int], dict[str, Any]]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    shrinks: bool


def _cropped(side: int) -> dict[str, Any]:
    square = {"height": side, "width": side}
    return {"size": {"shortest_edge": side}, "crop_size": square}


def _whole(side: int) -> dict[str, Any]:
    return {"size": {"height": side, "width": side}, "do_center_crop": False}


# By `model_type` of config.json.
_JOINED = {
    "llava_next": _Joined(
        336, 32_000, ((336, 672), (672, 336), (672, 672), (1008, 336), (336, 1008)), _cropped, *CLIP, shrinks=False
    ),
    "llava_onevision": _Joined(
        384,
        151_646,
        tuple((384 * rows, 384 * columns) for rows in range(1, 7) for columns in range(1, 7)),
        _whole,
        *CLIP,
        shrinks=True,
    ),
}
_ASPECT = "anyres_max_9"


def read_llava(files: ProcessorFiles) -> ProcessorSettings:
    """Pictures as the tower takes them."""
    return read_llava_pixtral(files) if files.tower.get("model_type") == "pixtral" else _read_cropped(files)


def _read_cropped(files: ProcessorFiles) -> ProcessorSettings:
    """Pictures alone, of which the middle is seen, in one size; transformers 4 says sides as one number."""
    side, patch_size = files.tower.get("image_size", 224), files.tower.get("patch_size", 32)
    told, crop = (
        {name: each} if isinstance(each := files.image.get(key), int) else each
        for key, name in (("size", "shortest_edge"), ("crop_size", "height"))
    )
    crop = crop and {"height": crop.get("height"), "width": crop.get("width", crop.get("height"))}
    needed = {**_cropped(side), "do_center_crop": True, "do_pad": False}
    files.check_image(needed, {**files.image, "size": told, "crop_size": crop})
    of_tokens = {"num_additional_image_tokens": 1, "vision_feature_select_strategy": "default"}
    files.check_both({"patch_size": patch_size, **of_tokens})
    with files.understood():
        pixels = normalized(files.image, side**2, side**2)
        return ProcessorSettings(
            patch_size=patch_size,
            merge_size=1,
            image=pixels,
            video=pixels,
            image_token_id=files.image_token_id(32_000),
            fixed_side=side,
            crops=True,
        )


def read_joined_tiles(files: ProcessorFiles) -> ProcessorSettings:
    """Pictures alone, in tiles that are joined; those of the class token are left out."""
    of_model, config = _JOINED[files.model_type], files.config
    side, patch_size = files.tower.get("image_size", of_model.side), files.tower.get("patch_size", 14)
    files.check_image({**of_model.size(side), "do_pad": True})
    aspect = config.get("vision_aspect_ratio", _ASPECT)
    tokens = (side // patch_size) ** 2
    files.check_both({"num_image_tokens": tokens, "vision_aspect_ratio": aspect, "patch_size": patch_size})
    with files.understood():
        listed = [told.get("image_grid_pinpoints") or None for told in (config, files.image)]
        resolutions, of_image = (
            of_model.resolutions if each is None else tuple((int(h), int(w)) for h, w in each) for each in listed
        )
        if resolutions != of_image or any(pixels % side or pixels < 1 for each in resolutions for pixels in each):
            raise CheckpointError(
                f"{files.folder}: image_grid_pinpoints must be multiples of {side}, and the same in config.json and "
                f"{IMAGE_FILE}"
            )
        pixels = normalized(files.image, side**2, side**2, of_model.mean, of_model.std)
        return ProcessorSettings(
            patch_size=patch_size,
            merge_size=1,
            image=pixels,
            video=pixels,
            image_token_id=files.image_token_id(of_model.image_token_id),
            fixed_side=side,
            resolutions=resolutions,
            most_tiles=int(aspect.removeprefix("anyres_max_")) if of_model.shrinks else None,
            several_whole=of_model.shrinks,
        )
