"""What clients name media by, and the files that come of it: data: URLs here, http(s) by the front end.

Knows no protocol and no network. `frontend/media/fetch.py` fetches what is left as a URL.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from jaxsgl.errors import InvalidRequest

if TYPE_CHECKING:
    from PIL import Image  # text-only servers never load it

_DATA_URL = re.compile(r"data:([\w.+-]+/[\w.+-]+)?((?:;[\w.+-]+=[^;,]*)*)(;base64)?,", re.ASCII | re.IGNORECASE)
_HEAD_CHARS = 256
MAX_FRAMES = 4096  # of a list; how many a model takes is known later
FRAME_LIST_TYPE = "video/jpeg"  # vLLM's name for frames as JPEG files in base64, separated by commas

Content: TypeAlias = "bytes | Image.Image"


class Budget:
    """Bytes that the files of a request may still have."""

    def __init__(self, num_bytes: int) -> None:
        self._most = self._left = num_bytes

    def check(self, num_bytes: int, name: str) -> None:
        """Raises `InvalidRequest` if so many are too many; `name` says which file it is."""
        if num_bytes > self._left:
            raise InvalidRequest(
                f"with {name} the request has more than {self._most} bytes of pictures, videos and "
                "sounds (--media-max-bytes): send fewer or smaller ones"
            )

    def take(self, num_bytes: int, name: str) -> None:
        """Counts bytes. Raises `InvalidRequest` if they are too many."""
        self.check(num_bytes, name)
        self._left -= num_bytes


@dataclass(frozen=True)
class ImageFile:
    """A picture's file, or a picture."""

    content: Content


@dataclass(frozen=True)
class VideoFile:
    """A video's file, or its frames, `fps` of them a second; None: as many as the model looks at."""

    content: bytes | tuple[Content, ...]
    fps: float | None = None


@dataclass(frozen=True)
class SoundFile:
    """A sound's file."""

    content: bytes


File: TypeAlias = ImageFile | VideoFile | SoundFile

Named: TypeAlias = "str | bytes | Image.Image"  # a URL, a file's content, or a decoded picture


@dataclass(frozen=True)
class ImageSource:
    """A picture as a client names it: by a data: or http(s) URL, or by its content."""

    named: Named


@dataclass(frozen=True)
class VideoSource:
    """A video as a client names it: a file, or its frames, `fps` of them a second."""

    named: str | bytes | tuple[Named, ...]
    fps: float | None = None


@dataclass(frozen=True)
class SoundSource:
    """A sound as a client names it: by a data: or http(s) URL, or by its content."""

    named: str | bytes


Source: TypeAlias = ImageSource | VideoSource | SoundSource
UNTOLD_TYPES = ("", "application/octet-stream", "binary/octet-stream")  # of files whose names say nothing
# Media types of files; sound may come in files of video.
IMAGE_KINDS, VIDEO_KINDS, SOUND_KINDS = ("image",), ("video", "image"), ("audio", "video")
_EXAMPLES = {"image": "image/png", "video": "video/mp4", "audio": "audio/wav"}


def check_taken(media: Sequence[Source | File], hears: bool, takes: str) -> None:
    """Raises `InvalidRequest` for media that a model doesn't take, which hears or else sees, and takes `takes`."""
    for number, each in enumerate(media):
        if isinstance(each, SoundSource | SoundFile) != hears:
            what = "a picture or video" if hears else "a sound"
            raise InvalidRequest(
                f"medium {number} of the request is {what}, but the model takes {takes} alone: leave it out"
            )


def is_remote(url: object) -> bool:
    """Whether something is a URL that must be fetched."""
    return isinstance(url, str) and url[:5].lower() != "data:"


def files_of(sources: Sequence[Source], fetched: Mapping[str, bytes], budget: Budget) -> list[File]:
    """Returns the files of `sources`, those at remote URLs from `fetched`. Raises `InvalidRequest`."""
    files: list[File] = []
    for number, source in enumerate(sources):
        if isinstance(source, ImageSource):
            content = _content(source.named, IMAGE_KINDS, fetched, budget, f"image {number}")
            if isinstance(content, tuple):
                raise InvalidRequest(f"image {number} is a list of frames: send it as a video")
            files.append(ImageFile(content))
            continue
        if isinstance(source, SoundSource):
            content = _content(source.named, SOUND_KINDS, fetched, budget, f"sound {number}")
            if not isinstance(content, bytes):
                raise InvalidRequest(f"sound {number} is a list of frames: send a file of sound")
            files.append(SoundFile(content))
            continue
        name = f"video {number}"
        if isinstance(source.named, tuple):
            if len(source.named) > MAX_FRAMES:
                raise InvalidRequest(f"{name} has {len(source.named)} frames, but may have {MAX_FRAMES}: send fewer")
            frames: list[Content] = []
            for frame in source.named:
                content = _content(frame, IMAGE_KINDS, fetched, budget, f"a frame of {name}")
                assert not isinstance(content, tuple)
                frames.append(content)
            files.append(VideoFile(tuple(frames), source.fps))
        else:
            content = _content(source.named, VIDEO_KINDS, fetched, budget, name)
            files.append(VideoFile(content if isinstance(content, bytes | tuple) else (content,), source.fps))
    return files


def _content(
    named: Named, kinds: tuple[str, ...], fetched: Mapping[str, bytes], budget: Budget, name: str
) -> Content | tuple[bytes, ...]:
    if isinstance(named, bytes):
        budget.take(len(named), name)
        return named
    if not isinstance(named, str):
        return named
    return fetched[named] if is_remote(named) else data_of(named, kinds, budget, name)


def data_of(url: str, kinds: tuple[str, ...], budget: Budget, name: str) -> bytes | tuple[bytes, ...]:
    """Returns the content of a data: URL; of vLLM's `video/jpeg`, the frames. Raises `InvalidRequest`.

    `kinds` are the main media types that are taken, as "image"; `name` says in errors which one it is.
    """
    head = _DATA_URL.match(url[:_HEAD_CHARS])
    if head is None or head[3] is None:
        raise InvalidRequest(f"{name} is no data: URL in base64: send data:{_EXAMPLES[kinds[0]]};base64,...")
    media_type = (head[1] or "").lower()
    check_type(media_type, kinds, name)
    text = url[head.end() :]
    if media_type == FRAME_LIST_TYPE:
        if text.count(",") >= MAX_FRAMES:
            raise InvalidRequest(f"{name} has {text.count(',') + 1} frames, but may have {MAX_FRAMES}: send fewer")
        return tuple(from_base64(frame, budget, f"frame {i} of {name}") for i, frame in enumerate(text.split(",")))
    return from_base64(text, budget, name)


def check_type(media_type: str, kinds: tuple[str, ...], name: str) -> None:
    """Raises `InvalidRequest` for a media type of none of these kinds; one that says nothing is taken."""
    if media_type not in UNTOLD_TYPES and media_type != "application/ogg" and media_type.partition("/")[0] not in kinds:
        raise InvalidRequest(f"{name} is of the type {media_type[:100]}, but must be {' or '.join(kinds)}")


def from_base64(text: str, budget: Budget, name: str) -> bytes:
    """Returns what `text` stands for, in lines or not. Raises `InvalidRequest`, before it decodes what is too long."""
    budget.take(len(text) * 3 // 4, name)
    try:
        content = base64.b64decode(text.replace("\n", "").replace("\r", ""), validate=True)
    except ValueError:
        raise InvalidRequest(f"{name} is no base64: encode the file again") from None
    if not content:
        raise InvalidRequest(f"{name} is empty: send a file")
    return content
