"""The size that a picture is scaled to, and the patches that it is cut into, as the model's processor does it.

Pure functions of sizes and pixels. `loading.py` calls them with decoded pictures.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from jaxsgl.errors import InvalidRequest
from jaxsgl.preprocess.settings import ProcessorSettings
from jaxsgl.requests.media import Tiling

MAX_RATIO = 200  # of the sides of a picture
_LEAST_SHRINK = 1.1  # by less joined lines are not shrunk

Pixels = npt.NDArray[np.uint8]


def image_size(height: int, width: int, settings: ProcessorSettings, max_pixels: int) -> tuple[int, int]:
    """Returns the height and width to which a picture is scaled: multiples of `settings.unit`.

    The sides keep their ratio, as far as that goes; the area stays within the processor's limits and `max_pixels`.
    Raises `InvalidRequest` for a picture that is far longer than wide.
    """
    limits = settings.image
    if settings.fixed_side is not None:
        _check_ratio(height, width)
        if settings.crops:
            return _around_square(height, width, settings.fixed_side)
        rows, columns = (1, 1)
        if settings.tiles is not None:
            most = max_pixels // settings.fixed_side**2 - 1  # and one that shows it whole
            tiles = [max(min(number, most), 1) for number in settings.tiles]
            rows, columns = (_fitting if settings.tiles_fit else _tiling)(height, width, settings.fixed_side, *tiles)
        return rows * settings.fixed_side, columns * settings.fixed_side
    if settings.fills:
        return _filled(height, width, settings.unit, min(limits.max_pixels, max_pixels))
    if settings.longest_side is not None:
        return _within(height, width, settings.unit, settings.longest_side, max_pixels)
    if settings.counts_frames:
        depth = settings.temporal_patch_size
        most = min(limits.max_pixels, max_pixels * depth)
        return _clip_size(depth, height, width, settings, limits.min_pixels, most)
    if settings.lifts:
        height, width = _lifted(height, width, settings.unit)
    return _size(height, width, settings.unit, limits.min_pixels, min(limits.max_pixels, max_pixels))


def tiled_sizes(height: int, width: int, side: int, longest: int) -> list[tuple[int, int]]:
    """Returns the heights and widths to which a picture is scaled one after the other: with its longer side `longest`,
    and with both in multiples of `side`.

    In double precision, as the model's processor does it. Raises `InvalidRequest`.
    """
    _check_ratio(height, width)
    ratio = width / height
    if width >= height:
        width, height = longest, int(longest / ratio)
        height += height % 2
    else:
        height, width = longest, int(longest * ratio)
        width += width % 2
    first = max(height, 1), max(width, 1)
    ratio = first[1] / first[0]
    if first[1] >= first[0]:
        wide = math.ceil(first[1] / side) * side
        return [first, (math.ceil(int(wide / ratio) / side) * side, wide)]
    high = math.ceil(first[0] / side) * side
    return [first, (high, math.ceil(int(high * ratio) / side) * side)]


class Joined(NamedTuple):
    """How a picture is cut into tiles that are joined.

    Attributes:
      height, width: to which it is scaled.
      all_height, all_width: pixels of the tiles together, in whose middle it lies.
      tiling: what its tokens make.
    """

    height: int
    width: int
    all_height: int
    all_width: int
    tiling: Tiling


def joined_tiles(height: int, width: int, settings: ProcessorSettings, max_pixels: int) -> Joined:
    """Returns it for a picture, whose tiles have `max_pixels` together at most, as far as resolutions allow.

    In double precision, and in the order of the model's processor. Raises `InvalidRequest`.
    """
    _check_ratio(height, width)
    assert settings.fixed_side is not None and settings.resolutions is not None
    most = max_pixels - settings.fixed_side**2
    fitting = [each for each in settings.resolutions if math.prod(each) <= most]
    all_height, all_width = _best(height, width, fitting or [min(settings.resolutions, key=math.prod)])
    by_width, by_height = all_width / width, all_height / height
    scaled = (
        (min(math.ceil(height * by_width), all_height), all_width)
        if by_width < by_height
        else (all_height, min(math.ceil(width * by_height), all_width))
    )
    side = settings.fixed_side // settings.patch_size
    columns = all_width // settings.fixed_side
    all_lines, all_columns = all_height // settings.fixed_side * side, columns * side
    lines, across = all_lines, all_columns
    if width / height > all_columns / all_lines:
        lines -= (all_lines - int(round(height * (all_columns / width), 7))) // 2 * 2
    else:
        across -= (all_columns - int(round(width * (all_lines / height), 7))) // 2 * 2
    shown = lines, across
    if settings.most_tiles is not None:
        ratio = math.sqrt(lines * across / (settings.most_tiles * side**2))
        if ratio > _LEAST_SHRINK:
            shown = int(lines // ratio), int(across // ratio)
    return Joined(*scaled, all_height, all_width, Tiling(columns, lines, across, *shown))


def _best(height: int, width: int, resolutions: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """The resolution that shows most of a picture's pixels, and of several the one that leaves fewest empty."""

    def shown(resolution: tuple[int, int]) -> tuple[int, int]:
        all_height, all_width = resolution
        scale = min(all_width / width, all_height / height)
        pixels = min(int(width * scale) * int(height * scale), width * height)
        return pixels, pixels - all_height * all_width

    return max(resolutions, key=shown)


def view_sizes(height: int, width: int, settings: ProcessorSettings, max_pixels: int) -> list[tuple[int, int]]:
    """Returns the heights and widths to which a picture is scaled, one after the other; see `image_size`.

    The tiles of `tiles_longest` are cut of what is scaled twice, and the whole picture is that, scaled once more.

    There are two of a picture that is cut into several tiles: that of all of them, and that of one which shows it
    whole.
    """
    side = settings.fixed_side
    if side is not None and settings.tiles_longest is not None:
        sizes = tiled_sizes(height, width, side, settings.tiles_longest)
        return sizes if sizes[1] == (side, side) else [*sizes, (side, side)]
    if settings.tile_side is not None:
        return _large_sizes(height, width, settings, max_pixels)
    size = image_size(height, width, settings, max_pixels)
    return [size] if side is None or settings.crops or size == (side, side) else [size, (side, side)]


def _large_sizes(height: int, width: int, settings: ProcessorSettings, max_pixels: int) -> list[tuple[int, int]]:
    """Those of `tile_side`: of all tiles, if the picture is large, and of what shows it whole."""
    _check_ratio(height, width)
    assert settings.tile_side is not None and settings.tiles is not None
    unit, limits = settings.unit, settings.image
    h, w = (_nearest(side, unit) for side in (height, width))
    most = min(limits.max_pixels, max_pixels)
    whole = max(h, unit), max(w, unit)
    if math.prod(whole) > most:
        whole = _shrunk(height, width, unit, math.sqrt(height * width / most))
    elif math.prod(whole) < limits.min_pixels:
        whole = _grown(height, width, unit, math.sqrt(limits.min_pixels / (height * width)))
    if max(h, settings.patch_size) * max(w, settings.patch_size) <= 2 * limits.max_pixels:
        return [whole]
    rows, columns = _tiling(height, width, settings.tile_side, *settings.tiles)
    return [(rows * settings.tile_side, columns * settings.tile_side), whole]


def cut_views(views: Sequence[Pixels], settings: ProcessorSettings) -> list[Pixels]:
    """Returns what is seen of a picture that is scaled to each of `view_sizes`."""
    if settings.tile_side is None:
        return [tile for view in views for tile in cut(view, settings)]
    *large, whole = views
    return [*(tile for view in large for tile in _squares(view, settings.tile_side)), whole]


def cut(pixels: Pixels, settings: ProcessorSettings) -> list[Pixels]:
    """Returns the squares of a picture `[h, w, 3]`, line by line, or the one in its middle, or the picture itself."""
    side = settings.fixed_side
    if side is None:
        return [pixels]
    height, width, _ = pixels.shape
    if settings.crops:
        top, left = (height - side) // 2, (width - side) // 2
        return [pixels[top : top + side, left : left + side]]
    return _squares(pixels, side)


def _squares(pixels: Pixels, side: int) -> list[Pixels]:
    """Those of a picture, line by line."""
    height, width, _ = pixels.shape
    return [
        pixels[top : top + side, left : left + side] for top in range(0, height, side) for left in range(0, width, side)
    ]


def frame_size(
    num_frames: int, height: int, width: int, settings: ProcessorSettings, max_pixels: int
) -> tuple[int, int]:
    """Returns the height and width to which the frames of a video are scaled.

    The processor's limits are those of all frames together, unless its settings are by frame; `max_pixels` is that of a
    frame. Raises `InvalidRequest`.
    """
    unit, limits, depth = settings.unit, settings.video, settings.temporal_patch_size
    most = limits.max_pixels
    if settings.fixed_side is not None:
        return settings.fixed_side, settings.fixed_side
    if settings.fills:
        return _filled(height, width, unit, min(most, max_pixels))
    if settings.by_frame:
        if settings.caps_frames:
            share = int(settings.max_video_tokens * unit**2 * 0.9) * depth // num_frames
            most = max(min(most, share), int(limits.min_pixels * 1.05))
        return _size(height, width, unit, limits.min_pixels, min(most, max_pixels))
    if settings.caps_frames:
        cap = settings.max_frame_tokens * unit**2
        most = max(min(cap, most // num_frames), int(limits.min_pixels * 1.05)) * num_frames
    return _clip_size(num_frames, height, width, settings, limits.min_pixels, min(most, max_pixels * num_frames))


def patches_of_frames(frames: Sequence[Pixels], patch_size: int, merge_size: int) -> bytes:
    """Returns the pixels of a `MediaItem`: one temporal patch of `frames [h, w, 3]`.

    A row is a patch, channel by channel and frame by frame. Patches that are merged into one token follow each other;
    these squares go line by line.
    """
    x = np.stack(frames)
    t, h, w, channels = x.shape
    rows, columns = h // patch_size // merge_size, w // patch_size // merge_size
    x = x.reshape(t, rows, merge_size, patch_size, columns, merge_size, patch_size, channels)
    return x.transpose(1, 4, 2, 5, 7, 0, 3, 6).tobytes()


def _around_square(height: int, width: int, side: int) -> tuple[int, int]:
    """Height and width of which the shorter one is `side`; the other is rounded down."""
    short, long = sorted((height, width))
    longer = int(side * long / short)
    return (longer, side) if width <= height else (side, longer)


def _tiling(height: int, width: int, side: int, least: int, most: int) -> tuple[int, int]:
    """Rows and columns of squares of `side`, `least` to `most` of them, whose ratio is nearest to the picture's.

    Of several the first one counts, with the fewest squares and columns, unless the picture has more than half of the
    pixels of another one.
    """
    columns_and_rows = [
        (columns, rows)
        for columns in range(1, most + 1)
        for rows in range(1, most // columns + 1)
        if columns * rows >= least
    ]
    best, nearest = (1, 1), math.inf
    for columns, rows in sorted(columns_and_rows, key=math.prod):
        apart = abs(width / height - columns / rows)
        if apart < nearest or (apart == nearest and 2 * width * height > side**2 * columns * rows):
            best, nearest = (rows, columns), apart
    return best


def _fitting(height: int, width: int, side: int, least: int, most: int) -> tuple[int, int]:
    """Rows and columns of up to `most` squares of `side` that scale a picture up least or, if none does, down least.

    Of several those with the fewest squares and columns count.
    """
    tilings = [(rows, columns) for columns in range(1, most + 1) for rows in range(1, most // columns + 1)]
    tilings.sort(key=math.prod)
    scales = {(rows, columns): min(columns * side / width, rows * side / height) for rows, columns in tilings}
    growing = [tiling for tiling in tilings if scales[tiling] >= 1]
    return min(growing, key=scales.__getitem__) if growing else max(tilings, key=scales.__getitem__)


def _size(height: int, width: int, unit: int, least: int, most: int) -> tuple[int, int]:
    """Height and width nearest to what is given, in multiples of `unit`, with `least` to `most` pixels."""
    _check_ratio(height, width)
    h, w = _nearest(height, unit), _nearest(width, unit)
    if h * w > most:
        return _shrunk(height, width, unit, math.sqrt(height * width / most))
    if h * w < least:
        return _grown(height, width, unit, math.sqrt(least / (height * width)))
    return h, w


def _lifted(height: int, width: int, unit: int) -> tuple[int, int]:
    """Height and width with no side below `unit`, in about the same ratio."""
    if height < unit:
        height, width = unit, round(width * unit / height)
    if width < unit:
        height, width = round(height * unit / width), unit
    return height, width


def _clip_size(
    num_frames: int, height: int, width: int, settings: ProcessorSettings, least: int, most: int
) -> tuple[int, int]:
    """The same for frames that have so many pixels together, where their number is rounded to temporal patches."""
    unit, depth = settings.unit, settings.temporal_patch_size
    if height < unit or width < unit:
        scale = max(unit / height, unit / width)
        height, width = int(height * scale), int(width * scale)
    _check_ratio(height, width)
    num_frames = max(num_frames, depth)
    h, w = _nearest(height, unit), _nearest(width, unit)
    num_pixels = round(num_frames / depth) * depth * h * w
    if num_pixels > most:
        return _shrunk(height, width, unit, math.sqrt(num_frames * height * width / most))
    if num_pixels < least:
        return _grown(height, width, unit, math.sqrt(least / (num_frames * height * width)))
    return h, w


def _within(height: int, width: int, unit: int, longest: int, most: int) -> tuple[int, int]:
    """Height and width with no side above `longest`, rounded up to multiples of `unit`; at most `most` pixels."""
    _check_ratio(height, width)
    ratio = max(height, width) / longest
    if ratio > 1:
        height, width = max(math.floor(height / ratio), 1), max(math.floor(width / ratio), 1)
    h, w = (math.ceil(side / unit) * unit for side in (height, width))
    return _shrunk(height, width, unit, math.sqrt(height * width / most)) if h * w > most else (h, w)


def _filled(height: int, width: int, unit: int, most: int) -> tuple[int, int]:
    """Height and width with the ratio of the given ones and `most` pixels, rounded down to multiples of `unit`.

    In double precision, and in the order of the model's processor, since a product may lie next to a multiple.
    """
    _check_ratio(height, width)
    factor = math.sqrt(most / (height * width))
    h, w = (math.floor(factor * side / unit) * unit for side in (height, width))
    longest = most // unit**2 * unit
    if h == 0:
        return unit, min(width // height * unit, longest)
    if w == 0:
        return min(height // width * unit, longest), unit
    return h, w


def _check_ratio(height: int, width: int) -> None:
    if max(height, width) > MAX_RATIO * min(height, width):
        raise InvalidRequest(
            f"a picture has {width} x {height} pixels, but one side may be at most {MAX_RATIO} times the other: crop it"
        )


def _nearest(side: int, unit: int) -> int:
    return round(side / unit) * unit


def _shrunk(height: int, width: int, unit: int, factor: float) -> tuple[int, int]:
    return (
        max(unit, math.floor(height / factor / unit) * unit),
        max(unit, math.floor(width / factor / unit) * unit),
    )


def _grown(height: int, width: int, unit: int, factor: float) -> tuple[int, int]:
    return math.ceil(height * factor / unit) * unit, math.ceil(width * factor / unit) * unit
