"""Images and video frames of a request as values: pixels, where their placeholder tokens stand, and what names them.

Two arrays of ids follow from a request: the step embeds `prompt_ids`, in which all images look alike (placeholder
tokens); prefix cache, KV events, host tier and router compare `hash_ids`, in which each placeholder is replaced by a
number made of the image's digest. So a prompt with another image never shares KV after its first placeholder.

Owns these values and their checks. Never knows files, protocols or devices. The front end (or `LLM`) makes the values,
the scheduler hashes them, the engine encodes them.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Sequence
from typing import TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from jaxsgl.errors import InvalidRequest

DIGEST_BYTES = 32
CHANNELS = 3
FIRST_HASH_ID = 1 << 20  # above all token ids, so that no text looks like an image
MAX_LATER = 1 << 24  # positions of time that a video takes; of a day they are 1 << 18
_NUM_HASH_IDS = (1 << 31) - FIRST_HASH_ID
_SGLANG_FIRST_PAD_ID = 1_000_000
_SGLANG_PAD_IDS = 1 << 30
_MAX_HEAD_BYTES = 128  # of a packed item without its pixels
TOKENS_OF_ITEM = 32  # of --media-max-tokens, for each image that a request may have
FRAMES_OF_PATCH = 2  # of a sound
_FRAME_TYPE = np.dtype("<f4")

IntArray: TypeAlias = npt.NDArray[np.int32]
Grid: TypeAlias = tuple[int, int, int]


class Tiling(msgspec.Struct, frozen=True, array_like=True):
    """How the tokens of a picture's tiles are joined to lines, after those of what shows it whole.

    Attributes:
      columns: tiles of a line; 0: there are none, and a single end follows what shows it whole.
      lines, width: tokens of all tiles together that show the picture, in their middle; around it they show nothing.
      shown_lines, shown_width: what these are shrunk to; each line ends with one token more.
    """

    columns: int
    lines: int
    width: int
    shown_lines: int
    shown_width: int

    def num_tokens(self, side: int) -> int:
        """Tokens of a picture whose tiles have `side` tokens along each side."""
        return side**2 + (self.shown_lines * (self.shown_width + 1) if self.columns else 1)


class SoundShape(msgspec.Struct, frozen=True, array_like=True):
    """How a model hears: in chunks of equal length, each of which is a `MediaItem` with the grid (1, num_patches, 1).

    A patch is `FRAMES_OF_PATCH` frames of a log-mel spectrogram, which are one position of the tower.

    Attributes:
      num_patches: of a chunk.
      bins: of a frame.
      merge: patches that become one token.
      hears_all: the silence after the end of a sound, up to that of its last chunk, is heard, too, and becomes tokens;
        else a sound is one chunk, in which nothing looks at silence.
    """

    num_patches: int
    bins: int
    merge: int
    hears_all: bool

    @property
    def patch_bytes(self) -> int:
        """Bytes of a patch: float32, frame by frame."""
        return FRAMES_OF_PATCH * self.bins * _FRAME_TYPE.itemsize

    @property
    def grid(self) -> Grid:
        """Of each chunk."""
        return 1, self.num_patches, 1

    def num_tokens(self, filled: int) -> int:
        """Of a chunk of which a sound fills so many patches."""
        return (self.num_patches if self.hears_all else filled) // self.merge


class MediaItem(msgspec.Struct, frozen=True, array_like=True):
    """A still image, or one temporal patch of a video (its frames by twos, as the model takes them), or some seconds of
    a sound (`SoundShape`).

    A video of n temporal patches is n items, since the tower looks at each of them alone. Each has placeholder tokens
    of its own, after its timestamp or, in older models, right after those of the one before.

    Attributes:
      digest: SHA-256 of the pixels, the grid and the processor's settings; see `digest_of`.
      offset, length: of its tokens in the prompt: placeholders, and those that end its lines.
      grid: (t, h, w) in patches. t is 1.
      pixels: uint8 `[t * h * w, channels * temporal * patch * patch]`, the patches in the order of the model's merges;
        see `patches_of`. They are RGB, resized, and not normalized yet.
      pad_id: stands for each of its tokens among the `hash_ids`; None: numbers that are drawn from `digest`.
      later: it goes on with the video of the item before, right after which it stands, by so many positions of time
        after the video's beginning; None: it begins something.
      line_len: tokens of a line, of which the last one ends it and stands for no part of the image; 0: nothing tells
        lines.
      tiling: of a picture whose tiles are joined, which lie one under the other in its grid, the whole picture first;
        None: it has no such tiles.
      filled: patches of a chunk that its sound fills; 0: it is none.
    """

    digest: bytes
    offset: int
    length: int
    grid: Grid
    pixels: bytes
    pad_id: int | None = None
    later: int | None = None
    line_len: int = 0
    tiling: Tiling | None = None
    filled: int = 0

    @property
    def num_patches(self) -> int:
        """Patches that the tower encodes."""
        t, h, w = self.grid
        return t * h * w

    @property
    def stop(self) -> int:
        """The position after its last token."""
        return self.offset + self.length

    @property
    def num_rows(self) -> int:
        """Embeddings that the tower makes of it: one for each placeholder."""
        return self.length - self.length // self.line_len if self.line_len else self.length

    def by_token(self, rows: IntArray) -> IntArray:
        """`[length]` which of its `rows [num_rows]` each of its tokens has; 0: none, since it ends a line."""
        if not self.line_len:
            return rows
        return np.pad(rows.reshape(-1, self.line_len - 1), ((0, 0), (0, 1))).reshape(-1)


class MediaLimits(msgspec.Struct, frozen=True):
    """What a model with a tower takes, and how much of it in one request.

    Attributes:
      image_token_id, video_token_id: the placeholder tokens of images, or of sounds, and of video frames; -1: there are
        no videos.
      patch_size, temporal_patch_size: pixels along the sides of a patch, and frames in it.
      merge_size: patches along the sides of the square that becomes one token.
      max_items: images and temporal patches of videos of a request, at each of which every plan of a step looks.
      max_patches: of one item.
      max_picture_patches: of all tiles of a picture, of models that see it in tiles, each of which is an item.
      max_request_patches: of all items of a request, whose pixels host memory holds until they are encoded.
      has_lines: tokens end the lines of images, see `MediaItem.line_len`.
      image_side: patches along the sides of any image; 0: they differ.
      joins_tiles: images have a `MediaItem.tiling`, and `image_side` is that of a tile.
      sound: the model hears, and sees nothing; None: it sees.
      may_come_later: requests of two legs may lack them, or their pixels, here: the prefill server encodes them.
    """

    image_token_id: int
    video_token_id: int
    patch_size: int = 16
    temporal_patch_size: int = 2
    merge_size: int = 2
    max_items: int = 1024
    max_patches: int = 16384
    max_request_patches: int = 131072
    max_picture_patches: int = 16384
    has_lines: bool = False
    image_side: int = 0
    joins_tiles: bool = False
    sound: SoundShape | None = None
    may_come_later: bool = False

    @property
    def what(self) -> str:
        """What the model takes besides text, in words."""
        return "pictures" if self.sound is None else "sound"

    @property
    def item_name(self) -> str:
        """What an item is, in words."""
        return "image" if self.sound is None else "sound"

    @property
    def square(self) -> int:
        """Patches that become one token."""
        return self.merge_size**2 if self.sound is None else self.sound.merge

    @property
    def patch_bytes(self) -> int:
        """Bytes of `MediaItem.pixels` for each patch."""
        if self.sound is not None:
            return self.sound.patch_bytes
        return CHANNELS * self.temporal_patch_size * self.patch_size**2

    @property
    def max_packed_bytes(self) -> int:
        """Bytes that `pack_images` makes of a request's images at most."""
        return self.max_request_patches * self.patch_bytes + self.max_items * _MAX_HEAD_BYTES


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(tuple[MediaItem, ...])


def patches_of(item: MediaItem) -> npt.NDArray[np.uint8]:
    """Returns the item's pixels as `[num_patches, channels * temporal * patch * patch]`, a read-only view."""
    return np.frombuffer(item.pixels, dtype=np.uint8).reshape(item.num_patches, -1)


def digest_of(pixels: bytes, grid: Grid, settings: str) -> bytes:
    """Returns the name of an item: the same for the same pixels, grid and settings of the processor, in any process."""
    digest = hashlib.sha256(f"jaxsgl media {settings} {grid}\n".encode())
    digest.update(pixels)
    return digest.digest()


def sglang_pad_id(digest: bytes) -> int:
    """Returns the number that SGLang's formula makes of a hash: routers that know it find the same prefixes.

    Two images get the same one with a probability of 2**-30, so that one in 39,000 images has a twin at even odds.
    """
    return _SGLANG_FIRST_PAD_ID + int.from_bytes(digest[:8], "big") % _SGLANG_PAD_IDS


def hash_ids(prompt_ids: Sequence[int] | IntArray, media: Sequence[MediaItem]) -> IntArray:
    """Returns `[n]` what the prefix cache compares instead of `prompt_ids`: equal to them where there is no media.

    A placeholder's number depends on its item and on its place in the item; it is at least `FIRST_HASH_ID`.
    """
    ids = np.array(prompt_ids, dtype=np.int32)
    for item in media:
        ids[item.offset : item.stop] = _drawn_ids(item) if item.pad_id is None else item.pad_id
    return ids


def _drawn_ids(item: MediaItem) -> IntArray:
    drawn = hashlib.shake_256(item.digest).digest(4 * item.length)
    return (np.frombuffer(drawn, dtype="<u4") % _NUM_HASH_IDS + FIRST_HASH_ID).astype(np.int32)


def num_placeholders(prompt_ids: Sequence[int], limits: MediaLimits) -> int:
    """Placeholder tokens of a prompt."""
    return prompt_ids.count(limits.image_token_id) + prompt_ids.count(limits.video_token_id)


def images_hash(media: Sequence[MediaItem]) -> int:
    """A number that tells the images of two legs of a request apart; 0 for none."""
    return zlib.crc32(b"".join(item.digest for item in media)) or 1 if media else 0


def without_pixels(media: Sequence[MediaItem]) -> tuple[MediaItem, ...]:
    """Returns what a server needs of `media` that doesn't encode them."""
    return tuple(msgspec.structs.replace(item, pixels=b"") for item in media)


def pack_images(media: Sequence[MediaItem]) -> bytes:
    """Returns `media` as bytes for another server."""
    return _encoder.encode(media)


def unpack_images(data: bytes | bytearray) -> tuple[MediaItem, ...]:
    """Returns what `pack_images` packed. Raises `InvalidRequest` if it is something else."""
    try:
        return _decoder.decode(data)
    except msgspec.DecodeError as error:
        raise InvalidRequest(f"the images that came from prefill are malformed: {error}") from None


def check_media(media: Sequence[MediaItem], prompt_ids: Sequence[int], limits: MediaLimits | None) -> None:
    """Raises `InvalidRequest` unless the model takes `media`, and all placeholders of the prompt belong to an item."""
    if limits is None:
        if media:
            raise InvalidRequest(
                f"the request has {len(media)} pictures, video frames or sounds, but the model takes text alone: leave "
                "them out, or ask a server whose model sees or hears"
            )
        return
    if len(media) > limits.max_items:
        raise InvalidRequest(
            f"the request has {len(media)} pictures, frame pairs or sounds, but may have {limits.max_items}, one for "
            f"each {TOKENS_OF_ITEM} of --media-max-tokens: send fewer"
        )
    end = num_patches = 0
    for number, item in enumerate(media):
        name = f"{limits.item_name} {number}"
        _check_item(name, item, prompt_ids, limits)
        if item.offset < end:
            raise InvalidRequest(f"{name} begins at token {item.offset}, but the one before ends at {end}")
        if item.later is not None and not (number and item.offset == end and 0 <= item.later <= MAX_LATER):
            raise InvalidRequest(
                f"{name} goes on with a video at token {item.offset}, {item.later} later, but must follow the "
                f"one before, which ends at {end}, by 0 to {MAX_LATER}"
            )
        end = item.stop
        num_patches += item.num_patches
    if num_patches > limits.max_request_patches:
        raise too_many_patches(num_patches, limits.max_request_patches, limits.square)
    placeholders = num_placeholders(prompt_ids, limits)
    expected = sum(item.num_rows for item in media)
    if placeholders != expected:
        raise InvalidRequest(
            f"the prompt has {placeholders} placeholder tokens, but its {limits.item_name}s have {expected}: write no "
            "placeholders besides them"
        )


def too_many_patches(num_patches: int, max_request_patches: int, square: int) -> InvalidRequest:
    """Returns the error of a request whose images have so many patches, or more, which are too many.

    `square` patches become one token.
    """
    found, most = (number // square for number in (num_patches, max_request_patches))
    return InvalidRequest(
        f"the media of the request have {found} tokens or more, but may have {most} together (the least of "
        "--media-max-tokens, the context and, with prompts extended whole, --mm-pool-tokens): send fewer or smaller "
        "pictures, or shorter videos and sounds"
    )


def _check_grid(name: str, item: MediaItem, limits: MediaLimits) -> None:
    """Raises `InvalidRequest` unless the model takes items of this grid."""
    (t, h, w), merge, side = item.grid, limits.merge_size, limits.image_side
    if (sound := limits.sound) is not None:
        if item.grid != sound.grid or not 1 <= item.filled <= sound.num_patches:
            raise InvalidRequest(
                f"{name} has the grid {item.grid}, of which a sound fills {item.filled}, but the model hears "
                f"{sound.grid}, of which one fills 1 and more"
            )
        return
    if item.filled:
        raise InvalidRequest(f"{name} is a sound, but the model takes {limits.what} alone")
    if t != 1 or h < merge or w < merge or h % merge or w % merge:
        raise InvalidRequest(f"{name} has the grid {item.grid}, but must have (1, h, w) in multiples of {merge}")
    if limits.joins_tiles:
        _check_tiling(name, item, side)
    elif side and (h, w) != (side, side):
        raise InvalidRequest(f"{name} has the grid {item.grid}, but all images of the model have (1, {side}, {side})")


def _check_item(name: str, item: MediaItem, prompt_ids: Sequence[int], limits: MediaLimits) -> None:
    _check_grid(name, item, limits)
    _, h, w = item.grid
    merge = limits.merge_size
    if item.num_patches > limits.max_patches:
        raise InvalidRequest(
            f"{name} has {item.num_patches} patches of {limits.patch_size} x {limits.patch_size} pixels, but may have "
            f"{limits.max_patches}: send a smaller one"
        )
    num_bytes = item.num_patches * limits.patch_bytes
    if len(item.pixels) != num_bytes and (item.pixels or not limits.may_come_later):
        raise InvalidRequest(
            f"{name} has {len(item.pixels)} bytes of pixels, but its grid {item.grid} needs {num_bytes}"
        )
    if len(item.digest) != DIGEST_BYTES:
        raise InvalidRequest(f"{name} has a digest of {len(item.digest)} bytes, but SHA-256 has {DIGEST_BYTES}")
    line_len = w // merge + 1 if limits.has_lines else 0
    num_tokens = h // merge * line_len if line_len else item.num_patches // limits.square
    if limits.sound is not None:
        num_tokens = limits.sound.num_tokens(item.filled)
    if limits.joins_tiles and item.tiling is not None:
        num_tokens = item.tiling.num_tokens(limits.image_side)
    if (item.length, item.line_len) != (num_tokens, line_len):
        of_lines = f" in lines of {item.line_len}" if item.line_len else ""
        raise InvalidRequest(
            f"{name} has {item.length} placeholder tokens{of_lines}, but its grid {item.grid} needs {num_tokens}"
            + (f" in lines of {line_len}" if line_len else "")
        )
    if item.offset < 0 or item.stop > len(prompt_ids):
        raise InvalidRequest(
            f"{name} stands at tokens {item.offset} to {item.stop - 1}, but the prompt has {len(prompt_ids)}"
        )
    is_row = item.by_token(np.ones(item.num_rows, np.int32)).tolist()
    tokens = zip(prompt_ids[item.offset : item.stop], is_row, strict=True)
    kinds = {token_id for token_id, of_image in tokens if of_image}
    if len(kinds) != 1 or not kinds <= {limits.image_token_id, limits.video_token_id}:
        raise InvalidRequest(
            f"{name} stands at tokens {item.offset} to {item.stop - 1}, but not all of these are placeholders"
        )


def _check_tiling(name: str, item: MediaItem, side: int) -> None:
    """Raises `InvalidRequest` unless its tiles have `side` patches along each side, and their lines what they need."""
    tiling, (_, h, w) = item.tiling, item.grid
    if tiling is not None and w == side and h % side == 0:
        rows, rest = divmod(h // side - 1, tiling.columns or 1)
        whole = rows * side, tiling.columns * side
        of_tiles = (tiling.lines, tiling.width)
        is_within = all(0 < of <= most and (most - of) % 2 == 0 for of, most in zip(of_tiles, whole, strict=True))
        is_shown = 0 < tiling.shown_lines <= tiling.lines and 0 < tiling.shown_width <= tiling.width
        if rest == 0 and (is_within and is_shown if tiling.columns > 0 else tiling.columns == rows == 0):
            return
    raise InvalidRequest(
        f"{name} has the grid {item.grid} and joins {tiling}, but the model's tiles have {side} x {side} patches: give "
        "the grid and the lines that these make"
    )
