"""What clients name a picture or video by, and the files that come of it: data: URLs here, http(s) by the front end.

Knows no protocol and no network. `frontend/media_fetch.py` fetches what is left as a URL.
"""

from __future__ import annotations

import base64
import binascii
import re
from dataclasses import dataclass
from typing import TypeAlias

from PIL import Image

from jaxsgl.errors import InvalidRequest

MAX_BYTES = 32 << 20  # of a picture or video
_DATA_URL = re.compile(r"data:([\w.+-]+/[\w.+-]+)?((?:;[\w.+-]+=[^;,]*)*)(;base64)?,", re.ASCII)
_HEAD_CHARS = 256
FRAME_LIST_TYPE = "video/jpeg"  # vLLM's name for frames as JPEG files in base64, separated by commas

Content: TypeAlias = "bytes | Image.Image"


@dataclass(frozen=True)
class ImageFile:
    """A picture's file, or a picture."""

    content: Content


@dataclass(frozen=True)
class VideoFile:
    """A video's file, or its frames, `fps` of them a second; None: as many as the model looks at."""

    content: bytes | tuple[Content, ...]
    fps: float | None = None


File: TypeAlias = ImageFile | VideoFile


def data_of(url: str, kinds: tuple[str, ...], max_bytes: int, name: str) -> tuple[str, bytes]:
    """Returns the media type and the content of a data: URL. Raises `InvalidRequest`.

    `kinds` are the main types that are taken, as "image"; `name` says in errors which one it is.
    """
    head = _DATA_URL.match(url[:_HEAD_CHARS])
    if head is None or head[3] is None:
        raise InvalidRequest(f"{name} is no data: URL in base64: send data:image/png;base64,...")
    media_type = (head[1] or "").lower()
    check_type(media_type, kinds, name)
    return media_type, from_base64(url[head.end() :], max_bytes, name)


def check_type(media_type: str, kinds: tuple[str, ...], name: str) -> None:
    """Raises `InvalidRequest` for a media type that is no picture or video."""
    if media_type.partition("/")[0] not in kinds:
        raise InvalidRequest(
            f"{name} is of the type {media_type[:100] or 'text/plain'}, but must be {' or '.join(kinds)}"
        )


def from_base64(text: str, max_bytes: int, name: str) -> bytes:
    """Returns what `text` stands for. Raises `InvalidRequest`, before it decodes what is too long."""
    num_bytes = len(text) * 3 // 4
    if num_bytes > max_bytes + 2:
        raise InvalidRequest(f"{name} has {num_bytes} bytes, but may have {max_bytes} (--media-max-bytes): send less")
    try:
        content = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise InvalidRequest(f"{name} is no base64: encode the file again") from None
    if not content:
        raise InvalidRequest(f"{name} is empty: send a file")
    return content


def frames_of(text: str, max_frames: int, max_bytes: int, name: str) -> tuple[bytes, ...]:
    """Returns the files in `text`, which are in base64 and separated by commas. Raises `InvalidRequest`."""
    count = text.count(",") + 1
    if count > max_frames:
        raise InvalidRequest(f"{name} has {count} frames, but may have {max_frames}: send fewer")
    if len(text) * 3 // 4 > max_bytes:
        raise InvalidRequest(
            f"{name} has {len(text) * 3 // 4} bytes, but may have {max_bytes} (--media-max-bytes): send less"
        )
    return tuple(from_base64(frame, max_bytes, f"frame {i} of {name}") for i, frame in enumerate(text.split(",")))
