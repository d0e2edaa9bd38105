"""Images and video frames as values: what names them, and which of them are refused."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import pytest

from jaxsgl.config.engine import Limits
from jaxsgl.errors import InvalidRequest
from jaxsgl.requests.media import (
    FIRST_HASH_ID,
    Grid,
    MediaItem,
    MediaLimits,
    Tiling,
    check_media,
    digest_of,
    hash_ids,
    images_hash,
    pack_images,
    patches_of,
    unpack_images,
)
from jaxsgl.requests.media import sglang_pad_id as pad_id_of
from jaxsgl.requests.request import Rendezvous, Request, SamplingParams, check_request

IMAGE, VIDEO = 90, 91
LIMITS = MediaLimits(IMAGE, VIDEO, patch_size=4, max_items=3, max_patches=64, max_request_patches=96)


def item(offset: int = 2, grid: Grid = (1, 4, 6), fill: int = 7) -> MediaItem:
    num_patches = grid[0] * grid[1] * grid[2]
    pixels = bytes([fill]) * (num_patches * LIMITS.patch_bytes)
    return MediaItem(digest_of(pixels, grid, "s"), offset, num_patches // 4, grid, pixels)


def prompt_with(media: Sequence[MediaItem], num_tokens: int = 40) -> list[int]:
    ids = list(range(num_tokens))
    for image in media:
        ids[image.offset : image.stop] = [IMAGE] * image.length
    return ids


def test_hash_ids_differ_from_the_prompt_at_placeholders_alone() -> None:
    image = item()
    ids = prompt_with([image])
    hashed = hash_ids(ids, [image])
    assert hashed.dtype == np.int32
    inside = slice(image.offset, image.stop)
    assert (hashed[inside] >= FIRST_HASH_ID).all() and len(set(hashed[inside].tolist())) == image.length
    assert hashed[: image.offset].tolist() == ids[: image.offset]
    assert hashed[image.stop :].tolist() == ids[image.stop :]
    assert hash_ids(ids, ()).tolist() == ids


def test_equal_images_have_equal_hash_ids_wherever_they_stand_and_other_images_have_others() -> None:
    one, moved, other = item(offset=2), item(offset=9), item(offset=2, fill=8)
    ids = {name: hash_ids(prompt_with([image]), [image]) for name, image in (("a", one), ("b", moved), ("c", other))}
    assert ids["a"][2:8].tolist() == ids["b"][9:15].tolist()
    assert not set(ids["a"][2:8].tolist()) & set(ids["c"][2:8].tolist())


def test_a_digest_depends_on_pixels_grid_and_settings() -> None:
    assert len({digest_of(b"ab", (1, 2, 2), "s"), digest_of(b"ac", (1, 2, 2), "s"), digest_of(b"ab", (1, 2, 4), "s"),
                digest_of(b"ab", (1, 2, 2), "t")}) == 4  # fmt: skip


def test_a_pad_id_stands_for_every_token_of_its_image() -> None:
    image = item()
    pad_id = pad_id_of(image.digest)
    assert 1_000_000 <= pad_id < 1_000_000 + 2**30
    hashed = hash_ids(prompt_with([image]), [msgspec.structs.replace(image, pad_id=pad_id)])
    assert set(hashed[image.offset : image.stop].tolist()) == {pad_id}


def test_patches_are_a_view_of_the_pixels() -> None:
    image = item()
    assert patches_of(image).shape == (24, LIMITS.patch_bytes)
    assert np.shares_memory(patches_of(image), np.frombuffer(image.pixels, np.uint8))


def test_a_request_with_media_travels_unchanged() -> None:
    image = item()
    request = Request("a", prompt_with([image]), SamplingParams(), media=(image,))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(request), type=Request) == request


def test_media_that_fit_are_taken_by_models_with_a_tower_alone() -> None:
    image = item()
    request = Request("a", prompt_with([image]), SamplingParams(max_tokens=4), media=(image,))
    check_request(request, Limits(100, 64, 64, LIMITS))
    with pytest.raises(InvalidRequest, match="1 pictures, video frames or sounds, but the model takes text alone"):
        check_request(request, Limits(100, 64, 64))


JOINING = MediaLimits(IMAGE, -1, 4, 1, 1, max_items=3, image_side=2, joins_tiles=True)


def joined(tiling: Tiling | None, tiles: int, length: int | None = None) -> MediaItem:
    grid = (1, 2 * tiles, 2)
    pixels = bytes(4 * tiles * JOINING.patch_bytes)
    tokens = 4 if tiling is None else tiling.num_tokens(2)
    return MediaItem(digest_of(pixels, grid, "s"), 2, length or tokens, grid, pixels, tiling=tiling)


def test_joined_tiles_have_the_tokens_of_their_lines() -> None:
    for image, length in ((joined(Tiling(2, 2, 4, 2, 4), 3), 14), (joined(Tiling(0, 0, 0, 0, 0), 1), 5)):
        assert image.length == length
        check_request(Request("a", prompt_with([image]), SamplingParams(max_tokens=4), media=(image,)), FOR_JOINED)


FOR_JOINED = Limits(100, 64, 64, JOINING)
BROKEN = [
    joined(None, 1), joined(Tiling(2, 2, 4, 2, 4), 4), joined(Tiling(2, 2, 3, 2, 3), 3),
    joined(Tiling(2, 3, 4, 2, 4), 3), joined(Tiling(2, 2, 4, 3, 4), 3), joined(Tiling(2, 2, 4, 2, 0), 3),
    joined(Tiling(0, 0, 0, 0, 0), 2), joined(Tiling(-1, 2, 4, 2, 4), 3),
]  # fmt: skip


@pytest.mark.parametrize("image", BROKEN, ids=range(len(BROKEN)))
def test_lines_that_tiles_do_not_make_are_refused(image: MediaItem) -> None:
    with pytest.raises(InvalidRequest, match=r"but the model's tiles have 2 x 2 patches: give the grid and the lines"):
        check_request(Request("a", prompt_with([image]), SamplingParams(max_tokens=4), media=(image,)), FOR_JOINED)


def test_joined_tiles_have_no_other_number_of_placeholders() -> None:
    image = joined(Tiling(2, 2, 4, 2, 4), 3, length=13)
    with pytest.raises(InvalidRequest, match=r"has 13 placeholder tokens, but its grid .* needs 14"):
        check_request(Request("a", prompt_with([image]), SamplingParams(max_tokens=4), media=(image,)), FOR_JOINED)


replace = msgspec.structs.replace
WRONG = {
    "placeholder tokens, but its grid": [replace(item(), length=5)],
    "bytes of pixels, but its grid": [replace(item(), pixels=b"ab")],
    "multiples of 2": [item(grid=(1, 3, 8))],
    r"must have \(1, h, w\)": [item(grid=(2, 2, 2))],
    "patches of 4 x 4 pixels, but may have 64": [item(grid=(1, 8, 10))],
    "stands at tokens": [item(offset=36)],
    "stands at tokens -": [item(offset=-3)],
    "not all of these are placeholders": [replace(item(), offset=3)],
    "the one before ends at 8": [item(2), item(2)],
    "have 3, one for each 32 of": [item(0, (1, 2, 2)), item(1, (1, 2, 2)), item(2, (1, 2, 2)), item(3, (1, 2, 2))],
    r"28 tokens or more, .*24 together \(the least of --media-max-to": [item(0, (1, 8, 8)), item(16, (1, 8, 6))],
    "goes on with a video at token 2, 1 later, but must follow": [replace(item(), later=1)],
    "but must follow the one before, which ends at 8": [item(2), replace(item(10), later=1)],
    "8, -1 later": [item(2), replace(item(8), later=-1)],
    "8, 16777217 later": [item(2), replace(item(8), later=(1 << 24) + 1)],
    "a digest of 3 bytes": [replace(item(), digest=b"abc")],
}


LINED = MediaLimits(IMAGE, -1, patch_size=4, has_lines=True)
LINES = replace(item(), length=8, line_len=4)  # 2 lines of 3 and their ends
OF_LINES = [IMAGE, IMAGE, IMAGE, 93, IMAGE, IMAGE, IMAGE, 92]


def test_all_images_of_a_model_may_have_to_be_squares_of_one_size() -> None:
    limits = msgspec.structs.replace(LIMITS, image_side=4)
    square = item(grid=(1, 4, 4))
    check_media([square], prompt_with([square]), limits)
    with pytest.raises(InvalidRequest, match=r"but all images of the model have \(1, 4, 4\)"):
        check_media([item()], prompt_with([item()]), limits)


def test_an_image_in_lines_is_taken_by_models_that_tell_lines_alone() -> None:
    image = replace(LINES, grid=(1, 4, 6), pixels=LINES.pixels[: 24 * LINED.patch_bytes])
    check_media([image], [1, 2, *OF_LINES, 3], LINED)
    with pytest.raises(InvalidRequest, match=r"has 8 placeholder tokens in lines of 4, but its grid .* needs 6$"):
        check_media([image], [1, 2, *OF_LINES, 3], LIMITS)
    with pytest.raises(InvalidRequest, match=r"has 6 placeholder tokens, but its grid .* needs 8 in lines of 4"):
        check_media([replace(image, length=6, line_len=0)], [1, 2, *[IMAGE] * 6], LINED)
    with pytest.raises(InvalidRequest, match="not all of these are placeholders"):
        check_media([image], [1, 2, *OF_LINES[:2], 5, *OF_LINES[3:], 3], LINED)
    with pytest.raises(InvalidRequest, match="the prompt has 7 placeholder tokens, but its images have 6"):
        check_media([image], [1, 2, *OF_LINES[:3], IMAGE, *OF_LINES[4:], 3], LINED)


@pytest.mark.parametrize("message", WRONG)
def test_wrong_media_is_refused_with_the_limit(message: str) -> None:
    media = WRONG[message]
    kept = [item()] if "not all" in message else media
    with pytest.raises(InvalidRequest, match=message):
        check_media(media, prompt_with([image for image in kept if 0 <= image.offset < 36]), LIMITS)


def test_placeholders_without_an_image_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="the prompt has 1 placeholder tokens, but its images have 0"):
        check_media((), [1, VIDEO, 2], LIMITS)
    check_media((), [1, VIDEO, 2], None)


def test_only_a_decode_leg_may_lack_images() -> None:
    ids = prompt_with([item()])
    sampling = SamplingParams(max_tokens=1)
    for room, may_come_later in ((None, True), (Rendezvous("a", 1, 1), False)):
        limits = msgspec.structs.replace(LIMITS, may_come_later=may_come_later)
        with pytest.raises(InvalidRequest, match="placeholder"):
            check_request(Request("a", ids, sampling, room=room), Limits(100, 64, 64, limits))
    limits = msgspec.structs.replace(LIMITS, may_come_later=True)
    check_request(Request("a", ids, sampling, room=Rendezvous("a", 1, 1)), Limits(100, 64, 64, limits))
    with pytest.raises(InvalidRequest, match="placeholder"):
        check_request(
            Request("a", [*ids, IMAGE], sampling, room=Rendezvous("a", 1, 1), media=(item(),)),
            Limits(100, 64, 64, limits),
        )


def test_images_are_packed_for_another_server() -> None:
    media = (item(), item(offset=20, fill=9))
    packed = pack_images(media)
    assert unpack_images(packed) == media and len(packed) <= LIMITS.max_packed_bytes
    assert images_hash(media) != images_hash(media[:1]) != images_hash(()) == 0
    with pytest.raises(InvalidRequest, match="malformed"):
        unpack_images(packed[:-1])
