"""Requests with images for the fake engine, and what it answers."""

from __future__ import annotations

import numpy as np

from jaxsgl.batch.buckets import Capacity
from jaxsgl.batch.patches import TowerCapacity, TowerShape
from jaxsgl.requests.media import MediaItem, MediaLimits, digest_of, patches_of
from jaxsgl.requests.request import Request, SamplingParams
from jaxsgl.testing.device import image_ids
from jaxsgl.testing.engine import generate
from tests.scheduler.serving import VOCAB

PLACEHOLDER = 999
PATCH_LEN = 6


def capacity(
    rows: int = 16, page_size: int = 4, num_pages: int = 100, chunk: int = 24, num_bins: int = 1, host_rows: int = 0
) -> Capacity:
    tower = TowerCapacity(TowerShape(2, 4, PATCH_LEN), rows, 64, num_bins, host_bytes=4 * host_rows)
    limits = MediaLimits(PLACEHOLDER, PLACEHOLDER - 1, patch_size=1)
    return Capacity(page_size, num_pages, 6, 160, chunk, VOCAB, media=limits, tower=tower, has_axes=True)


def asked(request_id: str, parts: list[int | tuple[int, int]], max_tokens: int = 5) -> Request:
    """A prompt of so many tokens of text, and images as (seed, tokens), in turns."""
    ids: list[int] = []
    media = []
    for part in parts:
        if isinstance(part, int):
            ids += [(7 * len(ids) + 3) % 900 for _ in range(part)]
            continue
        seed, tokens = part
        pixels = np.random.default_rng(seed).integers(0, 256, (4 * tokens, PATCH_LEN), dtype=np.uint8).tobytes()
        grid = (1, 2, 2 * tokens)
        media.append(MediaItem(digest_of(pixels, grid, ""), len(ids), tokens, grid, pixels))
        ids += [PLACEHOLDER] * tokens
    return Request(request_id, ids, SamplingParams(temperature=0.0, max_tokens=max_tokens), media=tuple(media))


def expected(request: Request, weights: int = 0, adapter: int = 0, stop_ids: frozenset[int] = frozenset()) -> list[int]:
    """What the fake engine yields with `weights` and an adapter, given what is in the images' places."""
    ids = list(request.prompt_ids)
    for item in request.media:
        ids[item.offset : item.stop] = image_ids(patches_of(item).reshape(item.length, -1), weights).tolist()
    max_tokens = request.sampling.max_tokens
    assert max_tokens is not None
    return generate(ids, max_tokens, stop_ids, VOCAB, weights=weights + adapter)
