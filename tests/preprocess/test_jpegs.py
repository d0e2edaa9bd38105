"""The scans of JPEG files are counted before they are decoded."""

from __future__ import annotations

import io
import struct

import pytest
from PIL import Image

from jaxsgl.errors import InvalidRequest
from jaxsgl.preprocess.jpegs import MAX_SCANS, MAX_SEGMENTS, check_scans, has_several_scans
from jaxsgl.preprocess.loading import Bounds, load
from jaxsgl.preprocess.sources import ImageFile, VideoFile
from tests.attacks.media_files import many_scans
from tests.preprocess.pictures import SMALL, file_of, picture

BOUNDS = Bounds(max_patches=65536, max_request_patches=1 << 20)
TOO_MANY = r"is a JPEG of more than 100 scans, but may have 100: save it as baseline JPEG"
COMMENT = b"\xff\xfe" + struct.pack(">H", 2 + 300) + b"\xff\xda\x00" * 100  # what looks like 100 scans


def test_jpegs_of_more_than_a_hundred_scans_are_refused() -> None:
    assert load([ImageFile(many_scans(MAX_SCANS, 64))], SMALL, BOUNDS)
    for content in (many_scans(MAX_SCANS + 1, 64), many_scans(50_000, 5792)):
        with pytest.raises(InvalidRequest, match="image 0 " + TOO_MANY):
            load([ImageFile(content)], SMALL, BOUNDS)
    with pytest.raises(InvalidRequest, match="frame 1 of video 0 " + TOO_MANY):
        load([VideoFile((many_scans(1, 64), many_scans(101, 64)))], SMALL, BOUNDS)


@pytest.mark.parametrize(
    "between",
    [
        *(b"", b"\xff" * 9, b"\x00junk", b"\xff\x00", b"\xff\xd0", b"\xff\x01"),
        *(COMMENT, b"\xff\xfe\x00\x00", b"\xff\xfe\x00\x01"),
    ],
)
def test_scans_are_found_where_libjpeg_finds_them(between: bytes) -> None:
    """Whatever stands between two scans that libjpeg skips."""
    scan = b"\xff\xda" + many_scans(1, 64).partition(b"\xff\xda")[2][:-2]
    head = many_scans(0, 64)[:-2]
    with pytest.raises(InvalidRequest, match=TOO_MANY):
        check_scans(head + (between + scan) * (MAX_SCANS + 1) + b"\xff\xd9", "image 0")
    check_scans(head + (between + scan) * MAX_SCANS + b"\xff\xd9", "image 0")


def test_what_only_looks_like_scans_is_not_counted() -> None:
    plain = file_of(picture(64, 64), "JPEG")
    for content in (
        plain[:2] + COMMENT * 9 + plain[2:],  # in metadata
        plain + b"\xff\xda" * 999,  # after the picture, as of a film that a telephone adds
        plain[: len(plain) // 2],
        plain[:3],
        b"\xff\xd8",
    ):
        check_scans(content, "image 0")
    assert load([ImageFile(plain + b"\xff\xda" * 999)], SMALL, BOUNDS)


def test_markers_are_found_across_windows() -> None:
    window = 1 << 20
    scan = many_scans(101, 64)[2:]
    for num_bytes in range(window - 4, window + 2):
        with pytest.raises(InvalidRequest, match=TOO_MANY):
            check_scans(b"\xff\xd8" + bytes(num_bytes) + scan, "image 0")
        with pytest.raises(InvalidRequest, match=TOO_MANY):
            check_scans(b"\xff\xd8" + b"\xff" * num_bytes + scan[1:], "image 0")


def test_segments_are_bounded() -> None:
    content = file_of(picture(64, 64), "JPEG")
    with pytest.raises(InvalidRequest, match="more than 10000 segments"):
        check_scans(content[:2] + b"\xff\xfe\x00\x02" * MAX_SEGMENTS + content[2:], "image 0")


def test_the_other_pictures_of_an_mpo_file_are_not_decoded() -> None:
    content = file_of(picture(64, 64), "MPO", save_all=True, append_images=[picture(32, 32)])
    with Image.open(io.BytesIO(content)) as opened:
        assert opened.format == "MPO"
    (video,) = load([VideoFile(content)], SMALL, BOUNDS)
    assert len(video.parts) == 1


def test_jpegs_of_several_scans_are_known_by_their_first_ones() -> None:
    plain, progressive = (file_of(picture(64, 64), "JPEG", progressive=flag) for flag in (False, True))
    assert not has_several_scans(plain) and has_several_scans(progressive)
    assert not has_several_scans(file_of(picture(64, 64, "L"), "JPEG"))
    start = plain.index(b"\xff\xda")
    lacking = plain[: start + 4] + b"\x01" + plain[start + 5 :]  # a scan of one of three components
    assert has_several_scans(lacking)
