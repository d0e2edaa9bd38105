"""Pictures, videos and sounds to patches: what is large is done here, file by file.

`load` decodes, scales and cuts; `placeholders.py` then says where in the prompt the patches belong. Callers have got
the files before (`sources.py` says what a file may be). Servers call it in a child process (`decoding.py`), `LLM` in
its own one. Never knows prompts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

import msgspec
import numpy as np
from PIL import Image

from jaxsgl.errors import InvalidRequest
from jaxsgl.preprocess import pictures
from jaxsgl.preprocess.decode_room import DecodeRoom
from jaxsgl.preprocess.movies import KIND_NAMES, Movie, is_movie
from jaxsgl.preprocess.patches import Pixels, cut, cut_views, frame_size, joined_tiles, patches_of_frames, view_sizes
from jaxsgl.preprocess.placeholders import Part, Visual
from jaxsgl.preprocess.settings import PixelSettings, ProcessorSettings
from jaxsgl.preprocess.sounds import WORKING_BYTES, parts_of
from jaxsgl.preprocess.sources import Content, File, ImageFile, SoundFile, VideoFile, check_taken
from jaxsgl.requests.media import CHANNELS, MAX_LATER, Tiling, digest_of, too_many_patches

MAX_PIXELS = 1 << 25  # of a picture: 8K
MAX_REQUEST_PIXELS = 1 << 29  # that are decoded for a request: some seconds
MAX_READ_FRAMES = 4096  # of an animation, of which some are taken
DEFAULT_FPS = 24.0  # of an animation that doesn't say how long its frames are shown
# Of videos whose sampling is "by length": for those of so many seconds at most, temporal patches in a second.
_PATCHES_PER_S = ((30.0, 3.0), (300.0, 1.0), (2400.0, 0.5))
_MOST_BY_LENGTH = 640  # frames
_READABLE = f"video that can be read: send {KIND_NAMES}, or an animated GIF, WebP or PNG"


@dataclass(frozen=True)
class Bounds:
    """What `load` refuses.

    Attributes:
      max_patches: a picture or frame is scaled down to so many; not those in tiles.
      max_request_patches: of all that is loaded for a request.
      max_pixels: of a picture, before it is scaled.
      room: memory for decoding, which the caller's threads share.
      max_picture_patches: a picture is cut into tiles that have so many together, or into one.
    """

    max_patches: int
    max_request_patches: int
    max_pixels: int = MAX_PIXELS
    room: DecodeRoom = field(default_factory=DecodeRoom)
    max_picture_patches: int = 16384


def load(files: Sequence[File], settings: ProcessorSettings, bounds: Bounds) -> list[Visual]:
    """Returns what `files` hold, in their order. Raises `InvalidRequest`."""
    check_taken(files, settings.sound is not None, settings.what)
    loaded: list[Visual] = []
    left = Left(bounds.max_request_patches, settings.square)
    if settings.several_whole and sum(isinstance(file, ImageFile) for file in files) > 1:
        settings = replace(settings, resolutions=())
    for number, file in enumerate(files):
        if isinstance(file, SoundFile):
            assert settings.sound is not None
            name = f"sound {number}"
            with bounds.room.taken(WORKING_BYTES, name):
                visual = Visual(parts_of(file.content, settings.sound, left.num_patches, name), is_video=False)
            left.take_patches(sum(part.num_patches for part in visual.parts))
            loaded.append(visual)
        elif isinstance(file, ImageFile):
            of_kind = _joined if settings.resolutions is not None else _image
            visual = of_kind(file, settings, bounds, left, f"image {number}")
            left.take_patches(sum(part.num_patches for part in visual.parts))
            loaded.append(visual)
        else:
            loaded.append(Visual(_video(file, settings, bounds, left, f"video {number}"), is_video=True))
    return loaded


class Left:
    """What may still be loaded for a request: patches, of which `square` become a token, and pixels to decode."""

    def __init__(self, num_patches: int, square: int) -> None:
        self._most = self.num_patches = num_patches
        self._square = square
        self._pixels = MAX_REQUEST_PIXELS

    def take_pixels(self, num_pixels: int, name: str) -> None:
        """Counts pixels that are to be decoded. Raises `InvalidRequest` if they are too many."""
        if num_pixels > self._pixels:
            raise InvalidRequest(
                f"with {name} the request has more than {MAX_REQUEST_PIXELS} pixels to decode: send fewer or smaller "
                "pictures and frames"
            )
        self._pixels -= num_pixels

    def take_patches(self, num_patches: int) -> None:
        """Counts patches. Raises `InvalidRequest` if they are too many."""
        self.num_patches -= num_patches
        if self.num_patches < 0:
            raise too_many_patches(self._most - self.num_patches, self._most, self._square)


def _image(file: ImageFile, settings: ProcessorSettings, bounds: Bounds, left: Left, name: str) -> Visual:
    """The picture, or its tiles."""
    max_patches = bounds.max_patches if settings.tiles is None else bounds.max_picture_patches

    def sizes_of(height: int, width: int) -> list[tuple[int, int]]:
        return view_sizes(height, width, settings, max_patches * settings.patch_size**2)

    picture = _opened(file.content, bounds.max_pixels, name)
    sizes = sizes_of(picture.height, picture.width)  # refuses what needn't be decoded
    left.take_pixels(picture.width * picture.height, name)
    num_bytes = _view_bytes(picture, file.content, sizes)
    if settings.tiles is not None:  # if it is turned, its tiles may be others
        num_bytes = max(num_bytes, _view_bytes(picture, file.content, sizes_of(picture.width, picture.height)))
    del picture
    with bounds.room.taken(num_bytes, name):
        views = _scaled(file.content, bounds, sizes_of, name, settings)
        tiles = cut_views(views, settings)
        parts = tuple(_part([tile], settings, settings.image) for tile in tiles)
    side = settings.fixed_side or settings.tile_side
    columns = max(views[0].shape[1] // side, 1) if side and settings.tile_words else 0
    return Visual(parts, is_video=False, columns=columns)


def _joined(file: ImageFile, settings: ProcessorSettings, bounds: Bounds, left: Left, name: str) -> Visual:
    """The picture in one part, of tiles that are joined; without resolutions it is shown whole alone, on a square."""
    side, most = settings.fixed_side, bounds.max_picture_patches * settings.patch_size**2
    assert side is not None
    picture = _opened(file.content, bounds.max_pixels, name)
    left.take_pixels(picture.width * picture.height, name)
    if settings.resolutions:
        ways = [joined_tiles(*size, settings, most) for size in (picture.size, picture.size[::-1])]  # it may be turned
        scaling = max(_view_bytes(picture, file.content, [(way.height, way.width), (side, side)]) for way in ways)
        num_bytes = max(scaling, 4 * CHANNELS * max(way.all_height * way.all_width for way in ways))
    else:
        num_bytes = _view_bytes(picture, file.content, [(side, side)]) + max(picture.size) ** 2
    del picture
    with bounds.room.taken(num_bytes, name):
        tiles, tiling = _tiles(file.content, settings, bounds, name, side, most)
        return Visual((_joined_part(tiles, settings, tiling),), is_video=False)


def _tiles(
    content: Content, settings: ProcessorSettings, bounds: Bounds, name: str, side: int, most: int
) -> tuple[list[Pixels], Tiling]:
    """The whole picture in a tile, and the others."""
    picture = _opened(content, bounds.max_pixels, name)
    turn = pictures.decode(picture, name)
    width, height = pictures.upright_size(picture, turn)
    if not settings.resolutions:
        red, green, blue = (int(255 * mean) for mean in settings.image.mean)
        square = pictures.on_square(picture, turn, (red, green, blue), side, settings.resample)
        return [np.asarray(square)], Tiling(0, 0, 0, 0, 0)
    way = joined_tiles(height, width, settings, most)
    views = [
        pictures.scaled(picture, turn, *size, settings.resample) for size in ((side, side), (way.width, way.height))
    ]
    del picture  # its memory
    whole, inner = map(np.asarray, views)
    filled = np.zeros((way.all_height, way.all_width, CHANNELS), np.uint8)
    top, left = (way.all_height - way.height) // 2, (way.all_width - way.width) // 2
    filled[top : top + way.height, left : left + way.width] = inner
    return [whole, *cut(filled, settings)], way.tiling


def _joined_part(tiles: Sequence[Pixels], settings: ProcessorSettings, tiling: Tiling) -> Part:
    """The tiles one under the other."""
    parts = [_part([tile], settings, settings.image) for tile in tiles]
    pixels = b"".join(part.pixels for part in parts)
    _, h, w = parts[0].grid
    grid = (1, h * len(parts), w)
    name = f"{settings.name_of(settings.image)} {msgspec.structs.astuple(tiling)}"
    return Part(digest_of(pixels, grid, name), grid, pixels, tiling=tiling)


def _video(file: VideoFile, settings: ProcessorSettings, bounds: Bounds, left: Left, name: str) -> tuple[Part, ...]:
    if settings.video_token_id < 0:
        raise InvalidRequest(f"the request has {name}, but the model takes pictures alone: send some of its frames")
    if isinstance(file.content, tuple):
        return _parts(_frames(file, settings, bounds, left, name), settings, bounds, left)
    settings = _with_fps(settings, file.fps, name)
    if is_movie(file.content):
        movie = Movie(file.content, bounds.max_pixels, name)
        with bounds.room.taken(movie.num_bytes, name):
            return _parts(_movie(movie, settings), settings, bounds, left)
    animation = pictures.open_picture(file.content, bounds.max_pixels, name, _READABLE)
    with bounds.room.taken(pictures.animation_bytes(animation), name):  # which is open until its last frame is scaled
        return _parts(_animation(animation, settings, left, name), settings, bounds, left)


def _with_fps(settings: ProcessorSettings, fps: float | None, name: str) -> ProcessorSettings:
    """The settings for a file of which so many frames a second are asked for; None: as many as the model looks at."""
    if fps is None:
        return settings
    if settings.num_frames is not None:
        raise InvalidRequest(
            f"{name} is a file with fps {fps:g}, but the model takes {settings.num_frames} frames of each file: leave "
            "fps out, or send a list of the frames"
        )
    if settings.sampling == "by length":
        raise InvalidRequest(
            f"{name} is a file with fps {fps:g}, but the model takes as many frames of each file as follow from its "
            "length: leave fps out, or send a list of the frames"
        )
    return replace(settings, video_fps=fps)


def _parts(clip: Clip, settings: ProcessorSettings, bounds: Bounds, left: Left) -> tuple[Part, ...]:
    """The temporal patches of a video."""
    height, width = frame_size(
        len(clip.times_s), clip.height, clip.width, settings, bounds.max_patches * settings.patch_size**2
    )
    depth = settings.temporal_patch_size
    firsts = range(0, len(clip.times_s), depth)
    left.take_patches(len(firsts) * (height // settings.patch_size) * (width // settings.patch_size))
    parts: list[Part] = []
    for number, first in enumerate(firsts):
        stamps = clip.times_s[first : first + depth]
        frames = [clip.pixels_of(first + i, (height, width)) for i in range(len(stamps))]
        stamps += stamps[-1:] * (depth - len(stamps))
        if settings.by_frame:
            parts.append(_part(frames, settings, settings.video, later=_later(number, clip.fps, settings)))
        else:
            time_s = stamps[0] if settings.times.endswith("after") else (stamps[0] + stamps[-1]) / 2
            parts.append(_part(frames, settings, settings.video, time_s))
    return tuple(parts)


def _later(number: int, fps: float, settings: ProcessorSettings) -> int | None:
    """Positions of time between a video's beginning and its temporal patch of that number; None of the first.

    `fps`: frames that are taken, a second. In float32, as the reference computes it.
    """
    if number == 0:
        return None
    per_s = settings.positions_per_s
    apart = 1.0 if per_s is None else per_s * settings.temporal_patch_size / fps
    if number * apart > MAX_LATER:
        raise InvalidRequest(
            f"a video with {fps:g} frames a second takes {number * apart:g} positions of time, but may take "
            f"{MAX_LATER}: send more frames of each second, or fewer in all"
        )
    return int(np.float32(number) * np.float32(apart))


@dataclass(frozen=True)
class Clip:
    """The frames of a video that the model sees: their times, `fps` of them a second, the first one's size [pixels],
    and each scaled, asked in order.
    """

    times_s: list[float]
    fps: float
    height: int
    width: int
    pixels_of: Callable[[int, tuple[int, int]], Pixels]


def _frames(file: VideoFile, settings: ProcessorSettings, bounds: Bounds, left: Left, name: str) -> Clip:
    """A video that came as single pictures, all of which are taken."""
    contents, fps = file.content, file.fps or settings.video_fps
    assert isinstance(contents, tuple)
    if not 1 <= len(contents) <= settings.max_frames:
        raise InvalidRequest(f"{name} has {len(contents)} frames, but must have 1 to {settings.max_frames}")
    sizes: list[tuple[int, int]] = []
    for number, content in enumerate(contents):
        picture = _opened(content, bounds.max_pixels, f"frame {number} of {name}")
        left.take_pixels(picture.width * picture.height, name)
        sizes.append(picture.size)

    def pixels_of(number: int, size: tuple[int, int]) -> Pixels:
        of_frame, content = f"frame {number} of {name}", contents[number]
        num_bytes = _still_bytes(_opened(content, bounds.max_pixels, of_frame), content, size)
        with bounds.room.taken(num_bytes, of_frame):
            (frame,) = _scaled(content, bounds, lambda height, width: [size], of_frame, settings)
            return frame

    width, height = sizes[0]
    return Clip([number / fps for number in range(len(contents))], fps, height, width, pixels_of)


def _animation(animation: Image.Image, settings: ProcessorSettings, left: Left, name: str) -> Clip:
    """A video that came as an animated picture, of which some frames are taken."""
    num_frames = pictures.num_frames(animation, MAX_READ_FRAMES, name)
    left.take_pixels(2 * num_frames * animation.width * animation.height, name)  # once for the times
    durations_s = pictures.durations_s(animation, num_frames, name)
    fps = num_frames / (sum(durations_s) or num_frames / DEFAULT_FPS)
    taken = sampled_frames(num_frames, fps, settings)

    def pixels_of(number: int, size: tuple[int, int]) -> Pixels:
        pictures.decode_frame(animation, taken[number], name)
        height, width = size
        return np.asarray(pictures.scaled(animation, None, width, height))

    times_s = [number / fps for number in taken]
    return Clip(times_s, len(taken) / num_frames * fps, animation.height, animation.width, pixels_of)


def _movie(movie: Movie, settings: ProcessorSettings) -> Clip:
    """A file of video, of which some frames are taken, in their order; its size is that of the first one, upright."""
    taken = sampled_frames(movie.num_frames, movie.fps, settings)
    decoded = movie.frames(taken)
    first = next(decoded)
    frames = chain((first,), decoded)

    def pixels_of(number: int, size: tuple[int, int]) -> Pixels:
        height, width = size
        return np.asarray(pictures.scaled(next(frames), None, width, height))

    times_s = [number / movie.fps for number in taken]
    return Clip(times_s, len(taken) / movie.num_frames * movie.fps, first.height, first.width, pixels_of)


def sampled_frames(num_frames: int, fps: float, settings: ProcessorSettings) -> list[int]:
    """Returns which of a video's frames the model sees: `settings.video_fps` a second, spread evenly, as a rule."""
    if settings.sampling in ("steps", "by length"):
        taken = (_in_steps if settings.sampling == "steps" else _by_length)(num_frames, fps, settings)
        taken = list(dict.fromkeys(taken))
        return taken + taken[-1:] * (-len(taken) % settings.temporal_patch_size)
    if settings.num_frames is not None:
        count = min(settings.num_frames, num_frames)
        if settings.sampling == "middles":
            return [int(np.float32((number + 0.5) * num_frames / count)) for number in range(count)]
        return [number * num_frames // count for number in range(count)]
    wanted = int(num_frames / fps * settings.video_fps)
    count = min(max(wanted, settings.min_frames), settings.max_frames, num_frames)
    if settings.by_frame:
        count = max(count - count % settings.temporal_patch_size, 1)
    return [int(number) for number in np.linspace(0, num_frames - 1, count).round()]


def _in_steps(num_frames: int, fps: float, settings: ProcessorSettings) -> list[int]:
    """The first frames at or after times that are equally far apart."""
    last, wanted, duration_s = num_frames - 1, settings.video_fps, num_frames / fps
    if duration_s <= settings.max_duration_s:
        if wanted >= fps:
            return list(range(num_frames))
        count = max(math.floor(duration_s * wanted), 1)
        return [min(last, math.ceil(i * fps / wanted)) for i in range(count)]
    count = int(settings.max_duration_s * wanted)
    if count >= num_frames:
        return list(range(num_frames))
    return [min(last, math.ceil(time_s * fps)) for time_s in np.linspace(0, duration_s, count)]


def _by_length(num_frames: int, fps: float, settings: ProcessorSettings) -> list[int]:
    """The first frames at or after times that are equally far apart, if these give as many as the length asks for."""
    duration_s = num_frames / fps
    length_s = min(duration_s, _PATCHES_PER_S[-1][0])
    per_s = settings.temporal_patch_size * next(per_s for most_s, per_s in _PATCHES_PER_S if length_s <= most_s)
    count = max(min(int(length_s * per_s), _MOST_BY_LENGTH), 1)
    if num_frames < count:
        return _spread(0, num_frames - 1, count)
    taken, next_s, frame_s = list[int](), 0.0, 1 / fps
    for number in range(num_frames):
        if number * frame_s >= next_s:
            next_s += 1 / per_s
            taken.append(number)
            if next_s >= int(duration_s):
                break
    if len(taken) < count:
        return _spread(taken[0], taken[-1], count)
    return taken if len(taken) == count else _spread(0, num_frames - 1, count)


def _spread(first: int, last: int, count: int) -> list[int]:
    """So many numbers of frames, rounded down."""
    numbers: list[int] = np.linspace(first, last, count).astype(int).tolist()
    return numbers


def _opened(content: bytes | Image.Image, max_pixels: int, name: str) -> Image.Image:
    return pictures.open_picture(content, max_pixels, name) if isinstance(content, bytes) else content


def _still_bytes(picture: Image.Image, content: Content, size: tuple[int, int]) -> int:
    """Memory for a file's picture; a picture that came decoded takes none."""
    return pictures.still_bytes(picture, content, size) if isinstance(content, bytes) else 0


def _view_bytes(picture: Image.Image, content: Content, sizes: list[tuple[int, int]]) -> int:
    """Memory for a file's picture that is scaled to each of `sizes`, the largest one first."""
    return _still_bytes(picture, content, sizes[0]) + sum(4 * height * width for height, width in sizes[1:])


def _scaled(
    content: Content,
    bounds: Bounds,
    sizes_of: Callable[[int, int], list[tuple[int, int]]],
    name: str,
    settings: ProcessorSettings,
) -> list[Pixels]:
    """Decodes and scales; `sizes_of` tells heights and widths to scale to from those of the upright picture.

    Each from what the file has; with `tiles_longest` each from the one before, of which the first is not seen.
    """
    picture = _opened(content, bounds.max_pixels, name)
    turn = pictures.decode(picture, name)
    width, height = pictures.upright_size(picture, turn)
    sizes = sizes_of(height, width)
    if settings.tiles_longest is None:
        made = [pictures.scaled(picture, turn, w, h, settings.resample) for h, w in sizes]
    else:
        made = [pictures.scaled(picture, turn, *sizes[0][::-1], settings.resample)]
        for h, w in sizes[1:]:
            made.append(made[-1].resize((w, h), Image.Resampling(settings.resample)))
        del made[0]
    del picture  # its memory
    return [np.asarray(each) for each in made]


def _part(
    frames: list[Pixels],
    settings: ProcessorSettings,
    of_kind: PixelSettings,
    time_s: float | None = None,
    later: int | None = None,
) -> Part:
    """A still picture stands for all frames of its temporal patch."""
    frames = frames + frames[-1:] * (settings.temporal_patch_size - len(frames))
    height, width, _ = frames[0].shape
    grid = (1, height // settings.patch_size, width // settings.patch_size)
    if settings.fixed_side is not None:  # no patch has the rest of a tile
        frames = [frame[: grid[1] * settings.patch_size, : grid[2] * settings.patch_size] for frame in frames]
    pixels = patches_of_frames(frames, settings.patch_size, settings.merge_size)
    name = settings.name_of(of_kind) + ("" if later is None else f" {later} later")  # its tokens' keys differ, too
    return Part(digest_of(pixels, grid, name), grid, pixels, time_s, later)
