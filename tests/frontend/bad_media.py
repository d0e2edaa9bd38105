"""Pictures that must be refused, each with what the refusal says: URLs, files, and what a gateway may send."""

from __future__ import annotations

import base64
import struct
import zlib
from typing import Any

import numpy as np
from PIL import Image
from smg_grpc_proto import sglang_scheduler_pb2 as pb
from vision_front_end import image_part, video_part

from tests.preprocess.pictures import animation, data_url, file_of, picture

NOT_ALLOWED = "which the server does not fetch from"
NOT_PUBLIC = "not a public one"
NO_URL = "must be data:, http: or https: with a host"

# With --allowed-media-domains allowed.example,*.cdn.example:8080: nothing is even looked up.
URLS = {
    "http://127.0.0.1/a.png": NOT_ALLOWED,
    "http://127.1/a.png": NOT_ALLOWED,
    "http://0x7f.0.0.1/a.png": NOT_ALLOWED,
    "http://2130706433/a.png": NOT_ALLOWED,
    "http://017700000001/a.png": NOT_ALLOWED,
    "http://[::1]/a.png": NOT_ALLOWED,
    "http://169.254.169.254/latest/meta-data/": NOT_ALLOWED,
    "http://localhost:30000/health": NOT_ALLOWED,
    "http://metadata.google.internal/": NOT_ALLOWED,
    "http://notallowed.example/a.png": NOT_ALLOWED,
    "http://allowed.example.evil.example/a.png": NOT_ALLOWED,
    "http://cdn.example:8080/a.png": NOT_ALLOWED,
    "http://a.cdn.example/a.png": NOT_ALLOWED,
    "https://allowed.example:22/a.png": NOT_ALLOWED,
    "http://127.0.0.1#@allowed.example/a.png": NOT_ALLOWED,
    "http://127.0.0.1?@allowed.example/a.png": NOT_ALLOWED,
    "http://allowed.example@127.0.0.1/a.png": "names a user",
    "http://user:pass@allowed.example/a.png": "names a user",
    "http://allowed.example\\@127.0.0.1/a.png": "a backslash",
    "http://allowed.example\t.evil/a.png": "holds a space",
    "http://①②⑦.⓪.⓪.①/a.png": "beyond ASCII",
    "http://allowed.example:99999/a.png": "is none",
    "file:///etc/passwd": NO_URL,
    "gopher://allowed.example/a.png": NO_URL,
    "/etc/passwd": NO_URL,
    "http:///a.png": NO_URL,
    "http://allowed.example/" + "a" * 9000: "but may have 8192",
}

# With every host allowed, and the system's resolver: nothing is dialled.
ADDRESSES = (
    "127.0.0.1", "127.1", "0x7f.1", "2130706433", "0", "10.0.0.1", "192.168.1.1", "172.16.0.1", "169.254.169.254",
    "100.64.0.1", "224.0.0.1", "255.255.255.255", "[::1]", "[::]", "[fe80::1]", "[fd00::1]", "[::ffff:127.0.0.1]",
    "[::ffff:7f00:1]", "[64:ff9b::7f00:1]", "[2002:7f00:1::]", "[ff02::1]", "[fec0::1]", "localhost",
    "a" * 64 + ".example", "a..example",
)  # fmt: skip

# What a server at an allowed host may answer, by path.
ANSWERS = {
    "/to-private": NOT_ALLOWED,
    "/to-user": "names a user",
    "/to-file": NO_URL,
    "/to-rebound": NOT_PUBLIC,
    "/to-nowhere": r"redirects to 'http://\[::1', which is no URL",
    "/loop": "redirected more than 3 times",
    "/big": "more than 100000 bytes of pictures, videos and sounds",
    "/endless": "more than 100000 bytes of pictures, videos and sounds",
    "/slow": "took longer than 0.3 s",
    "/html": "is of the type text/html, but must be image",
    "/missing": "status 404",
    "/truncated": "half of an answer",
    "/gzip": "a compressed answer",
    "/garbage": "no HTTP",
    "/headers": "bytes of headers",
    "/endless-hints": "bytes of headers",
    "/upgrade": "status 101",
    "/empty": "an empty answer",
    "/closed": "half of an answer",
    "/text.png": "no picture that can be read",
}


def bomb(width: int, height: int) -> bytes:
    """A PNG of few bytes whose header claims so many pixels."""
    data = bytearray(file_of(Image.new("1", (8, 8))))
    data[16:24] = struct.pack(">II", width, height)
    data[29:33] = struct.pack(">I", zlib.crc32(bytes(data[12:29])))
    return bytes(data)


def webp_bomb() -> bytes:
    """A WebP whose header claims 16384 x 16384 pixels."""
    data = bytearray(file_of(picture(16, 16, "RGBA"), "WEBP", exif=b"Exif\x00\x00x"))
    assert data[12:16] == b"VP8X"
    data[24:30] = b"\xff\x3f\x00\xff\x3f\x00"
    return bytes(data)


def long_gif(num_frames: int) -> bytes:
    """A GIF of so many frames of one pixel."""
    head = b"GIF89a" + struct.pack("<HHBBB", 1, 1, 0x80, 0, 0) + bytes(6)
    frame = b"," + struct.pack("<HHHHB", 0, 0, 1, 1, 0) + b"\x02\x02\x44\x01\x00"
    return head + frame * num_frames + b";"


def jpeg() -> bytes:
    return file_of(picture(64, 64), "JPEG")


def tiff() -> bytes:
    return file_of(picture(16, 16), "TIFF")


GOOD = data_url(picture(16, 16))
TEXT = base64.b64encode(b"no picture at all").decode()
# name -> parts of a message, what is said
FILES: dict[str, tuple[list[dict[str, Any]], str]] = {
    "png bomb": ([image_part(data_url(bomb(60000, 60000)))], r"pixels, but may have 1000000 \(--media-max-pixels\)"),
    "png just over": ([image_part(data_url(bomb(1001, 1000)))], "1001 x 1000 = 1001000 pixels, but may have 1000000"),
    "webp bomb": ([image_part(data_url(webp_bomb(), "image/webp"))], "16384 x 16384"),
    "truncated png": ([image_part(data_url(file_of(picture(64, 64))[:-400]))], "can't be decoded"),
    "truncated jpeg": ([image_part(data_url(jpeg()[:400], "image/jpeg"))], "can't be decoded|no picture"),
    "header alone": ([image_part(data_url(b"\x89PNG\r\n\x1a\n"))], "no picture that can be read"),
    "text as png": ([image_part(f"data:image/png;base64,{TEXT}")], "no picture that can be read"),
    "tiff": ([image_part(data_url(tiff(), "image/tiff"))], "send JPEG, PNG, WebP, GIF or BMP"),
    "svg": ([image_part(data_url(b"<svg xmlns='http://www.w3.org/2000/svg'/>", "image/svg+xml"))], "no picture"),
    "wrong type": ([image_part(f"data:text/html;base64,{TEXT}")], "is of the type text/html, but must be image"),
    "no type": ([image_part(f"data:;base64,{TEXT}")], "no picture that can be read"),
    "video as image": ([image_part(data_url(b"x", "video/mp4"))], "is of the type video/mp4, but must be image"),
    "not base64": ([image_part("data:image/png;base64,%%%%")], "no base64"),
    "no base64 mark": ([image_part("data:image/png,abc")], "no data: URL in base64"),
    "empty": ([image_part("data:image/png;base64,")], "is empty"),
    "no url": ([{"type": "image_url"}], "names no file"),
    "empty url": ([image_part("")], "names no file"),
    "too many bytes": ([image_part(data_url(b"x" * 120_000))], "more than 100000 bytes of pictures, videos and sounds"),
    "too many bytes in all": ([image_part(data_url(b"\x89PNG" * 9000))] * 3, "more than 100000 bytes|no picture"),
    "too many images": ([image_part(GOOD)] * 9, "has 9 media, but may have 8"),
    "too long": ([image_part(data_url(picture(1, 201)))], "at most 200 times"),
    "broken exif": ([image_part(data_url(b"\xff\xd8\xff\xe1\x00\x10Exif\x00\x00junkjunk", "image/jpeg"))], "."),
    "mp4": ([video_part(data_url(b"\x00\x00\x00\x18ftypmp42" + bytes(64), "video/mp4"))], "can't be decoded|PyAV"),
    "too many frames": (
        [video_part(data_url(long_gif(4100), "image/gif"))],
        "has 4100 frames, but may have 4096",
    ),
    "too many listed frames": ([video_part("data:video/jpeg;base64," + "," * 5000)], "5001 frames, but may have 4096"),
    "damaged frame": ([video_part(data_url(animation([picture(32, 32, seed=i) for i in range(4)])[:900]))], "."),
    "too many tokens": ([image_part(data_url(picture(60, 60, seed=i))) for i in range(6)], "may have 256 together"),
    "placeholder in the text": ([{"type": "text", "text": "<|image_pad|>"}, image_part(GOOD)], "has 2 placeholders"),
    "placeholder without": ([{"type": "text", "text": "<|image_pad|>"}], "1 placeholder tokens, but its images have 0"),
    "audio": ([{"type": "input_audio", "input_audio": {"data": "x", "format": "wav"}}], "is a sound, but"),
}  # fmt: skip


def tensor(values: Any, dtype: str) -> pb.TensorData:
    array = np.asarray(values, dtype)
    return pb.TensorData(data=array.tobytes(), shape=array.shape, dtype=dtype)


def inputs(rows: int = 16, columns: int = 96, grid: Any = ((1, 4, 4),), places: Any = ((1, 4),)) -> pb.MultimodalInputs:
    """One picture of 4 tokens at token 1."""
    return pb.MultimodalInputs(
        pixel_values=tensor(np.zeros((rows, columns)), "float32"),
        model_specific_tensors={"image_grid_thw": tensor(grid, "int64")},
        mm_placeholders=[pb.PlaceholderRange(offset=offset, length=length) for offset, length in places],
    )


def changed(**fields: Any) -> pb.MultimodalInputs:
    given = inputs()
    for name, value in fields.items():
        getattr(given, name).CopyFrom(value)
    return given


def with_grid(data: pb.TensorData) -> pb.MultimodalInputs:
    given = inputs()
    given.model_specific_tensors["image_grid_thw"].CopyFrom(data)
    return given


def without_grid() -> pb.MultimodalInputs:
    given = inputs()
    del given.model_specific_tensors["image_grid_thw"]
    return given


HUGE = 2**40
LIES = {
    "fewer rows": (inputs(rows=12), r"must have \[16, 96\]"),
    "more rows": (inputs(rows=20), r"must have \[16, 96\]"),
    "wrong columns": (inputs(columns=48), r"must have \[16, 96\]"),
    "a grid beyond the rows": (inputs(grid=((1, 8, 8),)), r"must have \[64, 96\]"),
    "an endless grid": (inputs(grid=((1, HUGE, HUGE),)), "sides of 1 to 65536"),
    "a large grid": (inputs(grid=((1, 60000, 60000),)), "but a request may have 1024"),
    "a negative grid": (inputs(grid=((1, -4, -4),)), "sides of 1 to 65536"),
    "an odd grid": (inputs(rows=15, grid=((1, 3, 5),)), "multiples of 2"),
    "frames": (inputs(rows=32, grid=((2, 4, 4),)), r"must have \(1, h, w\)"),
    "two grids for one place": (inputs(32, grid=((1, 4, 4), (1, 4, 4))), r"must have \[1, 3\]"),
    "no place": (inputs(places=()), "mm_placeholders has 0 entries"),
    "many places": (inputs(places=((1, 4),) * 9), "mm_placeholders has 9 entries, but must have 1 to 8"),
    "a short place": (inputs(places=((1, 3),)), "has 3 placeholder tokens, but its grid"),
    "a place elsewhere": (inputs(places=((0, 4),)), "not all of these are placeholders"),
    "a place beyond the prompt": (inputs(places=((2**31, 4),)), "but the prompt has"),
    "no grid": (without_grid(), "without model_specific_tensors"),
    "a grid of floats": (with_grid(tensor(((1, 4, 4),), "float32")), "is of type 'float32'"),
    "fewer bytes": (changed(pixel_values=pb.TensorData(data=b"1234", shape=[16, 96], dtype="float32")), "has 4 bytes"),
    "another type": (changed(pixel_values=pb.TensorData(data=b"1", shape=[16, 96], dtype="object")), "'object'"),
    "nan": (changed(pixel_values=tensor(np.full((16, 96), np.nan), "float32")), "not normalized"),
    "raw pixels": (changed(pixel_values=tensor(np.full((16, 96), 200.0), "float32")), "not normalized"),
    "videos": (pb.MultimodalInputs(video_urls=["http://allowed.example/a.mp4"]), "video_urls is not supported"),
    "a private url": (pb.MultimodalInputs(image_urls=["http://127.0.0.1/a.png"]), NOT_ALLOWED),
    "a file that is none": (pb.MultimodalInputs(image_data=[b"no picture"]), "no picture that can be read"),
}  # fmt: skip
