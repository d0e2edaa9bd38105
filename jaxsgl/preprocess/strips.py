"""Decoded pictures to scaled RGB: what must be turned, converted or put on white is so strip by strip, band by band.

So beside the decoded picture one band of its size stands in memory, not a second picture. Pillow scales each band by
itself: the bytes are those of scaling all three at once. Never knows files; `loading.py` calls it.
"""

from __future__ import annotations

from PIL import Image

STRIP_PIXELS = 1 << 18
_WHITE = (255, 255, 255, 255)
_Turn = Image.Transpose
TURNS = {  # by the orientation in EXIF
    2: _Turn.FLIP_LEFT_RIGHT, 3: _Turn.ROTATE_180, 4: _Turn.FLIP_TOP_BOTTOM, 5: _Turn.TRANSPOSE, 6: _Turn.ROTATE_270,
    7: _Turn.TRANSVERSE, 8: _Turn.ROTATE_90,
}  # fmt: skip
_ON_ITS_SIDE = {_Turn.TRANSPOSE, _Turn.ROTATE_270, _Turn.TRANSVERSE, _Turn.ROTATE_90}
_FROM_THE_END = {_Turn.ROTATE_180, _Turn.FLIP_TOP_BOTTOM, _Turn.TRANSVERSE, _Turn.ROTATE_90}


def upright_size(picture: Image.Image, turn: Image.Transpose | None) -> tuple[int, int]:
    """Returns width and height of the picture when it is turned."""
    width, height = picture.size
    return (height, width) if turn in _ON_ITS_SIDE else (width, height)


def scaled(picture: Image.Image, turn: Image.Transpose | None, width: int, height: int) -> Image.Image:
    """Returns the picture as RGB, upright, with what is transparent on white, scaled to `width` and `height`."""
    if _is_scaled_as_it_is(picture, turn):
        return picture.resize((width, height), Image.Resampling.BICUBIC)
    size = upright_size(picture, turn)
    lines = max(1, STRIP_PIXELS // size[0])
    if lines >= size[1]:
        return to_rgb(_upright_strip(picture, turn, 0, size[1])).resize((width, height), Image.Resampling.BICUBIC)
    # No name keeps a band while the next one is made.
    bands = [_band(picture, turn, band, lines).resize((width, height), Image.Resampling.BICUBIC) for band in range(3)]
    return Image.merge("RGB", bands)


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
