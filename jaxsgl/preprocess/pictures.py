"""Files of pictures to decoded ones: what the header says is checked before anything is decoded.

Only formats that are safe to decode are opened. Never knows where a file comes from or what becomes of its pixels;
`loading.py` calls it in threads.
"""

from __future__ import annotations

import io

from PIL import Image
from PIL.BmpImagePlugin import BmpImageFile as BMP
from PIL.GifImagePlugin import GifImageFile as GIF
from PIL.JpegImagePlugin import JpegImageFile as JPEG
from PIL.PngImagePlugin import PngImageFile as PNG
from PIL.WebPImagePlugin import WebPImageFile as WebP

from jaxsgl.errors import InvalidRequest
from jaxsgl.preprocess.jpegs import check_scans
from jaxsgl.preprocess.strips import TURNS

FORMATS = tuple(plugin.format for plugin in (JPEG, PNG, WebP, GIF, BMP))  # their import registers them
FORMAT_NAMES = "JPEG, PNG, WebP, GIF or BMP"
_ORIENTATION = 0x0112  # in EXIF


def open_picture(data: bytes, max_pixels: int, name: str) -> Image.Image:
    """Returns the picture in a file, of which only the header is read. Raises `InvalidRequest`.

    `name` says in errors which one it is; `max_pixels` are those of the header.
    """
    if data[:4] == b"RIFF":  # Pillow's decoder takes memory for the whole canvas when it opens it
        _check_pixels(*_webp_size(data), max_pixels, name)
    if data[:2] == b"\xff\xd8":
        check_scans(data, name)
    try:
        picture = Image.open(io.BytesIO(data), formats=FORMATS)
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise _too_large("far more", max_pixels, name) from None
    except Exception:  # decoders raise all kinds for what a client sends
        raise InvalidRequest(
            f"{name} is no picture that can be read: send {FORMAT_NAMES}, {len(data)} bytes came"
        ) from None
    _check_pixels(*picture.size, max_pixels, name)
    return picture


def decode(picture: Image.Image, name: str) -> Image.Transpose | None:
    """Decodes all pixels; returns how the picture must be turned, as EXIF says. Raises `InvalidRequest`."""
    try:
        picture.load()
        turn = TURNS.get(picture.getexif().get(_ORIENTATION, 1))
    except Exception as error:
        reason = str(error)[:200] or type(error).__name__
        raise InvalidRequest(f"{name} can't be decoded ({reason}): is the file complete?") from None
    if isinstance(picture, WebP):
        picture.fp = None  # a copy of all pixels
    return turn


def durations_s(picture: Image.Image, num_frames: int, name: str) -> list[float]:
    """Returns how long each frame of an animation is shown, in seconds; 0: the file doesn't say.

    Decodes all frames. Raises `InvalidRequest`.
    """
    found: list[float] = []
    for number in range(num_frames):
        decode_frame(picture, number, name)
        duration_ms = picture.info.get("duration", 0)
        found.append(duration_ms / 1000 if isinstance(duration_ms, int | float) else 0.0)
    return found


def decode_frame(picture: Image.Image, number: int, name: str) -> None:
    """Makes a frame the animation's present one. Raises `InvalidRequest`."""
    try:
        picture.seek(number)
        picture.load()
    except Exception as error:
        raise InvalidRequest(f"frame {number} of {name} can't be decoded ({str(error)[:200]})") from None


def num_frames(picture: Image.Image, max_frames: int, name: str) -> int:
    """Returns the number of frames of an animation; 1 of a still picture. Raises `InvalidRequest`."""
    if isinstance(picture, JPEG):  # the other pictures of an MPO file are views of it, whose scans are not counted
        return 1
    try:
        count = int(getattr(picture, "n_frames", 1))
    except Exception as error:
        raise InvalidRequest(f"the frames of {name} can't be counted ({str(error)[:200]})") from None
    if count > max_frames:
        raise InvalidRequest(f"{name} has {count} frames, but may have {max_frames}: send a shorter video")
    return count


def _check_pixels(width: int, height: int, max_pixels: int, name: str) -> None:
    if width * height > max_pixels:
        raise _too_large(f"{width} x {height} = {width * height}", max_pixels, name)
    if width < 1 or height < 1:
        raise InvalidRequest(f"{name} has {width} x {height} pixels, but needs one at least")


def _too_large(pixels: str, max_pixels: int, name: str) -> InvalidRequest:
    return InvalidRequest(
        f"{name} has {pixels} pixels, but may have {max_pixels} (--media-max-pixels): send a smaller one"
    )


def _webp_size(data: bytes) -> tuple[int, int]:
    """Returns the width and height of a WebP file; (1, 1) for what Pillow will refuse."""
    kind, body = data[12:16], data[20:30]
    if len(body) < 10:
        return 1, 1
    if kind == b"VP8X":
        return 1 + int.from_bytes(body[4:7], "little"), 1 + int.from_bytes(body[7:10], "little")
    if kind == b"VP8L":
        bits = int.from_bytes(body[1:5], "little")
        return 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
    if kind == b"VP8 ":
        return int.from_bytes(body[6:8], "little") & 0x3FFF, int.from_bytes(body[8:10], "little") & 0x3FFF
    return 1, 1
