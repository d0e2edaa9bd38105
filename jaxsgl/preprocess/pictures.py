"""Files of pictures to scaled RGB: what the header says is checked before anything is decoded, its memory included.

Only formats that are safe to decode are opened. Of memory, Pillow keeps pixels of one band in a byte or two, and all
others in four; some decoders hold more besides. The figures are measured with Pillow 13
(`tests/preprocess/test_decode_memory.py`). What must be turned, converted or put on white is so strip by strip, band by
band: beside the decoded picture one band of its size stands in memory, not a second picture. Pillow scales each band by
itself, so that the bytes are those of scaling all three at once.

Never knows where a file comes from; `loading.py` calls it in threads.
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
from jaxsgl.preprocess.jpegs import check_scans, has_several_scans

FORMATS = tuple(plugin.format for plugin in (JPEG, PNG, WebP, GIF, BMP))  # their import registers them
FORMAT_NAMES = "JPEG, PNG, WebP, GIF or BMP"
MOST_PIXELS = 1 << 28  # of a picture, at most what callers allow
_READABLE = f"picture that can be read: send {FORMAT_NAMES}"
_ORIENTATION = 0x0112  # in EXIF
_ANIMATION_BYTES = 22  # for each pixel: the canvas, the frames before and behind a change, their copies, scaled lines
_STRIP_BYTES = 6 << 20  # some copies of a strip
_WEBP_BYTES = 16.25  # two canvases, a frame, and its pixels
_COEFFICIENT_BYTES = 2
STRIP_PIXELS = 1 << 18
_WHITE = (255, 255, 255, 255)
_Turn = Image.Transpose
TURNS = {  # by the orientation in EXIF
    2: _Turn.FLIP_LEFT_RIGHT, 3: _Turn.ROTATE_180, 4: _Turn.FLIP_TOP_BOTTOM, 5: _Turn.TRANSPOSE, 6: _Turn.ROTATE_270,
    7: _Turn.TRANSVERSE, 8: _Turn.ROTATE_90,
}  # fmt: skip
_ON_ITS_SIDE = {_Turn.TRANSPOSE, _Turn.ROTATE_270, _Turn.TRANSVERSE, _Turn.ROTATE_90}
_FROM_THE_END = {_Turn.ROTATE_180, _Turn.FLIP_TOP_BOTTOM, _Turn.TRANSVERSE, _Turn.ROTATE_90}


if Image.MAX_IMAGE_PIXELS is not None:  # Pillow's own limit, which is lower by default
    Image.MAX_IMAGE_PIXELS = max(Image.MAX_IMAGE_PIXELS, MOST_PIXELS)


def open_picture(data: bytes, max_pixels: int, name: str, readable: str = _READABLE) -> Image.Image:
    """Returns the picture in a file, of which only the header is read. Raises `InvalidRequest`.

    `name` says in errors which one it is, `readable` what it should be; `max_pixels` are those of the header.
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
        raise InvalidRequest(f"{name} is no {readable}; {len(data)} bytes came") from None
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


def upright_size(picture: Image.Image, turn: Image.Transpose | None) -> tuple[int, int]:
    """Returns width and height of the picture when it is turned."""
    width, height = picture.size
    return (height, width) if turn in _ON_ITS_SIDE else (width, height)


def scaled(
    picture: Image.Image,
    turn: Image.Transpose | None,
    width: int,
    height: int,
    resample: int = Image.Resampling.BICUBIC,
) -> Image.Image:
    """Returns the picture as RGB, upright, with what is transparent on white, scaled to `width` and `height`."""
    way = Image.Resampling(resample)
    if _is_scaled_as_it_is(picture, turn):
        return picture.resize((width, height), way)
    size = upright_size(picture, turn)
    lines = max(1, STRIP_PIXELS // size[0])
    if lines >= size[1]:
        return to_rgb(_upright_strip(picture, turn, 0, size[1])).resize((width, height), way)
    # No name keeps a band while the next one is made.
    bands = [_band(picture, turn, band, lines).resize((width, height), way) for band in range(3)]
    return Image.merge("RGB", bands)


def on_square(
    picture: Image.Image, turn: Image.Transpose | None, colour: tuple[int, int, int], side: int, resample: int
) -> Image.Image:
    """Returns the same in the middle of a square of that colour, which is scaled to sides of `side`."""
    width, height = upright_size(picture, turn)
    longer, lines = max(width, height), max(1, STRIP_PIXELS // width)

    def scaled_band(band: int) -> Image.Image:
        square = Image.new("L", (longer, longer), colour[band])
        for top in range(0, height, lines):
            strip = to_rgb(_upright_strip(picture, turn, top, min(top + lines, height)))
            square.paste(strip.getchannel(band), ((longer - width) // 2, (longer - height) // 2 + top))
        return square.resize((side, side), Image.Resampling(resample))

    return Image.merge("RGB", [scaled_band(band) for band in range(3)])


def _is_scaled_as_it_is(picture: Image.Image, turn: Image.Transpose | None) -> bool:
    """Whether nothing must be done to the pixels before."""
    return turn is None and picture.mode == "RGB" and picture.info.get("transparency") is None


def _band(picture: Image.Image, turn: Image.Transpose | None, band: int, lines: int) -> Image.Image:
    """Red, green or blue of the upright picture on white, made from `lines` at a time."""
    width, height = upright_size(picture, turn)
    made = Image.new("L", (width, height))
    for top in range(0, height, lines):
        strip = to_rgb(_upright_strip(picture, turn, top, min(top + lines, height)))
        made.paste(strip.getchannel(band), (0, top))
    return made


def to_rgb(picture: Image.Image) -> Image.Image:
    """Returns `picture` as RGB, with what is transparent on white."""
    if "A" not in picture.getbands() and picture.info.get("transparency") is None:
        return picture if picture.mode == "RGB" else picture.convert("RGB")
    picture = picture.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", picture.size, _WHITE), picture).convert("RGB")


def _upright_strip(picture: Image.Image, turn: Image.Transpose | None, top: int, bottom: int) -> Image.Image:
    """Lines `top` to `bottom` of the turned picture."""
    width, height = picture.size
    count = width if turn in _ON_ITS_SIDE else height
    first, last = (count - bottom, count - top) if turn in _FROM_THE_END else (top, bottom)
    strip = picture.crop((first, 0, last, height) if turn in _ON_ITS_SIDE else (0, first, width, last))
    return strip if turn is None else strip.transpose(turn)


def kept_bytes(picture: Image.Image) -> int:
    """Bytes of all pixels once they are decoded."""
    one_band = {"1": 1, "L": 1, "P": 1, "I;16": 2, "I;16B": 2, "I;16L": 2}
    return picture.width * picture.height * one_band.get(picture.mode, 4)


def still_bytes(picture: Image.Image, content: bytes, scaled: tuple[int, int]) -> int:
    """Bytes at most while a picture is decoded and scaled to height and width `scaled`; only its header is read yet."""
    height, width = scaled
    num_pixels, kept = picture.width * picture.height, kept_bytes(picture)
    decoding = kept
    if isinstance(picture, JPEG):
        decoding += _coefficient_bytes(picture) if has_several_scans(content) else 0
    elif isinstance(picture, WebP):
        decoding, kept = int(_WEBP_BYTES * num_pixels), kept + 8 * num_pixels
    # Pillow scales lines, then columns; a picture on its side has the lines of the other side.
    between = max(width * picture.height, height * picture.width)
    at_once = 4 * (between + height * width)
    by_bands = num_pixels + between + 3 * height * width + min(_STRIP_BYTES, 24 * num_pixels)
    # Whether EXIF turns it is known once it is decoded.
    return max(decoding, kept + (max(at_once, by_bands) if picture.mode == "RGB" else by_bands))


def animation_bytes(picture: Image.Image) -> int:
    """Bytes at most while frames of an animation are decoded and scaled; it may have one frame alone."""
    has_canvas = isinstance(picture, GIF | WebP) or getattr(picture, "n_frames", 1) > 1
    return picture.width * picture.height * (_ANIMATION_BYTES if has_canvas else 8)


def _coefficient_bytes(picture: JPEG) -> int:
    """Bytes of all coefficients, which a JPEG of several scans keeps until the last one."""
    layers = getattr(picture, "layer", ())  # (id, horizontal and vertical samples, ...) of each component
    samples = [(layer[1], layer[2]) for layer in layers]
    if not samples:
        return _COEFFICIENT_BYTES * 4 * picture.width * picture.height
    most = max(h for h, _ in samples) * max(v for _, v in samples)
    of_one = picture.width * picture.height * sum(h * v for h, v in samples) / most
    return int(_COEFFICIENT_BYTES * of_one)
