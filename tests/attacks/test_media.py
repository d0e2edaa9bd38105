"""Pictures and videos that take minutes and gigabytes where nothing holds them, sent to a front end that serves on."""

from __future__ import annotations

import asyncio
import random
import re
import resource
import time
from collections.abc import Coroutine, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, TypeVar

import pytest
from vision_front_end import VisionFrontEnd, image_part, serving, video_part, vision_folder

from jaxsgl.frontend.proto import jaxsgl_pb2 as pb
from jaxsgl.frontend.proto import jaxsgl_pb2_grpc as pb_grpc
from tests.attacks.media_files import large_movies, many_scans
from tests.grids import count
from tests.preprocess.pictures import animation, data_url, file_of, movie, picture

T = TypeVar("T")
MOST_MORE_BYTES = 200 << 20
MOST_ADDRESSES = 1 << 30  # that this process may have more than at the start: nothing here may harm the machine
PATIENCE_S = 120.0
LONG_TEXT = "a long text " * 100  # tokenized in a thread


class Served:
    """A front end, in an event loop that stands still between two calls."""

    def __init__(self, folder: str) -> None:
        self._stack = AsyncExitStack()
        self._runner = asyncio.Runner()
        self.front_end: VisionFrontEnd = self.run(self._stack.enter_async_context(serving(folder)))

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self._runner.run(asyncio.wait_for(work, PATIENCE_S))

    def chat(self, part: dict[str, Any] | str) -> tuple[int, str]:
        answer = self.run(self.front_end.chat(part))
        return answer.status_code, answer.text

    def close(self) -> None:
        self.run(self._stack.aclose())
        self._runner.close()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    one = Served(vision_folder(tmp_path_factory.mktemp("vision")))
    assert one.chat(image_part(data_url(picture(16, 16))))[0] == 200
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes("VmSize") + MOST_ADDRESSES, limits[1]))
    yield one
    resource.setrlimit(resource.RLIMIT_AS, limits)
    one.close()


def memory_bytes(name: str) -> int:
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) << 10


@pytest.mark.parametrize("name", large_movies())
def test_small_videos_take_little_memory(served: Served, name: str) -> None:
    pytest.importorskip("av", reason="PyAV, the extra `video`, is not installed")
    Path("/proc/self/clear_refs").write_text("5")
    before = memory_bytes("VmRSS")
    status, text = served.chat(video_part(data_url(large_movies()[name], "video/mp4")))
    assert memory_bytes("VmHWM") - before < MOST_MORE_BYTES
    assert status == 400 and re.search(r"declares \d+ [a-z ]+, but may have \d+", text), text


def test_a_jpeg_of_many_scans_takes_no_time(served: Served) -> None:
    start_s = time.monotonic()
    status, text = served.chat(image_part(data_url(many_scans(20_000, 5792), "image/jpeg")))
    assert time.monotonic() - start_s < 10.0
    assert status == 400 and "more than 100 scans, but may have 100" in text, text


def test_calls_that_are_cancelled_hold_up_no_text(served: Served) -> None:
    """Threads can't be cancelled: they must have a place until they end, and none that texts need."""
    slow = pb.GenerateRequest(text="<|image_pad|>" * 4, media=[pb.Media(data=many_scans(100, 5792))] * 4)
    text = pb.GenerateRequest(text=LONG_TEXT)
    slow.sampling.max_tokens = text.sampling.max_tokens = 1

    async def generate(asked: pb.GenerateRequest) -> float:
        start_s = time.monotonic()
        stub = pb_grpc.JaxsglStub(served.front_end.channel)
        assert [reply async for reply in stub.Generate(asked)]
        return time.monotonic() - start_s

    async def attack() -> tuple[float, float]:
        alone_s = await generate(slow)
        for _ in range(8):
            call = asyncio.create_task(generate(slow))
            await asyncio.sleep(alone_s / 10)
            call.cancel()
            await asyncio.wait([call])
        return alone_s, await generate(text)

    alone_s, text_s = served.run(attack())
    assert text_s < alone_s / 4, f"a picture takes {alone_s:.1f} s, and a text waited for {text_s:.1f} s"


def mutated(rng: random.Random, content: bytes) -> bytes:
    """The file with some bytes changed, taken out or repeated, more of them at its head."""
    changed = bytearray(content)
    for _ in range(rng.randint(1, 8)):
        at = rng.randrange(min(len(changed), rng.choice((64, 1024, len(changed)))))
        some = rng.randint(1, 8)
        match rng.randrange(4):
            case 0:
                changed[at] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))
            case 1:
                changed[at : at + 4] = rng.choice(
                    (b"\0\0\0\0", b"\xff\xff\xff\xff", b"\x7f\xff\xff\xff", b"\0\1\x86\xa0")
                )
            case 2:
                del changed[at : at + some]
            case 3:
                changed[at:at] = changed[at : at + some * rng.choice((1, 99))]
        changed = changed or bytearray(content)
    return bytes(changed)


def files() -> list[tuple[bytes, bool]]:
    """A file of each kind, and whether it is a video."""
    pytest.importorskip("av", reason="PyAV, the extra `video`, is not installed")
    one = picture(48, 40)
    pictures = [file_of(one, kind) for kind in ("PNG", "WEBP", "GIF", "BMP", "JPEG")]
    pictures += [file_of(one, "JPEG", progressive=True), file_of(picture(48, 40, "CMYK"), "JPEG")]
    videos = [
        animation([picture(24, 16, seed=seed) for seed in range(3)], kind=kind) for kind in ("GIF", "WEBP", "PNG")
    ]
    videos += [
        movie(num_frames=4),
        movie("mov", "libx264", 4),
        movie("matroska", "libvpx-vp9", 4),
        movie("webm", "libvpx", 4),
    ]
    return [(content, False) for content in pictures] + [(content, True) for content in videos]


def test_files_with_random_changes_are_taken_or_refused(served: Served) -> None:
    rng = random.Random(31)
    originals = files()
    Path("/proc/self/clear_refs").write_text("5")
    before, statuses = memory_bytes("VmRSS"), set[int]()
    for number in range(count(70, 2000)):
        content, is_video = originals[number % len(originals)]
        url = data_url(mutated(rng, content), "video/mp4" if is_video else "image/png")
        status, text = served.chat(video_part(url) if is_video else image_part(url))
        assert status in (200, 400), text
        statuses.add(status)
    assert statuses == {200, 400}
    assert memory_bytes("VmHWM") - before < MOST_MORE_BYTES
