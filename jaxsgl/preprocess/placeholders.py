"""Where pictures stand in a prompt: one placeholder for each picture or video becomes as many as it has tokens.

A chat template, or a client, writes a placeholder for a picture and one for a whole video. A video's becomes, for each
temporal patch, its time in words and a placeholder in the model's frame of vision tokens: in the text before it is
tokenized (`write_placeholders`), or among ids (`expand_placeholders`). Where the model sees frames as pictures, it
stays a video's until `expand` repeats it. Of models that read a video's times from positions it stays one. Where
clients write a part of a frame alone, a picture's is completed likewise. Knows no pixels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from jaxsgl.errors import InvalidRequest
from jaxsgl.preprocess.settings import ProcessorSettings, TileWords, Times, Written
from jaxsgl.requests.media import Grid, MediaItem, Tiling, sglang_pad_id

EMPTY_LINE = "\n\n"


@dataclass(frozen=True)
class Part:
    """A picture, a tile of one, a temporal patch of a video, or a chunk of a sound.

    Attributes:
      digest, grid, pixels, later, tiling, filled: as in `MediaItem`.
      time_s: of a temporal patch, its time in words; None: no words tell it.
    """

    digest: bytes
    grid: Grid
    pixels: bytes
    time_s: float | None = None
    later: int | None = None
    tiling: Tiling | None = None
    filled: int = 0

    @property
    def num_patches(self) -> int:
        """Patches of the grid."""
        t, h, w = self.grid
        return t * h * w


@dataclass(frozen=True)
class Visual:
    """A picture, which has one part, or one for each tile, or a video, or a sound, which has one for each chunk.

    Attributes:
      parts: what is seen of it.
      is_video: it is one.
      columns: tiles of a line, whose places are told in words; 0: no words tell them.
    """

    parts: tuple[Part, ...]
    is_video: bool
    columns: int = 0

    @property
    def has_words(self) -> bool:
        """Whether each part has a placeholder of its own, next to its time in words; else there is one for all."""
        return self.parts[0].time_s is not None

    @property
    def runs(self) -> tuple[tuple[Part, ...], ...]:
        """The parts by placeholders."""
        return tuple((part,) for part in self.parts) if self.has_words or self.columns else (self.parts,)


@dataclass(frozen=True)
class Tokens:
    """The text of the tokens around pictures, and `written`, `times` and `tile_words` of `ProcessorSettings`."""

    image: str
    video: str
    start: str
    end: str
    written: Written = "framed"
    times: Times = "seconds"
    tile_words: TileWords | None = None


def tokens_of(settings: ProcessorSettings, name_of: Callable[[int], bytes]) -> Tokens:
    """Returns them, as `name_of` tells the text of a token; "" for those that the model lacks."""
    ids = (
        settings.image_token_id,
        settings.video_token_id,
        settings.vision_start_token_id,
        settings.vision_end_token_id,
    )
    image, video, start, end = (
        "" if token_id < 0 else name_of(token_id).decode("utf-8", "replace") for token_id in ids
    )
    return Tokens(image, video, start, end, settings.written, settings.times, settings.tile_words)


def words_around_tiles(picture: Visual, words: TileWords) -> list[str]:
    """Returns what stands before each tile of a picture, and what after the last one, which shows it whole."""
    before = [
        words.line_end * (number > 0 and number % picture.columns == 0)
        + words.tile.format(row=number // picture.columns + 1, column=number % picture.columns + 1, number=number + 1)
        for number in range(len(picture.parts) - 1)
    ]
    whole = (words.line_end + words.after_tiles) * bool(before) + words.whole
    first, *others = [*before, whole]
    return [words.start + first, *(words.after + each for each in (*others, words.end))]


def times_in_words(video: Visual, times: Times) -> list[tuple[str, str]]:
    """Returns what stands before each temporal patch of a video, and what after it: its time, or its number."""
    seconds = [part.time_s or 0.0 for part in video.parts]
    if times == "whole seconds after":
        return [("", str(int(time_s))) for time_s in seconds]
    if times == "seconds after":
        return [("", f"{time_s:.1f} seconds") for time_s in seconds]
    if times == "numbers":
        return [("\n" * bool(index) + f"Frame{index + 1}: ", "") for index in range(len(seconds))]
    if times == "seconds":
        return [(f"<{time_s:.1f} seconds>", "") for time_s in seconds]
    return [(f"{' ' * bool(index)}{int(s // 60):02d}:{int(s % 60):02d} ", "") for index, s in enumerate(seconds)]


def write_placeholders(text: str, visuals: Sequence[Visual], tokens: Tokens) -> str:
    """Returns `text` with a placeholder for each temporal patch of each video, and its time, if it has words for it.

    And with one for each picture, where clients write another token.

    The vision tokens around a video's placeholder go, since each temporal patch has its own. Raises `InvalidRequest`
    unless there is a placeholder for each video.
    """
    videos = [visual for visual in visuals if visual.is_video]
    if tokens.tile_words is not None:
        return _with_tiles(text, visuals, tokens.image, tokens.tile_words)
    framed = f"{tokens.start}{tokens.image}{tokens.end}"
    if tokens.written == "start":
        text = text.replace(tokens.start, f"{EMPTY_LINE}{framed}{EMPTY_LINE}")
    elif tokens.written == "image":
        text = text.replace(framed, tokens.image).replace(tokens.image, framed)
    if not (videos or tokens.video):
        return text
    pieces = text.split(tokens.video)
    if len(pieces) - 1 != len(videos):
        raise _mismatch(len(pieces) - 1, tokens.video, len(videos), "videos")
    written = pieces[0]
    for video, behind in zip(videos, pieces[1:], strict=True):
        if not video.has_words:
            written += tokens.video + behind
            continue
        if written.endswith(tokens.start) and behind.startswith(tokens.end):
            written, behind = written.removesuffix(tokens.start), behind.removeprefix(tokens.end)
        frame = f"{tokens.start}{tokens.video}{tokens.end}"
        written += "".join(f"{before}{frame}{after}" for before, after in times_in_words(video, tokens.times)) + behind
    return written


def _with_tiles(text: str, pictures: Sequence[Visual], placeholder: str, words: TileWords) -> str:
    """The text with a placeholder for each tile of each picture, between words."""
    told = words.placeholder or placeholder
    written, *others = text.split(told)
    if len(others) != len(pictures):
        raise _mismatch(len(others), told, len(pictures), "images")
    for picture, after in zip(pictures, others, strict=True):
        written += placeholder.join(words_around_tiles(picture, words)) + after
    return written


def expand_placeholders(
    ids: Sequence[int], visuals: Sequence[Visual], settings: ProcessorSettings, encode: Callable[[str], list[int]]
) -> list[int]:
    """Does to ids what `write_placeholders` does to text; `encode` gives the ids of a time in words."""
    videos = [visual for visual in visuals if visual.is_video]
    if settings.tile_words is not None:
        return _ids_with_tiles(ids, visuals, settings.image_token_id, settings.tile_words, encode)
    start, end = settings.vision_start_token_id, settings.vision_end_token_id
    framed = [start, settings.image_token_id, end]
    if settings.written == "start":
        line = encode(EMPTY_LINE)
        ids = _put(ids, [start], [*line, *framed, *line])
    elif settings.written == "image":
        ids = _put(_put(ids, framed, framed[1:2]), framed[1:2], framed)
    count = sum(token_id == settings.video_token_id for token_id in ids)
    if count != len(videos):
        raise _mismatch(count, f"id {settings.video_token_id}", len(videos), "videos")
    rest, expanded, of_video = list(ids), list[int](), iter(videos)
    place = 0
    while place < len(rest):
        token_id = rest[place]
        place += 1
        video = next(of_video) if token_id == settings.video_token_id else None
        if video is None or not video.has_words:
            expanded.append(token_id)
            continue
        if expanded and expanded[-1] == start and place < len(rest) and rest[place] == end:
            expanded.pop()
            place += 1
        for words in times_in_words(video, settings.times):
            before, after = (encode(each) if each else [] for each in words)
            expanded += [*before, start, token_id, end, *after]
    return expanded


def _ids_with_tiles(
    ids: Sequence[int],
    pictures: Sequence[Visual],
    placeholder: int,
    words: TileWords,
    encode: Callable[[str], list[int]],
) -> list[int]:
    count = sum(token_id == placeholder for token_id in ids)
    if count != len(pictures):
        raise _mismatch(count, f"id {placeholder}", len(pictures), "images")
    expanded, of_pictures = list[int](), iter(pictures)
    for token_id in ids:
        if token_id != placeholder:
            expanded.append(token_id)
            continue
        *before, end = map(encode, words_around_tiles(next(of_pictures), words))
        for each in before:
            expanded += [*each, placeholder]
        expanded += end
    return expanded


def _put(ids: Sequence[int], written: list[int], meant: list[int]) -> list[int]:
    """The ids with `meant` in the place of each run `written`."""
    made: list[int] = []
    for token_id in ids:
        made.append(token_id)
        if made[-len(written) :] == written:
            made[-len(written) :] = meant
    return made


def expand(
    ids: Sequence[int], visuals: Sequence[Visual], settings: ProcessorSettings, sglang_ids: bool = False
) -> tuple[list[int], tuple[MediaItem, ...]]:
    """Returns the prompt in which each placeholder is repeated for each of its tokens, and what stands there.

    `ids` have one placeholder for each run of `visuals`, in their order among pictures and among videos.
    `sglang_ids`: their `hash_ids` follow SGLang's formula. Raises `InvalidRequest`.
    """
    runs = {
        settings.image_token_id: [run for visual in visuals if not visual.is_video for run in visual.runs],
        settings.video_token_id: [run for visual in visuals if visual.is_video for run in visual.runs],
    }
    names = ("images" if settings.sound is None else "sounds", "frames of videos")
    for (token_id, of_kind), what in zip(runs.items(), names, strict=True):
        count = sum(known == token_id for known in ids)
        if count != len(of_kind):
            raise _mismatch(count, f"id {token_id}", len(of_kind), what)
    seen_as = {} if settings.frame_token_id is None else {settings.video_token_id: settings.frame_token_id}
    iterators: dict[int, Iterator[tuple[Part, ...]]] = {token_id: iter(of_kind) for token_id, of_kind in runs.items()}
    expanded: list[int] = []
    items: list[MediaItem] = []
    for token_id in ids:
        if token_id not in iterators:
            expanded.append(token_id)
            continue
        for part in next(iterators[token_id]):
            tokens, line_len = _tokens_of(part, seen_as.get(token_id, token_id), settings)
            pad_id = sglang_pad_id(part.digest) if sglang_ids else None
            place = len(expanded), len(tokens)
            items.append(
                MediaItem(
                    part.digest, *place, part.grid, part.pixels, pad_id, part.later, line_len, part.tiling, part.filled
                )
            )
            expanded += tokens
    return expanded, tuple(items)


def _tokens_of(part: Part, token_id: int, settings: ProcessorSettings) -> tuple[list[int], int]:
    """The tokens of a part, placeholders and ends of lines, and how many a line has; 0 if nothing ends lines."""
    if settings.sound is not None:
        return [token_id] * settings.sound.num_tokens(part.filled), 0
    if part.tiling is not None:
        return [token_id] * part.tiling.num_tokens(part.grid[2]), 0
    if settings.line_ends is None:
        return [token_id] * (part.num_patches // settings.merge_size**2), 0
    lines, width = (side // settings.merge_size for side in part.grid[1:])
    end, last = settings.line_ends
    return [*([*[token_id] * width, end] * lines)[:-1], last], width + 1


def _mismatch(count: int, placeholder: str, expected: int, what: str) -> InvalidRequest:
    return InvalidRequest(
        f"the prompt has {count} placeholders ({placeholder}), but {expected} {what} come with it: write one for each "
        "where it belongs, and none besides"
    )
