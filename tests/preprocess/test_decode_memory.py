"""Decoding takes no more memory than was foreseen from the header, and all pictures together as much as is allowed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from PIL import Image

from jaxsgl.config.features import MediaConfig
from jaxsgl.errors import InvalidRequest
from jaxsgl.preprocess import pictures
from jaxsgl.preprocess.decode_room import DecodeRoom
from jaxsgl.preprocess.loading import Bounds, load
from jaxsgl.preprocess.pictures import open_picture, still_bytes
from jaxsgl.preprocess.sources import ImageFile, VideoFile
from tests.grids import daily
from tests.preprocess.pictures import SETTINGS, animation, file_of, picture

pytestmark = pytest.mark.device  # starts a process

ROOT = Path(__file__).parents[2]
MOST_BYTES = 200 << 20
SPARE_BYTES = 12 << 20  # of patches, strips and the allocator
FULL, PHONE = (8192, 4096), (4032, 3024)
ON_ITS_SIDE = b"Exif\0\0II*\0\x08\0\0\0\x01\0\x12\x01\x03\0\x01\0\0\0\x06\0\0\0\0\0\0\0"
KINDS: dict[str, tuple[str, str, tuple[int, int], dict[str, object]]] = {
    "RGBA PNG": ("RGBA", "PNG", FULL, {}),
    "P PNG": ("P", "PNG", FULL, {"transparency": 0}),
    "LA PNG": ("LA", "PNG", FULL, {}),
    "16 bits PNG": ("I;16", "PNG", FULL, {}),
    "CMYK JPEG": ("CMYK", "JPEG", FULL, {}),
    "turned JPEG": ("RGB", "JPEG", FULL, {"exif": ON_ITS_SIDE}),
    "BMP": ("RGB", "BMP", (4096, 4096), {}),
    "GIF": ("P", "GIF", FULL, {}),
    "progressive JPEG": ("RGB", "JPEG", PHONE, {"progressive": True, "subsampling": 0}),
    "WebP": ("RGBA", "WEBP", PHONE, {"method": 0}),
}  # fmt: skip
CHILD = """
import json, sys
from tests.preprocess.test_decode_memory import peaks
print(json.dumps(peaks(sys.argv[1:])))
"""


def peaks(files: list[str]) -> list[int]:
    """In a process of its own: the bytes that loading each file adds at most."""
    room, added = DecodeRoom(MediaConfig().media_max_decode_bytes), []
    load([ImageFile(file_of(picture(64, 64)))], SETTINGS, Bounds(16384, 65536, room=room))  # imports
    for file in files:
        content = Path(file).read_bytes()
        Path("/proc/self/clear_refs").write_text("5")
        before = memory("VmRSS")
        load([ImageFile(content)], SETTINGS, Bounds(16384, 65536, room=room))
        added.append(memory("VmHWM") - before)
    return added


def memory(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith(f"{name}:"))
    return int(line.split()[1]) << 10


def test_the_largest_pictures_of_every_kind_stay_within_200_mb(tmp_path: Path) -> None:
    names = daily(list(KINDS), every=len(KINDS))
    foreseen = []
    for name in names:
        mode, kind, size, options = KINDS[name]
        content = file_of(Image.new(mode, size), kind, **options)
        (tmp_path / name).write_bytes(content)
        foreseen.append(still_bytes(open_picture(content, 1 << 25, name), content, (1448, 2896)))
    done = subprocess.run(
        [sys.executable, "-c", CHILD, *(str(tmp_path / name) for name in names)],
        capture_output=True, text=True, cwd=ROOT, env={**os.environ, "MALLOC_ARENA_MAX": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for name, most, added in zip(names, foreseen, json.loads(done.stdout), strict=True):
        assert added < MOST_BYTES, name
        assert added < most + SPARE_BYTES, f"{name}: {added} bytes, but {most} were foreseen"


@pytest.mark.parametrize("mode", ["RGB", "L", "1", "P", "RGBA", "LA", "CMYK"])
def test_pictures_made_of_strips_have_the_bytes_of_those_made_at_once(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = picture(93, 71, mode)
    if mode == "P":
        given.info["transparency"] = 3
    for turn in (None, *pictures.TURNS.values()):
        upright = pictures.to_rgb(given if turn is None else given.transpose(turn))
        for size in ((40, 52), (110, 30), (30, 110)):
            monkeypatch.setattr(pictures, "STRIP_PIXELS", 1000)
            made = pictures.scaled(given, turn, *size)
            assert made.tobytes() == upright.resize(size, Image.Resampling.BICUBIC).tobytes(), (turn, size)


def test_a_picture_that_takes_too_much_memory_is_refused_before_it_is_decoded() -> None:
    room = DecodeRoom(1 << 20)
    content = file_of(Image.new("RGB", (800, 400)))
    words = r"decoding image 0 takes \d+ bytes of memory, but may take 1048576 \(--media-max-decode-bytes\)"
    with pytest.raises(InvalidRequest, match=words):
        load([ImageFile(content[:200])], SETTINGS, Bounds(16384, 65536, room=room))
    frames = animation([picture(300, 300, seed=seed) for seed in range(2)])
    with pytest.raises(InvalidRequest, match="decoding video 0 takes"):
        load([VideoFile(frames)], SETTINGS, Bounds(16384, 65536, room=room))
    with pytest.raises(InvalidRequest, match="decoding frame 1 of video 0 takes"):
        load([VideoFile((file_of(picture(9, 9)), content))], SETTINGS, Bounds(16384, 65536, room=room))


def test_pictures_wait_until_there_is_memory_for_them() -> None:
    room, entered, leave, order = DecodeRoom(100), threading.Event(), threading.Event(), list[str]()

    def first() -> None:
        with room.taken(70, "first"):
            entered.set()
            assert leave.wait(30)
            order.append("first")

    def second() -> None:
        with room.taken(40, "second"):
            order.append("second")

    threads = [threading.Thread(target=first), threading.Thread(target=second)]
    threads[0].start()
    assert entered.wait(30)
    threads[1].start()
    with room.taken(30, "small"):
        order.append("small")
    leave.set()
    for thread in threads:
        thread.join(30)
    assert order == ["small", "first", "second"]
