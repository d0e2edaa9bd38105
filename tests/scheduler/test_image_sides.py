"""Images with prefill and decode apart: decode has no tower, and gets embeddings from prefill."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from jaxsgl.config.engine import SchedulingConfig
from jaxsgl.messages.orders import Abort
from jaxsgl.messages.replies import RefusalKind
from jaxsgl.requests.request import Request, SamplingParams
from jaxsgl.scheduler.disagg.decode_side import DecodeSide
from jaxsgl.testing.engine import RetractEvery
from tests.grids import count
from tests.scheduler.image_requests import asked, capacity, expected
from tests.scheduler.memory_wire import Network
from tests.scheduler.sides import PREFILL, Worker, at, run, without_tower


def pair_of(network: Network, host_rows: int = 60, has_lines: bool = False, **options: Any) -> tuple[Worker, Worker]:
    """A prefill worker, and a decode worker that has no tower and holds so many rows in host memory."""
    sizes = capacity(page_size=16, host_rows=12, has_lines=has_lines)
    prefill = Worker(network, PREFILL, sizes, radix_cache=True)
    decode_sizes = without_tower(capacity(page_size=16, host_rows=host_rows, has_lines=has_lines))
    return prefill, Worker(network, None, decode_sizes, radix_cache=True, **options)


def send(network: Network, prefill: Worker, decode: Worker, request: Request, number: int) -> None:
    """Sends both legs of a request and serves until nothing happens any more."""
    prefill.receive(
        at(msgspec.structs.replace(request, sampling=SamplingParams(temperature=0.0, max_tokens=1)), number)
    )
    decode.receive(at(request, number))
    run(network, prefill, decode)


@pytest.mark.parametrize(
    ("comes_later", "first", "width"),
    [
        (False, "prefill", None),
        (True, "prefill", None),
        (True, "decode", None),
        (False, "prefill", 3),
        (True, "decode", 3),
    ],
)
def test_prefill_and_decode_in_different_workers_yield_the_same_tokens(
    comes_later: bool, first: str, width: int | None
) -> None:
    """Decode computes less than a page of the prompt, which may be an image's, and again what is retracted.

    It has no tower: embeddings come from prefill, whose host memory holds those of one image, and requests wait for
    room to hold theirs. If the gateway gives it no images, it gets them from prefill.
    """
    network = Network()
    prefill, decode = pair_of(network, has_lines=width is not None, retract_also=RetractEvery(7))
    requests = [
        asked(str(i), [3, (i % 3, 9), i + 1, (5 + i, 12), 2 + i % 4], max_tokens=9, width=width) for i in range(8)
    ]
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


@pytest.mark.parametrize("comes_later", [False, True])
@pytest.mark.parametrize("proved", [True, False])
def test_embeddings_of_a_server_that_has_not_proved_itself_are_found_by_its_own_requests_alone(
    proved: bool, comes_later: bool
) -> None:
    network, other_address = Network(), ("other", 8998)
    prefill, decode = pair_of(network)
    other = Worker(network, other_address, capacity(page_size=16, host_rows=12), radix_cache=True)
    decode.wire.proves_peers = proved
    moved: list[int] = []
    for number, (worker, address) in enumerate(((prefill, PREFILL), (prefill, PREFILL), (other, other_address))):
        before = decode.transfer.moved_bytes
        request = asked(str(number), [3 + number, (1, 6), 2])  # less than a page, so that embeddings alone move
        leg = msgspec.structs.replace(request, sampling=SamplingParams(temperature=0.0, max_tokens=1))
        worker.receive(at(leg, number, address))
        bare = msgspec.structs.replace(request, media=()) if comes_later else request
        decode.receive(at(bare, number, address))
        run(network, prefill, other, decode)
        assert decode.outputs[str(number), 0] == expected(request)
        moved.append(decode.transfer.moved_bytes - before)
    assert moved[0] > 0 == moved[1]
    assert moved[2] == (0 if proved else moved[0])
    for worker in (prefill, other, decode):
        worker.check_empty()


@pytest.mark.parametrize("seed", range(count(6, 300)))
def test_random_histories_of_two_workers_yield_the_tokens_of_each_request_alone(seed: int) -> None:
    """Little memory everywhere: prompts beyond staging memory, evicted pages and embeddings, retractions, aborts."""
    rng = random.Random(seed)
    network, page_size = Network(), rng.choice([3, 4, 16])
    num_pages, chunk = 2 + rng.randint(110, 160) // page_size, rng.choice([5, 16, 40])
    options: dict[str, Any] = {"staging_pages": rng.choice([2, 5, 100])}
    sizes = capacity(rng.choice([16, 20, 60]), page_size, num_pages, chunk, host_rows=rng.choice([1, 17, 200]))
    prefill = Worker(network, PREFILL, sizes, radix_cache=rng.random() < 0.8, **options)
    sizes = without_tower(capacity(rng.choice([16, 20]), page_size, num_pages, chunk, host_rows=rng.choice([48, 200])))
    retract = RetractEvery(rng.choice([2, 3, 7])) if rng.random() < 0.6 else None
    decode = Worker(network, None, sizes, radix_cache=True, retract_also=retract, **options)
    decode.wire.proves_peers = seed % 2 == 0
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


@pytest.mark.parametrize("first", ["prefill", "decode"])
def test_a_decode_worker_refuses_images_that_it_can_not_have(first: str) -> None:
    network = Network()
    prefill, decode = pair_of(network, host_rows=20)
    large = asked("large", [3, (1, 12), 2, (2, 9), 1])
    leg = msgspec.structs.replace(large, sampling=SamplingParams(temperature=0.0, max_tokens=1))
    legs = [(prefill, leg), (decode, large)]
    for worker, of_leg in legs if first == "prefill" else reversed(legs):
        worker.receive(at(of_leg, 1))
        run(network, prefill, decode)
    assert set(prefill.ended.values()) == set(decode.ended.values()) == {RefusalKind.INVALID}
    assert decode.replies[-1].refusal is not None and "--mm-host-mib" in decode.replies[-1].refusal.text
    decode.receive(asked("whole", [3, (1, 12), 2]))
    assert decode.replies[-1].refusal is not None and "no vision tower" in decode.replies[-1].refusal.text
    decode.receive(text := asked("text", [9]))
    run(network, prefill, decode)
    assert decode.outputs["text", 0] == expected(text)
    prefill.check_empty()
    decode.check_empty()


@pytest.mark.parametrize("max_itl_ms", [None, 1000.0])
def test_a_request_whose_images_would_be_those_of_other_weights_must_be_sent_again(max_itl_ms: float | None) -> None:
    network = Network()
    prefill, decode = pair_of(network, config=SchedulingConfig(max_itl_ms=max_itl_ms))
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
    prefill, decode = Worker(network, PREFILL, sizes), Worker(network, None, may_lack)
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


@pytest.mark.parametrize("comes_later", [False, True])
def test_a_decode_worker_holds_no_pixels(comes_later: bool) -> None:
    network = Network()
    prefill, decode = pair_of(network)
    request = asked("a", [3, (1, 12), 4])
    decode.receive(at(msgspec.structs.replace(request, media=()) if comes_later else request, 1))
    prefill.receive(at(msgspec.structs.replace(request, sampling=SamplingParams(temperature=0.0, max_tokens=1)), 1))
    network.deliver_all()
    prefill.turn()
    network.deliver_all()
    decode.turn()
    assert isinstance(decode.side, DecodeSide)
    at_decode = decode.side.rooms.request("a")
    assert at_decode is not None and [len(item.pixels) for item in at_decode.media] == [0]
    run(network, prefill, decode)
    assert decode.outputs["a", 0] == expected(request)


def test_embeddings_of_weights_that_were_exchanged_on_the_way_are_not_used() -> None:
    network = Network()
    prefill, decode = pair_of(network)
    request = asked("a", [3, (1, 12), 40, (2, 12), 2], 9)
    prefill.receive(at(msgspec.structs.replace(request, sampling=SamplingParams(temperature=0.0, max_tokens=1)), 1))
    decode.receive(at(request, 1))
    network.deliver_all()
    prefill.turn()
    network.deliver_all()
    prefill.turn()  # with a first chunk
    assert prefill.scheduler.state.totals.encoded_images == 1
    prefill.engine.weight_version = "other"
    prefill.scheduler.retire_cache()
    run(network, prefill, decode)
    assert decode.ended["a", 0] is RefusalKind.PEER and not decode.outputs.get(("a", 0))
    host = decode.scheduler.kept_images
    assert host is not None and host.host.num_bytes == 0
    prefill.check_empty()
    decode.check_empty()


def test_embeddings_that_other_weights_made_in_between_are_not_kept() -> None:
    """The old weights come back, under their old name, before the request ends."""
    network = Network()
    prefill, decode = pair_of(network)
    request, again = (asked(name, [3, (1, 12), 40, (2, 12), 2], 9) for name in ("a", "b"))
    for worker in (prefill, decode):
        worker.engine.weight_version = "0"
    prefill.receive(at(msgspec.structs.replace(request, sampling=SamplingParams(temperature=0.0, max_tokens=1)), 1))
    decode.receive(at(request, 1))
    for weights in (1, 0):
        network.deliver_all()
        for worker in (prefill, decode):
            worker.turn()
            worker.scheduler.pause()
            while worker.in_flight:
                worker.turn()
            worker.engine.swap_weights(weights, str(weights))
            worker.scheduler.retire_cache()
            worker.settle()
            worker.scheduler.resume()
    run(network, prefill, decode)
    send(network, prefill, decode, again, 2)
    assert decode.outputs["b", 0] == expected(again)
    prefill.check_empty()
    decode.check_empty()


def test_embeddings_that_are_lost_on_their_way_to_the_host_end_their_request() -> None:
    """All is computed, and while the image's rows are copied weights are exchanged, under their old name."""
    network = Network()
    prefill, decode = pair_of(network)
    request, prefill.holds_gathers = asked("a", [3, (1, 12), 2], 9), True
    prefill.receive(at(msgspec.structs.replace(request, sampling=SamplingParams(temperature=0.0, max_tokens=1)), 1))
    decode.receive(at(request, 1))
    for _ in range(4):
        network.deliver_all()
        prefill.turn()
        decode.turn()
    assert prefill.scheduler.state.totals.encoded_images == 1 and not prefill.in_flight
    prefill.scheduler.retire_cache()
    prefill.holds_gathers = False
    run(network, prefill, decode)
    assert decode.ended["a", 0] is prefill.ended["a", 0] is RefusalKind.PEER
    prefill.check_empty()
    decode.check_empty()


def test_a_leg_whose_embeddings_are_lost_while_its_token_is_read_ends_once() -> None:
    """The turn that reads its last token is the one that hears of the loss."""
    network = Network()
    prefill, decode = pair_of(network)
    request, prefill.holds_gathers = asked("a", [3, (1, 12), 2], 9), True
    prefill.receive(at(msgspec.structs.replace(request, sampling=SamplingParams(temperature=0.0, max_tokens=1)), 1))
    decode.receive(at(request, 1))
    while not prefill.in_flight:
        network.deliver_all()
        prefill.turn()
        decode.turn()
    prefill.scheduler.retire_cache()
    prefill.holds_gathers = False
    prefill.turn()
    assert not prefill.in_flight and prefill.ended == {("a", 0): RefusalKind.PEER}
    run(network, prefill, decode)
    assert decode.ended["a", 0] is RefusalKind.PEER
    prefill.check_empty()
    decode.check_empty()
