"""Models that tell the lines of images by tokens give transformers' answers, wherever a chunk or a prefix ends."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from jaxsgl.config.engine import SchedulingConfig
from jaxsgl.config.features import VisionConfig
from jaxsgl.engine.engine import Engine
from jaxsgl.requests.request import Request
from tests.end_to_end.offline import ends, new_scheduler, outputs, serve
from tests.end_to_end.test_vision import engine_of, give_up_after, run
from tests.grids import daily
from tests.vision_models import BREAK, LAST, MERGES, WITH_LINES, is_greedy, make_model, request_in_lines

pytestmark = [pytest.mark.device, pytest.mark.usefixtures("greedy_steps_by_day")]


@pytest.fixture(scope="module", params=daily(list(zip(WITH_LINES, (4, 16, 1, 64), strict=True)), every=4), ids=str)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Engine, Any]]:
    kind, page_size = request.param
    folder = tmp_path_factory.mktemp(kind)
    model = make_model(folder, kind)
    most = 64 * MERGES.get(kind, 2) ** 2
    engine = engine_of(folder, page_size, vision=VisionConfig(mm_max_patches=most, mm_pool_tokens=80))
    yield engine, model
    engine.close()


def merge_of(engine: Engine) -> int:
    assert engine.arch.tower is not None
    return engine.arch.tower.merger.side


def mixture(merge: int) -> list[Request]:
    """20 requests with 0 to 3 images, of one line or column among others."""
    rng = np.random.default_rng(7)
    requests = []
    for number in range(20):
        grids = [(1, merge * int(rng.integers(1, 7)), merge * int(rng.integers(1, 6))) for _ in range(number % 4)]
        requests.append(request_in_lines(str(number), grids, number, merge))
    return requests


def test_many_requests_at_once_get_greedy_tokens(served: tuple[Engine, Any]) -> None:
    engine, model = served
    merge = merge_of(engine)
    before, requests = engine.recompiles, mixture(merge)
    assert {1, 2} <= {item.grid[1] // merge for each in requests for item in each.media}
    scheduling = SchedulingConfig(enable_mixed_chunk=True)
    answers = outputs(serve(engine, [requests[:8], [], requests[8:]], config=scheduling), requests)
    for asked, answer in zip(requests, answers, strict=True):
        assert is_greedy(model, asked, answer), asked.request_id
    assert len(set(map(tuple, answers))) > 15  # else any model would agree
    assert outputs(serve(engine, [requests], retract_every=5), requests) == answers
    assert engine.recompiles == before


def test_prefixes_that_end_within_a_line_or_at_its_end_change_no_token(served: tuple[Engine, Any]) -> None:
    engine, model = served
    merge, before = merge_of(engine), engine.recompiles
    asked = request_in_lines("a", [(1, 3 * merge, 2 * merge), (1, merge, 4 * merge)], 3, merge)
    (expected,) = outputs(serve(engine, [[asked]], radix=False), [asked])
    assert is_greedy(model, asked, expected)
    for cut in range(asked.media[0].offset, asked.media[1].stop + 2):
        scheduler = new_scheduler(engine, radix=True)
        give_up_after(cut, asked, engine, scheduler)
        mailbox = run(engine, scheduler, [asked])
        assert ends(mailbox)["a"].cached_tokens == cut - cut % engine.capacity.page_size
        assert mailbox.output_ids("a") == expected, cut
    assert engine.recompiles == before


def test_only_what_is_seen_takes_rows_of_the_pool(served: tuple[Engine, Any]) -> None:
    """An image of 128 tokens, half of which end lines, finds room in 80 rows, and comes back from host memory."""
    engine, model = served
    scheduler = new_scheduler(engine, radix=False)
    for number, seed in enumerate((41, 42, 41)):
        merge = merge_of(engine)
        asked = request_in_lines(str(number), [(1, 64 * merge, merge)], seed, merge)
        assert (asked.media[0].num_rows, asked.media[0].length) == (64, 128)
        assert is_greedy(model, asked, run(engine, scheduler, [asked]).output_ids(str(number)))
    assert (scheduler.state.totals.encoded_images, scheduler.state.totals.restored_images) == (2, 1)


def test_other_ends_of_lines_give_other_answers(served: tuple[Engine, Any]) -> None:
    """So their embeddings are read, and are those of the text's tokens."""
    engine, model = served
    asked = request_in_lines("a", [(1, 6, 4)], 9, merge_of(engine))
    swapped = {BREAK: LAST, LAST: BREAK}
    other = msgspec.structs.replace(asked, prompt_ids=[swapped.get(token, token) for token in asked.prompt_ids])
    for each in (asked, other):
        (answer,) = outputs(serve(engine, [[each]], radix=False), [each])
        assert is_greedy(model, each, answer)
    assert not is_greedy(model, other, outputs(serve(engine, [[asked]], radix=False), [asked])[0])


def test_names_of_tensors_in_memory_are_understood(tmp_path: Path) -> None:
    """Those of transformers' `state_dict()`; folders have others."""
    model = make_model(tmp_path, "mistral")
    stored = load_file(tmp_path / "model.safetensors")
    renamed = {name: tensor.contiguous() for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    assert not renamed.keys() & stored.keys()
    save_file(renamed, tmp_path / "model.safetensors")
    engine, asked = engine_of(tmp_path, 16), request_in_lines("a", [(1, 4, 6)], 5)
    (answer,) = outputs(serve(engine, [[asked]]), [asked])
    assert is_greedy(model, asked, answer)
    engine.close()
