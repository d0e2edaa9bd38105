"""Files of video become the frames and times that transformers' video processor takes, within bounds."""

from __future__ import annotations

import builtins
import io
import struct
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from PIL import Image

from jaxsgl.errors import InvalidRequest
from jaxsgl.preprocess import movies
from jaxsgl.preprocess.decode_room import DecodeRoom
from jaxsgl.preprocess.loading import Bounds, load, sampled_frames
from jaxsgl.preprocess.placeholders import Visual
from jaxsgl.preprocess.sources import ImageFile, VideoFile
from tests.preprocess.pictures import SMALL, file_of, movie, picture

av = pytest.importorskip("av", reason="PyAV, the extra `video`, is not installed")
pytestmark = pytest.mark.device

BOUNDS = Bounds(max_patches=65536, max_request_patches=1 << 20)


def loaded(content: bytes, bounds: Bounds = BOUNDS) -> Visual:
    (video,) = load([VideoFile(content)], SMALL, bounds)
    assert video.is_video
    return video


def frames_of(content: bytes) -> list[Image.Image]:
    """All frames, as PyAV's example decodes them."""
    with av.open(io.BytesIO(content)) as container:
        return [Image.fromarray(frame.to_ndarray(format="rgb24")) for frame in container.decode(video=0)]


@pytest.mark.parametrize(
    ("kind", "codec"),
    [("mp4", "mpeg4"), ("mp4", "libx264"), ("mov", "libx264"), ("matroska", "libvpx-vp9"), ("webm", "libvpx")],
)
def test_a_file_of_video_is_sampled_as_the_processor_does(kind: str, codec: str) -> None:
    """24 frames of 1/5 s are 4.8 s, of which two frames a second are taken; B-frames come by their times."""
    content = movie(kind, codec)
    frames, taken = frames_of(content), sampled_frames(24, 5.0, SMALL)
    assert len(frames) == 24 and len(taken) == 9
    (expected,) = load([VideoFile(tuple(frames[number] for number in taken), fps=2.0)], SMALL, BOUNDS)
    video = loaded(content)
    assert [part.digest for part in video.parts] == [part.digest for part in expected.parts]
    times = [number / 5 for number in taken] + [taken[-1] / 5]
    assert [part.time_s for part in video.parts] == pytest.approx(np.mean(np.reshape(times, (-1, 2)), axis=1).tolist())


def test_of_a_file_of_video_as_many_frames_a_second_are_taken_as_are_asked_for() -> None:
    (video,) = load([VideoFile(movie(), fps=1.0)], SMALL, BOUNDS)
    assert len(video.parts) == 2


@pytest.mark.parametrize(
    ("turned", "turn"),
    [
        ((0, 1, -1, 0), Image.Transpose.ROTATE_270),  # as phones that are held upright write it
        ((0, -1, 1, 0), Image.Transpose.ROTATE_90),
        ((-1, 0, 0, -1), Image.Transpose.ROTATE_180),
        ((1, 0, 0, 1), None),
    ],
)
def test_frames_are_turned_upright_as_the_file_says(turned: tuple[int, ...], turn: Image.Transpose | None) -> None:
    content = movie(num_frames=8)
    frames = [frame if turn is None else frame.transpose(turn) for frame in frames_of(content)]
    at = content.index(b"tkhd") + 44
    a, b, c, d = (number << 16 for number in turned)
    content = content[:at] + struct.pack(">9i", a, b, 0, c, d, 0, 0, 0, 1 << 30) + content[at + 36 :]
    taken = sampled_frames(8, 5.0, SMALL)
    (expected,) = load([VideoFile(tuple(frames[number] for number in taken), fps=2.0)], SMALL, BOUNDS)
    video = loaded(content)
    assert [part.digest for part in video.parts] == [part.digest for part in expected.parts]


@pytest.mark.parametrize("declared", [True, False])
def test_frames_that_come_at_another_rate_than_is_declared_have_their_own_times(declared: bool) -> None:
    """30 frames in a second and 20 in as many seconds, of which the file says 30 a second, or nothing."""
    file = io.BytesIO()
    with av.open(file, "w", format="webm") as container:
        stream = container.add_stream("libvpx", rate=30)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        stream.codec_context.time_base = stream.time_base = Fraction(1, 1000)
        for time_s in [*(number / 30 for number in range(30)), *range(1, 21)]:
            frame = av.VideoFrame.from_image(picture(64, 48, seed=round(30 * time_s)))
            frame.pts, frame.time_base = round(1000 * time_s), Fraction(1, 1000)
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    content = file.getvalue()
    at = content.index(b"\x23\xe3\x83")  # the duration of a frame
    if not declared:
        length = content[at + 3] & 0x7F
        content = content[:at] + bytes([0xEC, 0x80 | length + 2]) + bytes(length + 2) + content[at + 4 + length :]
    video = loaded(content)
    assert len(video.parts) == 20, "two frames a second, by pairs"
    assert video.parts[-1].time_s == pytest.approx(19.8, abs=0.1)


def test_a_file_that_ends_early_gives_the_frames_that_it_has() -> None:
    content = movie("matroska")
    video = loaded(content[: len(content) // 2])
    assert 0 < len(video.parts) < len(loaded(content).parts)


BAD = {
    b"\0\0\0\x18ftypisom" + bytes(400): "video 0 can't be decoded|has no video",
    b"\x1a\x45\xdf\xa3" + bytes(400): "video 0 can't be decoded|has no video",
    b"#EXTM3U\nhttp://a.example/b.ts\n": "video 0 is no video that can be read: send MP4, MOV, MKV or WebM, or an anim",
    b"RIFF\0\0\0\0AVI LIST" + bytes(100): "video 0 is no video that can be read: send MP4, MOV, MKV or WebM, or",
}


def test_a_file_that_is_no_video_is_refused() -> None:
    truncated, other = movie()[:400], movie("mov", "png", pixels="rgb24")
    words = {truncated: "can't be decoded|has no", other: "video 0 is coded as png, but must be one of av1, h264"}
    for content, refusal in (BAD | words).items():
        with pytest.raises(InvalidRequest, match=refusal):
            loaded(content)


def test_what_a_video_may_cost_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    content = movie()
    with pytest.raises(InvalidRequest, match=r"pixels by its header, but must have 1 to 3071 \(--media-max-pixels\)"):
        loaded(content, Bounds(65536, 1 << 20, max_pixels=3071))
    with pytest.raises(InvalidRequest, match=r"decoding video 0 takes \d+ bytes of memory, but may take 1048576"):
        loaded(content, Bounds(65536, 1 << 20, room=DecodeRoom(1 << 20)))
    monkeypatch.setattr(movies, "MAX_PACKETS", 23)
    with pytest.raises(InvalidRequest, match="video 0 has more than 23 frames"):
        loaded(content)


def test_frames_larger_than_the_header_says_are_not_decoded() -> None:
    file = movies.Movie(movie(num_frames=6, scale=8), 512 * 384, "video 0")
    assert [frame.size for frame in file.frames([0, 5])] == [(512, 384)] * 2
    file.width = file.height = 1  # as if the header had said less
    with pytest.raises(InvalidRequest, match="video 0 can't be decoded"):
        next(file.frames([0]))


def test_without_pyav_the_refusal_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    content, real = movie(), builtins.__import__

    def without_av(name: str, *rest: Any) -> Any:
        if name == "av":
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without_av)
    with pytest.raises(InvalidRequest, match=r"install jaxsgl\[video\], or send its frames"):
        loaded(content)


def test_a_video_is_no_image() -> None:
    with pytest.raises(InvalidRequest, match="image 0 is no picture that can be read"):
        load([ImageFile(movie())], SMALL, BOUNDS)
    assert not movies.is_movie(file_of(picture(4, 4)))
