"""Models that hear give transformers' answers, wherever a chunk of the prompt or a prefix ends; by day one of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest

from jaxsgl.config.engine import SchedulingConfig
from jaxsgl.config.features import VisionConfig
from jaxsgl.engine.engine import Engine
from jaxsgl.engine.start import sizing
from tests.end_to_end.offline import ends, new_scheduler, outputs, serve
from tests.end_to_end.test_vision import engine_of, give_up_after, run
from tests.grids import daily
from tests.sound_models import is_greedy, make_model, request

pytestmark = [pytest.mark.device, pytest.mark.usefixtures("greedy_steps_by_day")]


class Served(NamedTuple):
    """An engine of a tiny model, transformers' one, and their kind."""

    engine: Engine
    model: Any
    kind: str


@pytest.fixture(scope="module", params=daily([("qwen2_audio", 4), ("voxtral", 16)], every=2), ids=str)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    kind, page_size = request.param
    folder = tmp_path_factory.mktemp(kind)
    model = make_model(folder, kind)
    with pytest.MonkeyPatch.context() as patch:  # chunks are encoded in parts, too
        patch.setattr(sizing, "SLICED_PATCHES", 50)
        engine = engine_of(
            folder, page_size, vision=VisionConfig(mm_max_patches=100, mm_pool_tokens=60),
            scheduling=SchedulingConfig(max_itl_ms=1000.0),
        )  # fmt: skip
    yield Served(engine, model, kind)
    engine.close()


def test_many_requests_at_once_get_greedy_tokens(served: Served) -> None:
    engine, model, kind = served
    before, requests = engine.recompiles, [request(str(i), kind, i % 4, i) for i in range(14)]
    scheduling = SchedulingConfig(enable_mixed_chunk=True)
    answers = outputs(serve(engine, [requests[:8], [], requests[8:]], config=scheduling), requests)
    for asked, answer in zip(requests, answers, strict=True):
        assert is_greedy(model, asked, answer), asked.request_id
    assert len(set(map(tuple, answers))) > 11  # else any model would agree
    assert outputs(serve(engine, [requests], retract_every=5), requests) == answers
    in_parts = SchedulingConfig(enable_mixed_chunk=True, max_itl_ms=1.0)
    assert outputs(serve(engine, [requests[:8], [], requests[8:]], config=in_parts), requests) == answers
    assert engine.recompiles == before


def test_prefixes_that_end_within_a_sound_change_no_token(served: Served) -> None:
    engine, model, kind = served
    asked, before = request("a", kind, 2, 3), engine.recompiles
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
