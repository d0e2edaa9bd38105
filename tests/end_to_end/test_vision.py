"""Answers to requests with images are those of transformers, whatever chunks, prefixes and neighbours they have."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from jaxsgl.batch.patches import EncodePart, pack
from jaxsgl.config.engine import EngineConfig, SchedulingConfig
from jaxsgl.config.features import VisionConfig
from jaxsgl.engine.engine import Engine
from jaxsgl.engine.start import sizing
from jaxsgl.messages.orders import Abort
from jaxsgl.requests.request import Request
from jaxsgl.scheduler.loop import run_loop
from jaxsgl.testing.engine import ScriptedMailbox
from tests.end_to_end import vision_mesh
from tests.end_to_end.offline import ends, new_scheduler, outputs, serve
from tests.grids import NIGHTLY, daily
from tests.vision_models import APART, OF_GLM, WITH_STATES, image, is_greedy, logits_of, make_model, request

pytestmark = pytest.mark.device
ATOL = 2e-3
ROOT = Path(__file__).parents[2]


def engine_of(folder: Path, page_size: int, **flags: Any) -> Engine:
    config = EngineConfig(
        model=str(folder),
        page_size=page_size,
        max_total_tokens=1500,
        context_length=256,
        max_running_requests=8,
        chunked_prefill_size=48,
        extend_buckets=(48,),
        decode_buckets=(8,),
        vision=VisionConfig(mm_max_patches=256, mm_pool_tokens=80),
    )
    return Engine(replace(config, **flags), progress=False)


@pytest.fixture(
    scope="module",
    params=daily(
        [
            ("qwen3_vl", 1),
            ("qwen3_vl_moe", 16),
            ("qwen2_vl", 1),
            ("glm4v", 16),
            ("qwen2_5_vl", 16),
            ("glm4v_moe", 1),
            ("qwen3_vl_moe", 1),
            ("glm_ocr", 1),
        ],
        every=4,
    ),
    ids=str,
)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Engine, Any]]:
    kind, page_size = request.param
    folder = tmp_path_factory.mktemp("model")
    model = make_model(folder, kind)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sizing, "SLICED_PATCHES", 256)
        engine = engine_of(folder, page_size, scheduling=SchedulingConfig(max_itl_ms=1000.0))
    yield engine, model
    engine.close()


def mixture(kind: str) -> list[Request]:
    """24 requests with 0 to 4 images of odd sizes, and a video, if the model takes any."""
    rng = np.random.default_rng(7)
    requests = []
    for number in range(23):
        grids = [(1, 2 * int(rng.integers(1, 8)), 2 * int(rng.integers(1, 6))) for _ in range(number % 5)]
        requests.append(request(str(number), grids, number, frames=1 if kind == "lfm2_vl" else 2))
    if kind == "lfm2_vl":
        return requests
    frames = [(1, 6, 4)] * (3 if kind in APART else 4)
    of_kind: dict[str, Any] = {"as_images": True} if kind in OF_GLM else {"is_video": True, "apart": APART.get(kind)}
    return [*requests, request("video", frames, 99, **of_kind)]


def test_many_requests_at_once_get_greedy_tokens(served: tuple[Engine, Any]) -> None:
    engine, model = served
    before = engine.recompiles
    requests = mixture(model.config.model_type)
    scheduling = SchedulingConfig(enable_mixed_chunk=True)
    answers = outputs(serve(engine, [requests[:8], [], requests[8:]], config=scheduling), requests)
    for asked, answer in zip(requests, answers, strict=True):
        assert is_greedy(model, asked, answer), asked.request_id
    assert len(set(map(tuple, answers))) > 20  # else any model would agree
    assert outputs(serve(engine, [requests], retract_every=5), requests) == answers
    text = [asked for asked in requests if not asked.media]
    assert outputs(serve(engine, [text]), text) == [answers[requests.index(asked)] for asked in text]
    assert engine.recompiles == before


def test_logits_of_prompts_cut_at_each_token_of_an_image(served: tuple[Engine, Any]) -> None:
    engine, model = served
    asked = request("a", [(1, 4, 6), (1, 8, 4)], 3)
    exact = logits_of(model, asked)
    first, last = asked.media[0].offset - 1, asked.media[0].stop + 1
    for cut in range(first, last + 1):
        scheduler = new_scheduler(engine, radix=True)
        sizes = [cut, *[48] * 3]
        scheduler.receive([asked])
        while scheduler.num_waiting or scheduler.state.requests.extending:
            limit = replace(scheduler.state.config, max_prefill_tokens=sizes.pop(0))
            scheduler.state.config = limit
            inputs = scheduler.launch()
            assert inputs is not None
            logits = step_logits(engine, inputs)
        np.testing.assert_allclose(logits, exact[-1], atol=ATOL)
        scheduler.collect(np.array([int(logits.argmax())]))


def step_logits(engine: Engine, inputs: Any) -> np.ndarray:
    """Logits `[V]` of the step's first sequence."""
    (forward,) = engine.programs.of(inputs.bucket)
    return np.asarray(engine._runner.forward(forward, inputs).logits)[0]


def test_an_image_is_encoded_once_and_a_second_turn_computes_new_tokens_only(served: tuple[Engine, Any]) -> None:
    engine, model = served
    first = request("a", [(1, 8, 10)], 4)
    others = [msgspec.structs.replace(first, request_id=str(i)) for i in range(10)]
    same_image = image(2, first.media[0].grid, 400)
    assert same_image.digest == first.media[0].digest
    scheduler = new_scheduler(engine, radix=True)
    mailbox = run(engine, scheduler, [first, *others])
    assert scheduler.state.totals.encoded_images == 1
    answer = mailbox.output_ids("a")
    second = msgspec.structs.replace(first, request_id="turn", prompt_ids=[*first.prompt_ids, *answer[:-1], 17, 33, 21])
    mailbox = run(engine, scheduler, [second])
    assert scheduler.state.totals.encoded_images == 1
    page_size = engine.capacity.page_size
    known = len(first.prompt_ids) + len(answer) - 1
    assert ends(mailbox)["turn"].cached_tokens == known - known % page_size
    assert is_greedy(model, second, mailbox.output_ids("turn"))


def test_prefixes_that_end_within_an_image_or_right_after_it_change_no_token(served: tuple[Engine, Any]) -> None:
    """They are those of a request that was given up after its first chunk."""
    engine, model = served
    asked, before = request("a", [(1, 4, 6), (1, 8, 4)], 3), engine.recompiles
    (expected,) = outputs(serve(engine, [[asked]], radix=False), [asked])
    assert is_greedy(model, asked, expected)
    page_size = engine.capacity.page_size
    for cut in range(asked.media[0].offset, asked.media[1].stop + 2):
        scheduler = new_scheduler(engine, radix=True)
        give_up_after(cut, asked, engine, scheduler)
        mailbox = run(engine, scheduler, [asked])
        assert ends(mailbox)["a"].cached_tokens == cut - cut % page_size
        assert mailbox.output_ids("a") == expected, cut
    assert engine.recompiles == before


def test_an_image_that_the_pool_has_let_go_comes_back_from_host_memory(served: tuple[Engine, Any]) -> None:
    """The pool has 80 rows, and each of two images needs 64 of them."""
    engine, model = served
    before = engine.recompiles
    scheduler = new_scheduler(engine, radix=False)
    for number, seed in enumerate((41, 42, 41)):
        asked = request(str(number), [(1, 16, 16)], seed, text_seed=number)
        assert is_greedy(model, asked, run(engine, scheduler, [asked]).output_ids(str(number)))
    totals = scheduler.state.totals
    assert (totals.encoded_images, totals.restored_images) == (2, 1)
    assert engine.recompiles == before


def test_the_same_text_with_another_image_shares_nothing_behind_its_beginning(served: tuple[Engine, Any]) -> None:
    engine, model = served
    pair = [request("a", [(1, 4, 4)], 11, text_seed=1), request("b", [(1, 4, 4)], 12, text_seed=1)]
    assert pair[0].prompt_ids == pair[1].prompt_ids
    scheduler = new_scheduler(engine, radix=True)
    mailbox = run(engine, scheduler, pair[:1])
    after = run(engine, scheduler, pair[1:])
    assert ends(after)["b"].cached_tokens <= pair[1].media[0].offset
    assert is_greedy(model, pair[0], mailbox.output_ids("a")) and is_greedy(model, pair[1], after.output_ids("b"))


def test_samples_scores_and_aborts_of_requests_with_images(served: tuple[Engine, Any]) -> None:
    engine, model = served
    plain = request("a", [(1, 4, 6), (1, 2, 2)], 21)
    asked = request("a", [(1, 4, 6), (1, 2, 2)], 21, n=3, prompt_logprobs=0, logprobs=1)
    mailbox = serve(engine, [[asked]])
    answers = [[t for r in mailbox.replies if r.index == i for t in r.token_ids] for i in range(3)]
    assert answers[0] == answers[1] == answers[2] and is_greedy(model, plain, answers[0])
    (scores,) = [reply.prompt_logprobs for reply in mailbox.replies if reply.prompt_logprobs]
    exact = logits_of(model, plain).astype(np.float64)
    exact -= np.log(np.exp(exact).sum(axis=-1, keepdims=True))
    found = [score.logprob for score in scores]
    expected = [exact[i, token] for i, token in enumerate(plain.prompt_ids[1:])]
    np.testing.assert_allclose(found, expected, atol=ATOL)


def run(engine: Engine, scheduler: Any, requests: list[Request]) -> Any:
    mailbox = ScriptedMailbox([requests])
    run_loop(scheduler, engine, mailbox, 1)
    return mailbox


def give_up_after(num_tokens: int, asked: Request, engine: Engine, scheduler: Any) -> None:
    """Begins a request with `asked`'s prompt and aborts it after a first chunk of at most so many tokens."""
    whole = scheduler.state.config
    scheduler.state.config = replace(whole, max_prefill_tokens=num_tokens)
    begun = msgspec.structs.replace(asked, request_id="begun")
    run_loop(scheduler, engine, ScriptedMailbox([[begun], [Abort("begun")]]), 0)
    scheduler.state.config = whole


def test_other_weights_of_the_tower_encode_an_image_again(served: tuple[Engine, Any], tmp_path: Path) -> None:
    engine, model = served
    other = make_model(tmp_path, model.config.model_type, seed=1)
    asked = request("a", [(1, 4, 6), (1, 8, 4)], 31)
    scheduler = new_scheduler(engine, radix=True)
    before = engine.recompiles
    for turn, (weights, judge) in enumerate([(None, model), (str(tmp_path), other), (tensors_of(model), model)], 1):
        if weights is not None:
            engine.weight_store.swap_weights(engine.weight_store.stage_weights(weights))
            scheduler.retire_cache()
        mailbox = run(engine, scheduler, [asked])
        assert is_greedy(judge, asked, mailbox.output_ids("a"))
        assert scheduler.state.totals.encoded_images == 2 * turn
    assert engine.recompiles == before


def test_a_tower_run_layer_by_layer_makes_the_embeddings_of_one_call(served: tuple[Engine, Any]) -> None:
    engine, _ = served
    tower, item = engine.capacity.tower, image(0, (1, 8, 10), 55)
    assert tower is not None and tower.shape.num_layers == 4
    made = []
    for first in (1, 31):
        rows = np.arange(first, first + item.length, dtype=np.int32)
        call = pack([[(item, rows)]], engine.buckets.encode_of(item.num_patches), tower)
        parts = [EncodePart(call, *layers, 4) for layers in ((0, 1), (1, 3), (3, 4))]
        for each in [call] if first == 1 else parts:
            images = engine._runner.encode(each)
        made.append(np.asarray(images)[rows])
    assert np.abs(made[0]).max() > 0.1
    np.testing.assert_allclose(made[1], made[0], atol=1e-6, rtol=1e-6)


def test_tokens_come_between_the_layers_of_an_image(
    served: tuple[Engine, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, model = served
    text, asked = request("text", [], 61, max_tokens=40), request("a", [(1, 8, 10)], 62)
    parts: list[EncodePart] = []
    run_part = engine._runner._tower_parts.run

    def noted(params: Any, images: Any, part: EncodePart) -> Any:
        parts.append(part)
        return run_part(params, images, part)

    monkeypatch.setattr(engine._runner._tower_parts, "run", noted)
    before = engine.recompiles
    mailbox = serve(engine, [[text], [], [], [], [asked]], config=SchedulingConfig(max_itl_ms=1e-3))
    assert is_greedy(model, text, mailbox.output_ids("text")) and is_greedy(model, asked, mailbox.output_ids("a"))
    assert [(part.first, part.stop) for part in parts] == [(0, 1), (1, 2), (2, 3), (3, 4)]
    assert engine.recompiles == before


def tensors_of(model: Any) -> dict[str, np.ndarray]:
    return {name: tensor.numpy() for name, tensor in model.state_dict().items()}


@pytest.mark.skipif(not NIGHTLY, reason="an engine for each; by day test_scenario.py has one on two devices")
@pytest.mark.parametrize(
    ("kind", "tp", "shares"),
    [
        ("qwen3_vl", 2, True),
        ("qwen3_vl_moe", 4, True),
        ("qwen3_vl_moe", 2, False),
        ("qwen3_5", 2, True),
        ("qwen2_5_vl", 2, True),
        ("ministral3", 2, True),
        ("gemma3", 2, True),
        ("gemma4", 2, True),
        ("glm4v", 2, True),
        ("glm4v_moe", 2, False),
        ("internvl_moe", 2, True),
        ("llava_onevision", 2, True),
    ],
)
def test_devices_that_share_the_model_and_its_images_give_greedy_tokens(
    kind: str, tp: int, shares: bool, tmp_path: Path
) -> None:
    model = make_model(tmp_path, kind)
    page_size = 64 if kind in WITH_STATES else 4
    done = subprocess.run(
        [sys.executable, "-m", "tests.end_to_end.vision_mesh"],
        input=json.dumps({"folder": str(tmp_path), "kind": kind, "tp": tp, "shares": shares, "page_size": page_size}),
        capture_output=True, text=True, env={**os.environ, "JAX_PLATFORMS": "cpu"}, cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["recompiles"] == 0
    assert found["restored"] >= 1 and found["turns"][0] == found["turns"][2] != found["turns"][1]
    for asked, answer in zip(vision_mesh.requests(kind), found["answers"], strict=True):
        assert len(answer) == 8 and is_greedy(model, asked, answer)


@pytest.mark.skipif(not NIGHTLY, reason="an engine of its own; by night")
def test_a_server_without_the_tower_refuses_images(tmp_path: Path) -> None:
    model = make_model(tmp_path)
    engine = engine_of(tmp_path, 16, vision=VisionConfig(language_only=True))
    assert engine.arch.tower is None and engine.capacity.limits.media is None
    text, images = request("text", [], 1), request("images", [(1, 2, 2)], 2)
    mailbox = serve(engine, [[text, images]])
    assert is_greedy(model, text, mailbox.output_ids("text"))
    refusal = ends(mailbox)["images"].refusal
    assert refusal is not None and "takes text alone" in refusal.text
    engine.close()
