"""How a model's processor turns pictures into patches: sizes, resizing limits, normalization, placeholder tokens.

Values alone; `processors/` reads them from the model's folder. The front end (and `LLM`) preprocesses by them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from jaxsgl.requests.media import SoundShape

LANCZOS, BILINEAR, BICUBIC = 1, 2, 3  # in Pillow

Written: TypeAlias = Literal["framed", "start", "image"]
Times: TypeAlias = Literal["seconds", "minutes", "whole seconds after", "seconds after", "numbers"]
Sampling: TypeAlias = Literal["even", "steps", "by length", "middles"]


@dataclass(frozen=True)
class PixelSettings:
    """What is done to one picture, or to the frames of a video.

    Attributes:
      min_pixels, max_pixels: a picture is scaled until it has so many; of a video, all frames together, or each
        (`ProcessorSettings.by_frame`).
      mean, std: of the normalization, by channel, for values of 0 to 1.
    """

    min_pixels: int
    max_pixels: int
    mean: tuple[float, ...]
    std: tuple[float, ...]


@dataclass(frozen=True)
class TileWords:
    """What is written around the tiles of a picture.

    Attributes:
      tile: before a tile, whose `{row}`, `{column}` and `{number}` count from 1.
      line_end: after the last one of a line.
      after_tiles: before what shows the picture whole, if tiles come before that.
      whole: right before that.
      end: after it.
      after: after each tile, and what shows the picture whole.
      start: before all.
      placeholder: what clients write in texts for a picture; None: the placeholder that the model sees.
    """

    tile: str
    line_end: str
    after_tiles: str
    whole: str
    end: str
    start: str = ""
    placeholder: str | None = None
    after: str = ""


@dataclass(frozen=True)
class ProcessorSettings:
    """All that preprocessing depends on.

    Attributes:
      patch_size, temporal_patch_size, merge_size: see `MediaLimits`.
      image, video: what is done to pixels.
      video_fps: frames a second that are taken of a video, `min_frames` to `max_frames` in all.
      num_frames: frames that are taken of each video, if it has so many: the first ones of as many equal parts, or
        those in their "middles" (`sampling`); None: `video_fps` a second.
      sampling: how `video_fps` frames a second are found: spread evenly; or ("steps") those from which steps of equal
        time begin, of `max_duration_s` at most. "by length": other numbers hold for videos of other lengths.
      by_frame: videos are as Qwen2-VL takes them. Limits of pixels are those of a frame; frames are taken in whole
        temporal patches, which follow each other without words between them: their times are positions of tokens.
      positions_per_s: by_frame: positions of time in a second; None: temporal patches are one position apart.
      longest_side: pixels of a picture's longer side at most, which is the only limit; sides are rounded up. None: the
        limits are those of `image`.
      lifts: a side shorter than a token's is scaled to that first.
      counts_frames: limits of pixels of a picture are those of all frames of its temporal patch.
      fills: pictures and frames are scaled until they have as many pixels as they may, sides rounded down.
      fixed_side: pixels of both sides of a picture, whatever its own are; None: they follow from its own.
      crops: a picture is scaled until its shorter side has so many, and of its longer one the middle is taken.
      tiles: the least and the most squares of `fixed_side` that a picture is cut into; one more shows it whole, if
        they are several. None: it isn't cut.
      tiles_fit: the least and the most squares are those that scale a picture up least, or down, if all do; else those
        whose ratio is nearest to its own count.
      tile_side: a picture of more pixels than twice those of `image` is cut into tiles of so many along each side, as
        many as `tiles` says; one more shows it whole, scaled as a smaller picture. Sides have a token at least. None:
        tiles have `fixed_side`.
      tiles_longest: the longer side is scaled to so many pixels, and both then to multiples of `fixed_side`, which are
        cut into tiles; one more shows what was cut. None: tiles are as `tiles` says.
      tile_words: what is written around tiles; None: nothing is.
      resolutions: heights and widths, of which the best one is filled with a picture as far as its ratio allows, and
        cut into tiles of `fixed_side`, whose tokens are joined to lines; before them a tile shows it whole. None: tiles
        are as told above.
      most_tiles: joined lines are shrunk to as many tokens as so many tiles have; None: never.
      several_whole: where pictures are several, each is a tile that shows it whole, in the middle of a grey square.
      resample: how pictures are scaled, by Pillow's number.
      written: what clients write for a picture: its placeholder, within the tokens of `vision_start_token_id` and
        `vision_end_token_id` if the model has them ("framed"); the first of these alone, for which those and the
        placeholder between them are put, between empty lines ("start"); or the placeholder, for which the same is put
        without lines ("image").
      times: how the time of a temporal patch is told in words: as `<1.5 seconds>`, or as `00:01` between spaces; that
        of its first frame after it, as `1`, or as `1.5 seconds`. Or ("numbers") no time, but `Frame1: ` before it, in
        a line of its own.
      frame_token_id: what stands for frames of videos in prompts that the model sees; None: `video_token_id`.
      takes_pixels: gateways preprocess pictures as this model's processor does.
      line_ends: what ends the lines of a picture, and its last one; None: nothing does.
      caps_frames: whether a frame has at most `max_frame_tokens` tokens or, by frame, its share of `max_video_tokens`,
        as in Qwen's own tools.
      sound: how the model hears, which sees nothing; None: it sees.
      image_token_id, video_token_id: placeholders, the first one of pictures, or of sounds.
      vision_start_token_id, vision_end_token_id: what stands around them. Of videos and of these -1: there are none.
    """

    patch_size: int
    merge_size: int
    image: PixelSettings
    video: PixelSettings
    image_token_id: int
    video_token_id: int = -1
    vision_start_token_id: int = -1
    vision_end_token_id: int = -1
    temporal_patch_size: int = 1
    video_fps: float = 2.0
    min_frames: int = 4
    max_frames: int = 768
    caps_frames: bool = False
    max_frame_tokens: int = 768
    num_frames: int | None = None
    sampling: Sampling = "even"
    max_duration_s: float = 300.0
    by_frame: bool = False
    positions_per_s: float | None = None
    max_video_tokens: int = 128_000
    longest_side: int | None = None
    fixed_side: int | None = None
    crops: bool = False
    tiles: tuple[int, int] | None = None
    tiles_fit: bool = False
    tile_side: int | None = None
    tiles_longest: int | None = None
    tile_words: TileWords | None = None
    resolutions: tuple[tuple[int, int], ...] | None = None
    most_tiles: int | None = None
    several_whole: bool = False
    resample: int = BICUBIC
    lifts: bool = False
    counts_frames: bool = False
    fills: bool = False
    written: Written = "framed"
    times: Times = "seconds"
    frame_token_id: int | None = None
    takes_pixels: bool = False
    line_ends: tuple[int, int] | None = None
    sound: SoundShape | None = None

    @property
    def what(self) -> str:
        """What the model takes besides text, in words."""
        if self.sound is not None:
            return "sound"
        return "pictures" if self.video_token_id < 0 else "pictures and videos"

    @property
    def square(self) -> int:
        """Patches that become one token."""
        return self.merge_size**2 if self.sound is None else self.sound.merge

    @property
    def unit(self) -> int:
        """Pixels along the sides of the square that becomes one token."""
        return self.patch_size * self.merge_size

    def name_of(self, pixels: PixelSettings) -> str:
        """What a picture's digest must depend on besides its pixels."""
        return f"{self.patch_size} {self.temporal_patch_size} {self.merge_size} {pixels.mean} {pixels.std}"
