"""Random histories of prefill and decode workers: legs in any order, cuts, delays, duplicates, aborts in every state.

In others workers have a host tier besides: too few host pages, late gathers, retractions, flushes, new weights. In a
third kind requests have images, and weights are exchanged on one worker or on all.

The oracle is the hash chain of each request's tokens. Whatever happens, what a client gets is the beginning of what its
request would yield alone; a request that nothing befell ends as it should on both sides; and in the end no worker holds
a room, staging memory, or a page that is not cached. Every worker accounts for all its pages after every event.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from msgspec.structs import replace

from jaxsgl.batch.buckets import Capacity
from jaxsgl.cache.pages import pages_for
from jaxsgl.cache.tiers import WRITE_AFTER_REUSE, WRITE_THROUGH, HostTier
from jaxsgl.messages.orders import Abort
from jaxsgl.requests.request import FinishReason, Request, SamplingParams
from jaxsgl.scheduler.scheduler import Scheduler
from jaxsgl.testing.engine import RetractEvery, generate
from tests.choices import Choices, check_histories
from tests.grids import count
from tests.scheduler.image_requests import asked, capacity, expected
from tests.scheduler.memory_wire import Network
from tests.scheduler.sides import Worker, at, run, without_tower
from tests.scheduler.tiered import tier_of

pytestmark = pytest.mark.histories

VOCAB = 40
EOS = frozenset({0})
NUM_BYTES = 64  # some 15 events


class SideHistory:
    """Up to two workers of each kind, and what a gateway, clients and networks may do to them."""

    def __init__(self, choices: Choices) -> None:
        self.choices = choices
        one_of = choices.one_of
        self.now_s = 0.0
        self.network = Network()
        self.addresses = [("prefill", number) for number in range(one_of((1, 1, 2)))]
        num_decodes = one_of((1, 1, 2))
        of_kinds = self.sizes()
        staging_pages, max_rooms, overlap = one_of((1000, 15, 7, 1)), one_of((1000, 2)), one_of((True, False))
        retract_every = one_of((None, None, 3))
        self.workers = [
            Worker(
                self.network,
                address,
                sizes := of_kinds[address is None],
                lambda: self.now_s,
                eos=EOS,
                staging_pages=staging_pages,
                max_rooms=max_rooms,
                overlap=overlap,
                tier=self.tier(sizes),
                retract_also=None if retract_every is None else RetractEvery(retract_every),
            )
            for address in (*self.addresses, *[None] * num_decodes)
        ]
        self.prefills, self.decodes = self.workers[:-num_decodes], self.workers[-num_decodes:]
        self.legs: dict[str, tuple[Worker, Request, Worker, Request]] = {}
        self.unsent: dict[str, tuple[Worker, Request]] = {}
        self.troubled: set[str] = set()
        self.may_be_refused = max_rooms == 2

    def sizes(self) -> tuple[Capacity, Capacity]:
        """Of prefill and of decode workers."""
        one_of = self.choices.one_of
        page_size = one_of((4, 2, 1))
        num_pages = pages_for(40, page_size) + one_of(self.spare_pages)
        sizes = Capacity(page_size, num_pages, one_of(range(1, 5)), 40, one_of((40, 40, 8, 3)), VOCAB)
        return sizes, sizes

    spare_pages: Sequence[int] = range(1, 21)  # of the pool, besides those of the longest request
    lengths: Sequence[int] = range(1, 33)  # of prompts

    def tier(self, sizes: Capacity) -> HostTier | None:
        """That of the next worker."""
        return None

    @property
    def events(self) -> Sequence[Callable[[], None]]:
        """What may happen, each as likely."""
        return (
            self.flow, self.arrive, self.arrive, self.arrive, self.second_leg, self.second_leg, self.deliver,
            self.deliver, self.step, self.step, self.abort, self.cut, self.wait,
        )  # fmt: skip

    def play(self) -> None:
        """Plays the whole history."""
        events = self.events
        while not self.choices.are_over:
            self.choices.one_of(events)()
        self.end()

    def arrive(self, orders: Sequence[str] = ("both", "prefill", "decode", "decode")) -> None:
        """The gateway sends both legs, or one of them first."""
        one_of = self.choices.one_of
        number = len(self.legs)
        request_id = f"r{number}"
        whole, order = self.request(request_id), one_of(orders)
        place, decode = one_of(range(len(self.addresses))), one_of(self.decodes)
        address = self.addresses[place]
        leg = replace(whole, sampling=SamplingParams(temperature=0.0, max_tokens=1))
        whole = self.at_decode(whole)
        legs = ((self.prefills[place], at(leg, number % 5, address)), (decode, at(whole, number % 5, address)))
        self.legs[request_id] = (*legs[0], *legs[1])
        for (worker, of_leg), name in zip(legs, ("prefill", "decode"), strict=True):
            if order in ("both", name):
                worker.receive(of_leg)
            else:
                self.unsent[request_id] = worker, of_leg

    def request(self, request_id: str) -> Request:
        """The next request."""
        one_of = self.choices.one_of
        base, length, max_tokens, n = one_of(range(3)), one_of(self.lengths), one_of((1, 2, 3)), one_of((1, 1, 3))
        prompt = [1 + (i * i + base * (i // 5 + 1)) % (VOCAB - 1) for i in range(length)]
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, n=n)
        return Request(request_id, prompt, params, cache_salt=one_of(("", "", "a")))

    def at_decode(self, whole: Request) -> Request:
        """`whole` as the gateway gives it to decode."""
        return whole

    def oracle(self, request: Request) -> list[int]:
        """What a request yields alone."""
        return generate(request.prompt_ids, request.sampling.max_tokens or 0, EOS, VOCAB)

    def second_leg(self) -> None:
        if self.unsent:
            worker, of_leg = self.unsent.pop(self.choices.one_of(list(self.unsent)))
            worker.receive(of_leg)

    def abort(self) -> None:
        if not self.legs:
            return
        request_id, who = self.choices.one_of(list(self.legs)), self.choices.one_of(("prefill", "decode", "both"))
        prefill, _, decode, whole = self.legs[request_id]
        self.troubled.add(request_id)
        index = self.choices.one_of((None, None, *range(whole.sampling.n))) if who == "decode" else None
        for worker, name in ((prefill, "prefill"), (decode, "decode")):
            if who in ("both", name) and request_id in worker.requests:
                worker.receive(Abort(request_id, index))
                assert index is not None or (request_id, 0) in worker.ended, "what is aborted must end at once"

    def step(self) -> None:
        worker = self.choices.one_of(self.workers)
        for _ in range(self.choices.one_of(range(1, 5))):
            worker.turn()

    def flow(self) -> None:
        """All goes well for a while."""
        for _ in range(self.choices.one_of(range(1, 7))):
            self.network.deliver_all()
            for worker in self.workers:
                worker.turn()

    def deliver(self) -> None:
        """Some messages of one direction arrive; the others are late. A message may come twice."""
        ends = [end for end, messages in self.network.on_way.items() if messages]
        if not ends:
            return
        end, num, twice = self.choices.one_of(ends), self.choices.one_of((1, 2, 3)), self.choices.one_of((False, True))
        for _ in range(min(num, len(self.network.on_way[end]))):
            self.network.deliver(end, twice)

    def cut(self) -> None:
        """A connection breaks. Requests of these two workers may be lost."""
        if not self.network.links:
            return
        wire, peer = self.choices.one_of(list(self.network.links))
        both = {wire, self.network.links[wire, peer][0]}
        self.network.cut((wire, peer))
        self.troubled |= {
            name for name, (prefill, _, decode, _) in self.legs.items() if {prefill.wire, decode.wire} == both
        }

    def wait(self) -> None:
        seconds = self.choices.one_of((1.0, 1.0, 31.0))
        self.now_s += seconds
        if seconds > 30.0:
            self.troubled |= self.legs.keys()  # one leg may have waited for the other

    def end(self) -> None:
        """All that was said arrives, copies end, and what waits in vain expires: then everything has ended well."""
        for worker in self.workers:
            worker.holds_gathers = False
        for request_id, (worker, of_leg) in self.unsent.items():
            worker.receive(of_leg)
            assert request_id in self.legs
        run(self.network, *self.workers)
        self.now_s += 31.0
        run(self.network, *self.workers)
        for request_id, (prefill, leg, decode, whole) in self.legs.items():
            self.check_request(request_id, prefill, leg, decode, whole)
        for worker in self.workers:
            worker.check_empty()

    def check_request(self, request_id: str, prefill: Worker, leg: Request, decode: Worker, whole: Request) -> None:
        for worker, request in ((prefill, leg), (decode, whole)):
            oracle = self.oracle(request)
            for index in range(request.sampling.n):
                key = request_id, index
                output = worker.outputs.get(key, [])
                assert output == oracle[: len(output)], f"{key} yields other tokens"
                ended = worker.ended[key]
                if ended in (FinishReason.LENGTH, FinishReason.STOP):
                    assert output == oracle
                else:
                    assert request_id in self.troubled or self.may_be_refused or self.has_twin(request_id), ended

    def has_twin(self, request_id: str) -> bool:
        """Whether another request has the same room: then one of both is refused, if they run at once."""
        number = int(request_id[1:])
        prompt = self.legs[request_id][1].prompt_ids
        return any(
            int(other[1:]) % 5 == number % 5 and leg.prompt_ids == prompt
            for other, (_, leg, _, _) in self.legs.items()
            if other != request_id
        )


class TieredHistory(SideHistory):
    """Workers with a host tier, and pools so small that prefixes leave them."""

    spare_pages = (2, 3, 5, 9)
    lengths = (36, 36, 36, *range(1, 37))

    def tier(self, sizes: Capacity) -> HostTier | None:
        one_of = self.choices.one_of
        host_pages = one_of((100, 100, 100, 30, 12, 3, 0))
        policy, most_pages = one_of((WRITE_THROUGH, WRITE_THROUGH, WRITE_AFTER_REUSE)), one_of((2, 1, 64))
        return tier_of(sizes, host_pages, policy, most_pages) if host_pages else None

    @property
    def events(self) -> Sequence[Callable[[], None]]:
        """Requests that are served before others come, so that prefixes leave the pool and are needed again."""
        return (*super().events, *[self.serve] * 10, self.hold_gathers, self.arrive_late, self.operate, self.operate)

    def serve(self) -> None:
        """A request comes, and all goes well until nothing is left to do, or nothing moves unless time passes."""
        self.arrive(("both",))
        still, before = 0, None
        while still < 4:
            self.network.deliver_all()
            for worker in self.workers:
                worker.turn()
            if not any(worker.is_busy for worker in self.workers):
                return
            now = [(len(each.scheduler.launched), len(each.replies), len(each.in_flight)) for each in self.workers]
            still = still + 1 if now == before and not any(self.network.on_way.values()) else 0
            before = now

    def arrive_late(self) -> None:
        """A request whose load, if it has one, comes to its deadline."""
        self.arrive(("both",))
        self.flow()
        self.now_s += 6.0

    def hold_gathers(self) -> None:
        """Copies to the host take long on one worker, or end at last."""
        self.choices.one_of(self.workers).holds_gathers = self.choices.one_of((False, False, True))

    def operate(self) -> None:
        """See `acts`."""
        worker = self.choices.one_of(self.workers)
        scheduler = worker.scheduler
        act = self.choices.one_of(self.acts(scheduler))
        scheduler.pause()
        while worker.in_flight:
            worker.turn()
        act()
        worker.settle()
        scheduler.resume()

    def acts(self, scheduler: Scheduler) -> Sequence[Callable[[], None]]:
        """Retracts all, drops what is cached, or takes new weights, which happen to compute the same."""
        return scheduler.retract_all, scheduler.flush_cache, scheduler.retire_cache


class ImageHistory(TieredHistory):
    """Requests with images, for which decode workers have no tower, and weights that are exchanged on any workers."""

    def __init__(self, choices: Choices) -> None:
        self.weights: dict[str, int] = {}  # of requests
        self.mixed: set[str] = set()  # requests that ran with several
        self.proved = choices.one_of((True, False))
        super().__init__(choices)
        for worker in self.workers:
            worker.engine.weight_version = "0"
            worker.wire.proves_peers = self.proved

    def sizes(self) -> tuple[Capacity, Capacity]:
        one_of = self.choices.one_of
        page_size, chunk = one_of((4, 3, 16)), one_of((16, 40, 5))
        num_pages, host_rows = one_of((160, 100)) // page_size + 2, one_of((17, 200, 1))
        sees: dict[str, Any] = {"sees_ahead": chunk >= 16 and one_of((False, True))}  # images have up to 13 tokens
        prefill = capacity(one_of((16, 20, 60)), page_size, num_pages, chunk, host_rows=host_rows, **sees)
        decode = capacity(one_of((16, 20)), page_size, num_pages, chunk, host_rows=one_of((36, 200)), **sees)
        return prefill, without_tower(decode)

    def tier(self, sizes: Capacity) -> HostTier | None:
        return super().tier(sizes) if self.choices.one_of((False, True)) else None

    @property
    def events(self) -> Sequence[Callable[[], None]]:
        return (*super().events, self.exchange, self.exchange)

    def acts(self, scheduler: Scheduler) -> Sequence[Callable[[], None]]:
        return scheduler.retract_all, scheduler.flush_cache

    def request(self, request_id: str) -> Request:
        one_of = self.choices.one_of
        parts: list[int | tuple[int, int]] = [one_of(range(1, 10))]
        for _ in range(one_of((1, 0, 2, 3))):
            image = one_of(range(5))
            parts += [(image, 3 * image + 1), one_of(range(1, 7))]
        whole = asked(request_id, parts, one_of((5, 1, 12)))
        return replace(whole, sampling=replace(whole.sampling, n=one_of((1, 1, 2))))

    def at_decode(self, whole: Request) -> Request:
        return replace(whole, media=()) if self.choices.one_of((False, False, True)) else whole

    def oracle(self, request: Request) -> list[int]:
        _, with_images, _, _ = self.legs[request.request_id]
        return expected(replace(request, media=with_images.media), self.weights[request.request_id], stop_ids=EOS)

    def arrive(self, orders: Sequence[str] = ("both", "prefill", "decode", "decode")) -> None:
        super().arrive(orders)
        name, (prefill, _, decode, _) = next(reversed(self.legs.items()))
        if self.base_of(prefill) != self.base_of(decode):
            self.troubled.add(name)
        self.weights[name] = self.base_of(prefill)

    @staticmethod
    def base_of(worker: Worker) -> int:
        """Its weights."""
        return worker.engine._weights

    def exchange(self) -> None:
        """One worker, or all of them, gets other weights, in the mode "retract" or "in_place"."""
        one_of = self.choices.one_of
        base, retracts = one_of((0, 1, 2)), one_of((False, True))
        for worker in one_of((self.workers, self.workers, [one_of(self.workers)])):
            scheduler = worker.scheduler
            scheduler.pause()
            while worker.in_flight:
                worker.turn()
            worker.engine.swap_weights(base, str(base))
            if retracts:
                scheduler.retract_all()
            scheduler.retire_cache()
            worker.settle()
            scheduler.resume()
        for name, (prefill, leg, decode, whole) in self.legs.items():
            of_legs = ((worker, request) for worker, request in ((prefill, leg), (decode, whole)))
            keys = [(worker, (name, index)) for worker, request in of_legs for index in range(request.sampling.n)]
            if any(key not in worker.ended for worker, key in keys):
                self.troubled.add(name)
                self.mixed.add(name)

    def check_request(self, request_id: str, prefill: Worker, leg: Request, decode: Worker, whole: Request) -> None:
        if request_id in self.mixed:
            assert (request_id, 0) in prefill.ended and (request_id, 0) in decode.ended
        else:
            super().check_request(request_id, prefill, leg, decode, whole)


@pytest.mark.timeout(1800)
def test_every_history_of_two_legs_yields_right_tokens_and_leaves_nothing() -> None:
    """By night 5,000 histories, drawn anew each night."""
    check_histories(lambda choices: SideHistory(choices).play(), count(150, 5_000), NUM_BYTES)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("part", range(count(1, 8)))
def test_every_history_of_two_legs_with_host_tiers_yields_right_tokens_and_leaves_no_pin(part: int) -> None:
    """By night 20,000 histories, in parts that are drawn anew."""
    check_histories(lambda choices: TieredHistory(choices).play(), count(500, 2_500), count(40, 50))


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("part", range(count(1, 2)))
def test_every_history_of_two_legs_with_images_yields_right_tokens_and_leaves_no_rows(part: int) -> None:
    """By night 5,000 histories, in parts that are drawn anew."""
    check_histories(lambda choices: ImageHistory(choices).play(), count(40, 2_500), 100)
