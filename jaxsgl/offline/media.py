"""Pictures, videos and sounds of offline prompts: PIL images, files, paths and data: URLs. `LLM` calls it.

A prompt with media is `{"prompt": ..., "multi_modal_data": {"image": ..., "video": ..., "audio": ...}}` as in vLLM,
with a placeholder for each in the text; chat.py reads those of chats. Nothing is fetched.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from jaxsgl.errors import InvalidRequest
from jaxsgl.preprocess.processors import load_settings
from jaxsgl.preprocess.sources import SOUND_KINDS, Budget, File, ImageFile, SoundFile, VideoFile, data_of
from jaxsgl.preprocess.waves import wave_of
from jaxsgl.requests.media import MediaItem, MediaLimits
from jaxsgl.text.tokenizer import TemplateOptions, Tokenizer, Turn

_MAX_BYTES = 1 << 32  # of a data: URL
_MAX_RATE = 1 << 20  # samples a second; what is refused where they are read is far less
_TEXT_ALONE = (
    "the prompt has images, videos or sounds, but the model takes text alone: leave them out, or load a model with a "
    "tower for them"
)
# By their main media type: what files are called, and what they may be given as.
_NAMES = {
    "image": ("picture", "a PIL image, bytes, a path or a data: URL"),
    "video": ("video", "bytes, a path, a data: URL or a list of frames"),
    "audio": ("sound", "bytes, a path, a data: URL, or samples and their rate"),
}
_KEYS = {"prompt", "prompt_token_ids", "multi_modal_data"}


class OfflinePrompt(NamedTuple):
    """A text or ids, and the files that belong to its placeholders."""

    prompt: str | Sequence[int]
    files: list[File]


def read_prompt(given: Mapping[str, Any]) -> OfflinePrompt:
    """Reads a prompt in vLLM's form. Raises `InvalidRequest`."""
    if set(given) - _KEYS or ("prompt" in given) == ("prompt_token_ids" in given):
        raise InvalidRequest(f"a prompt has the keys {sorted(given)}, but may have prompt or prompt_token_ids, and "
                             "multi_modal_data")  # fmt: skip
    data = given.get("multi_modal_data") or {}
    if set(data) - {"image", "video", "audio"}:
        raise InvalidRequest(f"multi_modal_data has the keys {sorted(data)}, but may have image, video and audio")
    files: list[File] = [ImageFile(content_of(image)) for image in _as_list(data.get("image"))]
    files += [video_of(video) for video in _as_list(data.get("video"))]
    sounds = data.get("audio")
    files += [sound_of(sound) for sound in ([sounds] if _are_samples(sounds) else _as_list(sounds))]
    return OfflinePrompt(given["prompt"] if "prompt" in given else given["prompt_token_ids"], files)


class OfflineMedia:
    """Prepares prompts for the model in `folder`, whose tower has `limits`, or None if it has none."""

    def __init__(self, folder: str, limits: MediaLimits | None, tokenizer: Tokenizer) -> None:
        self._folder = folder
        self._limits = limits
        self._tokenizer = tokenizer

    def prepare(self, given: OfflinePrompt, add_special_tokens: bool) -> tuple[list[int], tuple[MediaItem, ...]]:
        """Returns ids with a placeholder for each token of the media, and the media. Raises `InvalidRequest`."""
        settings = None if self._limits is None else load_settings(self._folder)
        if self._limits is None or settings is None:
            raise InvalidRequest(_TEXT_ALONE)
        from jaxsgl.preprocess.loading import Bounds, load  # imports Pillow, which text needs not
        from jaxsgl.preprocess.pictures import MOST_PIXELS
        from jaxsgl.preprocess.placeholders import expand, expand_placeholders, tokens_of, write_placeholders

        limits = self._limits
        bounds = Bounds(
            limits.max_patches,
            limits.max_request_patches,
            MOST_PIXELS,
            max_picture_patches=limits.max_picture_patches,
        )
        visuals = load(given.files, settings, bounds)
        if isinstance(given.prompt, str):
            text = write_placeholders(given.prompt, visuals, tokens_of(settings, self._tokenizer.token_bytes))
            ids = self._tokenizer.encode(text, add_special_tokens)
        else:
            ids = expand_placeholders(given.prompt, visuals, settings, lambda text: self._tokenizer.encode(text, False))
        return expand(ids, visuals, settings)

    def prepare_chat(
        self, turns: Sequence[Turn], files: list[File], options: TemplateOptions
    ) -> tuple[list[int], tuple[MediaItem, ...]]:
        """The same for the text that the chat template makes of `turns`, to whose placeholders `files` belong."""
        if self._limits is None:  # before a template that knows no parts fails
            raise InvalidRequest(_TEXT_ALONE)
        text = self._tokenizer.render_chat(turns, options)
        return self.prepare(OfflinePrompt(text, files), add_special_tokens=False)


def video_of(given: Any, fps: float | None = None) -> VideoFile:
    """Returns a file of video, or its frames in a list. Raises `InvalidRequest`."""
    if isinstance(given, list | tuple):
        return VideoFile(tuple(content_of(frame) for frame in given), fps)
    content = content_of(given, ("video", "image"))
    return VideoFile(content if isinstance(content, bytes) else (content,), fps)


def sound_of(given: Any) -> SoundFile:
    """Returns a file of sound, or samples in vLLM's form as one. Raises `InvalidRequest`."""
    if _are_samples(given):
        samples, rate = given
        return SoundFile(_wave_of(np.asarray(samples), rate))
    return SoundFile(content_of(given, SOUND_KINDS))


def _are_samples(given: Any) -> bool:
    return isinstance(given, list | tuple) and len(given) == 2 and isinstance(given[1], int | float | np.number)


def _wave_of(samples: npt.NDArray[Any], rate: float) -> bytes:
    if samples.ndim != 1 or samples.dtype.kind != "f" or not (0 <= rate <= _MAX_RATE and rate == int(rate)):
        raise InvalidRequest(
            f"the samples of a sound have the shape {samples.shape}, the type {samples.dtype} and the rate {rate}, but "
            "must be floats of -1 to 1 of one channel, and so many a second"
        )
    with np.errstate(over="ignore"):  # what is infinite is refused where it is read
        return wave_of(samples.astype(np.float32), int(rate))


def content_of(given: Any, kinds: tuple[str, ...] = ("image",)) -> Any:
    """Returns a picture as it is, or the content of a file. Raises `InvalidRequest`."""
    name, forms = _NAMES[kinds[0]]
    if isinstance(given, bytes) or (hasattr(given, "getbands") and kinds != SOUND_KINDS):
        return given
    if isinstance(given, str) and given[:5].lower() == "data:":
        return data_of(given, kinds, Budget(_MAX_BYTES), f"a {name}")
    if isinstance(given, str) and given[:8].lower().startswith(("http://", "https://")):
        raise InvalidRequest(f"the {name} {given[:200]} is a URL, but nothing is fetched here: give {forms}")
    if isinstance(given, str | Path):
        try:
            return Path(given).read_bytes()
        except (OSError, ValueError) as error:
            raise InvalidRequest(f"the {name} {str(given)[:200]} can't be read: {error}") from None
    raise InvalidRequest(f"a {name} is a {type(given).__name__}, but must be {forms}")


def _as_list(given: Any) -> list[Any]:
    if given is None:
        return []
    return list(given) if isinstance(given, list | tuple) else [given]
