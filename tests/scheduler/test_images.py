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

from jaxsgl.batch.buckets import BucketSet
from jaxsgl.batch.capacity import Capacity
from jaxsgl.batch.inputs import StepInputs
from jaxsgl.batch.patches import TowerCapacity, TowerShape
from jaxsgl.config.engine import SchedulingConfig
from jaxsgl.messages.orders import Abort
from jaxsgl.messages.replies import RefusalKind
from jaxsgl.messages.wire import ToEngine
from jaxsgl.requests.media import MediaItem, MediaLimits, digest_of, patches_of
from jaxsgl.requests.request import Request
from jaxsgl.requests.sampling import SamplingParams
from jaxsgl.scheduler.images import share_out
from jaxsgl.scheduler.loop import run_loop
from jaxsgl.testing.device import image_ids
from jaxsgl.testing.engine import FakeEngine, RetractEvery, ScriptedMailbox, generate
from jaxsgl.testing.handle import FakeHandle
from tests.checked import CheckedScheduler
from tests.grids import count
from tests.scheduler.legs import PREFILL, LegWorker, at, run
from tests.scheduler.memory_wire import Network
from tests.scheduler.serving import VOCAB

PLACEHOLDER = 999
PATCH_LEN = 6


def capacity(
    rows: int = 16, page_size: int = 4, num_pages: int = 100, chunk: int = 24, num_bins: int = 1, host_rows: int = 0
) -> Capacity:
    tower = TowerCapacity(TowerShape(2, 4, PATCH_LEN), rows, 64, num_bins, host_bytes=4 * host_rows)
    limits = MediaLimits(PLACEHOLDER, PLACEHOLDER - 1, patch_size=1)
    return Capacity(page_size, num_pages, 6, 160, chunk, VOCAB, media=limits, tower=tower, has_axes=True)


def asked(request_id: str, parts: list[int | tuple[int, int]], max_tokens: int = 5) -> Request:
    """A prompt of so many tokens of text, and images as (seed, tokens), in turns."""
    ids: list[int] = []
    media = []
    for part in parts:
        if isinstance(part, int):
            ids += [(7 * len(ids) + 3) % 900 for _ in range(part)]
            continue
        seed, tokens = part
        pixels = np.random.default_rng(seed).integers(0, 256, (4 * tokens, PATCH_LEN), dtype=np.uint8).tobytes()
        grid = (1, 2, 2 * tokens)
        media.append(MediaItem(digest_of(pixels, grid, ""), len(ids), tokens, grid, pixels))
        ids += [PLACEHOLDER] * tokens
    return Request(request_id, ids, SamplingParams(temperature=0.0, max_tokens=max_tokens), media=tuple(media))


def expected(request: Request) -> list[int]:
    """What the fake engine yields, given what is in the images' places."""
    ids = list(request.prompt_ids)
    for item in request.media:
        ids[item.offset : item.stop] = image_ids(patches_of(item).reshape(item.length, -1)).tolist()
    max_tokens = request.sampling.max_tokens
    assert max_tokens is not None
    return generate(ids, max_tokens, frozenset(), VOCAB)


def serve(
    sizes: Capacity, script: list[list[ToEngine]], config: SchedulingConfig = SchedulingConfig(), **options: Any
) -> tuple[ScriptedMailbox, CheckedScheduler]:
    scheduler = CheckedScheduler(sizes, BucketSet.derive(sizes), (), config, **options)
    mailbox = ScriptedMailbox(script)
    engine = FakeEngine(sizes)
    run_loop(scheduler, engine, mailbox, True, pages=engine)
    images = scheduler.state.images
    assert scheduler.is_idle and images is not None and images.pool.num_available == images.pool.num_rows
    return mailbox, scheduler


def test_requests_with_one_image_have_it_encoded_once() -> None:
    requests = [asked(str(i), [3, (1, 9), i + 1]) for i in range(10)]
    mailbox, scheduler = serve(capacity(), [[*requests[:4]], [], [*requests[4:]]])
    assert [mailbox.output_ids(one.request_id) for one in requests] == [expected(one) for one in requests]
    assert scheduler.state.totals.encoded_images == 1
    assert scheduler.state.totals.encoded_patches == 36


def test_images_beyond_the_pool_take_turns() -> None:
    """Each has most of the pool; chunks end inside of them, and requests wait for rows."""
    requests = [asked(str(i), [2, (10 + i, 12), 1, (20 + i, 15), 2]) for i in range(5)]
    mailbox, scheduler = serve(capacity(rows=16, chunk=16), [list(requests)])
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
    run_loop(scheduler, FakeEngine(scheduler.state.capacity), mailbox, True)
    assert mailbox.output_ids("a") == expected(request)
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


@pytest.mark.parametrize("order", ["retire_cache", "flush_cache"])
def test_orders_empty_host_memory_of_images(order: str) -> None:
    sizes = capacity(rows=10, host_rows=100)
    turns = [asked("a", [2, (1, 9), 3]), asked("b", [2, (2, 9), 3])]
    _, scheduler = serve(sizes, after(*turns))
    getattr(scheduler, order)()
    assert scheduler.kept_images is not None and scheduler.kept_images.host.num_bytes == 0
    engine, mailbox = FakeEngine(sizes), ScriptedMailbox([[turns[0]]])
    run_loop(scheduler, engine, mailbox, True, pages=engine)
    assert scheduler.state.totals.encoded_images == 3


def without_tower(sizes: Capacity) -> Capacity:
    assert sizes.media is not None and sizes.tower is not None
    media = msgspec.structs.replace(sizes.media, may_come_later=True)
    return replace(sizes, media=media, tower=replace(sizes.tower, encodes=False))


def pair_of(network: Network, host_rows: int = 60, **options: Any) -> tuple[LegWorker, LegWorker]:
    """A prefill worker, and a decode worker that has no tower and holds so many rows in host memory."""
    prefill = LegWorker(network, PREFILL, capacity(page_size=16, host_rows=12), radix_cache=True)
    decode_sizes = without_tower(capacity(page_size=16, host_rows=host_rows))
    return prefill, LegWorker(network, None, decode_sizes, radix_cache=True, **options)


def send(network: Network, prefill: LegWorker, decode: LegWorker, request: Request, number: int) -> None:
    """Sends both legs of a request and serves until nothing happens any more."""
    prefill.receive(
        at(msgspec.structs.replace(request, sampling=SamplingParams(temperature=0.0, max_tokens=1)), number)
    )
    decode.receive(at(request, number))
    run(network, prefill, decode)


@pytest.mark.parametrize(("comes_later", "first"), [(False, "prefill"), (True, "prefill"), (True, "decode")])
def test_prefill_and_decode_in_different_workers_yield_the_same_tokens(comes_later: bool, first: str) -> None:
    """Decode computes less than a page of the prompt, which may be an image's, and again what is retracted.

    It has no tower: embeddings come from prefill, whose host memory holds those of one image, and requests wait for
    room to hold theirs. If the gateway gives it no images, it gets them from prefill.
    """
    network = Network()
    prefill, decode = pair_of(network, retract_also=RetractEvery(7))
    requests = [asked(str(i), [3, (i % 3, 9), i + 1, (5 + i, 11), 2 + i % 4], max_tokens=9) for i in range(8)]
    for number, request in enumerate(requests):
        leg = msgspec.structs.replace(request, sampling=SamplingParams(temperature=0.0, max_tokens=1))
        bare = msgspec.structs.replace(request, media=()) if comes_later else request
        legs = [(prefill, leg), (decode, bare)]
        for worker, of_leg in legs if first == "prefill" else reversed(legs):
            worker.receive(at(of_leg, number))
            network.deliver_all()
    run(network, prefill, decode)
    assert [decode.outputs[request.request_id, 0] for request in requests] == [expected(one) for one in requests]
    totals = decode.scheduler.state.totals
    assert totals.cached_prompt_tokens > 0 and totals.retractions > 0 and totals.restored_images > 0
    assert totals.encoded_images == 0 and not decode.scheduler.state.buckets.encode
    prefill.check_empty()
    decode.check_empty()


@pytest.mark.parametrize("seed", range(count(6, 300)))
def test_random_histories_of_two_workers_yield_the_tokens_of_each_request_alone(seed: int) -> None:
    """Little memory everywhere: prompts beyond staging memory, evicted pages and embeddings, retractions, aborts."""
    rng = random.Random(seed)
    network, page_size = Network(), rng.choice([3, 4, 16])
    num_pages, chunk = 2 + rng.randint(110, 160) // page_size, rng.choice([5, 16, 40])
    options: dict[str, Any] = {"staging_pages": rng.choice([2, 5, 100])}
    sizes = capacity(rng.choice([16, 20, 60]), page_size, num_pages, chunk, host_rows=rng.choice([1, 17, 200]))
    prefill = LegWorker(network, PREFILL, sizes, radix_cache=rng.random() < 0.8, **options)
    sizes = without_tower(capacity(rng.choice([16, 20]), page_size, num_pages, chunk, host_rows=rng.choice([48, 200])))
    retract = RetractEvery(rng.choice([2, 3, 7])) if rng.random() < 0.6 else None
    decode = LegWorker(network, None, sizes, radix_cache=True, retract_also=retract, **options)
    requests, aborted = [], set()
    for number in range(rng.randint(3, 12)):
        parts: list[int | tuple[int, int]] = [rng.randint(1, 9)]
        for _ in range(rng.randint(0, 3)):
            parts += [(image := rng.randint(0, 5), 3 * image + 1), rng.randint(1, 6)]
        requests.append(asked(str(number), parts, rng.randint(1, 8)))
        leg = msgspec.structs.replace(requests[-1], sampling=SamplingParams(temperature=0.0, max_tokens=1))
        for worker, of_leg in rng.sample([(prefill, leg), (decode, requests[-1])], 2):
            worker.receive(at(of_leg, number))
            for _ in range(rng.randint(0, 4)):
                network.deliver_all()
                prefill.turn()
                decode.turn()
        if rng.random() < 0.15:
            aborted.add(name := str(rng.randint(0, number)))
            for worker in (prefill, decode):
                worker.receive(Abort(name))
        if rng.random() < 0.1:
            rng.choice([prefill, decode]).scheduler.flush_cache()
    run(network, prefill, decode)
    for request in requests:
        answer = decode.outputs.get((request.request_id, 0), [])
        if request.request_id in aborted:
            assert answer == expected(request)[: len(answer)]
        else:
            assert answer == expected(request), decode.ended[request.request_id, 0]
    prefill.check_empty()
    decode.check_empty()


def test_images_of_cached_prompts_are_encoded_again_if_their_embeddings_are_nowhere() -> None:
    """Prefill still has the KV of the prompt, and decode has nothing of it."""
    network = Network()
    prefill, decode = pair_of(network)
    request, others = asked("a", [3, (1, 12), 2], 9), [asked(str(i), [1 + i, (5 + i, 12), 1], 2) for i in range(2)]
    for number, each in enumerate((request, *others)):
        send(network, prefill, decode, each, number)
    assert prefill.scheduler.state.totals.encoded_images == 3
    decode.scheduler.flush_cache()
    again = msgspec.structs.replace(request, request_id="again")
    send(network, prefill, decode, again, 9)
    assert decode.outputs["a", 0] == decode.outputs["again", 0] == expected(request)
    assert prefill.scheduler.state.totals.encoded_images == 4
    third = msgspec.structs.replace(request, request_id="third")
    send(network, prefill, decode, third, 10)
    assert decode.outputs["third", 0] == expected(request)
    assert prefill.scheduler.state.totals.encoded_images == 4, "decode still has its embeddings"
    prefill.check_empty()
    decode.check_empty()


def test_a_decode_worker_refuses_images_that_it_can_not_have() -> None:
    network = Network()
    prefill, decode = pair_of(network, host_rows=20)
    send(network, prefill, decode, asked("large", [3, (1, 12), 2, (2, 9), 1]), 1)
    assert set(prefill.ended.values()) == set(decode.ended.values()) == {RefusalKind.INVALID}
    assert decode.replies[-1].refusal is not None and "--mm-host-mib" in decode.replies[-1].refusal.text
    decode.receive(asked("whole", [3, (1, 12), 2]))
    assert decode.replies[-1].refusal is not None and "no vision tower" in decode.replies[-1].refusal.text
    decode.receive(text := asked("text", [9]))
    run(network, prefill, decode)
    assert decode.outputs["text", 0] == expected(text)
    prefill.check_empty()
    decode.check_empty()


def test_a_request_whose_images_would_be_those_of_other_weights_must_be_sent_again() -> None:
    network = Network()
    prefill, decode = pair_of(network)
    request, text = asked("images", [3, (1, 12), 2], 30), asked("text", [9], 30)
    decode.receive(text)
    prefill.receive(at(msgspec.structs.replace(request, sampling=SamplingParams(temperature=0.0, max_tokens=1)), 1))
    decode.receive(at(request, 1))
    for _ in range(12):
        network.deliver_all()
        prefill.turn()
        decode.turn()
    assert len(decode.outputs["images", 0]) > 0 and not decode.ended
    scheduler = decode.scheduler
    scheduler.pause()
    while decode.in_flight:
        decode.turn()
    scheduler.retract_all()
    scheduler.retire_cache()
    scheduler.resume()
    run(network, prefill, decode)
    assert decode.ended["images", 0] is RefusalKind.PEER and decode.outputs["text", 0] == expected(text)
    assert scheduler.state.totals.failed_requests == 0
    again = msgspec.structs.replace(request, request_id="again")
    send(network, prefill, decode, again, 2)
    assert decode.outputs["again", 0] == expected(request)
    prefill.check_empty()
    decode.check_empty()


def test_a_prompt_that_stands_for_images_which_prefill_lacks_too_is_refused_by_both() -> None:
    network, sizes = Network(), capacity(page_size=16)
    assert sizes.media is not None
    may_lack = replace(sizes, media=msgspec.structs.replace(sizes.media, may_come_later=True))
    prefill, decode = LegWorker(network, PREFILL, sizes), LegWorker(network, None, may_lack)
    whole, other = asked("a", [3, (1, 9), 4]), asked("a", [3, (2, 9), 4])
    decode.receive(at(msgspec.structs.replace(whole, media=()), 1))
    prefill.receive(at(msgspec.structs.replace(whole, media=()), 1))
    run(network, prefill, decode)
    assert set(prefill.ended.values()) == set(decode.ended.values()) == {RefusalKind.INVALID}
    prefill.ended.clear()
    decode.ended.clear()
    decode.receive(at(whole, 2))
    prefill.receive(at(other, 2))
    run(network, prefill, decode)
    assert set(prefill.ended.values()) == set(decode.ended.values()) == {RefusalKind.INVALID}, "images differ"
    prefill.ended.clear()
    decode.ended.clear()
    decode.receive(at(msgspec.structs.replace(whole, media=()), 3))
    decode.receive(Abort("a"))
    run(network, prefill, decode)
    prefill.check_empty()
    decode.check_empty()


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
        calls = share_out([(item, np.zeros(item.length, np.int32)) for item in items], num_bins, 16384)
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

    def submit(self, inputs: StepInputs) -> FakeHandle:
        self.num_images.append(sum(call.num_images for call in inputs.encodes))
        return super().submit(inputs)


@pytest.mark.parametrize(("patch_s", "most"), [(None, 1), (1 / 64, 2), (1.0, 1), (0.0, 6)])
def test_a_bound_on_latency_bounds_the_images_encoded_before_a_step(patch_s: float | None, most: int) -> None:
    """Images of 16 patches, in half a second at most, while a request decodes."""
    sizes = capacity(rows=60, chunk=40)
    config = SchedulingConfig(max_itl_ms=1000.0)
    scheduler = CheckedScheduler(sizes, BucketSet.derive(sizes), (), config, clock=lambda: 0.0)
    latency = scheduler.state.latency
    assert latency is not None
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
    run_loop(scheduler, engine, mailbox, True)
    assert [mailbox.output_ids(one.request_id) for one in requests] == [expected(one) for one in requests]
    first = next(count for count in engine.num_images if count)
    assert (first if patch_s is None else max(engine.num_images)) == most
