"""Memory that decoding a picture takes, known from its header.

Pillow keeps pixels of one band in a byte or two, and all others in four. Some decoders hold more besides; the figures
are measured with Pillow 13 (`tests/preprocess/test_decode_memory.py`). Never knows what pixels become; `loading.py`
asks before it decodes.
"""

from __future__ import annotations

from PIL import Image
from PIL.GifImagePlugin import GifImageFile as GIF
from PIL.JpegImagePlugin import JpegImageFile as JPEG
from PIL.WebPImagePlugin import WebPImageFile as WebP

from jaxsgl.preprocess.jpegs import has_several_scans

_ANIMATION_BYTES = 22  # for each pixel: the canvas, the frames before and behind a change, their copies, scaled lines
_STRIP_BYTES = 6 << 20  # some copies of a strip
_WEBP_BYTES = 16.25  # two canvases, a frame, and its pixels
_COEFFICIENT_BYTES = 2


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
