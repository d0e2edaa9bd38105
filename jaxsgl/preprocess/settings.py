"""How a model's processor turns pictures into patches: sizes, resizing limits, normalization, placeholder tokens.

Read from the model's folder: config.json, and what beside it tells of the processor. Never knows pictures. The front
end (and `LLM`) preprocesses by it.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

from jaxsgl.errors import CheckpointError
from jaxsgl.json_file import read_object

LANCZOS, BILINEAR, BICUBIC = 1, 2, 3  # in Pillow
_RESCALE = 1 / 255
_IMAGE_FILE, _VIDEO_FILE = "preprocessor_config.json", "video_preprocessor_config.json"
_BOTH_FILE = "processor_config.json"


Written: TypeAlias = Literal["framed", "start", "image"]
Times: TypeAlias = Literal["seconds", "minutes", "whole seconds after", "seconds after", "numbers"]
Sampling: TypeAlias = Literal["even", "steps", "by length", "middles"]


@dataclass(frozen=True)
class PixelSettings:
    """What is done to one picture, or to the frames of a video.

    Attributes:
      min_pixels, max_pixels: a picture is scaled until it has so many; of a video, all frames together, or each
        (`ProcessorSettings.by_frame`).
      mean, std: of the normalization, by channel, for values of 0 to 1.
    """

    min_pixels: int
    max_pixels: int
    mean: tuple[float, ...]
    std: tuple[float, ...]


@dataclass(frozen=True)
class TileWords:
    """What is written around the tiles of a picture.

    Attributes:
      tile: before a tile, whose `{row}`, `{column}` and `{number}` count from 1.
      line_end: after the last one of a line.
      after_tiles: before what shows the picture whole, if tiles come before that.
      whole: right before that.
      end: after it.
      after: after each tile, and what shows the picture whole.
      start: before all.
      placeholder: what clients write in texts for a picture; None: the placeholder that the model sees.
    """

    tile: str
    line_end: str
    after_tiles: str
    whole: str
    end: str
    start: str = ""
    placeholder: str | None = None
    after: str = ""


@dataclass(frozen=True)
class ProcessorSettings:
    """All that preprocessing depends on.

    Attributes:
      patch_size, temporal_patch_size, merge_size: see `MediaLimits`.
      image, video: what is done to pixels.
      video_fps: frames a second that are taken of a video, `min_frames` to `max_frames` in all.
      num_frames: frames that are taken of each video, if it has so many: the first ones of as many equal parts, or
        those in their "middles" (`sampling`); None: `video_fps` a second.
      sampling: how `video_fps` frames a second are found: spread evenly; or ("steps") those from which steps of equal
        time begin, of `max_duration_s` at most. "by length": other numbers hold for videos of other lengths.
      by_frame: videos are as Qwen2-VL takes them. Limits of pixels are those of a frame; frames are taken in whole
        temporal patches, which follow each other without words between them: their times are positions of tokens.
      positions_per_s: by_frame: positions of time in a second; None: temporal patches are one position apart.
      longest_side: pixels of a picture's longer side at most, which is the only limit; sides are rounded up. None: the
        limits are those of `image`.
      lifts: a side shorter than a token's is scaled to that first.
      counts_frames: limits of pixels of a picture are those of all frames of its temporal patch.
      fills: pictures and frames are scaled until they have as many pixels as they may, sides rounded down.
      fixed_side: pixels of both sides of a picture, whatever its own are; None: they follow from its own.
      crops: a picture is scaled until its shorter side has so many, and of its longer one the middle is taken.
      tiles: the least and the most squares of `fixed_side` that a picture is cut into; one more shows it whole, if
        they are several. None: it isn't cut.
      tiles_fit: the least and the most squares are those that scale a picture up least, or down, if all do; else those
        whose ratio is nearest to its own count.
      tile_side: a picture of more pixels than twice those of `image` is cut into tiles of so many along each side, as
        many as `tiles` says; one more shows it whole, scaled as a smaller picture. Sides have a token at least. None:
        tiles have `fixed_side`.
      tiles_longest: the longer side is scaled to so many pixels, and both then to multiples of `fixed_side`, which are
        cut into tiles; one more shows what was cut. None: tiles are as `tiles` says.
      tile_words: what is written around tiles; None: nothing is.
      resolutions: heights and widths, of which the best one is filled with a picture as far as its ratio allows, and
        cut into tiles of `fixed_side`, whose tokens are joined to lines; before them a tile shows it whole. None: tiles
        are as told above.
      most_tiles: joined lines are shrunk to as many tokens as so many tiles have; None: never.
      several_whole: where pictures are several, each is a tile that shows it whole, in the middle of a grey square.
      resample: how pictures are scaled, by Pillow's number.
      written: what clients write for a picture: its placeholder, within the tokens of `vision_start_token_id` and
        `vision_end_token_id` if the model has them ("framed"); the first of these alone, for which those and the
        placeholder between them are put, between empty lines ("start"); or the placeholder, for which the same is put
        without lines ("image").
      times: how the time of a temporal patch is told in words: as `<1.5 seconds>`, or as `00:01` between spaces; that
        of its first frame after it, as `1`, or as `1.5 seconds`. Or ("numbers") no time, but `Frame1: ` before it, in
        a line of its own.
      frame_token_id: what stands for frames of videos in prompts that the model sees; None: `video_token_id`.
      takes_pixels: gateways preprocess pictures as this model's processor does.
      line_ends: what ends the lines of a picture, and its last one; None: nothing does.
      caps_frames: whether a frame has at most `max_frame_tokens` tokens or, by frame, its share of `max_video_tokens`,
        as in Qwen's own tools.
      image_token_id, video_token_id: placeholders.
      vision_start_token_id, vision_end_token_id: what stands around them. Of videos and of these -1: there are none.
    """

    patch_size: int
    temporal_patch_size: int
    merge_size: int
    image: PixelSettings
    video: PixelSettings
    image_token_id: int
    video_token_id: int
    vision_start_token_id: int
    vision_end_token_id: int
    video_fps: float = 2.0
    min_frames: int = 4
    max_frames: int = 768
    caps_frames: bool = False
    max_frame_tokens: int = 768
    num_frames: int | None = None
    sampling: Sampling = "even"
    max_duration_s: float = 300.0
    by_frame: bool = False
    positions_per_s: float | None = None
    max_video_tokens: int = 128_000
    longest_side: int | None = None
    fixed_side: int | None = None
    crops: bool = False
    tiles: tuple[int, int] | None = None
    tiles_fit: bool = False
    tile_side: int | None = None
    tiles_longest: int | None = None
    tile_words: TileWords | None = None
    resolutions: tuple[tuple[int, int], ...] | None = None
    most_tiles: int | None = None
    several_whole: bool = False
    resample: int = BICUBIC
    lifts: bool = False
    counts_frames: bool = False
    fills: bool = False
    written: Written = "framed"
    times: Times = "seconds"
    frame_token_id: int | None = None
    takes_pixels: bool = True
    line_ends: tuple[int, int] | None = None

    @property
    def unit(self) -> int:
        """Pixels along the sides of the square that becomes one token."""
        return self.patch_size * self.merge_size

    def name_of(self, pixels: PixelSettings) -> str:
        """What a picture's digest must depend on besides its pixels."""
        return f"{self.patch_size} {self.temporal_patch_size} {self.merge_size} {pixels.mean} {pixels.std}"


class _OfModel(NamedTuple):
    """What holds where a model's folder says nothing.

    Attributes:
      patch_size: pixels along the sides of a patch.
      image, video: limits of pixels.
      mean, std: of the normalization.
      by_frame: see `ProcessorSettings`.
      positions_per_s: of the key `tokens_per_second`; None: the model has no such key.
    """

    patch_size: int
    image: tuple[int, int]
    video: tuple[int, int]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    by_frame: bool = False
    positions_per_s: float | None = None


_HALF = (0.5, 0.5, 0.5)
_CLIP = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
_QWEN3_VL = _OfModel(16, (65536, 16777216), (4096, 25165824), _HALF, _HALF)
_QWEN2_VL = _OfModel(14, (3136, 1003520), (100352, 602112), *_CLIP, by_frame=True)
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

    of_model: _OfModel
    temporal_patch_size: int
    image_token_id: int
    start_token_id: int = -1
    end_token_id: int = -1
    lifts: bool = False


_PADDLE_OCR = _OfModel(14, (384 * 384, 1536 * 1536), (384 * 384, 1536 * 1536), *_CLIP)
# By `model_type`, too.
_ALONE = {
    "exaone4_5": _Alone(_QWEN2_VL, 2, 67),
    "paddleocr_vl": _Alone(_PADDLE_OCR, 1, 100_295, 101_305, 101_306, lifts=True),
}
_IDEFICS3_LONGEST = 4096  # pixels, from which on its processor rounds once more
_FAKE = "<fake_token_around_image>"
_IDEFICS3_WORDS = TileWords(_FAKE + "<row_{row}_col_{column}>", "\n", "\n", f"{_FAKE}<global-img>", _FAKE)
_AYA_WORDS = TileWords(
    "TILE_{number}", "", "", "TILE_GLOBAL", "<|END_OF_IMG|>", start="<|START_OF_IMG|>", placeholder="<image>"
)


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


# By `model_type`, too.
_JOINED = {
    "llava_next": _Joined(
        336, 32_000, ((336, 672), (672, 336), (672, 672), (1008, 336), (336, 1008)), _cropped, *_CLIP, shrinks=False
    ),
    "llava_onevision": _Joined(
        384,
        151_646,
        tuple((384 * rows, 384 * columns) for rows in range(1, 7) for columns in range(1, 7)),
        _whole,
        *_CLIP,
        shrinks=True,
    ),
}
_ASPECT = "anyres_max_9"
_LFM2_VL_WORDS = TileWords(
    "<|img_row_{row}_col_{column}|>", "", "<|img_thumbnail|>", "", "<|image_end|>", start="<|image_start|>"
)
_GLM4V = _OfModel(14, (12544, 11_760_000), (12544, 47_040_000), *_CLIP)
# What config.json leaves out: the token of images, before that of videos, and what begins an image, before its end.
_GLM4V_TOKENS = {
    "glm4v": (151_343, 151_339),
    "glm4v_moe": (151_363, 151_339),
    "glm46v": (151_343, 151_339),
    "glm_ocr": (59_280, 59_256),
}
_GLM_CLASS = re.compile(r"(Glm4v|Glm46V)(?:Image|Video)?Processor(?:Fast|Pil)?")


def load_settings(folder: str | Path) -> ProcessorSettings | None:
    """Returns the settings of the model in `folder`; None if it has no vision tower.

    Raises `CheckpointError` for a file that can't be read, or a processor that does something else to pictures.
    """
    folder = Path(folder)
    config = _read(folder / "config.json")
    vision = config.get("vision_config")
    if not isinstance(vision, dict):
        return None
    of_model = _MODELS.get(str(config.get("model_type")), _QWEN3_VL)
    both = _read(folder / _BOTH_FILE)
    image = _read(folder / _IMAGE_FILE) or both.get("image_processor") or {}
    if config.get("model_type") == "mistral3":
        return _of_mistral3(folder, config, vision, image, both)
    if config.get("model_type") == "lighton_ocr":
        return _of_light_on_ocr(folder, config, vision, image, both)
    if (alone := _ALONE.get(str(config.get("model_type")))) is not None:
        return _of_pictures(folder, config, vision, image, alone)
    if config.get("model_type") == "aya_vision":
        return _of_aya_vision(folder, config, vision, image, both)
    if config.get("model_type") == "cohere2_vision":
        return _of_cohere2_vision(folder, config, vision, image)
    if config.get("model_type") in ("lfm2_vl", "lfm2-vl"):
        return _of_lfm2_vl(folder, config, vision, image)
    if config.get("model_type") in ("idefics3", "smolvlm"):
        return _of_idefics3(folder, config, vision, image, both)
    if config.get("model_type") == "llava":
        of_tower = _of_llava_pixtral if vision.get("model_type") == "pixtral" else _of_llava
        return of_tower(folder, config, vision, image, both)
    if config.get("model_type") in _JOINED:
        return _of_joined_tiles(folder, config, vision, image, both)
    if config.get("model_type") == "gemma3":
        return _of_gemma3(folder, config, vision, image)
    video = _read(folder / _VIDEO_FILE) or both.get("video_processor") or {}
    if config.get("model_type") in ("gemma4", "gemma4_unified"):
        return _of_gemma4(folder, config, vision, image, video)
    if config.get("model_type") == "internvl":
        return _of_internvl(folder, config, vision, image, video)
    if config.get("model_type") in _GLM4V_TOKENS:
        return _of_glm4v(folder, config, vision, image, video, both)
    sizes = {
        "patch_size": vision.get("patch_size", of_model.patch_size),
        "temporal_patch_size": vision.get("temporal_patch_size", 2),
        "merge_size": vision.get("spatial_merge_size", 2),
    }
    for file, values in ((_IMAGE_FILE, image), (_VIDEO_FILE, video)):
        _check_processor(folder / file, values, sizes)
    with _understood(folder):
        settings = ProcessorSettings(
            **sizes,
            image=_pixels(image, of_model.image, of_model),
            video=_pixels(video or _normalization(image), of_model.video, of_model),
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
        )
    _check_normalization(folder, settings)
    return settings


def _of_mistral3(
    folder: Path, config: dict[str, Any], vision: dict[str, Any], image: dict[str, Any], both: dict[str, Any]
) -> ProcessorSettings:
    """Pictures alone, whose lines are told by tokens."""
    merge_size = config.get("spatial_merge_size", 2)
    whole = _of_pixtral(folder, config, _Tower(vision, 14, merge_size, 10, vision.get("patch_size", 14)), image, both)
    return _with_lines(folder, whole, both)


def _of_llava_pixtral(
    folder: Path, config: dict[str, Any], vision: dict[str, Any], image: dict[str, Any], both: dict[str, Any]
) -> ProcessorSettings:
    """The same, but patches are not merged."""
    whole = _of_pixtral(folder, config, _Tower(vision, 16, 1, 32_000, vision.get("patch_size", 16)), image, both)
    return _with_lines(folder, whole, both)


def _of_light_on_ocr(
    folder: Path, config: dict[str, Any], vision: dict[str, Any], image: dict[str, Any], both: dict[str, Any]
) -> ProcessorSettings:
    """Pictures without ends of lines. Where sides were no multiples of a token's, the model would drop the rest."""
    merge_size = config.get("spatial_merge_size", 2)
    unit = vision.get("patch_size", 14) * merge_size
    return _of_pixtral(folder, config, _Tower(vision, 14, merge_size, 151_655, unit), image, both)


class _Tower(NamedTuple):
    """What differs in folders of Pixtral's tower: `vision_config`, what its patches have, if it doesn't say it, how
    they are merged, the placeholder if config.json doesn't tell it, and the `patch_size` of the image processor.
    """

    config: dict[str, Any]
    patch_size: int
    merge_size: int
    image_token_id: int
    told_patch_size: int


def _of_pixtral(
    folder: Path, config: dict[str, Any], tower: _Tower, image: dict[str, Any], both: dict[str, Any]
) -> ProcessorSettings:
    """Pictures alone, scaled down by their longer side."""
    sizes = {"patch_size": tower.config.get("patch_size", tower.patch_size), "spatial_merge_size": tower.merge_size}
    patch_size, size = image.get("patch_size"), image.get("size") or {}
    if isinstance(patch_size, dict):
        same = patch_size.get("height") == patch_size.get("width")
        image = {**image, "patch_size": patch_size["height"] if same else patch_size}
    _check_processor(folder / _IMAGE_FILE, image, {"patch_size": tower.told_patch_size})
    _check_processor(folder / _BOTH_FILE, both, sizes)
    with _understood(folder):
        longest = int(size.get("longest_edge") or tower.config.get("image_size") or 1540)
        pixels = PixelSettings(1, longest**2, *_mean_and_std(image))
        return ProcessorSettings(
            patch_size=sizes["patch_size"],
            temporal_patch_size=1,
            merge_size=tower.merge_size,
            image=pixels,
            video=pixels,
            image_token_id=config.get("image_token_id") or config.get("image_token_index", tower.image_token_id),
            video_token_id=-1,
            vision_start_token_id=-1,
            vision_end_token_id=-1,
            longest_side=longest,
            takes_pixels=False,
        )


def _with_lines(folder: Path, settings: ProcessorSettings, both: dict[str, Any]) -> ProcessorSettings:
    """The settings with the tokens that end lines."""
    ids = _added_tokens(folder)
    with _understood(folder):
        end, last = (ids[both.get(f"image_{of}_token", f"[IMG_{of.upper()}]")] for of in ("break", "end"))
    return replace(settings, line_ends=(end, last))


def _of_pictures(
    folder: Path, config: dict[str, Any], vision: dict[str, Any], image: dict[str, Any], alone: _Alone
) -> ProcessorSettings:
    """Pictures alone, scaled as Qwen2-VL's."""
    sizes = {"patch_size": vision.get("patch_size", 14), "merge_size": vision.get("spatial_merge_size", 2)}
    sizes["temporal_patch_size"] = alone.temporal_patch_size
    _check_processor(folder / _IMAGE_FILE, image, sizes)
    with _understood(folder):
        pixels = _pixels(image, alone.of_model.image, alone.of_model)
        return ProcessorSettings(
            **sizes,
            image=pixels,
            video=pixels,
            image_token_id=config.get("image_token_id", alone.image_token_id),
            video_token_id=-1,
            vision_start_token_id=config.get("vision_start_token_id", alone.start_token_id),
            vision_end_token_id=config.get("vision_end_token_id", alone.end_token_id),
            lifts=alone.lifts,
            takes_pixels=False,
        )


def _of_idefics3(
    folder: Path, config: dict[str, Any], vision: dict[str, Any], image: dict[str, Any], both: dict[str, Any]
) -> ProcessorSettings:
    """Pictures alone, in tiles whose places are told in words."""
    patch_size, merge_size = vision.get("patch_size", 32), config.get("scale_factor", 2)
    expected = {"do_image_splitting": True, "do_pad": True, "resample": LANCZOS}
    _check_processor(folder / _IMAGE_FILE, image, expected)
    side = vision.get("image_size", 224)
    tokens = (side // patch_size // merge_size) ** 2
    _check_processor(folder / _BOTH_FILE, both, {"image_seq_len": tokens})
    with _understood(folder):
        told = (image.get(key) or {"longest_edge": usual} for key, usual in (("size", 1456), ("max_image_size", 364)))
        longest, tile = (int(each["longest_edge"]) for each in told)
        if tile != side or longest > _IDEFICS3_LONGEST:
            raise CheckpointError(
                f"{folder}: max_image_size is {tile} and size {longest}, but supported are {side}, the tower's own, "
                f"and up to {_IDEFICS3_LONGEST}"
            )
        mean, std = (image.get(f"image_{of}") or _HALF for of in ("mean", "std"))
        pixels = PixelSettings(side**2, side**2, tuple(map(float, mean)), tuple(map(float, std)))
        return ProcessorSettings(
            patch_size=patch_size,
            temporal_patch_size=1,
            merge_size=merge_size,
            image=pixels,
            video=pixels,
            image_token_id=config.get("image_token_id", 128_257),
            video_token_id=-1,
            vision_start_token_id=-1,
            vision_end_token_id=-1,
            fixed_side=side,
            tiles_longest=longest,
            tile_words=_IDEFICS3_WORDS,
            resample=LANCZOS,
            takes_pixels=False,
        )


def _of_aya_vision(
    folder: Path, config: dict[str, Any], vision: dict[str, Any], image: dict[str, Any], both: dict[str, Any]
) -> ProcessorSettings:
    """Pictures alone, in tiles as InternVL's, whose numbers are told in words."""
    side, patch_size = vision.get("image_size", 224), vision.get("patch_size", 16)
    merge_size = config.get("downsample_factor", 2)
    _check_processor(folder / _IMAGE_FILE, image, {"size": {"height": side, "width": side}, "do_center_crop": False})
    words = {
        f"{of}_token": text for of, text in (("image", "<image>"), ("tile", "TILE"), ("tile_global", "TILE_GLOBAL"))
    }
    sizes = {"img_size": side, "patch_size": patch_size, "downsample_factor": merge_size}
    _check_processor(folder / _BOTH_FILE, both, sizes | words)
    with _understood(folder):
        pixels = PixelSettings(side**2, side**2, *_mean_and_std(image))
        return ProcessorSettings(
            patch_size=patch_size,
            temporal_patch_size=1,
            merge_size=merge_size,
            image=pixels,
            video=pixels,
            image_token_id=config.get("image_token_id") or config.get("image_token_index", 255_036),
            video_token_id=-1,
            vision_start_token_id=-1,
            vision_end_token_id=-1,
            fixed_side=side,
            tiles=(int(image.get("min_patches") or 1), int(image.get("max_patches") or 12)),
            tile_words=_AYA_WORDS,
            takes_pixels=False,
        )


def _of_cohere2_vision(
    folder: Path, config: dict[str, Any], vision: dict[str, Any], image: dict[str, Any]
) -> ProcessorSettings:
    """Pictures alone, in tiles of which a token ends each."""
    side, patch_size = vision.get("image_size", 512), vision.get("patch_size", 16)
    merge_size = config.get("downsample_factor", 2)
    expected = {"size": {"height": side, "width": side}, "crop_to_patches": True}
    _check_processor(folder / _IMAGE_FILE, image, expected | {"patch_size": side // patch_size // merge_size})
    told = _read(folder / "tokenizer_config.json")
    with _understood(folder):
        start, end, after, placeholder = (
            _text_of(told.get(f"{of}_token"), usual)
            for of, usual in (
                ("boi", "<|START_OF_IMG|>"),
                ("eoi", "<|END_OF_IMG|>"),
                ("img_line_break", "<|IMG_LINE_BREAK|>"),
                ("image", None),
            )
        )
        pixels = PixelSettings(side**2, side**2, *_mean_and_std(image))
        return ProcessorSettings(
            patch_size=patch_size,
            temporal_patch_size=1,
            merge_size=merge_size,
            image=pixels,
            video=pixels,
            image_token_id=config.get("image_token_id", 255_036),
            video_token_id=-1,
            vision_start_token_id=-1,
            vision_end_token_id=-1,
            fixed_side=side,
            tiles=(1, int(image.get("max_patches") or 12)),
            tiles_fit=True,
            tile_words=TileWords("", "", "", "", end or "", start or "", placeholder, after or ""),
            takes_pixels=False,
        )


def _of_lfm2_vl(
    folder: Path, config: dict[str, Any], vision: dict[str, Any], image: dict[str, Any]
) -> ProcessorSettings:
    """Pictures alone, of any size; large ones are cut into tiles, whose places are told in words."""
    patch_size, merge_size = vision.get("patch_size", 16), config.get("downsample_factor", 2)
    expected = {
        "downsample_factor": merge_size,
        "encoder_patch_size": patch_size,
        "max_pixels_tolerance": 2.0,
        "resample": BILINEAR,
        "use_thumbnail": True,
        "do_image_splitting": True,
    }
    _check_processor(folder / _IMAGE_FILE, image, expected)
    with _understood(folder):
        square = (patch_size * merge_size) ** 2
        mean, std = (tuple(map(float, image.get(f"image_{of}") or _HALF)) for of in ("mean", "std"))
        least, most = (int(image.get(f"{of}_image_tokens") or usual) for of, usual in (("min", 64), ("max", 256)))
        pixels = PixelSettings(least * square, most * square, mean, std)
        return ProcessorSettings(
            patch_size=patch_size,
            temporal_patch_size=1,
            merge_size=merge_size,
            image=pixels,
            video=pixels,
            image_token_id=config.get("image_token_id", 396),
            video_token_id=-1,
            vision_start_token_id=-1,
            vision_end_token_id=-1,
            tiles=(int(image.get("min_tiles") or 2), int(image.get("max_tiles") or 10)),
            tile_side=int(image.get("tile_size") or 512),
            tile_words=_LFM2_VL_WORDS,
            resample=BILINEAR,
            takes_pixels=False,
        )


def _text_of(token: Any, usual: str | None) -> str | None:
    """A special token's text, which may be told with its properties."""
    told = token.get("content") if isinstance(token, dict) else token
    return str(told) if told else usual


def _of_joined_tiles(
    folder: Path, config: dict[str, Any], vision: dict[str, Any], image: dict[str, Any], both: dict[str, Any]
) -> ProcessorSettings:
    """Pictures alone, in tiles that are joined; those of the class token are left out."""
    of_model = _JOINED[config["model_type"]]
    side, patch_size = vision.get("image_size", of_model.side), vision.get("patch_size", 14)
    _check_processor(folder / _IMAGE_FILE, image, {**of_model.size(side), "do_pad": True})
    aspect = config.get("vision_aspect_ratio", _ASPECT)
    told = {"num_image_tokens": (side // patch_size) ** 2, "vision_aspect_ratio": aspect, "patch_size": patch_size}
    _check_processor(folder / _BOTH_FILE, both, told)
    with _understood(folder):
        listed = [each or None for each in (config.get("image_grid_pinpoints"), image.get("image_grid_pinpoints"))]
        of_both = [
            of_model.resolutions if each is None else tuple((int(h), int(w)) for h, w in each) for each in listed
        ]
        resolutions = of_both[0]
        if of_both[0] != of_both[1] or any(pixels % side or pixels < 1 for each in resolutions for pixels in each):
            raise CheckpointError(
                f"{folder}: image_grid_pinpoints must be multiples of {side}, and the same in config.json and "
                f"{_IMAGE_FILE}"
            )
        most = int(aspect.removeprefix("anyres_max_")) if of_model.shrinks else None
        usual = {"image_mean": of_model.mean, "image_std": of_model.std}
        mean, std = (tuple(map(float, image.get(key) or values)) for key, values in usual.items())
        pixels = PixelSettings(side**2, side**2, mean, std)
        return ProcessorSettings(
            patch_size=patch_size,
            temporal_patch_size=1,
            merge_size=1,
            image=pixels,
            video=pixels,
            image_token_id=config.get("image_token_id") or config.get("image_token_index", of_model.image_token_id),
            video_token_id=-1,
            vision_start_token_id=-1,
            vision_end_token_id=-1,
            fixed_side=side,
            resolutions=resolutions,
            most_tiles=most,
            several_whole=of_model.shrinks,
            takes_pixels=False,
        )


def _of_llava(
    folder: Path, config: dict[str, Any], vision: dict[str, Any], image: dict[str, Any], both: dict[str, Any]
) -> ProcessorSettings:
    """Pictures alone, of which the middle is seen, in one size; transformers 4 says sides as one number."""
    side, patch_size = vision.get("image_size", 224), vision.get("patch_size", 32)
    told, crop = (
        {name: each} if isinstance(each := image.get(key), int) else each
        for key, name in (("size", "shortest_edge"), ("crop_size", "height"))
    )
    crop = crop and {"height": crop.get("height"), "width": crop.get("width", crop.get("height"))}
    sizes = {"size": {"shortest_edge": side}, "crop_size": {"height": side, "width": side}}
    expected = sizes | {"do_center_crop": True, "do_pad": False}
    _check_processor(folder / _IMAGE_FILE, {**image, "size": told, "crop_size": crop}, expected)
    of_tokens = {
        "patch_size": patch_size,
        "num_additional_image_tokens": 1,
        "vision_feature_select_strategy": "default",
    }
    _check_processor(folder / _BOTH_FILE, both, of_tokens)
    with _understood(folder):
        pixels = PixelSettings(side**2, side**2, *_mean_and_std(image))
        return ProcessorSettings(
            patch_size=patch_size,
            temporal_patch_size=1,
            merge_size=1,
            image=pixels,
            video=pixels,
            image_token_id=config.get("image_token_id") or config.get("image_token_index", 32_000),
            video_token_id=-1,
            vision_start_token_id=-1,
            vision_end_token_id=-1,
            fixed_side=side,
            crops=True,
            takes_pixels=False,
        )


def _of_gemma3(
    folder: Path, config: dict[str, Any], vision: dict[str, Any], image: dict[str, Any]
) -> ProcessorSettings:
    """Pictures alone, all of one size."""
    side, patch_size = vision.get("image_size", 224), vision.get("patch_size", 16)
    size = {"height": side, "width": side}
    expected = {"size": size, "do_pan_and_scan": False, "resample": BILINEAR}
    _check_processor(folder / _IMAGE_FILE, image, expected)
    with _understood(folder):
        mean, std = (image.get(f"image_{of}") or _HALF for of in ("mean", "std"))
        pixels = PixelSettings(1, side**2, tuple(map(float, mean)), tuple(map(float, std)))
        return ProcessorSettings(
            patch_size=patch_size,
            temporal_patch_size=1,
            merge_size=side // patch_size // math.isqrt(config.get("mm_tokens_per_image") or 256),
            image=pixels,
            video=pixels,
            image_token_id=config.get("image_token_id") or config.get("image_token_index", 262_144),
            video_token_id=-1,
            vision_start_token_id=config.get("boi_token_index", 255_999),
            vision_end_token_id=config.get("eoi_token_index", 256_000),
            fixed_side=side,
            resample=BILINEAR,
            written="start",
            takes_pixels=False,
        )


def _of_gemma4(
    folder: Path, config: dict[str, Any], vision: dict[str, Any], image: dict[str, Any], video: dict[str, Any]
) -> ProcessorSettings:
    """Pictures and frames that fill a number of tokens; the tower normalizes. Without layers, a token is a patch."""
    patch_size, merge = vision.get("patch_size", 16), vision.get("pooling_kernel_size", 3)
    same = {"patch_size": patch_size, "pooling_kernel_size": merge}
    for file, values in ((_IMAGE_FILE, image), (_VIDEO_FILE, video)):
        told = values.get("do_normalize")
        changes_nothing = {} if told is False else {"image_mean": [0.0] * 3, "image_std": [1.0] * 3}
        _check_processor(folder / file, values, same | changes_nothing | {"do_normalize": told})
    square = (patch_size * merge) ** 2
    with _understood(folder):
        pixels, frame = (
            PixelSettings(square, int(values.get("max_soft_tokens") or tokens) * square, _HALF, _HALF)
            for values, tokens in ((image, 280), (video, 70))
        )
        is_free = config["model_type"] == "gemma4_unified"
        return ProcessorSettings(
            patch_size=patch_size * merge if is_free else patch_size,
            temporal_patch_size=1,
            merge_size=1 if is_free else merge,
            image=pixels,
            video=frame,
            image_token_id=config.get("image_token_id", 258_880),
            video_token_id=config.get("video_token_id", 258_884),
            vision_start_token_id=config.get("boi_token_id", 255_999),
            vision_end_token_id=config.get("eoi_token_id", 258_882),
            num_frames=int(video.get("num_frames") or 32),
            fills=True,
            written="image",
            times="minutes",
            takes_pixels=False,
        )


def _of_internvl(
    folder: Path, config: dict[str, Any], vision: dict[str, Any], image: dict[str, Any], video: dict[str, Any]
) -> ProcessorSettings:
    """Pictures in tiles of one size, and frames like one tile, whose placeholders are those of pictures.

    Sizes and normalization of frames are those of pictures, on which the model was trained: folders were published with
    384 pixels for frames, which transformers' model can't take.
    """
    side, patch_size = (_side(vision.get(key, usual)) for key, usual in (("image_size", 448), ("patch_size", 14)))
    tile = {"size": {"height": side, "width": side}, "do_center_crop": False}
    _check_processor(folder / _IMAGE_FILE, image, tile)
    ids = _added_tokens(folder)
    with _understood(folder):
        pixels = PixelSettings(side**2, side**2, *_mean_and_std(image))
        return ProcessorSettings(
            patch_size=patch_size,
            temporal_patch_size=1,
            merge_size=2,
            image=pixels,
            video=pixels,
            image_token_id=config.get("image_token_id", 151_667),
            video_token_id=ids.get("<video>", -1),
            vision_start_token_id=ids["<img>"],
            vision_end_token_id=ids["</img>"],
            num_frames=int(video.get("num_frames") or 8),  # as in what is published about the models
            sampling="middles",
            fixed_side=side,
            tiles=(int(image.get("min_patches") or 1), int(image.get("max_patches") or 12)),
            written="image",
            times="numbers",
            frame_token_id=config.get("image_token_id", 151_667),
            takes_pixels=False,
        )


def _side(told: Any) -> Any:
    """A number of pixels, which may be told for both sides."""
    return told[0] if isinstance(told, list) and len(told) == 2 and told[0] == told[1] else told


def _of_glm4v(
    folder: Path,
    config: dict[str, Any],
    vision: dict[str, Any],
    image: dict[str, Any],
    video: dict[str, Any],
    both: dict[str, Any],
) -> ProcessorSettings:
    """A picture counts as two frames; frames of a video are pictures within its tokens, each before its time."""
    sizes = {
        "patch_size": vision.get("patch_size", 14),
        "temporal_patch_size": vision.get("temporal_patch_size", 2),
        "merge_size": vision.get("spatial_merge_size", 2),
    }
    for file, values in ((_IMAGE_FILE, image), (_VIDEO_FILE, video)):
        _check_processor(folder / file, values, sizes)
    tokenizer = _read(folder / "tokenizer_config.json")
    usual = "Glm46VProcessor" if config["model_type"] == "glm46v" else None
    writes = _glm_class(folder, [*(each.get("processor_class") for each in (both, image, video, tokenizer)), usual])
    samples = _glm_class(folder, [video.get("video_processor_type"), image.get("image_processor_type"), writes])
    first, start = _GLM4V_TOKENS[config["model_type"]]
    with _understood(folder):
        settings = ProcessorSettings(
            **sizes,
            image=_pixels(image, _GLM4V.image, _GLM4V),
            video=_pixels(video or _normalization(image), _GLM4V.video, _GLM4V),
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
            takes_pixels=False,
        )
    _check_normalization(folder, settings)
    return settings


def _glm_class(folder: Path, told: list[str | None]) -> str:
    """The first of the processors' classes that are told; GLM-4.1V's, if none is. Raises `CheckpointError`."""
    name = next(filter(None, told), "Glm4vProcessor")
    if not isinstance(name, str) or _GLM_CLASS.fullmatch(name) is None:
        raise CheckpointError(
            f"{folder} names the processor {name}, but of GLM's models only Glm4v's and Glm46V's are supported"
        )
    return name


@contextlib.contextmanager
def _understood(folder: Path) -> Iterator[None]:
    """Makes an error of what the files say a `CheckpointError` that names the folder."""
    try:
        yield
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"the image processor of {folder} can't be understood: {error!r}") from error


def _mean_and_std(values: dict[str, Any]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """What `values` say, or CLIP's."""
    mean, std = (values.get(f"image_{of}") or clip for of, clip in zip(("mean", "std"), _CLIP, strict=True))
    return tuple(map(float, mean)), tuple(map(float, std))


def _added_tokens(folder: Path) -> dict[str, int]:
    """The ids of tokens that the tokenizer's files list one by one."""
    listed = _read(folder / "tokenizer.json").get("added_tokens") or []
    by_id = _read(folder / "tokenizer_config.json").get("added_tokens_decoder") or {}
    found = {token["content"]: int(number) for number, token in by_id.items()}
    return found | {token["content"]: int(token["id"]) for token in listed}


def _pixels(values: dict[str, Any], limits: tuple[int, int], of_model: _OfModel) -> PixelSettings:
    """Older files have min_pixels and max_pixels in place of `size`."""
    size = values.get("size") or {}
    low = values.get("min_pixels") or size.get("shortest_edge") or limits[0]
    high = values.get("max_pixels") or size.get("longest_edge") or limits[1]
    mean, std = values.get("image_mean") or of_model.mean, values.get("image_std") or of_model.std
    return PixelSettings(int(low), int(high), tuple(map(float, mean)), tuple(map(float, std)))


def _normalization(image: dict[str, Any]) -> dict[str, Any]:
    """What a folder that says nothing of videos says of them, as Qwen2-VL's: their limits are then the model's."""
    return {key: image[key] for key in ("image_mean", "image_std") if key in image}


def _check_normalization(folder: Path, settings: ProcessorSettings) -> None:
    """Raises `CheckpointError` for videos with a normalization of their own: the engine has one for all pixels."""
    image, video = ((pixels.mean, pixels.std) for pixels in (settings.image, settings.video))
    if image != video:
        raise CheckpointError(f"{folder}: mean and deviation are {image} of images, {video} of videos, but must agree")


def _check_processor(path: Path, values: dict[str, Any], sizes: dict[str, Any]) -> None:
    """Raises `CheckpointError` for steps that are not built."""
    expected = {
        **dict.fromkeys(("do_resize", "do_rescale", "do_normalize", "do_convert_rgb"), True),
        "resample": BICUBIC,
        **sizes,
    }
    for name, needed in expected.items():
        if values.get(name, needed) not in (needed, None):
            raise CheckpointError(f"{path}: {name} is {values[name]}, but only {needed} is supported")
    factor = values.get("rescale_factor")
    if factor is not None and abs(factor - _RESCALE) > 1e-9:
        raise CheckpointError(f"{path}: rescale_factor is {factor}, but only 1/255 is supported")


def _read(path: Path) -> dict[str, Any]:
    """Returns {} for a missing file."""
    return read_object(path) if path.is_file() else {}
