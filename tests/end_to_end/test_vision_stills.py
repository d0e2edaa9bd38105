"""Models that see pictures alone, each as it is, give transformers' answers, wherever a chunk or a prefix ends."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest

from jaxsgl.config.engine import SchedulingConfig
from jaxsgl.config.features import VisionConfig
from jaxsgl.engine.engine import Engine
from jaxsgl.engine.start import sizing
from jaxsgl.requests.media import Grid
from jaxsgl.requests.request import Request
from tests.end_to_end.offline import ends, new_scheduler, outputs, serve
from tests.end_to_end.test_vision import engine_of, give_up_after, run
from tests.grids import NIGHTLY
from tests.vision_models import (
    MERGES,
    OF_CLIP,
    OF_COHERE,
    OF_IDEFICS,
    SQUARE,
    WITH_JOINED,
    is_greedy,
    make_model,
    request,
    request_of_joined,
)

pytestmark = [pytest.mark.device, pytest.mark.usefixtures("greedy_steps_by_day")]
BY_NIGHT = pytest.mark.skipif(
    not NIGHTLY, reason="an engine for each; by day test_vision_prompts.py asks such models for answers"
)


class Served(NamedTuple):
    """An engine of a tiny model, transformers' one, and their kind."""

    engine: Engine
    model: Any
    kind: str

    def request(self, request_id: str, num_images: int, seed: int, **params: Any) -> Request:
        """Text with pictures that the model takes."""
        rng = np.random.default_rng(seed)
        if self.kind in WITH_JOINED:
            return request_of_joined(request_id, self.kind, num_images, seed, **params)
        grids: list[Grid] = [SQUARE] * num_images
        if self.kind not in (*OF_CLIP, *OF_COHERE, *OF_IDEFICS):
            grids = [(1, 2 * int(rng.integers(1, 8)), 2 * int(rng.integers(1, 6))) for _ in range(num_images)]
        merge = MERGES.get(self.kind, 2)
        frames = 2 if self.kind == "exaone4_5" else 1
        return request(request_id, grids, seed, frames=frames, merge=merge, **params)


ENGINES = [
    ("llava", 16),
    ("lighton_ocr", 4),
    ("paddleocr_vl", 16),
    ("exaone4_5", 1),
    ("idefics3", 4),
    ("smolvlm", 64),
    ("aya_vision", 16),
    ("llava_mistral", 1),
    ("llava_qwen2", 64),
    ("cohere2_vision", 4),
    ("llava_next", 16),
    ("llava_onevision", 4),
]


@pytest.fixture(scope="module", params=ENGINES, ids=str)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    kind, page_size = request.param
    folder = tmp_path_factory.mktemp(kind)
    model = make_model(folder, kind)
    most, rows = (80, 100) if kind in WITH_JOINED else (64 * MERGES.get(kind, 2) ** 2, 80)
    flags: dict[str, Any] = {"vision": VisionConfig(mm_max_patches=most, mm_pool_tokens=rows)}
    with pytest.MonkeyPatch.context() as patch:
        if kind in WITH_JOINED:  # whose images are encoded in parts, too
            patch.setattr(sizing, "SLICED_PATCHES", 32)
            flags |= {"scheduling": SchedulingConfig(max_itl_ms=1000.0)}
        engine = engine_of(folder, page_size, **flags)
    yield Served(engine, model, kind)
    engine.close()


@BY_NIGHT
def test_many_requests_at_once_get_greedy_tokens(served: Served) -> None:
    """LLaVA's pictures of 64 tokens end within chunks of 48, and the pool has 80 rows."""
    engine, model, _ = served
    before, requests = engine.recompiles, [served.request(str(i), i % 3, i) for i in range(14)]
    scheduling = SchedulingConfig(enable_mixed_chunk=True)
    answers = outputs(serve(engine, [requests[:8], [], requests[8:]], config=scheduling), requests)
    for asked, answer in zip(requests, answers, strict=True):
        assert is_greedy(model, asked, answer), asked.request_id
    assert len(set(map(tuple, answers))) > 11  # else any model would agree
    assert outputs(serve(engine, [requests], retract_every=5), requests) == answers
    if served.kind in WITH_JOINED:
        scheduling = SchedulingConfig(enable_mixed_chunk=True, max_itl_ms=1.0)
        assert outputs(serve(engine, [requests[:8], [], requests[8:]], config=scheduling), requests) == answers
    assert engine.recompiles == before


@BY_NIGHT
def test_prefixes_that_end_within_a_picture_change_no_token(served: Served) -> None:
    engine, model, _ = served
    asked, before = served.request("a", 2, 3), engine.recompiles
    (expected,) = outputs(serve(engine, [[asked]], radix=False), [asked])
    assert is_greedy(model, asked, expected)
    first, second = asked.media
    for cut in (first.offset, first.stop - 1, first.stop, first.stop + 1, second.stop - 1, second.stop):
        scheduler = new_scheduler(engine, radix=True)
        give_up_after(cut, asked, engine, scheduler)
        mailbox = run(engine, scheduler, [asked])
        computed = min(cut, engine.capacity.max_extend_tokens)
        assert ends(mailbox)["a"].cached_tokens == computed - computed % engine.capacity.page_size
        assert mailbox.output_ids("a") == expected, cut
    assert engine.recompiles == before
