"""A long image is encoded a few layers at a time, between decode steps, while `--max-itl-ms` bounds these."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from msgspec.structs import replace as changed

from jaxsgl.batch.buckets import BucketSet, Capacity
from jaxsgl.batch.inputs import StepInputs
from jaxsgl.batch.patches import EncodePart
from jaxsgl.config.engine import SchedulingConfig
from jaxsgl.messages.orders import Abort, ToEngine
from jaxsgl.requests.request import Request
from jaxsgl.scheduler.latency import Latency
from jaxsgl.scheduler.loop import run_loop
from jaxsgl.testing.engine import FakeEngine, FakeHandle, RetractEvery, ScriptedMailbox
from tests.checked import CheckedScheduler
from tests.grids import count
from tests.scheduler.image_requests import asked, capacity, expected

LAYERS = 6
BOUND = SchedulingConfig(max_itl_ms=1000.0)


def sliced(**options: Any) -> Capacity:
    sizes = capacity(**options)
    assert sizes.tower is not None
    shape = replace(sizes.tower.shape, num_layers=LAYERS)
    return replace(sizes, tower=replace(sizes.tower, shape=shape, sliced_from=64))


class WatchedEngine(FakeEngine):
    """Notes what comes before each step: layers of an image in parts, or whole calls."""

    def __init__(self, capacity: Capacity) -> None:
        super().__init__(capacity)
        self.steps: list[tuple[str, list[tuple[int, int] | str]]] = []

    def submit(self, inputs: StepInputs) -> FakeHandle:
        calls = [(call.first, call.stop) if isinstance(call, EncodePart) else "whole" for call in inputs.encodes]
        self.steps.append((inputs.bucket.kind, list(calls)))
        return super().submit(inputs)


def scheduler_of(sizes: Capacity, config: SchedulingConfig, patch_s: float | None, **options: Any) -> CheckedScheduler:
    """A patch takes `patch_s` by an earlier measurement."""
    scheduler = CheckedScheduler(sizes, BucketSet.derive(sizes), (), config, clock=lambda: 0.0, **options)
    latency = scheduler.state.timing
    if isinstance(latency, Latency):
        bucket = scheduler.state.buckets.extend(16, 1)
        latency.launched(bucket, 0.0, 0.0)
        latency.collected(0.0)
        if patch_s is not None:
            latency.launched(bucket, 0.0, 0.0, num_patches=64)
            latency.collected(64 * patch_s)
    return scheduler


def serve(
    sizes: Capacity,
    script: list[list[ToEngine]],
    config: SchedulingConfig = BOUND,
    patch_s: float | None = None,
    **options: Any,
) -> tuple[ScriptedMailbox, WatchedEngine, CheckedScheduler]:
    scheduler = scheduler_of(sizes, config, patch_s, **options)
    engine, mailbox = WatchedEngine(sizes), ScriptedMailbox(script)
    run_loop(scheduler, engine, mailbox, 1)
    images = scheduler.state.images
    assert scheduler.is_idle and images is not None and images.pool.num_available == images.pool.num_rows
    return mailbox, engine, scheduler


def parts_of(engine: WatchedEngine) -> list[tuple[int, int] | str]:
    return [call for _, calls in engine.steps for call in calls]


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize(("patch_s", "num_layers"), [(None, 1), (1 / 40, 1), (1 / 64, 3)])
def test_running_requests_get_tokens_between_the_layers_of_an_image(
    patch_s: float | None, num_layers: int, mixed: bool
) -> None:
    """64 patches in half a second: at 1 / 64 s each, 3 of 6 layers."""
    text, image = asked("text", [3], 40), asked("image", [2, (1, 9), 1])
    config = replace(BOUND, enable_mixed_chunk=mixed)
    mailbox, engine, scheduler = serve(sliced(), [[text], [], [], [image]], config, patch_s)
    assert [mailbox.output_ids(one.request_id) for one in (text, image)] == [expected(text), expected(image)]
    if patch_s is not None:
        assert parts_of(engine) == [(first, first + num_layers) for first in range(0, LAYERS, num_layers)]
    for kind, calls in engine.steps:
        assert len(calls) <= 1 and (mixed or not calls or kind == "decode"), "a part comes before a decode step"
    assert scheduler.state.totals.encoded_images == 1


def test_an_image_that_is_encoded_in_time_has_a_call_of_its_own() -> None:
    text, image = asked("text", [3], 40), asked("image", [2, (1, 9), 1])
    _, engine, _ = serve(sliced(), [[text], [], [], [image]], patch_s=1 / 1000)
    assert parts_of(engine) == ["whole"]
    _, engine, _ = serve(sliced(), [[text], [], [], [image]], SchedulingConfig())
    assert parts_of(engine) == ["whole"]


def test_when_no_request_decodes_any_more_the_rest_comes_at_once() -> None:
    text, image = asked("text", [3], 5), asked("image", [2, (1, 9), 1])
    mailbox, engine, _ = serve(sliced(), [[text], [], [image]], patch_s=1 / 40)
    assert mailbox.output_ids("image") == expected(image)
    parts = parts_of(engine)
    assert parts[0] == (0, 1) and parts[-1][1] == LAYERS and len(parts) < LAYERS


def test_an_abort_in_the_middle_frees_the_rows_and_the_next_image_begins_anew() -> None:
    text, first, second = asked("text", [3], 60), asked("a", [2, (1, 9), 1]), asked("b", [2, (2, 9), 1])
    script: list[list[ToEngine]] = [[text], [], [first], [], [], [], [Abort("a"), second]]
    mailbox, engine, scheduler = serve(sliced(rows=9), script, patch_s=1 / 40)
    assert mailbox.output_ids("b") == expected(second) and mailbox.output_ids("text") == expected(text)
    starts = [part for part in parts_of(engine) if part[0] == 0]
    assert len(starts) == 2 and len(parts_of(engine)) < 2 * LAYERS
    assert scheduler.state.totals.encoded_images == 1


def test_later_weights_begin_the_image_anew() -> None:
    text, image = asked("text", [3], 60), asked("image", [2, (1, 9), 1])
    sizes = sliced()
    scheduler = scheduler_of(sizes, BOUND, 1 / 40)
    images, engine = scheduler.state.images, WatchedEngine(sizes)
    assert images is not None
    scheduler.receive([text])
    for turn in range(60):
        if turn == 3:
            scheduler.receive([image])
        if images.sliced is not None and len(parts_of(engine)) == 3:
            scheduler.retire_cache()
            assert images.sliced is None
        inputs = scheduler.launch()
        if inputs is None:
            break
        scheduler.collect(engine.submit(inputs).tokens())
    assert parts_of(engine) == [(0, 1), (1, 2), (2, 3), *((layer, layer + 1) for layer in range(LAYERS))]


def test_a_request_that_waits_keeps_no_rows_once_another_one_has_read_its_image() -> None:
    """Two go before it in the queue: one with its image, and one whose image needs all rows of the pool."""
    text, low = asked("text", [3], 6), asked("low", [(1, 9), 3])
    same, other = (changed(asked(*args), priority=5) for args in (("same", [(1, 9), 1], 1), ("other", [(2, 9), 1])))
    config = replace(BOUND, enable_priority_scheduling=True, prefill_max_requests=1)
    script: list[list[ToEngine]] = [[text], [], [low], [], [same, other]]
    mailbox, engine, _ = serve(sliced(rows=9), script, config, patch_s=1 / 40)
    for request in (text, low, same, other):
        assert mailbox.output_ids(request.request_id) == expected(request)
    assert (0, 1) in parts_of(engine), "the image was begun before the others came"


@pytest.mark.parametrize("seed", sorted({57, *range(count(3, 200))}))
def test_random_histories_yield_the_tokens_of_each_request_alone(seed: int) -> None:
    rng = random.Random(seed)
    requests: list[Request] = [asked("text", [5], 50)]
    for number in range(12):
        parts: list[int | tuple[int, int]] = [rng.randrange(1, 6)]
        for _ in range(rng.randrange(3)):
            parts += [(rng.randrange(5), rng.randrange(1, 10)), rng.randrange(1, 4)]
        requests.append(asked(str(number), parts, rng.randrange(1, 20)))
    script: list[list[ToEngine]] = [[requests[0]], [], []]
    aborted = set()
    for request in requests[1:]:
        script += [[request], *[list[ToEngine]() for _ in range(rng.randrange(3))]]
        if rng.random() < 0.2:
            aborted.add(request.request_id)
            script[-1].append(Abort(request.request_id))
    config = replace(BOUND, enable_mixed_chunk=rng.random() < 0.5)
    sizes = sliced(rows=rng.choice([9, 12, 30]), page_size=rng.choice([1, 4]), num_pages=rng.choice([60, 300]))
    retract = RetractEvery(7) if rng.random() < 0.5 else None
    mailbox, *_ = serve(sizes, script, config, rng.choice([None, 1 / 40, 1 / 64]), retract_also=retract)
    for request in requests:
        if request.request_id not in aborted:
            assert mailbox.output_ids(request.request_id) == expected(request), request.request_id
