"""Models that see images and keep states answer as transformers does, and begin at states within images."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest

from jaxsgl.config.engine import SchedulingConfig
from jaxsgl.engine.engine import Engine
from jaxsgl.requests.request import Request
from jaxsgl.scheduler.loop import run_loop
from jaxsgl.testing.engine import ScriptedMailbox
from tests.end_to_end.offline import ends, new_scheduler, outputs, serve
from tests.end_to_end.test_vision import engine_of, mixture
from tests.grids import daily
from tests.vision_models import WITH_STATES, is_greedy, make_model, request

pytestmark = [pytest.mark.device, pytest.mark.timeout(900), pytest.mark.usefixtures("greedy_steps_by_day")]
PAGE = 64


@pytest.fixture(scope="module", params=daily([*WITH_STATES, "lfm2_vl"], every=3))
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Engine, Any]]:
    folder = tmp_path_factory.mktemp(request.param)
    model = make_model(folder, request.param)
    engine = engine_of(folder, PAGE, max_total_tokens=48 * PAGE, decode_steps=4)
    yield engine, model
    engine.close()


def test_many_requests_at_once_get_greedy_tokens(served: tuple[Engine, Any]) -> None:
    engine, model = served
    requests = mixture(model.config.model_type)
    mixed: dict[str, Any] = {"config": SchedulingConfig(enable_mixed_chunk=True)}
    answers = outputs(serve(engine, [requests[:8], [], requests[8:]], **mixed), requests)
    for asked, answer in zip(requests, answers, strict=True):
        assert is_greedy(model, asked, answer), asked.request_id
    assert len(set(map(tuple, answers))) > 20  # else any model would agree
    for changes in ({"retract_every": 5}, {"overlap": False}, {"decode_steps": 1}):
        assert outputs(serve(engine, [requests], **changes), requests) == answers, changes
    assert engine.recompiles == 0


def test_a_question_about_a_known_picture_begins_at_a_state_within_it(served: tuple[Engine, Any]) -> None:
    """The first page ends in the picture: its state is kept by the second question, and found by the third one."""
    engine, model = served
    frames = 1 if model.config.model_type == "lfm2_vl" else 2
    shown, other = (request("shown", [(1, 16, 16)], seed, text_seed=1, frames=frames) for seed in (5, 6))
    assert shown.media[0].offset < PAGE < shown.media[0].stop and shown.prompt_ids == other.prompt_ids
    tails = np.random.default_rng(3).integers(5, 240, (4, 70)).tolist()
    asked = [
        msgspec.structs.replace(of, request_id=str(i), prompt_ids=[*of.prompt_ids, *tail])
        for i, (of, tail) in enumerate(zip((shown, shown, shown, other), tails, strict=True))
    ]
    scheduler = new_scheduler(engine, radix=True)
    mailbox = ScriptedMailbox([each for one in asked for each in ([one], *[[]] * 80)])
    run_loop(scheduler, engine, mailbox, depth=1)
    assert [ends(mailbox)[one.request_id].cached_tokens for one in asked] == [0, 0, PAGE, 0]
    assert scheduler.state.totals.encoded_images == 2
    turns = []
    for one in asked:
        answer = mailbox.output_ids(one.request_id)
        assert is_greedy(model, one, answer), one.request_id
        turns.append(_next_turn(one, answer))
    mailbox = ScriptedMailbox([turns])
    run_loop(scheduler, engine, mailbox, depth=1)
    for turn in turns:
        assert ends(mailbox)[turn.request_id].cached_tokens == 2 * PAGE  # where the first answer's prompt had its last
        assert is_greedy(model, turn, mailbox.output_ids(turn.request_id)), turn.request_id
    assert engine.recompiles == 0


def _next_turn(first: Request, answer: list[int]) -> Request:
    return msgspec.structs.replace(
        first, request_id=f"{first.request_id} again", prompt_ids=[*first.prompt_ids, *answer, 17, 33, 21]
    )
