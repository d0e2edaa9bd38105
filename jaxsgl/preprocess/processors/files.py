"""The files that say what a processor does, and what all readers of them share."""

from __future__ import annotations

import contextlib
from collections.abc import Container, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from jaxsgl.errors import CheckpointError
from jaxsgl.json_file import read_object
from jaxsgl.preprocess.settings import BICUBIC, PixelSettings, ProcessorSettings

HALF = (0.5, 0.5, 0.5)
CLIP = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
IMAGE_FILE = "preprocessor_config.json"
_VIDEO_FILE, _BOTH_FILE = "video_preprocessor_config.json", "processor_config.json"
_RESCALE = 1 / 255


class OfModel(NamedTuple):
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


@dataclass(frozen=True)
class ProcessorFiles:
    """What the files of a model's folder say; {} for what is missing.

    Attributes:
      folder: where they are.
      config: config.json.
      tower: its part about the tower.
      image, video: what is done to pictures, and to videos.
      both: processor_config.json.
    """

    folder: Path
    config: dict[str, Any]
    tower: dict[str, Any]
    image: dict[str, Any]
    video: dict[str, Any]
    both: dict[str, Any]

    @property
    def model_type(self) -> str:
        """The model's kind, by which a reader is chosen."""
        return str(self.config.get("model_type"))

    def image_token_id(self, usual: int) -> int:
        """The placeholder of pictures, which transformers 4 calls an index."""
        return int(self.config.get("image_token_id") or self.config.get("image_token_index", usual))

    def check_image(self, needed: dict[str, Any], image: dict[str, Any] | None = None) -> None:
        """Raises `CheckpointError` if pictures (`image`: what is said of them, in one form) need steps not built."""
        _check_steps(self.folder / IMAGE_FILE, self.image if image is None else image, needed)

    def check_video(self, needed: dict[str, Any]) -> None:
        """Raises `CheckpointError` if videos need steps that are not built."""
        _check_steps(self.folder / _VIDEO_FILE, self.video, needed)

    def check_both(self, needed: dict[str, Any]) -> None:
        """Raises `CheckpointError` if the processor as a whole needs steps that are not built."""
        _check_steps(self.folder / _BOTH_FILE, self.both, needed)

    @contextlib.contextmanager
    def understood(self) -> Iterator[None]:
        """Makes an error of what the files say a `CheckpointError` that names the folder."""
        try:
            yield
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"the image processor of {self.folder} can't be understood: {error!r}") from error

    def tokenizer(self) -> dict[str, Any]:
        """Returns tokenizer_config.json."""
        return _read(self.folder / "tokenizer_config.json")

    def added_tokens(self) -> dict[str, int]:
        """The ids of tokens that the tokenizer's files list one by one."""
        listed = _read(self.folder / "tokenizer.json").get("added_tokens") or []
        by_id = self.tokenizer().get("added_tokens_decoder") or {}
        found = {token["content"]: int(number) for number, token in by_id.items()}
        return found | {token["content"]: int(token["id"]) for token in listed}


def read_files(folder: Path, hearing: Container[str]) -> ProcessorFiles | None:
    """Returns what the files of `folder` say, None if the model has no tower. Raises `CheckpointError`.

    `hearing` are kinds of models whose towers hear.
    """
    config = _read(folder / "config.json")
    tower = config.get("audio_config" if config.get("model_type") in hearing else "vision_config")
    if not isinstance(tower, dict):
        return None
    both = _read(folder / _BOTH_FILE)
    image = _read(folder / IMAGE_FILE) or both.get("image_processor") or {}
    video = _read(folder / _VIDEO_FILE) or both.get("video_processor") or {}
    return ProcessorFiles(folder, config, tower, image, video, both)


def pixels_between(
    values: dict[str, Any], limits: tuple[int, int], mean: tuple[float, ...], std: tuple[float, ...]
) -> PixelSettings:
    """What `values` say, or else the model's. Older files have min_pixels and max_pixels in place of `size`."""
    size = values.get("size") or {}
    low = values.get("min_pixels") or size.get("shortest_edge") or limits[0]
    high = values.get("max_pixels") or size.get("longest_edge") or limits[1]
    return normalized(values, int(low), int(high), mean, std)


def normalized(
    values: dict[str, Any],
    low: int,
    high: int,
    mean: tuple[float, ...] = CLIP[0],
    std: tuple[float, ...] = CLIP[1],
) -> PixelSettings:
    """Limits of pixels, with the mean and deviation that `values` say, or else with these."""
    mean, std = values.get("image_mean") or mean, values.get("image_std") or std
    return PixelSettings(low, high, tuple(map(float, mean)), tuple(map(float, std)))


def normalization(image: dict[str, Any]) -> dict[str, Any]:
    """What a folder that says nothing of videos says of them, as Qwen2-VL's: their limits are then the model's."""
    return {key: image[key] for key in ("image_mean", "image_std") if key in image}


def check_normalization(folder: Path, settings: ProcessorSettings) -> None:
    """Raises `CheckpointError` for videos with a normalization of their own: the engine has one for all pixels."""
    image, video = ((pixels.mean, pixels.std) for pixels in (settings.image, settings.video))
    if image != video:
        raise CheckpointError(f"{folder}: mean and deviation are {image} of images, {video} of videos, but must agree")


def _check_steps(path: Path, values: dict[str, Any], needed: dict[str, Any]) -> None:
    usual = {**dict.fromkeys(("do_resize", "do_rescale", "do_normalize", "do_convert_rgb"), True), "resample": BICUBIC}
    for name, need in (usual | needed).items():
        if values.get(name, need) not in (need, None):
            raise CheckpointError(f"{path}: {name} is {values[name]}, but only {need} is supported")
    factor = values.get("rescale_factor")
    if factor is not None and abs(factor - _RESCALE) > 1e-9:
        raise CheckpointError(f"{path}: rescale_factor is {factor}, but only 1/255 is supported")


def _read(path: Path) -> dict[str, Any]:
    """Returns {} for a missing file."""
    return read_object(path) if path.is_file() else {}
