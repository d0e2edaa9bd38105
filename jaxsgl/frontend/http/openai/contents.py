"""The contents of chat messages: texts, and parts among which pictures and videos may be.

Turns a content into what chat templates take, and collects what is to be loaded. chat.py calls it.
"""

from __future__ import annotations

from typing import Any

from jaxsgl.errors import InvalidRequest
from jaxsgl.frontend.http.openai.schemas import ContentPart, MediaUrl
from jaxsgl.preprocess.sources import ImageSource, Source, VideoSource

_IMAGES = {"image_url": "image_url", "input_image": "image_url", "image": "image"}  # type -> field that names the file
_VIDEOS = {"video_url": "video_url", "input_video": "video_url", "video": "video"}
_TEXTS = ("text", "input_text")


def content_of(index: int, content: str | list[ContentPart] | None, media: list[Source]) -> str | list[dict[str, Any]]:
    """Returns the content of messages[index] for the template, and adds its pictures and videos to `media`.

    The texts of several parts are joined by line breaks, as in vLLM, unless there are pictures among them: then the
    template gets the parts. Raises `InvalidRequest` for a part of another kind.
    """
    if content is None or isinstance(content, str):
        return content or ""
    parts = [_part(f"messages[{index}].content[{number}]", part, media) for number, part in enumerate(content)]
    if all(part["type"] == "text" for part in parts):
        return "\n".join(part["text"] for part in parts)
    return parts


def _part(name: str, part: ContentPart, media: list[Source]) -> dict[str, Any]:
    if part.type in _TEXTS and part.text is not None:
        return {"type": "text", "text": part.text}
    if part.type in _IMAGES:
        media.append(ImageSource(_url(name, getattr(part, _IMAGES[part.type]), _IMAGES[part.type])))
        return {"type": "image"}
    if part.type in _VIDEOS:
        media.append(_video(name, part))
        return {"type": "video"}
    raise InvalidRequest(
        f'{name} is of type {part.type[:100]}, but must be text, image_url or video_url: send {{"type": "text", '
        '"text": ...} or {"type": "image_url", "image_url": {"url": ...}}'
    )


def _video(name: str, part: ContentPart) -> VideoSource:
    field = _VIDEOS[part.type]
    given = getattr(part, field)
    fps = given.fps if isinstance(given, MediaUrl) and given.fps is not None else part.fps
    if isinstance(given, list):
        return VideoSource(tuple(given), fps)
    return VideoSource(_url(name, given, field), fps)


def _url(name: str, given: MediaUrl | str | None, field: str) -> str:
    url = given.url if isinstance(given, MediaUrl) else given
    if not url:
        raise InvalidRequest(f'{name} names no file: send "{field}": {{"url": "data:...;base64,..."}}')
    return url
