"""Where the patches of images lie, as a vision tower is told: places, learned positions around them, which image.

NumPy only: the host computes this for a grid once, and packs the images of one call of the tower into padded arrays.
Knows no parameters and no requests. The scheduler's side packs, `engine/encoding.py` unpacks. Also the three positions
of each of a prompt's tokens, which follow from the grids alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from jaxsgl.cache.pages import IntArray
from jaxsgl.requests.media import Grid, MediaItem, SoundShape, Tiling, patches_of

# How patches have learned positions, if they have any: between those of a square that is spread over the image, corners
# on corners; the same with edges on edges; that by cubics; or those of rows and of columns.
Positions: TypeAlias = Literal["square", "edges", "cubic", "axes", "blurred"]
NUM_TAPS: dict[Positions, int] = {"square": 4, "edges": 4, "cubic": 16, "axes": 4}  # others have the table's side
CUBIC = -0.75  # the slope that cubics have one position away from their own
MIN_CALL_PATCHES = 256  # of the smallest call of the tower
SHARED_CALL_PATCHES = 4096  # images share a call of the tower up to so many on a device; a larger one has its own
KEPT_GRIDS = 256  # layouts of grids that are remembered
PAD_SEGMENT = -1
JOINED_TAPS = 4  # tokens of the tower that make a token of shrunk lines
LINE_END = -1  # in the place of such a token: what ends a line


@dataclass(frozen=True)
class TowerShape:
    """What of a tower the host must know.

    Attributes:
      merge_size: patches along the sides of the square that becomes one token; of sounds, those that do.
      table_side: learned positions along the sides of an image; 0: there are none.
      positions: how patches have them.
      patch_len: C, numbers of a patch.
      num_layers: layers of the tower.
      window: tokens along the sides of a window; 0: the tower has none.
      num_taps: layers whose outputs become embeddings, too.
      joined_side: tokens along the sides of a tile, of pictures whose tiles are joined; 0: none are.
      sound: how it hears, a column of patches each time; None: it sees.
    """

    merge_size: int
    table_side: int
    patch_len: int
    num_layers: int = 1
    window: int = 0
    num_taps: int = 0
    positions: Positions = "square"
    joined_side: int = 0
    sound: SoundShape | None = None

    @property
    def merge(self) -> tuple[int, int]:
        """Rows and columns of patches that become one token."""
        return self.merge_size, self.merge_size if self.sound is None else 1

    @property
    def square(self) -> int:
        """Patches that become one token."""
        return math.prod(self.merge)

    @property
    def num_columns(self) -> int:
        """Columns of `EncodeInputs.columns`."""
        return 2 + 2 * NUM_TAPS.get(self.positions, self.table_side) + 2

    def tokens_of(self, num_patches: int) -> int:
        """The tokens that so many patches become at most: each line of a tile may be ended by one more."""
        tokens = num_patches // self.square
        return tokens + tokens // self.joined_side if self.joined_side else tokens

    def patches_of(self, num_tokens: int) -> int:
        """The patches that become no more than so many tokens."""
        if self.joined_side:
            num_tokens = num_tokens * self.joined_side // (self.joined_side + 1)
        return num_tokens * self.square


@dataclass(frozen=True)
class TowerCapacity:
    """What one engine encodes, fixed at start-up.

    Attributes:
      shape: of the tower.
      num_rows: tokens that the pool of embeddings holds, in the rows from 1 on; row 0 stands for text.
      max_patches: of a call, on each device that encodes other images; an image has no more.
      num_bins: devices that share the images of a call, each of which encodes whole ones.
      host_bytes: of embeddings that are kept in host memory; 0: none are.
      row_bytes: of a token's embedding.
      sliced_from: an image alone in a call of this size or more may be encoded in parts; None: no image is.
      call_patches: of the smallest call.
      max_image_tokens: of an image at most; None: as many as go into a call.
      encodes: whether there is a tower; else embeddings come from the server of a request's other leg.
    """

    shape: TowerShape
    num_rows: int
    max_patches: int
    num_bins: int = 1
    host_bytes: int = 0
    row_bytes: int = 4
    encodes: bool = True
    call_patches: int = MIN_CALL_PATCHES
    max_image_tokens: int | None = None
    sliced_from: int | None = None

    @property
    def image_tokens(self) -> int:
        """Tokens of an image at most."""
        in_call = self.shape.tokens_of(self.max_patches)
        return in_call if self.max_image_tokens is None else min(self.max_image_tokens, in_call)

    @property
    def shared_patches(self) -> int:
        """Patches up to which images share a call on each device: they fill the largest call that is meant for that."""
        return max((each.num_patches for each in self.buckets if each.num_patches <= SHARED_CALL_PATCHES), default=0)

    def is_sliced(self, bucket: EncodeBucket) -> bool:
        """Whether calls of this shape may be run in parts."""
        return self.sliced_from is not None and self.num_bins == 1 and bucket.num_patches >= self.sliced_from

    @property
    def buckets_in_parts(self) -> tuple[EncodeBucket, ...]:
        """Those of `buckets` that may be run in parts."""
        return tuple(bucket for bucket in self.buckets if self.is_sliced(bucket))

    @property
    def buckets(self) -> tuple[EncodeBucket, ...]:
        """Shapes of calls, ascending: sizes double up to what an image, or several, need. None without a tower."""
        if not self.encodes:
            return ()
        sizes = [min(self.call_patches, self.max_patches)]
        image = min(self.image_tokens * self.shape.square, self.max_patches)
        while sizes[-1] < image or (2 * sizes[-1] <= SHARED_CALL_PATCHES and sizes[-1] < self.max_patches):
            sizes.append(min(2 * sizes[-1], self.max_patches))
        return tuple([EncodeBucket(size, self.num_bins) for size in sizes])


def smallest_call(image_patches: int, square: int) -> int:
    """Patches of the smallest call, from which sizes double: in whole squares, and so that a large image fills a call.

    Args:
      image_patches: of an image that is as large as images become; 0: there is no such limit.
      square: patches that become one token.
    """
    size = image_patches or -(-MIN_CALL_PATCHES // square) * square
    while size >= 2 * MIN_CALL_PATCHES and size % (2 * square) == 0:
        size //= 2
    return size


class EncodeBucket(NamedTuple):
    """The shape of a call of the tower: patches on each of `num_bins` devices that share the images."""

    num_patches: int
    num_bins: int = 1


@dataclass(frozen=True)
class EncodeInputs:
    """One call of the tower, padded; read-only.

    Attributes:
      bucket: which compiled program runs it.
      pixels: `[bins, P, C]` uint8.
      columns: `[bins, P, shape.num_columns]` int32: row and column of each patch, the learned positions around it, the
        bits of their float32 weights, which window of all it is of, and which image; -1: none looks at it.
      rows: `[bins, P / 4]` int32, where each token goes in the pool of embeddings; padding goes past its end. Where
        tiles are joined, `[bins, tokens, 9]`: that, four of the tower's tokens that make it, and the bits of their
        float32 weights; P stands for what ends a line.
    """

    bucket: EncodeBucket
    pixels: npt.NDArray[np.uint8]
    columns: IntArray
    rows: IntArray

    @property
    def cost_patches(self) -> int:
        """Patches that it takes the time of, padding included."""
        return self.bucket.num_patches


@dataclass(frozen=True)
class EncodePart:
    """Some layers of a call of the tower, whose others come with earlier and later steps; read-only.

    Attributes:
      call: all of it. The part with layer 0 makes embeddings of pixels first.
      first, stop: layers first .. stop - 1.
      num_layers: of the tower. The last part writes what the call makes.
    """

    call: EncodeInputs
    first: int
    stop: int
    num_layers: int

    @property
    def bucket(self) -> EncodeBucket:
        """The shape of the call."""
        return self.call.bucket

    @property
    def is_last(self) -> bool:
        """Whether the image is encoded once it is run."""
        return self.stop == self.num_layers

    @property
    def cost_patches(self) -> int:
        """Patches of a whole call that takes as long, padding included."""
        return -(-self.bucket.num_patches * (self.stop - self.first) // self.num_layers)


class Layout(NamedTuple):
    """How one image is packed; read-only.

    Attributes:
      order: `[tokens]` which of the image's tokens the tower takes first, and so on: those of a window follow each
        other.
      columns: `[h * w, num_columns - 1]` all columns but the last of its patches, in that order; windows count from 0.
      num_windows: of the image.
    """

    order: IntArray
    columns: IntArray
    num_windows: int


@lru_cache(maxsize=KEPT_GRIDS)
def layout_of(grid: Grid, shape: TowerShape) -> Layout:
    """How an image of this grid is packed; tiles that are joined lie in it one under the other."""
    _, h, w = grid
    if shape.joined_side and h > shape.joined_side:
        tile, count = layout_of((1, w, w), shape), h // w
        order, columns = np.arange(count * w * w, dtype=np.int32), np.tile(tile.columns, (count, 1))
        return Layout(order, columns, tile.num_windows)
    rows_of, columns_of = shape.merge
    in_rows, in_columns = np.indices((h // rows_of, w // columns_of)).reshape(2, -1)
    window = shape.window or max(grid)  # without windows the image is one
    across = -(-(w // columns_of) // window)
    windows = in_rows // window * across + in_columns // window
    order = np.argsort(windows, kind="stable").astype(np.int32)
    row, column = (
        (merge * of_square[order, None, None] + within).reshape(-1)
        for merge, of_square, within in zip(shape.merge, (in_rows, in_columns), np.indices(shape.merge), strict=True)
    )
    columns = np.concatenate(
        [
            np.stack([row, column], axis=1),
            _TAPS[shape.positions](row, column, grid, shape.table_side),
            np.repeat(windows[order], shape.square)[:, None],
        ],
        axis=1,
    ).astype(np.int32)
    for array in (order, columns):
        array.flags.writeable = False
    return Layout(order, columns, int(windows[-1]) + 1)


def _taps(row: Places, column: Places, grid: Grid, side: int) -> IntArray:
    """`[n, 8]`: the four learned positions around each patch, and the bits of their weights; zeros without any.

    In float32, as the reference does: the corners of the image are those of the table.
    """
    if side == 0:
        return np.zeros((len(row), 8), np.int32)
    y, x = (
        at.astype(np.float32) * np.float32(side - 1) / np.float32(max(count - 1, 1))
        for at, count in zip((row, column), grid[1:], strict=True)
    )
    return _between(y, x, side)


def _taps_by_edges(row: Places, column: Places, grid: Grid, side: int) -> IntArray:
    """As `_taps`, with the edges of the image on those of the table; beyond it those at its edge hold."""
    half = np.float32(0.5)
    y, x = (
        (at.astype(np.float32) + half) * np.float32(side) / np.float32(count) - half
        for at, count in zip((row, column), grid[1:], strict=True)
    )
    return _between(y, x, side)


def _between(y: Floats, x: Floats, side: int) -> IntArray:
    """The four positions around places `[n]` of a table, and the bits of their weights."""
    first_y, first_x = np.floor(y).astype(np.int32), np.floor(x).astype(np.int32)
    (y0, y1), (x0, x1) = (
        (np.clip(first, 0, side - 1), np.clip(first + 1, 0, side - 1)) for first in (first_y, first_x)
    )
    fy, fx = y - first_y.astype(np.float32), x - first_x.astype(np.float32)
    one = np.float32(1)
    taps = np.stack([y0 * side + x0, y0 * side + x1, y1 * side + x0, y1 * side + x1], axis=1)
    weights = np.stack([(one - fy) * (one - fx), (one - fy) * fx, fy * (one - fx), fy * fx], axis=1)
    return np.concatenate([taps, weights.astype(np.float32).view(np.int32)], axis=1)


def _cubic_taps(row: Places, column: Places, grid: Grid, side: int) -> IntArray:
    """`[n, 32]`: the same with 4 x 4 positions; beyond the table those at its edge hold."""
    (rows, of_rows), (columns, of_columns) = (
        _cubic(at, count, side) for at, count in zip((row, column), grid[1:], strict=True)
    )
    taps = (side * rows[:, :, None] + columns[:, None]).reshape(len(row), 16)
    weights = (of_rows[:, :, None] * of_columns[:, None]).reshape(len(row), 16)
    return np.concatenate([taps, weights.view(np.int32)], axis=1)


def _cubic(at: Places, count: int, side: int) -> tuple[IntArray, npt.NDArray[np.float32]]:
    """`[n, 4]` positions of an axis of `side` around places of `count`, and their weights; in float32, as above.

    The weights are those of cubic convolution (Keys 1981, "Cubic convolution interpolation for digital image
    processing").
    """
    half, one, two = np.float32(0.5), np.float32(1), np.float32(2)
    centre = (at.astype(np.float32) + half) / np.float32(count) * two - one  # -1 to 1, from edge to edge
    place = ((centre + one) * np.float32(side) - one) / two
    first = np.floor(place)
    far = np.abs(place[:, None] - first[:, None] - np.arange(-1, 3, dtype=np.float32))  # 0 to 2
    slope = np.float32(CUBIC)
    near = ((slope + two) * far - (slope + np.float32(3))) * far * far + one
    outer = ((slope * far - np.float32(5) * slope) * far + np.float32(8) * slope) * far - np.float32(4) * slope
    positions = np.clip(first.astype(np.int32)[:, None] + np.arange(-1, 3, dtype=np.int32), 0, side - 1)
    return positions, np.where(far <= one, near, outer).astype(np.float32)


def _taps_by_axis(row: Places, column: Places, grid: Grid, side: int) -> IntArray:
    """As `_taps` for two tables, that of columns and then that of rows; beyond a table its last position holds."""
    none = np.zeros_like(row)
    taps = np.stack([np.minimum(column, side - 1), side + np.minimum(row, side - 1), none, none], axis=1)
    weights = np.tile(np.array([1, 1, 0, 0], np.float32), (len(row), 1))
    return np.concatenate([taps.astype(np.int32), weights.view(np.int32)], axis=1)


def _blurred(row: Places, column: Places, grid: Grid, side: int) -> IntArray:
    """`[n, 2 side]`: the bits of the weights of all rows of the table, and of all columns, whose products count.

    As PyTorch's bilinear `interpolate` with `antialias` has them.
    """
    axes = zip((row, column), grid[1:], strict=True)
    return np.concatenate([_blurred_axis(count, side)[at] for at, count in axes], axis=1).view(np.int32)


def _blurred_axis(count: int, side: int) -> Floats:
    """`[count, side]` weights of an axis of `side` in each of `count` even places."""
    scale = side / count
    reach = max(scale, 1.0)  # on either side
    centres = scale * (np.arange(count) + 0.5)
    far = np.abs(np.arange(side) + 0.5 - centres[:, None]) / reach
    weights = np.maximum(1 - far, 0)
    return (weights / weights.sum(axis=1, keepdims=True)).astype(np.float32)


Places: TypeAlias = npt.NDArray[np.intp]
Floats: TypeAlias = npt.NDArray[np.float32]
_TAPS: dict[Positions, Callable[[Places, Places, Grid, int], IntArray]] = {
    "square": _taps,
    "edges": _taps_by_edges,
    "cubic": _cubic_taps,
    "axes": _taps_by_axis,
    "blurred": _blurred,
}


def pack(
    bins: Sequence[Sequence[tuple[MediaItem, IntArray]]], bucket: EncodeBucket, capacity: TowerCapacity
) -> EncodeInputs:
    """Packs images into a call of the tower.

    Args:
      bins: for each device the images that it encodes, with the rows `[length]` of their tokens.
      bucket: its patches hold those of each bin.
      capacity: of tower and pool; padding goes past the pool's last row, where it is dropped.
    """
    size, shape = bucket.num_patches, capacity.shape
    pixels = np.zeros((bucket.num_bins, size, shape.patch_len), np.uint8)
    columns = np.zeros((bucket.num_bins, size, shape.num_columns), np.int32)
    columns[:, :, -2:] = PAD_SEGMENT
    rows = np.full((bucket.num_bins, shape.tokens_of(size)), capacity.num_rows + 1, np.int32)
    if shape.joined_side:
        rows = np.stack([rows, *[np.zeros_like(rows)] * (2 * JOINED_TAPS)], axis=-1)
    for b, images in enumerate(bins):
        first = first_window = 0
        for segment, (item, of_tokens) in enumerate(images):
            stop, layout = first + item.num_patches, layout_of(item.grid, shape)
            squares = patches_of(item).reshape(len(layout.order), -1, shape.patch_len)
            pixels[b, first:stop] = squares[layout.order].reshape(-1, shape.patch_len)
            columns[b, first:stop, :-1] = layout.columns
            columns[b, first:stop, -2] += first_window
            columns[b, first:stop, -1] = segment
            start = shape.tokens_of(first)
            if shape.sound is not None:
                if not shape.sound.hears_all:
                    columns[b, first + item.filled : stop, -1] = PAD_SEGMENT
                rows[b, start : start + item.length] = of_tokens
            elif item.tiling is None:
                rows[b, start : shape.tokens_of(stop)] = of_tokens[layout.order]
            else:
                taps, weights = joined_tokens(item.num_patches, item.tiling, shape.joined_side)
                of_item = rows[b, start : start + item.length]
                of_item[:, 0] = of_tokens
                of_item[:, 1 : 1 + JOINED_TAPS] = np.where(taps == LINE_END, size, taps + first)
                of_item[:, 1 + JOINED_TAPS :] = weights.view(np.int32)
            first, first_window = stop, first_window + layout.num_windows
    for array in (pixels, columns, rows):
        array.flags.writeable = False
    return EncodeInputs(bucket, pixels, columns, rows)


@lru_cache(maxsize=KEPT_GRIDS // 8)
def joined_tokens(num_patches: int, tiling: Tiling, side: int) -> tuple[IntArray, Floats]:
    """`[length, 4]` which of a picture's patches make each of its tokens, and their weights; `LINE_END` ends lines.

    Shrunk lines are as PyTorch's bilinear `interpolate` makes them, in float32.
    """
    whole = np.arange(side**2)
    if not tiling.columns:
        return _taken(np.append(whole, LINE_END))
    numbers = np.arange(side**2, num_patches).reshape(-1, tiling.columns, side, side)
    in_lines = numbers.transpose(0, 2, 1, 3).reshape(-1, tiling.columns * side)
    top, left = ((all_of - of) // 2 for all_of, of in zip(in_lines.shape, (tiling.lines, tiling.width), strict=True))
    in_lines = in_lines[top : top + tiling.lines, left : left + tiling.width]
    shown = tiling.shown_lines, tiling.shown_width
    if shown == in_lines.shape:
        ended = np.pad(in_lines, ((0, 0), (0, 1)), constant_values=LINE_END)
        return _taken(np.concatenate([whole, ended.reshape(-1)]))
    (rows, of_rows), (columns, of_columns) = (
        _between_two(count, most) for count, most in zip(shown, in_lines.shape, strict=True)
    )
    taps = in_lines[rows[:, None, :, None], columns[None, :, None, :]].reshape(*shown, JOINED_TAPS)
    weights = (of_rows[:, None, :, None] * of_columns[None, :, None, :]).reshape(*shown, JOINED_TAPS)
    end_taps, end_weights = _taken(np.full(shown[0], LINE_END))
    of_whole = _taken(whole)
    of_lines = (
        np.concatenate([lines, ends[:, None]], axis=1).reshape(-1, JOINED_TAPS)
        for lines, ends in ((taps, end_taps), (weights, end_weights))
    )
    taps, weights = (np.concatenate(each) for each in zip(of_whole, of_lines, strict=True))
    return taps.astype(np.int32), weights


def _taken(numbers: npt.NDArray[np.intp]) -> tuple[IntArray, Floats]:
    """Each token as it is."""
    taps = np.repeat(numbers.astype(np.int32)[:, None], JOINED_TAPS, axis=1)
    return taps, np.tile(np.array([1, 0, 0, 0], np.float32), (len(numbers), 1))


def _between_two(count: int, most: int) -> tuple[npt.NDArray[np.intp], Floats]:
    """`[count, 2]` places of an axis of `most` that make each of `count` even ones, and their weights."""
    half = np.float32(0.5)
    at = np.maximum((np.arange(count, dtype=np.float32) + half) * (np.float32(most) / np.float32(count)) - half, 0)
    first = at.astype(np.intp)
    share = at - first.astype(np.float32)
    return np.stack([first, np.minimum(first + 1, most - 1)], axis=1), np.stack([1 - share, share], axis=1)


def empty_call(bucket: EncodeBucket, capacity: TowerCapacity) -> EncodeInputs:
    """A call of padding only, which changes nothing."""
    return pack([[] for _ in range(bucket.num_bins)], bucket, capacity)


def token_positions(num_tokens: int, media: Sequence[MediaItem]) -> tuple[IntArray, int]:
    """The positions `[3, n]` (time, row, column) of a prompt's tokens, and what is added to the index of later ones.

    Text counts on by one in all three. An image's tokens share their time, count rows and
    columns from where the image begins, and what follows goes on after the larger side. The patches of a video that
    goes on have rows and columns of its first one, and what follows goes on after the largest position. That is
    Qwen2-VL's own rule (arXiv 2409.12191); transformers 5 leaves the times out of it.
    """
    positions = np.empty((3, num_tokens), np.int32)
    index = position = begin = 0
    for item in media:
        positions[:, index : item.offset] = np.arange(index, item.offset) + (position - index)
        position += item.offset - index
        begin = position if item.later is None else begin
        time = begin + (item.later or 0)
        merge_size = math.isqrt(item.num_patches // item.length)
        height, width = item.grid[1] // merge_size, item.grid[2] // merge_size
        at = np.arange(item.length)
        positions[0, item.offset : item.stop] = time
        positions[1, item.offset : item.stop] = begin + at // width
        positions[2, item.offset : item.stop] = begin + at % width
        position, index = max(position, begin + max(height, width), time + 1), item.stop
    positions[:, index:] = np.arange(index, num_tokens) + (position - index)
    return positions, position - index
