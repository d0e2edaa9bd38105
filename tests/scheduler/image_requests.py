"""Requests with images for the fake engine, and what it answers."""

from __future__ import annotations

import numpy as np
from msgspec.structs import replace as changed

from jaxsgl.batch.buckets import Capacity
from jaxsgl.batch.patches import TowerCapacity, TowerShape
from jaxsgl.requests.media import MediaItem, MediaLimits, digest_of, patches_of
from jaxsgl.requests.request import Request, SamplingParams
from jaxsgl.testing.device import image_ids
from jaxsgl.testing.engine import generate
from tests.scheduler.grammars import constrained_output
from tests.scheduler.serving import VOCAB

PLACEHOLDER, LINE_END = 999, 997
PATCH_LEN = 6


def capacity(
    rows: int = 16, page_size: int = 4, num_pages: int = 100, chunk: int = 24, num_bins: int = 1, host_rows: int = 0,
    has_lines: bool = False, sees_ahead: bool = False,
) -> Capacity:  # fmt: skip
    tower = TowerCapacity(TowerShape(2, 4, PATCH_LEN), rows, 64, num_bins, host_bytes=4 * host_rows)
    limits = MediaLimits(PLACEHOLDER, PLACEHOLDER - 1, patch_size=1, has_lines=has_lines)
    return Capacity(page_size, num_pages, 6, 160, chunk, VOCAB, media=limits, tower=tower,
                    has_axes=not (has_lines or sees_ahead), sees_ahead=sees_ahead)  # fmt: skip


def asked(
    request_id: str, parts: list[int | tuple[int, int]], max_tokens: int = 5, width: int | None = None
) -> Request:
    """A prompt of so many tokens of text, and images as (seed, tokens), in turns.

    `width`: images have lines of so many tokens, each of which another one ends; None: they have none.
    """
    ids: list[int] = []
    media = []
    for part in parts:
        if isinstance(part, int):
            ids += [(7 * len(ids) + 3) % 900 for _ in range(part)]
            continue
        seed, tokens = part
        pixels = np.random.default_rng(seed).integers(0, 256, (4 * tokens, PATCH_LEN), dtype=np.uint8).tobytes()
        lines = 1 if width is None else tokens // width
        grid, line_len = (1, 2 * lines, 2 * tokens // lines), 0 if width is None else width + 1
        of_image = [PLACEHOLDER] * tokens if width is None else [*[PLACEHOLDER] * width, LINE_END] * lines
        digest = digest_of(pixels, grid, "")
        media.append(MediaItem(digest, len(ids), len(of_image), grid, pixels, line_len=line_len))
        ids += of_image
    return Request(request_id, ids, SamplingParams(temperature=0.0, max_tokens=max_tokens), media=tuple(media))


def expected(request: Request, weights: int = 0, adapter: int = 0, stop_ids: frozenset[int] = frozenset()) -> list[int]:
    """What the fake engine yields with `weights` and an adapter, given what is in the images' places."""
    ids = list(request.prompt_ids)
    for item in request.media:
        seen = image_ids(patches_of(item).reshape(item.num_rows, -1), weights)
        known = ids[item.offset : item.stop]
        of_tokens = zip(known, item.by_token(seen).tolist(), strict=True)
        ids[item.offset : item.stop] = [given if given == LINE_END else found for given, found in of_tokens]
    max_tokens = request.sampling.max_tokens
    assert max_tokens is not None
    if request.sampling.masked:
        return constrained_output(changed(request, prompt_ids=ids), max_tokens, VOCAB, stop_ids, weights + adapter)[0]
    return generate(ids, max_tokens, stop_ids, VOCAB, weights=weights + adapter)
