"""Pictures and videos of offline prompts: PIL images, files, paths and data: URLs. `LLM` calls it.

A prompt with media is `{"prompt": ..., "multi_modal_data": {"image": ..., "video": ...}}` as in vLLM, with a
placeholder for each picture in the text; in chats, contents have parts such as `{"type": "image", "image": ...}`.
Nothing is fetched.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxsgl.errors import InvalidRequest
from jaxsgl.preprocess.settings import load_settings
from jaxsgl.preprocess.sources import Budget, File, ImageFile, VideoFile, data_of
from jaxsgl.requests.media import MediaItem, MediaLimits
from jaxsgl.text.tokenizer import TemplateOptions, Tokenizer, Turn

_MAX_BYTES = 1 << 32  # of a data: URL
_TEXT_ALONE = (
    "the prompt has images or videos, but the model takes text alone: leave them out, or load a model with a vision "
    "tower"
)
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
    if set(data) - {"image", "video"}:
        raise InvalidRequest(f"multi_modal_data has the keys {sorted(data)}, but may have image and video")
    files: list[File] = [ImageFile(_content(image)) for image in _as_list(data.get("image"))]
    files += [_video(video) for video in _as_list(data.get("video"))]
    return OfflinePrompt(given["prompt"] if "prompt" in given else given["prompt_token_ids"], files)


def read_chat(turns: Sequence[Mapping[str, Any]]) -> tuple[list[Turn], list[File]]:
    """Returns `turns` as chat templates take them, and their files. Raises `InvalidRequest`.

    Texts of several parts are joined by line breaks, as servers do, unless there are pictures or videos among them.
    """
    files: list[File] = []
    return [_turn(turn, files) for turn in turns], files


class OfflineMedia:
    """Prepares prompts for the model in `folder`, whose vision tower has `limits`, or None if it has none."""

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

        bounds = Bounds(self._limits.max_patches, self._limits.max_request_patches, MOST_PIXELS)
        visuals = load(given.files, settings, bounds)
        if isinstance(given.prompt, str):
            text = write_placeholders(given.prompt, visuals, tokens_of(settings, self._tokenizer.token_bytes))
            ids = self._tokenizer.encode(text, add_special_tokens)
        else:
            ids = expand_placeholders(given.prompt, visuals, settings, lambda text: self._tokenizer.encode(text, False))
        return expand(ids, visuals, settings)

    def prepare_chat(self, turns: Sequence[Turn], files: list[File]) -> tuple[list[int], tuple[MediaItem, ...]]:
        """The same for the text that the chat template makes of `turns`, to whose placeholders `files` belong."""
        if self._limits is None:  # before a template that knows no parts fails
            raise InvalidRequest(_TEXT_ALONE)
        text = self._tokenizer.render_chat(turns, TemplateOptions())
        return self.prepare(OfflinePrompt(text, files), add_special_tokens=False)


def _turn(turn: Any, files: list[File]) -> Turn:
    if not isinstance(turn, Mapping):
        raise InvalidRequest(f'a turn is a {type(turn).__name__}, but must be {{"role": ..., "content": ...}}')
    if not ("role" in turn and "content" in turn):
        raise InvalidRequest(f"a turn has the keys {sorted(turn)}, but needs role and content")
    role, content = turn["role"], turn["content"]
    if content is None or isinstance(content, str):
        return {"role": role, "content": content or ""}
    if not isinstance(content, list | tuple):
        raise InvalidRequest(f"a content is a {type(content).__name__}, but must be a text or a list of parts")
    parts = [_part(part, files) for part in content]
    if all(part["type"] == "text" for part in parts):
        return {"role": role, "content": "\n".join(part["text"] for part in parts)}
    return {"role": role, "content": parts}


def _part(part: Any, files: list[File]) -> dict[str, Any]:
    if not isinstance(part, Mapping):
        raise InvalidRequest(f'a part is a {type(part).__name__}, but must be as {{"type": "text", "text": ...}}')
    kind = part.get("type")
    if kind == "text":
        if not isinstance(part.get("text"), str):
            raise InvalidRequest('a part is of type text without a text: give {"type": "text", "text": ...}')
        return {"type": "text", "text": part["text"]}
    if kind not in ("image", "image_url", "video", "video_url"):
        raise InvalidRequest(f"a part is of type {kind!r}, but must be text, image, image_url, video or video_url")
    given, fps = part.get(kind), part.get("fps")
    if isinstance(given, Mapping):
        fps = given.get("fps", fps)
        given = given.get("url")
    if kind.startswith("image"):
        files.append(ImageFile(_content(given)))
        return {"type": "image"}
    files.append(_video(given, _fps(fps)))
    return {"type": "video"}


def _fps(given: Any) -> float | None:
    if given is None:
        return None
    if isinstance(given, bool) or not (isinstance(given, int | float) and 0.001 <= given <= 1000):
        raise InvalidRequest(f"fps is {given!r:.100}, but must be a number of 0.001 to 1000")
    return float(given)


def _video(given: Any, fps: float | None = None) -> VideoFile:
    if isinstance(given, list | tuple):
        return VideoFile(tuple(_content(frame) for frame in given), fps)
    content = _content(given, ("video", "image"))
    return VideoFile(content if isinstance(content, bytes) else (content,), fps)


def _content(given: Any, kinds: tuple[str, ...] = ("image",)) -> Any:
    """Returns a picture as it is, or the content of a file."""
    if hasattr(given, "getbands") or isinstance(given, bytes):
        return given
    if isinstance(given, str) and given[:5].lower() == "data:":
        return data_of(given, kinds, Budget(_MAX_BYTES), "a picture")
    if isinstance(given, str | Path):
        try:
            return Path(given).read_bytes()
        except (OSError, ValueError) as error:
            raise InvalidRequest(f"the picture {str(given)[:200]} can't be read: {error}") from None
    raise InvalidRequest(
        f"a picture is a {type(given).__name__}, but must be a PIL image, bytes, a path or a data: URL"
    )


def _as_list(given: Any) -> list[Any]:
    if given is None:
        return []
    return list(given) if isinstance(given, list | tuple) else [given]
