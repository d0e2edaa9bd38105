"""What an MP4 file declares is bounded before FFmpeg opens it; what cameras and browsers make is taken."""

from __future__ import annotations

import importlib
import io
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from jaxsgl.errors import InvalidRequest
from jaxsgl.preprocess import boxes
from jaxsgl.preprocess.boxes import check_boxes
from tests.attacks.media_files import (
    box,
    fragment,
    fragmented,
    large_movies,
    mp4,
    numbers,
    same_edits,
    table,
    track,
)  # fmt: skip
from tests.preprocess.pictures import movie, picture

LARGE = table(b"stsz", numbers(1, 100_001))


@pytest.mark.parametrize("name", large_movies())
def test_small_files_that_declare_gigabytes_are_refused(name: str) -> None:
    content = large_movies()[name]
    assert len(content) < 13_000
    with pytest.raises(
        InvalidRequest, match=r"video 0 declares \d{8,9} [a-z ]+, but may have \d+: send a shorter video"
    ):
        check_boxes(content, "video 0")


@pytest.mark.parametrize("kind", ["stts", "ctts", "stsc", "stco", "co64", "stss", "stps", "elst", "sbgp"])
def test_no_table_has_more_entries_than_a_video_of_half_an_hour(kind: str) -> None:
    before = numbers(0) if kind == "sbgp" else b""
    with pytest.raises(InvalidRequest, match=f"declares 100001 entries in a box {kind}, but may have 100000"):
        check_boxes(mp4(track(10, table(kind.encode(), before, numbers(100_001)))), "video 0")


def test_tracks_fragments_boxes_and_their_bytes_are_bounded() -> None:
    check_boxes(mp4(*(track(10) for _ in range(8))), "video 0")
    many = boxes.MAX_FRAGMENTS + 1
    for content, words in {
        mp4(*(track(10) for _ in range(9))): "declares 9 tracks, but may have 8",
        mp4(track(10)) + fragment(1) * many: "declares 10001 fragments, but may have 10000",
        mp4(track(10)) + table(b"sidx", bytes(18), struct.pack(">H", many)): "declares 10001 fragments",
        mp4(track(10)) + table(b"tfra", numbers(1, 0, many)): "declares 10001 fragments",
        mp4(track(10)) + box(b"free") * 100_001: "declares 100001 boxes",
        mp4(track(10)) + box(b"free", table(b"stss", numbers(0)) * 100_001): "declares 100001 boxes",
        mp4(track(10)) + box(b"free", bytes(16 << 20)): r"declares \d+ bytes that are no samples, but may have 1677",
        mp4(box(b"cmov", box(b"cmvd"))): r"has compressed boxes \(cmov\)",
        mp4(track(10), b"".join(fragment(60_000) for _ in range(2))): "declares 120000 samples in fragments",
    }.items():  # fmt: skip
        with pytest.raises(InvalidRequest, match=words):
            check_boxes(content, "video 0")


@pytest.mark.parametrize(
    "hide",
    [
        lambda given: box(b"free", given),
        lambda given: box(b"moov", box(b"udta", box(b"meta", given))),
        lambda given: numbers(1) + b"moov" + struct.pack(">Q", 16 + len(given)) + given,
        lambda given: numbers(0) + b"moov" + given,
        lambda given: numbers(7) + b"mdat" + given,  # no length, so that what follows are no samples
        lambda given: box(b"mdat", bytes(9)) + box(b"moov", given) + box(b"mdat", bytes(9)),
        lambda given: box(b"moov", box(b"mdat", given)),
        lambda given: box(b"moov", b"\0stt" + given[4:]),  # a length whose letters begin another name
        lambda given: box(b"moov", numbers(1) + given[4:8] + bytes(8) + given[8:]),
        lambda given: box(b"moov", given[:-2]) + given[-2:],
    ],
)
def test_tables_are_found_wherever_ffmpeg_may_find_them(hide: Callable[[bytes], bytes]) -> None:
    """In whatever boxes, with lengths of 64 bits, to the end of the file, cut off, or longer than their parents."""
    kind = box(b"ftyp", b"isom", numbers(0))
    with pytest.raises(InvalidRequest, match="100001 samples in a track"):
        check_boxes(kind + hide(LARGE), "video 0")


def test_samples_are_not_searched() -> None:
    check_boxes(mp4(track(10)) + box(b"mdat", LARGE * 999), "video 0")
    check_boxes(mp4(track(10)) + numbers(0) + b"mdat" + LARGE, "video 0")


@pytest.mark.parametrize(
    "content", [b"", b"ftyp", b"\0" * 99, box(b"ftyp"), mp4(track(10))[:-90], numbers(1) + b"ftyp", LARGE[:12]]
)
def test_files_that_end_early_are_left_to_ffmpeg(content: bytes) -> None:
    check_boxes(content, "video 0")


def sound(num_samples: int, in_chunk: int, num_chunks: int, handler: bytes = b"soun", each: int = 1) -> bytes:
    """A track of sound without compression, which FFmpeg joins."""
    return box(
        b"trak",
        table(b"hdlr", numbers(0), handler, bytes(13)),
        table(b"stts", numbers(1, num_samples, 1)),
        table(b"stsz", numbers(each, num_samples)),
        table(b"stsc", numbers(2, 1, in_chunk, 1, num_chunks, 99, 1)),
        table(b"stco", numbers(num_chunks), bytes(4 * num_chunks)),
    )


def test_sound_without_compression_may_have_as_many_samples_as_fit_into_the_file() -> None:
    minutes = 48_000 * 60 * 3
    check_boxes(mp4(sound(minutes, 48_000, 180), after=box(b"mdat", bytes(minutes))), "video 0")
    for content, words in {
        mp4(sound(minutes, 48_000, 180)): f"declares {minutes} bytes of sound, but has",
        mp4(sound(minutes, 48_000, 180), after=box(b"mdat", bytes(minutes)))
        + sound(minutes, 48_000, 180): "bytes of sound, but has",
        mp4(sound(200_000, 99, 99, b"vide"), after=box(b"mdat", bytes(200_000))): "declares 200000 samples in a track",
        mp4(sound(500_000, 99, 99, each=0), after=box(b"mdat", bytes(500_000))): "declares 500000 samples in a track",
        mp4(sound(10, 0x7FFFFFFF, 20)): r"declares \d+ samples with its edits, but may have 1000000",
        mp4(sound(10, 99, 20) + table(b"stsc", numbers(1, 1, 0x7FFFFFFF, 1))): r"declares \d+ samples with its edits",
    }.items():  # fmt: skip
        with pytest.raises(InvalidRequest, match=words):
            check_boxes(content, "video 0")


def test_sound_may_last_as_long_as_the_frames_of_its_video() -> None:
    """40 minutes at 25 frames a second have 112,500 samples of AAC, and may have a chunk for each."""
    frames, heard = track(60_000), sound(112_500, 1, 112_500, each=0)
    check_boxes(mp4(frames, heard), "video 0")
    check_boxes(mp4(track(10), heard, fragment(60_000) + fragment(112_500)), "video 0")
    with pytest.raises(InvalidRequest, match="declares 112500 entries in a box stco, but may have 100000"):
        check_boxes(mp4(frames, sound(112_500, 1, 112_500, b"vide", each=0)), "video 0")
    with pytest.raises(InvalidRequest, match="declares 600000 samples in fragments, but may have 500000"):
        check_boxes(mp4(track(10), heard, fragment(600_000)), "video 0")


def test_edits_may_show_a_short_track_some_times() -> None:
    check_boxes(mp4(track(10_000, edits=same_edits(100, 10_000))), "video 0")
    with pytest.raises(InvalidRequest, match="declares 1010000 samples with its edits, but may have 1000000"):
        check_boxes(mp4(track(10_000, edits=same_edits(101, 10_000))), "video 0")


def with_sound(kind: str, codec: str, seconds: int, **options: str) -> bytes:
    """A file of video with sound, by FFmpeg's own muxer."""
    av: Any = importlib.import_module("av")
    file = io.BytesIO()
    with av.open(file, "w", format=kind, options=options) as container:
        stream = container.add_stream("mpeg4", rate=5)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        heard = container.add_stream(codec, rate=48_000)
        heard.layout = "mono"
        for number in range(5 * seconds):
            container.mux(stream.encode(av.VideoFrame.from_image(picture(64, 48, seed=number))))
        container.mux(stream.encode())
        form = "fltp" if codec == "aac" else "s16"
        silence = np.zeros((1, 48_000), np.float32 if codec == "aac" else np.int16)
        for second in range(seconds):
            frame = av.AudioFrame.from_ndarray(silence, format=form, layout="mono")
            frame.rate, frame.pts = 48_000, 48_000 * second
            container.mux(heard.encode(frame))
        container.mux(heard.encode())
    return file.getvalue()


def test_what_muxers_write_is_taken() -> None:
    pytest.importorskip("av", reason="PyAV, the extra `video`, is not installed")
    for content in (
        movie(), movie("mov"), movie("mp4", "libx264"), with_sound("mp4", "aac", 4), with_sound("mov", "pcm_s16le", 8),
        with_sound("mp4", "aac", 4, movflags="frag_keyframe+empty_moov+default_base_moof+dash"),
        fragmented(10),
    ):  # fmt: skip
        check_boxes(content, "video 0")
