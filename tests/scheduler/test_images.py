"""Images in the scheduler: rows are locked while chunks need them, each image is encoded once, for its own requests.

The fake engine stores an id of the pixels for each of an image's tokens, which it reads from its pool of embeddings. A
row that is taken away too early, or read before it is written, changes the tokens.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest

from jaxsgl.batch.buckets import BucketSet, Capacity
from jaxsgl.batch.engine_api import EngineOp, RestoreRows
from jaxsgl.batch.inputs import StepInputs
from jaxsgl.batch.patches import EncodeInputs
from jaxsgl.config.engine import SchedulingConfig
from jaxsgl.messages.orders import Abort, ToEngine
from jaxsgl.requests.request import Request
from jaxsgl.scheduler.latency import Latency
from jaxsgl.scheduler.loop import run_loop
from jaxsgl.scheduler.resources.images import share_out
from jaxsgl.testing.engine import FakeEngine, FakeHandle, RetractEvery, ScriptedMailbox
from tests.checked import CheckedScheduler
from tests.grids import count
from tests.scheduler.image_requests import asked, capacity, expected


def serve(
    sizes: Capacity, script: list[list[ToEngine]], config: SchedulingConfig = SchedulingConfig(), **options: Any
) -> tuple[ScriptedMailbox, CheckedScheduler]:
    scheduler = CheckedScheduler(sizes, BucketSet.derive(sizes), (), config, **options)
    mailbox = ScriptedMailbox(script)
    engine = FakeEngine(sizes)
    run_loop(scheduler, engine, mailbox, 1)
    images = scheduler.state.images
    assert scheduler.is_idle and images is not None and images.pool.num_available == images.pool.num_rows
    return mailbox, scheduler


def test_requests_with_one_image_have_it_encoded_once() -> None:
    requests = [asked(str(i), [3, (1, 9), i + 1]) for i in range(10)]
    mailbox, scheduler = serve(capacity(), [[*requests[:4]], [], [*requests[4:]]])
    assert [mailbox.output_ids(one.request_id) for one in requests] == [expected(one) for one in requests]
    assert scheduler.state.totals.encoded_images == 1


@pytest.mark.parametrize("width", [None, 3, 1])
def test_images_beyond_the_pool_take_turns(width: int | None) -> None:
    """Each has most of the pool; chunks end inside of them, and requests wait for rows. What ends lines takes none."""
    requests = [asked(str(i), [2, (10 + i, 12), 1, (20 + i, 15), 2], width=width) for i in range(5)]
    mailbox, scheduler = serve(capacity(rows=16, chunk=16, has_lines=width is not None), [list(requests)])
    assert [mailbox.output_ids(one.request_id) for one in requests] == [expected(one) for one in requests]
    assert scheduler.state.totals.encoded_images == 10


def test_two_images_of_one_prompt_may_be_the_same() -> None:
    request = asked("a", [2, (1, 9), 2, (1, 9), 2, (1, 9)])
    mailbox, scheduler = serve(capacity(rows=9, chunk=8), [[request]])
    assert mailbox.output_ids("a") == expected(request)
    assert scheduler.state.totals.encoded_images == 1


def test_what_is_cached_needs_no_image() -> None:
    request = asked("a", [4, (1, 8), 9])
    again = asked("b", [4, (1, 8), 9])
    mailbox, scheduler = serve(
        capacity(rows=8), [[request], *[[]] * 12, [asked("c", [(2, 8), 1])], *[[]] * 12, [again]]
    )
    assert mailbox.output_ids("a") == mailbox.output_ids("b") == expected(request)
    assert scheduler.state.totals.encoded_images == 2  # not three, though the second image took the first one's rows


def test_later_weights_encode_images_again() -> None:
    request = asked("a", [4, (1, 8), 2])
    _, scheduler = serve(capacity(), [[request]])
    scheduler.retire_cache()
    mailbox = ScriptedMailbox([[request]])
    run_loop(scheduler, FakeEngine(scheduler.state.capacity), mailbox, 1)
    assert mailbox.output_ids("a") == expected(request)
    assert scheduler.state.totals.encoded_images == 2


class NewWeightsAfterOneStep(CheckedScheduler):
    """Nothing is found any more that the first step has computed."""

    def launch(self) -> StepInputs | None:
        if self.num_steps == 1:
            self.retire_cache()
        return super().launch()


def test_rows_of_old_weights_are_not_counted_for_another_request_with_that_image() -> None:
    """One holds them between two chunks; the other can't share them, so it waits until they are free."""
    sizes, requests = capacity(rows=12, chunk=9), [asked(name, [(1, 11), 3]) for name in ("a", "b")]
    scheduler = NewWeightsAfterOneStep(sizes, BucketSet.derive(sizes), ())
    mailbox = ScriptedMailbox([[requests[0]], [requests[1]]])
    run_loop(scheduler, FakeEngine(sizes), mailbox, 0)
    assert [mailbox.output_ids(one.request_id) for one in requests] == [expected(one) for one in requests]
    assert scheduler.state.totals.encoded_images == 2


def after(*turns: Request) -> list[list[ToEngine]]:
    """Each of `turns` once the one before has ended; nothing is left of it in the prefix cache."""
    script: list[list[ToEngine]] = []
    for turn in turns:
        script += [[turn], *([] for _ in range(20))]
    return script


def test_an_image_that_the_device_has_let_go_comes_back_from_host_memory() -> None:
    """The pool holds one of the images; prompts begin with other texts, so that no KV is shared."""
    turns = [asked(str(i), [2 + i, (seed, 9), 3]) for i, seed in enumerate((1, 2, 1, 2, 1))]
    mailbox, scheduler = serve(capacity(rows=10, host_rows=18), after(*turns), radix_cache=False)
    assert [mailbox.output_ids(one.request_id) for one in turns] == [expected(one) for one in turns]
    totals = scheduler.state.totals
    assert (totals.encoded_images, totals.restored_images) == (2, 3)


def test_host_memory_keeps_the_images_used_last() -> None:
    turns = [asked(str(i), [2 + i, (seed, 9), 3]) for i, seed in enumerate((1, 2, 1, 3, 1, 2))]
    mailbox, scheduler = serve(capacity(rows=10, host_rows=20), after(*turns), radix_cache=False)
    assert [mailbox.output_ids(one.request_id) for one in turns] == [expected(one) for one in turns]
    assert scheduler.state.totals.encoded_images == 4, "the second image was let go for the third"
    assert scheduler.state.totals.restored_images == 2
    assert scheduler.kept_images is not None and scheduler.kept_images.host.num_bytes <= 4 * 20


def test_an_image_that_is_used_on_the_device_stays_in_host_memory_too() -> None:
    turns = [asked(str(i), [2 + i, (seed, 9), 3]) for i, seed in enumerate((1, 2, 1, 3))]
    _, scheduler = serve(capacity(rows=40, host_rows=20), after(*turns), radix_cache=False)
    assert scheduler.state.totals.restored_images == 0 and scheduler.kept_images is not None
    one, other, last = (turns[i].media[0].digest for i in (0, 1, 3))
    assert [scheduler.kept_images.host.find(digest) is None for digest in (one, other, last)] == [False, True, False]


@pytest.mark.parametrize("order", ["retire_cache", "flush_cache"])
def test_orders_empty_host_memory_of_images(order: str) -> None:
    sizes = capacity(rows=10, host_rows=100)
    turns = [asked("a", [2, (1, 9), 3]), asked("b", [2, (2, 9), 3])]
    _, scheduler = serve(sizes, after(*turns))
    getattr(scheduler, order)()
    assert scheduler.kept_images is not None and scheduler.kept_images.host.num_bytes == 0
    engine, mailbox = FakeEngine(sizes), ScriptedMailbox([[turns[0]]])
    run_loop(scheduler, engine, mailbox, 1)
    assert scheduler.state.totals.encoded_images == 3


@pytest.mark.parametrize("seed", range(count(12, 400)))
def test_random_histories_yield_the_tokens_of_each_request_alone(seed: int) -> None:
    rng = random.Random(seed)
    rows = rng.choice([16, 20, 60])
    page_size = rng.choice([1, 3, 4, 16])
    num_pages = 2 + rng.randint(110, 250) // page_size
    host_rows = rng.choice([0, 17, 1000])
    sizes = capacity(rows, page_size, num_pages, rng.choice([5, 16, 40]), rng.choice([1, 2]), host_rows)
    config = SchedulingConfig(
        enable_mixed_chunk=rng.random() < 0.5,
        decode_first=rng.random() < 0.3,
        max_itl_ms=rng.choice([None, None, 0.001, 5000.0]),
    )
    script: list[list[ToEngine]] = []
    requests = []
    for number in range(rng.randint(3, 14)):
        parts: list[int | tuple[int, int]] = [rng.randint(1, 9)]
        for _ in range(rng.randint(0, 4)):
            parts += [(seed := rng.randint(0, 5), 3 * seed + 1), rng.randint(1, 6)]
        requests.append(asked(str(number), parts, rng.randint(1, 8)))
        script += [[] for _ in range(rng.randint(0, 4))]
        script.append([requests[-1]])
        if rng.random() < 0.1:
            script.append([Abort(str(rng.randint(0, number)))])
    aborted = {message.request_id for turn in script for message in turn if isinstance(message, Abort)}
    retract = RetractEvery(rng.choice([2, 3, 7])) if rng.random() < 0.5 else None
    mailbox, _ = serve(sizes, script, config, retract_also=retract, radix_cache=rng.random() < 0.8)
    for request in requests:
        answer = mailbox.output_ids(request.request_id)
        if request.request_id in aborted:
            assert answer == expected(request)[: len(answer)]
        else:
            assert answer == expected(request)


def test_devices_share_images_within_one_of_the_best_balance() -> None:
    rng = random.Random(3)
    for _ in range(200):
        num_bins = rng.choice([2, 4, 8])
        items = [asked("", [(seed, rng.randint(1, 200))]).media[0] for seed in range(rng.randint(1, 20))]
        calls = share_out([(item, np.zeros(item.length, np.int32)) for item in items], num_bins, 4096)
        placed = [item.digest for bins in calls for images in bins for item, _ in images]
        assert sorted(placed) == sorted(item.digest for item in items)
        for bins in calls:
            loads = [sum(item.num_patches for item, _ in images) for images in bins]
            sizes = [item.num_patches for images in bins for item, _ in images]
            best = max(max(sizes), -(-sum(sizes) // num_bins))  # no packing has less on its fullest device
            assert max(loads) <= best + max(sizes)
            assert max(loads) - min(loads) <= max(sizes)


class WatchedEngine(FakeEngine):
    """Counts the images that are encoded before each step."""

    def __init__(self, capacity: Capacity) -> None:
        super().__init__(capacity)
        self.num_images: list[int] = []
        self.num_restored: list[int] = []
        self._restored = 0

    def submit(self, inputs: StepInputs) -> FakeHandle:
        calls = [call for call in inputs.encodes if isinstance(call, EncodeInputs)]
        self.num_images.append(sum(int(of_bin[:, -1].max()) + 1 for call in calls for of_bin in call.columns))
        self.num_restored.append(self._restored)
        self._restored = 0
        return super().submit(inputs)

    def apply(self, op: EngineOp, number: int) -> None:
        self._restored += isinstance(op, RestoreRows)
        super().apply(op, number)


@pytest.mark.parametrize(("patch_s", "most"), [(None, 1), (1 / 64, 2), (1.0, 1), (0.0, 6)])
def test_a_bound_on_latency_bounds_the_images_encoded_before_a_step(patch_s: float | None, most: int) -> None:
    """Images of 16 patches, in half a second at most, while a request decodes."""
    sizes = capacity(rows=60, chunk=40)
    config = SchedulingConfig(max_itl_ms=1000.0)
    scheduler = CheckedScheduler(sizes, BucketSet.derive(sizes), (), config, clock=lambda: 0.0)
    latency = scheduler.state.timing
    assert isinstance(latency, Latency)
    bucket = scheduler.state.buckets.extend(16, 1)
    latency.launched(bucket, 0.0, 0.0)
    latency.collected(0.0)
    if patch_s is not None:
        latency.launched(bucket, 0.0, 0.0, num_patches=64)
        latency.collected(64 * patch_s)
    requests = [
        asked("text", [3], 40),
        *(asked(str(i), [2, (i, 4), 1, (10 + i, 4), 1, (20 + i, 4), 2]) for i in (1, 2)),
    ]
    engine = WatchedEngine(sizes)
    mailbox = ScriptedMailbox([requests[:1], [], [], list(requests[1:])])
    run_loop(scheduler, engine, mailbox, 1)
    assert [mailbox.output_ids(one.request_id) for one in requests] == [expected(one) for one in requests]
    first = next(count for count in engine.num_images if count)
    assert (first if patch_s is None else max(engine.num_images)) == most


@pytest.mark.parametrize(("embedding_s", "most"), [(None, 1), (1 / 16, 2), (1.0, 1), (0.0, 6)])
def test_a_bound_on_latency_bounds_the_images_copied_back_before_a_step(embedding_s: float | None, most: int) -> None:
    """Images of 4 embeddings, in half a second at most, while a request decodes; encoding takes no time."""
    sizes = capacity(rows=60, chunk=40, host_rows=100)
    config = SchedulingConfig(max_itl_ms=1000.0)
    scheduler = CheckedScheduler(sizes, BucketSet.derive(sizes), (), config, clock=lambda: 0.0, radix_cache=False)
    latency, images = scheduler.state.timing, scheduler.state.images
    assert isinstance(latency, Latency) and images is not None
    bucket = scheduler.state.buckets.extend(16, 1)
    for patches, embeddings, seconds in ((0, 0, 0.0), (64, 0, 0.0), (0, 64, embedding_s)):
        if seconds is not None:
            latency.launched(bucket, 0.0, 0.0, patches, embeddings)
            latency.collected(seconds * embeddings)
    engine = WatchedEngine(sizes)
    turns = [asked(str(i), [2, (i, 4), 1, (10 + i, 4), 1, (20 + i, 4), 2]) for i in (1, 2)]
    run_loop(scheduler, engine, ScriptedMailbox(after(*turns)), 1)
    images.pool.flush()  # the device lets them go
    repeated = [msgspec.structs.replace(turn, request_id=f"again {turn.request_id}") for turn in turns]
    again = [asked("text", [3], 40), *repeated]
    mailbox = ScriptedMailbox([again[:1], [], [], again[1:]])
    run_loop(scheduler, engine, mailbox, 1)
    assert [mailbox.output_ids(one.request_id) for one in again] == [expected(one) for one in again]
    assert scheduler.state.totals.restored_images == 6
    first = next(count for count in engine.num_restored if count)
    assert (first if embedding_s is None else max(engine.num_restored)) == most


class SeeingEngine(FakeEngine):
    """Notes of each step with images how many tokens see ahead, none farther than its sequence's last one."""

    def __init__(self, capacity: Capacity) -> None:
        super().__init__(capacity)
        self.num_ahead = 0

    def submit(self, inputs: StepInputs) -> FakeHandle:
        if inputs.bucket.sees_ahead:
            arrays, count = inputs.arrays, inputs.num_tokens
            assert arrays.seen is not None
            ahead = arrays.seen[:count] - arrays.positions[:count] - 1
            ends = np.repeat(arrays.lengths, np.diff(arrays.query_offsets))
            assert (ahead >= 0).all() and (arrays.seen[:count] <= ends[:count]).all()
            self.num_ahead += int((ahead > 0).sum())
        return super().submit(inputs)


@pytest.mark.parametrize(("chunk", "page_size", "config"), [
    (24, 4, SchedulingConfig()),
    (16, 16, SchedulingConfig(enable_mixed_chunk=True)),
    (22, 3, SchedulingConfig(enable_mixed_chunk=True, max_itl_ms=1e-3)),
])  # fmt: skip
def test_images_that_are_seen_whole_are_never_parted(chunk: int, page_size: int, config: SchedulingConfig) -> None:
    """Images of up to 15 tokens in chunks of little more, shared by six requests that come and go."""
    sizes = capacity(rows=40, page_size=page_size, chunk=chunk, sees_ahead=True)
    requests = [
        asked(f"{i}", [1 + i % 7, (i % 5, 8 + i % 5), 1 + i % 4, (9 + i % 3, 15 - i % 3), 1 + i % 6], 6)
        for i in range(24)
    ]
    scheduler = CheckedScheduler(sizes, BucketSet.derive(sizes), (), config, retract_also=RetractEvery(11))
    engine = SeeingEngine(sizes)
    mailbox = ScriptedMailbox([requests[:9], [], [], requests[9:]])
    run_loop(scheduler, engine, mailbox, 1)
    assert [mailbox.output_ids(one.request_id) for one in requests] == [expected(one) for one in requests]
    assert engine.num_ahead > 24 * 10 and scheduler.state.totals.retractions > 0


@pytest.mark.parametrize("mixed", [False, True])
def test_an_image_that_is_seen_whole_goes_before_the_shares_of_prompts_that_keep_coming(mixed: bool) -> None:
    """It has 40 tokens of a step's 64; a prompt between chunks has half of a step while others wait."""
    sizes = capacity(rows=40, page_size=4, num_pages=400, chunk=64, sees_ahead=True)
    assert sizes.tower is not None
    sizes = replace(sizes, context_length=400, tower=replace(sizes.tower, max_patches=256, num_rows=100))
    image = asked("image", [30, (1, 40), 2], 3)
    script: list[list[Any]] = [[image, asked("text", [40], 1)]]
    script += [[asked(f"{turn} {i}", [32], 1) for i in range(2)] for turn in range(40)]
    scheduler = CheckedScheduler(sizes, BucketSet.derive(sizes), (), SchedulingConfig(enable_mixed_chunk=mixed))
    mailbox = ScriptedMailbox(script)
    run_loop(scheduler, FakeEngine(sizes), mailbox, 1)
    assert mailbox.output_ids("image") == expected(image)
    assert [reply.request_id for reply in mailbox.replies if reply.token_ids].index("image") < 6
