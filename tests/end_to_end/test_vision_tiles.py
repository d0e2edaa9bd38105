"""Models that see pictures in tiles give transformers' answers, wherever a chunk or a prefix ends."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from jaxsgl.config.engine import SchedulingConfig
from jaxsgl.config.features import VisionConfig
from jaxsgl.engine.engine import Engine
from jaxsgl.errors import ConfigError
from tests.end_to_end.offline import ends, new_scheduler, outputs, serve
from tests.end_to_end.test_vision import engine_of, give_up_after, run
from tests.grids import daily
from tests.vision_models import is_greedy, make_model, request_of_tiles

pytestmark = [pytest.mark.device, pytest.mark.usefixtures("greedy_steps_by_day")]


ENGINES = [
    ("internvl_moe", 16),
    ("internvl", 4),
    ("internvl_qwen3", 1),
    ("internvl_llama", 64),
    ("internvl_gpt_oss", 16),
]


@pytest.fixture(scope="module", params=daily(ENGINES, every=len(ENGINES)), ids=str)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Engine, Any]]:
    kind, page_size = request.param
    folder = tmp_path_factory.mktemp(kind)
    model = make_model(folder, kind)
    scheduling = SchedulingConfig(max_itl_ms=1000.0)  # so that the tower's parts are compiled
    engine = engine_of(folder, page_size, max_total_tokens=3000, scheduling=scheduling)
    yield engine, model
    engine.close()


def test_many_requests_at_once_get_greedy_tokens(served: tuple[Engine, Any]) -> None:
    """Pictures of 1 to 6 tiles of 16 tokens: chunks of 48 end within them, and the pool has 80 rows."""
    engine, model = served
    before = engine.recompiles
    requests = [request_of_tiles(str(i), [1 + (i + 3 * j) % 6 for j in range(i % 3)], i) for i in range(12)]
    assert max(sum(item.length for item in asked.media) for asked in requests) > 80
    for max_itl_ms in (1000.0, 1.0):  # with the latter images are encoded in parts
        scheduling = SchedulingConfig(enable_mixed_chunk=True, max_itl_ms=max_itl_ms)
        answers = outputs(serve(engine, [requests[:8], [], requests[8:]], config=scheduling), requests)
        for asked, answer in zip(requests, answers, strict=True):
            assert is_greedy(model, asked, answer), asked.request_id
    assert len(set(map(tuple, answers))) > 9  # else any model would agree
    assert outputs(serve(engine, [requests], retract_every=5), requests) == answers
    assert engine.recompiles == before


def test_prefixes_that_end_within_a_picture_change_no_token(served: tuple[Engine, Any]) -> None:
    engine, model = served
    asked, before = request_of_tiles("a", [2, 1], 3), engine.recompiles
    (expected,) = outputs(serve(engine, [[asked]], radix=False), [asked])
    assert is_greedy(model, asked, expected)
    first, second, _ = asked.media
    assert first.stop == second.offset
    for cut in (first.offset + 5, first.stop - 1, first.stop, first.stop + 1, second.stop, second.stop + 2):
        scheduler = new_scheduler(engine, radix=True)
        give_up_after(cut, asked, engine, scheduler)
        mailbox = run(engine, scheduler, [asked])
        assert ends(mailbox)["a"].cached_tokens == cut - cut % engine.capacity.page_size
        assert mailbox.output_ids("a") == expected, cut
    assert engine.recompiles == before


def test_each_tile_is_encoded_once(served: tuple[Engine, Any]) -> None:
    """Also where a picture comes twice in a prompt, and where other pictures have a tile like it."""
    engine, model = served
    scheduler = new_scheduler(engine, radix=True)
    asked = request_of_tiles("a", [2, 2, 1], 4)
    tiles = [asked.media[place] for place in (0, 1, 0, 1, 1)]
    again = [msgspec.structs.replace(tile, offset=item.offset) for tile, item in zip(tiles, asked.media, strict=True)]
    asked = msgspec.structs.replace(asked, media=tuple(again))
    mailbox = run(engine, scheduler, [asked, msgspec.structs.replace(asked, request_id="b")])
    assert scheduler.state.totals.encoded_images == 2
    answer = mailbox.output_ids("a")
    assert answer == mailbox.output_ids("b") and is_greedy(model, asked, answer)
    turn = msgspec.structs.replace(asked, request_id="turn", prompt_ids=[*asked.prompt_ids, *answer[:-1], 17, 33])
    mailbox = run(engine, scheduler, [turn])
    known = len(asked.prompt_ids) + len(answer) - 1
    assert ends(mailbox)["turn"].cached_tokens == known - known % engine.capacity.page_size
    assert scheduler.state.totals.encoded_images == 2 and is_greedy(model, turn, mailbox.output_ids("turn"))


def test_a_server_that_can_never_encode_a_tile_does_not_start(tmp_path: Path) -> None:
    make_model(tmp_path, "internvl")
    with pytest.raises(ConfigError, match="--mm-max-patches is 63, but each image has 64: raise it"):
        engine_of(tmp_path, 16, vision=VisionConfig(mm_max_patches=63))
