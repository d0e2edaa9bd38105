"""A placeholder becomes as many as its picture has tokens; a video's becomes its frames with their times."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from transformers.models.cohere2_vision.processing_cohere2_vision import Cohere2VisionProcessor

from jaxsgl.errors import InvalidRequest
from jaxsgl.preprocess.placeholders import (
    Part,
    Tokens,
    Visual,
    expand,
    expand_placeholders,
    tokens_of,
    write_placeholders,
)
from jaxsgl.preprocess.settings import TileWords
from jaxsgl.requests.media import FIRST_HASH_ID, MediaLimits, check_media, hash_ids, sglang_pad_id
from tests.preprocess.pictures import SMALL

IMAGE, VIDEO, START, END = 7, 8, 5, 6
TOKENS = Tokens("<image>", "<video>", "<start>", "<end>")


def part(height: int, width: int, time_s: float | None = None) -> Part:
    pixels = bytes(height * width * 96)
    return Part(bytes([height]) * 32, (1, height, width), pixels, time_s)


PICTURE, WIDE = Visual((part(2, 4),), False), Visual((part(4, 6),), False)
CLIP = Visual((part(2, 2, 0.25), part(2, 2, 1.04)), True)


def test_each_picture_has_its_tokens_in_the_order_of_the_prompt() -> None:
    ids, items = expand([1, START, IMAGE, END, 2, IMAGE, 3], [PICTURE, WIDE], SMALL)
    assert ids == [1, START, IMAGE, IMAGE, END, 2, *[IMAGE] * 6, 3]
    assert [(item.offset, item.length, item.grid) for item in items] == [(3 - 1, 2, (1, 2, 4)), (6, 6, (1, 4, 6))]
    check_media(items, ids, MediaLimits(IMAGE, VIDEO, patch_size=4))


def test_pictures_and_videos_are_told_apart_by_their_placeholders() -> None:
    ids, items = expand([VIDEO, IMAGE, VIDEO], [PICTURE, CLIP], SMALL)
    assert ids == [VIDEO, IMAGE, IMAGE, VIDEO]
    assert [item.grid for item in items] == [(1, 2, 2), (1, 2, 4), (1, 2, 2)]


def test_the_text_of_a_video_names_the_time_of_each_of_its_temporal_patches() -> None:
    frames = "<0.2 seconds><start><video><end><1.0 seconds><start><video><end>"
    assert write_placeholders("a:<start><video><end>b", [PICTURE, CLIP], TOKENS) == f"a:{frames}b"
    assert write_placeholders("a:<video>b<start><video><end>", [CLIP, CLIP], TOKENS) == f"a:{frames}b{frames}"
    assert write_placeholders("no video", [], TOKENS) == "no video"


def test_ids_of_a_video_are_those_of_its_text() -> None:
    def encode(text: str) -> list[int]:
        return [ord(letter) for letter in text]

    first, second = encode("<0.2 seconds>"), encode("<1.0 seconds>")
    frames = [*first, START, VIDEO, END, *second, START, VIDEO, END]
    assert expand_placeholders([1, START, VIDEO, END, 2], [CLIP], SMALL, encode) == [1, *frames, 2]
    assert expand_placeholders([VIDEO], [CLIP], SMALL, encode) == frames


def test_a_video_whose_times_are_positions_keeps_one_placeholder() -> None:
    first, second = part(2, 4), replace(part(2, 4), later=3)
    clip, words = Visual((first, second), True), "a:<start><video><end>b"
    assert write_placeholders(words, [PICTURE, clip], TOKENS) == words
    ids = expand_placeholders([1, START, VIDEO, END, IMAGE], [clip, PICTURE], SMALL, lambda text: [])
    assert ids == [1, START, VIDEO, END, IMAGE]
    ids, items = expand(ids, [clip, PICTURE], SMALL)
    assert ids == [1, START, *[VIDEO] * 4, END, IMAGE, IMAGE]
    assert [(item.offset, item.length, item.later) for item in items] == [(2, 2, None), (4, 2, 3), (7, 2, None)]
    check_media(items, ids, MediaLimits(IMAGE, VIDEO, patch_size=4))


def test_lines_of_a_picture_end_with_tokens_of_their_own() -> None:
    settings = replace(SMALL, video_token_id=-1, line_ends=(21, 22))
    ids, items = expand([1, IMAGE, 2, IMAGE], [WIDE, PICTURE], settings)
    assert ids == [1, *[IMAGE] * 3, 21, *[IMAGE] * 3, 22, 2, IMAGE, IMAGE, 22]
    assert [(item.offset, item.length, item.line_len, item.num_rows) for item in items] == [(1, 8, 4, 6), (10, 3, 3, 2)]
    assert items[0].by_token(np.arange(5, 11, dtype=np.int32)).tolist() == [5, 6, 7, 0, 8, 9, 10, 0]
    check_media(items, ids, MediaLimits(IMAGE, -1, patch_size=4, has_lines=True))
    tokens = tokens_of(
        replace(settings, vision_start_token_id=-1, vision_end_token_id=-1), lambda number: b"[%d]" % number
    )
    assert tokens == Tokens("[7]", "", "", "") and write_placeholders("a[7]", [PICTURE], tokens) == "a[7]"


def test_what_stands_for_a_picture_of_gemma_3_becomes_its_frame() -> None:
    settings = replace(SMALL, video_token_id=-1, written="start")
    names = {IMAGE: "<image>", START: "<start>", END: "<end>"}
    tokens = tokens_of(settings, lambda number: names[number].encode())
    frame = "\n\n<start><image><end>\n\n"
    assert write_placeholders("a<start>b<start>", [PICTURE, WIDE], tokens) == f"a{frame}b{frame}"
    ids = expand_placeholders([1, START, 2], [PICTURE], settings, lambda text: [ord(letter) for letter in text])
    assert ids == [1, 10, 10, START, IMAGE, END, 10, 10, 2]
    with pytest.raises(InvalidRequest, match="0 placeholders"):
        expand([1, 2], [PICTURE], settings)


def test_what_stands_for_a_picture_or_a_video_of_gemma_4_becomes_frames() -> None:
    settings = replace(SMALL, written="image", times="minutes")
    names = {IMAGE: "<image>", VIDEO: "<video>", START: "<start>", END: "<end>"}
    tokens = tokens_of(settings, lambda number: names[number].encode())
    clip = Visual((part(2, 2, 0.9), part(2, 2, 61.0)), True)
    frames = "00:00 <start><video><end> 01:01 <start><video><end>"
    written = write_placeholders("a<image>b<video>c", [PICTURE, clip], tokens)
    assert written == f"a<start><image><end>b{frames}c"
    assert write_placeholders("a<start><image><end>b<image>", [PICTURE, WIDE], replace(tokens, video="")) == (
        "a<start><image><end>b<start><image><end>"
    )
    ids = expand_placeholders([1, IMAGE, VIDEO], [PICTURE, clip], settings, lambda text: [ord(each) for each in text])
    spelled = [[ord(each) for each in time] for time in ("00:00 ", " 01:01 ")]
    framed = expand_placeholders([START, IMAGE, END, 3, IMAGE], [PICTURE, WIDE], settings, lambda text: [])
    assert framed == [START, IMAGE, END, 3, START, IMAGE, END]
    assert ids == [1, START, IMAGE, END, *spelled[0], START, VIDEO, END, *spelled[1], START, VIDEO, END]


def test_places_of_tiles_are_told_in_words() -> None:
    """As transformers' processor of Idefics 3 writes them."""
    words = TileWords("<a><{row},{column}>", "|", "/", "<a><whole>", "<a>")
    settings = replace(SMALL, video_token_id=-1, vision_start_token_id=-1, vision_end_token_id=-1, tile_words=words)
    tokens = tokens_of(settings, lambda number: b"<image>")
    tiles, whole = Visual((part(2, 2),) * 5, False, columns=2), Visual((part(2, 2),), False, columns=1)
    of_tiles = "<a><1,1><image><a><1,2><image>|<a><2,1><image><a><2,2><image>|/<a><whole><image><a>"
    of_whole = "<a><whole><image><a>"
    assert write_placeholders("x<image>y<image>", [tiles, whole], tokens) == f"x{of_tiles}y{of_whole}"

    def encode(text: str) -> list[int]:
        return [ord(letter) for letter in text]

    ids = expand_placeholders([1, IMAGE, 2, IMAGE], [tiles, whole], settings, encode)
    pieces = [encode(piece) for piece in f"{of_tiles}\0{of_whole}".split("<image>")]
    expected = [1, *pieces[0]]
    for piece in pieces[1:]:
        expected += [IMAGE, *(2 if token == 0 else token for token in piece)]
    assert ids == expected
    ids, items = expand(ids, [tiles, whole], settings)
    assert ids == expected and [item.length for item in items] == [1] * 6
    numbered = replace(words, tile="T{number}", line_end="", after_tiles="", start="<s>", placeholder="<written>")
    tokens = replace(tokens, tile_words=numbered)
    of_tiles = "<s>T1<image>T2<image>T3<image>T4<image><a><whole><image><a>"
    assert write_placeholders("x<written>", [tiles], tokens) == f"x{of_tiles}"
    assert write_placeholders("<written>", [whole], tokens) == "<s><a><whole><image><a>"
    tokens = replace(tokens, tile_words=words)
    for call in (
        lambda: write_placeholders("x", [tiles], tokens),
        lambda: expand_placeholders([IMAGE, IMAGE], [tiles], settings, encode),
    ):
        with pytest.raises(InvalidRequest, match=r"[02] placeholders .*, but 1 images"):
            call()


@pytest.mark.skipif(
    not hasattr(Cohere2VisionProcessor, "replace_image_token"), reason="older transformers write them within a call"
)
def test_words_around_tiles_are_those_of_transformers_processor_of_command_a_vision() -> None:
    ended = TileWords("", "", "", "", "<end>", "<start>", after="<break>")
    settings = replace(SMALL, video_token_id=-1, vision_start_token_id=-1, vision_end_token_id=-1, tile_words=ended)
    tiles, whole = Visual((part(2, 2),) * 5, False, columns=2), Visual((part(2, 2),), False, columns=1)
    writer = SimpleNamespace(
        image_token="<image>", boi_token="<start>", eoi_token="<end>", img_line_break_token="<break>", patch_size=1
    )
    of_pictures = [Cohere2VisionProcessor.replace_image_token(writer, {"num_patches": [5, 1]}, i) for i in (0, 1)]
    written = write_placeholders("<image>x<image>", [tiles, whole], tokens_of(settings, lambda number: b"<image>"))
    assert written == "x".join(of_pictures)


@pytest.mark.parametrize(
    ("times", "words"),
    [("whole seconds after", ("0", "61")), ("seconds after", ("0.9 seconds", "61.0 seconds"))],
)
def test_frames_of_a_video_of_glm_4v_are_pictures_before_their_times(times: Any, words: tuple[str, str]) -> None:
    """Where a video and a picture are seen is told by the video's own tokens, which stay."""
    settings = replace(SMALL, times=times, frame_token_id=IMAGE)
    names = {IMAGE: "<image>", VIDEO: "<video>", START: "<start>", END: "<end>"}
    tokens = tokens_of(settings, lambda number: names[number].encode())
    clip = Visual((part(2, 2, 0.9), part(2, 2, 61.0)), True)
    frames = "".join(f"<start><video><end>{time}" for time in words)
    given = "<begin><video></begin><start><image><end>"
    assert write_placeholders(given, [PICTURE, clip], tokens) == f"<begin>{frames}</begin><start><image><end>"
    ids = expand_placeholders([2, VIDEO, 3, START, IMAGE, END], [PICTURE, clip], settings, lambda text: [len(text)])
    framed = [token for time in words for token in (START, VIDEO, END, len(time))]
    assert ids == [2, *framed, 3, START, IMAGE, END]
    ids, items = expand(ids, [PICTURE, clip], settings)
    seen = [IMAGE if token == VIDEO else token for token in framed]
    assert ids == [2, *seen, 3, START, IMAGE, IMAGE, END]
    assert [(item.offset, item.grid) for item in items] == [(2, (1, 2, 2)), (6, (1, 2, 2)), (11, (1, 2, 4))]
    check_media(items, ids, MediaLimits(IMAGE, VIDEO, patch_size=4))


def test_sglangs_formula_gives_a_picture_one_number() -> None:
    ids, items = expand([IMAGE, 3], [PICTURE], SMALL, sglang_ids=True)
    assert hash_ids(ids, items).tolist() == [sglang_pad_id(items[0].digest)] * 2 + [3]
    ids, items = expand([IMAGE, 3], [PICTURE], SMALL)
    assert len(set(hash_ids(ids, items).tolist())) == 3 and hash_ids(ids, items)[0] >= FIRST_HASH_ID


@pytest.mark.parametrize(
    ("ids", "visuals", "message"),
    [
        ([1, IMAGE, IMAGE], [PICTURE], "the prompt has 2 placeholders .id 7., but 1 images come with it"),
        ([1], [PICTURE], "0 placeholders"),
        ([IMAGE], [], "the prompt has 1 placeholders"),
        ([VIDEO], [CLIP], "the prompt has 1 placeholders .id 8., but 2 frames of videos"),
    ],
)  # fmt: skip
def test_a_placeholder_too_many_or_too_few_is_refused(ids: list[int], visuals: list[Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        expand(ids, visuals, SMALL)


def test_a_video_without_a_placeholder_is_refused() -> None:
    with pytest.raises(InvalidRequest, match=r"0 placeholders .<video>., but 1 videos"):
        write_placeholders("no video", [CLIP], TOKENS)
    with pytest.raises(InvalidRequest, match=r"1 placeholders .id 8., but 0 videos"):
        expand_placeholders([VIDEO], [], SMALL, lambda text: [])
