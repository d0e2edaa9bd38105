"""Pictures for tests, made from a seed, and settings of a processor."""

from __future__ import annotations

import base64
import importlib
import io
from dataclasses import replace
from typing import Any

import numpy as np
from PIL import Image

from jaxsgl.preprocess.settings import PixelSettings, ProcessorSettings, TileWords

PIXELS = PixelSettings(65536, 16777216, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
SETTINGS = ProcessorSettings(
    16, 2, PIXELS, PixelSettings(4096, 25165824, PIXELS.mean, PIXELS.std), 7, 8, 5, 6,
    temporal_patch_size=2, takes_pixels=True,
)  # fmt: skip
CLIP = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
# Of Qwen2.5-VL, as published.
OLDER = ProcessorSettings(
    14, 2, PixelSettings(3136, 12845056, *CLIP), PixelSettings(100352, 602112, *CLIP), 7, 8, 5, 6,
    caps_frames=True, by_frame=True, positions_per_s=2.0, temporal_patch_size=2, takes_pixels=True,
)  # fmt: skip
# Of Mistral Small 3.1 and 3.2, as published.
IN_LINES = ProcessorSettings(
    14, 2, PixelSettings(1, 1540**2, *CLIP), PixelSettings(1, 1540**2, *CLIP), 10,
    longest_side=1540, line_ends=(12, 13),
)  # fmt: skip
# Of Pixtral 12B in transformers' form, and of LLaVA 1.5, as published.
UNMERGED = ProcessorSettings(
    16, 1, PixelSettings(1, 1024**2, *CLIP), PixelSettings(1, 1024**2, *CLIP), 10,
    longest_side=1024, line_ends=(12, 13),
)  # fmt: skip
CROPPED = ProcessorSettings(
    14, 1, PixelSettings(336**2, 336**2, *CLIP), PixelSettings(336**2, 336**2, *CLIP), 32_000,
    fixed_side=336, crops=True,
)  # fmt: skip
# Of LLaVA-NeXT and LLaVA-OneVision, as published.
JOINED = replace(CROPPED, crops=False, resolutions=((336, 672), (672, 336), (672, 672), (1008, 336), (336, 1008)))
SHRUNK = ProcessorSettings(
    14, 1, PixelSettings(384**2, 384**2, PIXELS.mean, PIXELS.std),
    PixelSettings(384**2, 384**2, PIXELS.mean, PIXELS.std), 151_646, fixed_side=384,
    resolutions=tuple((384 * rows, 384 * columns) for rows in range(1, 7) for columns in range(1, 7)),
    most_tiles=9, several_whole=True,
)  # fmt: skip
# Of SmolVLM 2.2B, as published: its patches leave out 6 of 384 pixels.
TOLD_TILES = ProcessorSettings(
    14, 3, PixelSettings(384**2, 384**2, PIXELS.mean, PIXELS.std),
    PixelSettings(384**2, 384**2, PIXELS.mean, PIXELS.std), 49_153, fixed_side=384, tiles_longest=1536,
    tile_words=TileWords(
        "<fake_token_around_image><row_{row}_col_{column}>", "\n", "\n", "<fake_token_around_image><global-img>",
        "<fake_token_around_image>",
    ), resample=1,
)  # fmt: skip
# Of PaddleOCR-VL, as in transformers.
LIFTED = ProcessorSettings(
    14, 2, PixelSettings(147456, 2359296, *CLIP), PixelSettings(147456, 2359296, *CLIP), 100_295, -1, 101_305,
    101_306, lifts=True,
)  # fmt: skip
# Of Gemma 3, as published.
SQUARE = ProcessorSettings(
    14, 4, PixelSettings(1, 896**2, PIXELS.mean, PIXELS.std), PixelSettings(1, 896**2, PIXELS.mean, PIXELS.std),
    262_144, -1, 255_999, 256_000, fixed_side=896, resample=2, written="start",
)  # fmt: skip
# Of Gemma 4, as published.
FILLED = ProcessorSettings(
    16, 3, PixelSettings(2304, 280 * 2304, PIXELS.mean, PIXELS.std),
    PixelSettings(2304, 70 * 2304, PIXELS.mean, PIXELS.std), 258_880, 258_884, 255_999, 258_882,
    num_frames=32, fills=True, written="image", times="minutes",
)  # fmt: skip
# Of GLM-4.1V and 4.5V, as published: the second one's placeholders are others.
STEPPED = ProcessorSettings(
    14, 2, PixelSettings(12544, 9633792, *CLIP), PixelSettings(12544, 47040000, *CLIP), 151_343, 151_344, 151_339,
    151_340, sampling="steps", counts_frames=True, times="whole seconds after", frame_token_id=151_343,
    temporal_patch_size=2,
)  # fmt: skip
# Of InternVL3, as published.
IMAGENET = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
TILED = ProcessorSettings(
    14, 2, PixelSettings(448**2, 448**2, *IMAGENET), PixelSettings(448**2, 448**2, *IMAGENET), 151_667, 151_674,
    151_665, 151_666, num_frames=8, sampling="middles", fixed_side=448, tiles=(1, 12), written="image",
    times="numbers", frame_token_id=151_667,
)  # fmt: skip
SMALL = ProcessorSettings(
    4, 2, PixelSettings(256, 4096, PIXELS.mean, PIXELS.std), PixelSettings(256, 65536, PIXELS.mean, PIXELS.std),
    7, 8, 5, 6, temporal_patch_size=2, takes_pixels=True,
)  # fmt: skip


def picture(width: int, height: int, mode: str = "RGB", seed: int = 0) -> Image.Image:
    """A smooth random picture; with an alpha channel, parts of it are transparent."""
    rng = np.random.default_rng(seed)
    coarse = rng.integers(0, 256, (max(2, height // 8), max(2, width // 8), 4), dtype=np.uint8)
    smooth = Image.fromarray(coarse, "RGBA").resize((width, height), Image.Resampling.BILINEAR)
    if mode in ("RGBA", "LA"):
        return smooth.convert(mode)
    return smooth.convert("RGB").convert(mode)


def file_of(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    """The picture as a file."""
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def animation(frames: list[Image.Image], duration_ms: int = 250, kind: str = "GIF") -> bytes:
    """Frames as an animated file."""
    return file_of(frames[0], kind, save_all=True, append_images=frames[1:], duration=duration_ms)


def movie(
    kind: str = "mp4", codec: str = "mpeg4", num_frames: int = 24, fps: int = 5, pixels: str = "yuv420p", scale: int = 1
) -> bytes:
    """A file of video whose frames differ."""
    av: Any = importlib.import_module("av")  # the extra `video`
    file = io.BytesIO()
    with av.open(file, "w", format=kind) as container:
        stream = container.add_stream(codec, rate=fps)
        stream.width, stream.height, stream.pix_fmt = 64 * scale, 48 * scale, pixels
        for number in range(num_frames):
            container.mux(stream.encode(av.VideoFrame.from_image(picture(64 * scale, 48 * scale, seed=number))))
        container.mux(stream.encode())
    return file.getvalue()


def data_url(file: bytes | Image.Image, media_type: str = "image/png") -> str:
    """A data: URL."""
    content = file if isinstance(file, bytes) else file_of(file)
    return f"data:{media_type};base64,{base64.b64encode(content).decode()}"
