"""Models whose tokens of an image see up to its end give transformers' answers: an image is extended in one step."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from jaxsgl.batch.patches import EncodePart
from jaxsgl.config.engine import SchedulingConfig
from jaxsgl.config.features import VisionConfig
from jaxsgl.engine.engine import Engine
from jaxsgl.errors import ConfigError
from jaxsgl.requests.request import Request
from tests.end_to_end.offline import ends, new_scheduler, outputs, serve
from tests.end_to_end.test_vision import engine_of, give_up_after, run
from tests.grids import NIGHTLY, daily
from tests.vision_models import (
    IMAGE,
    MERGES,
    VIDEO,
    is_greedy,
    logits_of,
    make_model,
    pictures,
    request_of_whole_images,
)

pytestmark = [pytest.mark.device, pytest.mark.usefixtures("greedy_steps_by_day")]


class Served(NamedTuple):
    """An engine of a tiny model, and transformers' one."""

    engine: Engine
    model: Any
    kind: str

    def request(self, request_id: str, num_images: int, seed: int, **params: Any) -> Request:
        """Text with images that the model takes."""
        return request_of_whole_images(request_id, num_images, seed, self.kind, **params)


ENGINES = [(kind, page_size) for page_size in (16, 4, 64) for kind in ("gemma4", "gemma3", "gemma4_unified")]


def vision_of(kind: str) -> VisionConfig:
    """A pool of 80 rows; an image has 20 tokens at most."""
    return VisionConfig(mm_max_patches=20 * MERGES.get(kind, 2) ** 2, mm_pool_tokens=80)


@pytest.fixture(scope="module", params=daily(ENGINES, every=9))
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    kind, page_size = request.param
    folder = tmp_path_factory.mktemp(kind)
    model = make_model(folder, kind)
    scheduling = SchedulingConfig(max_itl_ms=1000.0)  # so that the tower's parts are compiled
    engine = engine_of(folder, page_size, max_total_tokens=4000, scheduling=scheduling, vision=vision_of(kind))
    yield Served(engine, model, kind)
    engine.close()


def test_many_requests_at_once_get_greedy_tokens(served: Served) -> None:
    """Chunks of 48 tokens, shared by up to 8 requests: an image of 16 finds room in few of them."""
    engine, model, _ = served
    before, requests = engine.recompiles, [served.request(str(i), i % 5, i) for i in range(24)]
    scheduling = SchedulingConfig(enable_mixed_chunk=True)
    answers = outputs(serve(engine, [requests[:8], [], requests[8:]], config=scheduling), requests)
    for asked, answer in zip(requests, answers, strict=True):
        assert is_greedy(model, asked, answer), asked.request_id
    assert len(set(map(tuple, answers))) > 20  # else any model would agree
    assert outputs(serve(engine, [requests], retract_every=5), requests) == answers
    assert engine.recompiles == before


def test_what_comes_later_in_an_image_counts(served: Served) -> None:
    """Else causal attention would pass, too."""
    _, model, _ = served
    asked = served.request("a", 1, 3)
    exact, media = logits_of(model, asked), pictures(model, asked.media)
    with torch.no_grad():
        causal = model(input_ids=torch.tensor([asked.prompt_ids]), use_cache=False, **media).logits[0].numpy()
    assert np.abs(exact - causal)[asked.media[0].offset :].max() > 0.1


def test_chunks_and_prefixes_never_part_an_image(served: Served) -> None:
    """A first request is given up after its first chunk, whose budget ends at each place within two images."""
    engine, model, _ = served
    asked, before = served.request("a", 2, 3), engine.recompiles
    (expected,) = outputs(serve(engine, [[asked]], radix=False), [asked])
    assert is_greedy(model, asked, expected)
    first, second = asked.media
    for cut in range(max(first.offset - 1, 1), second.stop + 2):
        scheduler = new_scheduler(engine, radix=True)
        give_up_after(cut, asked, engine, scheduler)
        mailbox = run(engine, scheduler, [asked])
        computed = next((item.offset for item in asked.media if item.offset < cut < item.stop), cut)
        page_size = engine.capacity.page_size
        assert ends(mailbox)["a"].cached_tokens <= computed - computed % page_size
        assert mailbox.output_ids("a") == expected, cut
    assert engine.recompiles == before


def test_a_prefix_may_end_within_an_image(served: Served) -> None:
    """The cached part of the image was computed with all of it in view; the rest sees all of it, too."""
    engine, model, _ = served
    page_size = engine.capacity.page_size
    for seed in range(4):
        asked = served.request("a", 3, seed)
        other = msgspec.structs.replace(asked, request_id="b")
        scheduler = new_scheduler(engine, radix=True)
        run(engine, scheduler, [asked])
        mailbox = run(engine, scheduler, [other])
        cached = ends(mailbox)["b"].cached_tokens
        assert cached == (len(asked.prompt_ids) - 1) // page_size * page_size
        assert is_greedy(model, other, mailbox.output_ids("b"))


@pytest.mark.skipif(not NIGHTLY, reason="an engine of its own; by night")
def test_names_of_tensors_in_older_folders_are_understood(tmp_path: Path) -> None:
    """As Gemma 3 was published: the tower is a model of its own within its part."""
    model = make_model(tmp_path, "gemma3")
    stored = load_file(tmp_path / "model.safetensors")
    renamed = {name.replace("vision_tower.", "vision_tower.vision_model."): tensor for name, tensor in stored.items()}
    assert renamed.keys() != stored.keys()
    save_file(renamed, tmp_path / "model.safetensors")
    engine, asked = engine_of(tmp_path, 16), request_of_whole_images("a", 2, 5)
    (answer,) = outputs(serve(engine, [[asked]]), [asked])
    assert is_greedy(model, asked, answer)
    engine.close()


def test_time_limits_and_full_steps_let_images_pass(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of a millisecond at most: images are encoded in parts, and the first chunk of a step takes a whole one."""
    engine, model, kind = served
    firsts, run_part = set(), engine._runner._tower_parts.run

    def noted(params: Any, images: Any, part: EncodePart) -> Any:
        firsts.add(part.first)
        return run_part(params, images, part)

    monkeypatch.setattr(engine._runner._tower_parts, "run", noted)
    requests = [served.request(str(i), 1, 70 + i, max_tokens=20) for i in range(12)]
    scheduling = SchedulingConfig(enable_mixed_chunk=True, max_itl_ms=1.0)
    answers = outputs(serve(engine, [requests[:6], [], [], requests[6:]], config=scheduling), requests)
    for asked, answer in zip(requests, answers, strict=True):
        assert is_greedy(model, asked, answer), asked.request_id
    assert len(firsts) > 1 or kind == "gemma4_unified"  # which has no layers


@pytest.mark.skipif(not NIGHTLY, reason="two engines; by day tests of the kernels compare the two")
def test_the_native_kernel_sees_ahead_as_xla_does(tmp_path: Path) -> None:
    """Over a cache of bfloat16, as CPUs have it by default; heads of 32, which it takes."""
    model = make_model(tmp_path, "gemma3", head_dim=32)
    asked = [request_of_whole_images(str(i), 1 + i % 3, 40 + i, prompt_logprobs=0, max_tokens=1) for i in range(6)]
    found: dict[str, list[float]] = {}
    for backend in ("native", "xla"):
        engine = engine_of(tmp_path, 16, dtype="bfloat16", kernels=(f"extend={backend}",))
        mailbox = serve(engine, [asked])
        scores = [reply.prompt_logprobs for reply in mailbox.replies if reply.prompt_logprobs]
        found[backend] = [score.logprob for each in scores for score in each]
        engine.close()
    exact = []
    for each in asked:
        logits = logits_of(model, each).astype(np.float64)
        logprobs = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
        exact += [logprobs[i, token] for i, token in enumerate(each.prompt_ids[1:])]
    errors = {name: np.abs(np.sort(each) - np.sort(exact)).max() for name, each in found.items()}
    assert len(exact) == len(found["native"]) and errors["native"] < max(1.5 * errors["xla"], 0.05), errors


@pytest.mark.parametrize("kind", daily(["gemma4_small", "gemma4", "gemma4_unified"], every=3))
def test_frames_of_a_video_are_images_of_their_own(kind: str, tmp_path: Path) -> None:
    """And in the small model no image is seen whole, and layers have embeddings of tokens, of which images are none."""
    model = make_model(tmp_path, kind)
    engine = engine_of(tmp_path, 16, vision=vision_of(kind))
    assert engine.capacity.sees_ahead == (kind != "gemma4_small")
    requests = [
        request_of_whole_images(str(i), i, 10 * i, kind, VIDEO if i % 2 else IMAGE, max_tokens=12) for i in range(6)
    ]
    answers = outputs(serve(engine, [requests[:3], requests[3:]]), requests)
    for asked, answer in zip(requests, answers, strict=True):
        assert is_greedy(model, asked, answer), asked.request_id
    assert len(set(map(tuple, answers))) > 4
    engine.close()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"chunked_prefill_size": 15, "extend_buckets": (15,)}, "a step extends 15 tokens, but all 16 of an image"),
        ({"vision": VisionConfig(mm_max_patches=60)}, "--mm-max-patches is 60, but each image has 64: raise it"),
    ],
)
def test_a_server_that_can_never_extend_an_image_does_not_start(
    flags: dict[str, Any], words: str, tmp_path: Path
) -> None:
    make_model(tmp_path, "gemma3")
    with pytest.raises(ConfigError, match=words):
        engine_of(tmp_path, 16, **flags)


def test_windows_that_do_not_hold_an_image_are_refused(tmp_path: Path) -> None:
    make_model(tmp_path, "gemma4_unified")
    with pytest.raises(ConfigError, match="may have 28 tokens, but windows have 20: lower --mm-max-patches to 20"):
        engine_of(tmp_path, 16, vision=VisionConfig(mm_max_patches=28))
