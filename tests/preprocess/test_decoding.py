"""Files are decoded in a child process: the same patches, within limits that the kernel enforces."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from PIL import Image

from jaxsgl.config.features import MediaConfig
from jaxsgl.errors import EngineUnavailable, InvalidRequest
from jaxsgl.preprocess.decoding import CpuBudget, Decoder, media_sandbox
from jaxsgl.preprocess.loading import Bounds, load
from jaxsgl.preprocess.sources import File, ImageFile, VideoFile
from jaxsgl.requests.media import MediaLimits
from jaxsgl.sandbox import Limits, Sandbox
from tests.attacks.media_files import large_movies, many_scans
from tests.preprocess.pictures import SMALL, TILED, animation, file_of, movie, picture
from tests.preprocess.undefended import CRASH, KILLED, KILLED_HELPER

pytestmark = pytest.mark.device  # starts processes

LIMITS = MediaLimits(7, 8, patch_size=4, max_items=8, max_patches=256, max_request_patches=4096)
PICTURE = file_of(picture(40, 48))


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    one = media_sandbox()
    yield one
    one.close()


@pytest.fixture(scope="module")
def undefended() -> Iterator[Sandbox]:
    one = Sandbox("tests.preprocess.undefended:make", name="undefended")
    yield one
    one.close()


def decoder(sandbox: Sandbox, **config: Any) -> Decoder:
    return Decoder(SMALL, LIMITS, MediaConfig(**config), sandbox)


def test_files_have_the_same_parts_as_in_this_process(sandbox: Sandbox) -> None:
    frames = [picture(24, 16, seed=seed) for seed in range(3)]
    files: list[File] = [
        ImageFile(PICTURE), VideoFile(tuple(map(file_of, frames)), 3.0), VideoFile(animation(frames)),
        ImageFile(file_of(picture(32, 32), "JPEG")),
    ]  # fmt: skip
    expected = load(files, SMALL, Bounds(LIMITS.max_patches, LIMITS.max_request_patches))
    assert decoder(sandbox).load(files) == expected


def test_tiles_of_a_picture_are_those_of_this_process(sandbox: Sandbox) -> None:
    limits = msgspec.structs.replace(LIMITS, max_request_patches=8192, max_picture_patches=6 * 1024)
    files: list[File] = [ImageFile(file_of(picture(20, 48)))]
    (visual,) = Decoder(TILED, limits, MediaConfig(), sandbox).load(files)
    assert [visual] == load(files, TILED, Bounds(1024, 8192, max_picture_patches=6 * 1024))
    assert len(visual.parts) == 2 * 1 + 1


def test_a_video_is_decoded(sandbox: Sandbox) -> None:
    pytest.importorskip("av", reason="PyAV, the extra `video`, is not installed")
    files = [VideoFile(movie(num_frames=6))]
    assert decoder(sandbox).load(files) == load(files, SMALL, Bounds(LIMITS.max_patches, LIMITS.max_request_patches))


def test_refusals_are_those_of_this_process(sandbox: Sandbox) -> None:
    with pytest.raises(InvalidRequest, match=r"^image 1 is no picture that can be read: send JPEG, .* 9 bytes came$"):
        decoder(sandbox).load([ImageFile(PICTURE), ImageFile(b"something")])
    with pytest.raises(InvalidRequest, match=r"pixels, but may have 1024 \(--media-max-pixels\)"):
        decoder(sandbox, media_max_pixels=1024).load([ImageFile(PICTURE)])


def test_a_file_that_is_named_many_times_is_sent_once(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    call, sizes = sandbox.call, list[int]()

    def noted(request: bytes, limit: Limits) -> bytearray:
        sizes.append(len(request))
        return call(request, limit)

    monkeypatch.setattr(sandbox, "call", noted)
    content, other = PICTURE + bytes(100_000), file_of(picture(24, 16))
    many: list[File] = [ImageFile(content), ImageFile(other), VideoFile((content, other) * 4), ImageFile(content)]
    assert decoder(sandbox).load(many) == load(many, SMALL, Bounds(LIMITS.max_patches, LIMITS.max_request_patches))
    assert sizes[0] < len(content) + len(other) + 1000


def test_a_picture_may_take_all_memory_for_decoding_but_no_more(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beyond half of it, the request is loaded again."""
    call, limits = sandbox.call, list[Limits]()

    def noted(request: bytes, limit: Limits) -> bytearray:
        limits.append(limit)
        return call(request, limit)

    monkeypatch.setattr(sandbox, "call", noted)
    content = file_of(Image.new("RGB", (1000, 800)))
    (alone,) = decoder(sandbox).load([ImageFile(content)])
    assert decoder(sandbox, media_max_decode_bytes=12 << 20).load([ImageFile(PICTURE), ImageFile(content)])[1] == alone
    assert [limit.memory_bytes - limits[1].memory_bytes for limit in limits[1:]] == [0, 6 << 20]
    with pytest.raises(InvalidRequest, match=r"decoding image 0 takes \d+ bytes of memory, but may take 2097152"):
        decoder(sandbox, media_max_decode_bytes=2 << 20).load([ImageFile(content)])


def test_all_files_of_a_request_have_one_limit_of_processor_time(undefended: Sandbox) -> None:
    start_s = time.process_time(), time.monotonic()
    words = r"take more than 0.5 s of processor time to decode and scale \(--media-max-cpu-s\)"
    one = ImageFile(many_scans(100, 5792))
    for files in ([ImageFile(many_scans(50_000, 5792))], [one] * 8):
        with pytest.raises(InvalidRequest, match=words):
            decoder(undefended, media_max_cpu_s=0.5).load(files)
    assert time.process_time() - start_s[0] < 1.0, "this process did the work"
    assert time.monotonic() - start_s[1] < 30.0
    assert decoder(undefended).load([ImageFile(PICTURE)])


def test_all_that_a_call_loads_has_one_limit_of_processor_time(undefended: Sandbox) -> None:
    cpu = CpuBudget(20.0)
    assert decoder(undefended).load([ImageFile(PICTURE)], cpu)
    assert 0.0 < cpu.left_s < 20.0
    cpu.left_s = 0.0
    with pytest.raises(InvalidRequest, match="take more than 20 s of processor time"):
        decoder(undefended).load([ImageFile(many_scans(100, 5792))], cpu)


@pytest.mark.parametrize("name", large_movies())
def test_what_ffmpeg_takes_beyond_all_foresight_ends_the_child_alone(undefended: Sandbox, name: str) -> None:
    pytest.importorskip("av", reason="PyAV, the extra `video`, is not installed")
    with pytest.raises(InvalidRequest, match=r"video 0|take more than"):
        decoder(undefended, media_max_cpu_s=5.0).load([VideoFile(large_movies()[name])])
    assert decoder(undefended).load([ImageFile(PICTURE)])


def test_a_decoder_that_crashes_costs_the_request_alone(undefended: Sandbox) -> None:
    with pytest.raises(InvalidRequest, match="can't be decoded, for their decoder ended"):
        decoder(undefended).load([ImageFile(CRASH)])
    assert decoder(undefended).load([ImageFile(PICTURE)])


@pytest.mark.parametrize("killed", [KILLED, KILLED_HELPER])
def test_a_decoder_that_was_killed_is_asked_once_more_and_then_it_is_our_fault(
    undefended: Sandbox, monkeypatch: pytest.MonkeyPatch, killed: bytes
) -> None:
    with pytest.raises(EngineUnavailable, match=r"was killed or does not start, .*: try again later"):
        decoder(undefended).load([ImageFile(killed)])
    call, requests = undefended.call, list[bytes]()

    def killed_once(request: bytes, limit: Limits) -> bytearray:
        requests.append(request)
        return call(killed if len(requests) == 1 else request, limit)

    monkeypatch.setattr(undefended, "call", killed_once)
    assert decoder(undefended).load([ImageFile(PICTURE)])
    assert len(requests) == 2
