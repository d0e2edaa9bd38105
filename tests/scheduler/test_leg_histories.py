"""Random histories of prefill and decode workers: legs in any order, cuts, delays, duplicates, aborts in every state.

The oracle is the hash chain of each request's tokens. Whatever happens, what a client gets is the beginning of what its
request would yield alone; a request that nothing befell ends as it should on both sides; and in the end no worker holds
a room, staging memory, or a page that is not cached. Every worker accounts for all its pages after every event.
"""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from jaxsgl.batch.capacity import Capacity
from jaxsgl.cache.pages import pages_for
from jaxsgl.messages.orders import Abort
from jaxsgl.requests.request import FinishReason, Request
from jaxsgl.requests.sampling import SamplingParams
from jaxsgl.testing.engine import RetractEvery, generate
from tests.grids import count
from tests.scheduler.legs import LegWorker, at, run
from tests.scheduler.memory_wire import Network

VOCAB = 40
EOS = frozenset({0})
SALTS = ("", "", "a")


class LegMachine(RuleBasedStateMachine):
    """Up to two workers of each kind, and what a gateway, clients and networks may do to them."""

    @initialize(
        num_prefill=st.integers(1, 2),
        num_decode=st.integers(1, 2),
        page_size=st.sampled_from([1, 2, 4]),
        spare_pages=st.integers(1, 20),
        rows=st.integers(1, 4),
        chunk=st.sampled_from([3, 8, 40]),
        staging_pages=st.sampled_from([1, 7, 15, 1000]),
        max_rooms=st.sampled_from([2, 1000]),
        overlap=st.booleans(),
        retract_every=st.sampled_from([None, None, 3]),
    )
    def start(
        self,
        num_prefill: int,
        num_decode: int,
        page_size: int,
        spare_pages: int,
        rows: int,
        chunk: int,
        staging_pages: int,
        max_rooms: int,
        overlap: bool,
        retract_every: int | None,
    ) -> None:
        self.now_s = 0.0
        self.network = Network()
        self.addresses = [("prefill", number) for number in range(num_prefill)]
        num_pages = pages_for(40, page_size) + spare_pages
        sizes = Capacity(page_size, num_pages, rows, 40, chunk, VOCAB)
        self.workers = [
            LegWorker(
                self.network,
                address,
                sizes,
                lambda: self.now_s,
                eos=EOS,
                staging_pages=staging_pages,
                max_rooms=max_rooms,
                overlap=overlap,
                retract_also=None if retract_every is None else RetractEvery(retract_every),
            )
            for address in (*self.addresses, *[None] * num_decode)
        ]
        self.prefills, self.decodes = self.workers[:num_prefill], self.workers[num_prefill:]
        self.legs: dict[str, tuple[LegWorker, Request, LegWorker, Request]] = {}
        self.unsent: dict[str, tuple[LegWorker, Request]] = {}
        self.troubled: set[str] = set()
        self.may_be_refused = max_rooms == 2

    @rule(
        base=st.integers(0, 2),
        length=st.integers(1, 36),
        max_tokens=st.sampled_from([1, 2, 4]),
        n=st.sampled_from([1, 1, 3]),
        salt=st.sampled_from(SALTS),
        order=st.sampled_from(["both", "prefill", "decode", "decode"]),
        data=st.data(),
    )
    def arrive(
        self, base: int, length: int, max_tokens: int, n: int, salt: str, order: str, data: st.DataObject
    ) -> None:
        """The gateway sends both legs, or one of them first."""
        prompt = [1 + (i * i + base * (i // 5 + 1)) % (VOCAB - 1) for i in range(length)]
        number = len(self.legs)
        request_id = f"r{number}"
        place = data.draw(st.integers(0, len(self.addresses) - 1))
        decode = data.draw(st.sampled_from(self.decodes))
        address = self.addresses[place]
        whole = Request(request_id, prompt, SamplingParams(temperature=0.0, max_tokens=max_tokens, n=n), 0, salt)
        leg = Request(request_id, prompt, SamplingParams(temperature=0.0, max_tokens=1), 0, salt)
        legs = ((self.prefills[place], at(leg, number % 5, address)), (decode, at(whole, number % 5, address)))
        self.legs[request_id] = (*legs[0], *legs[1])
        for (worker, of_leg), name in zip(legs, ("prefill", "decode"), strict=True):
            if order in ("both", name):
                worker.receive(of_leg)
            else:
                self.unsent[request_id] = worker, of_leg

    @precondition(lambda self: self.unsent)
    @rule(data=st.data())
    def second_leg(self, data: st.DataObject) -> None:
        worker, of_leg = self.unsent.pop(data.draw(st.sampled_from(sorted(self.unsent))))
        worker.receive(of_leg)

    @precondition(lambda self: self.legs)
    @rule(data=st.data(), who=st.sampled_from(["prefill", "decode", "both"]))
    def abort(self, data: st.DataObject, who: str) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.legs)))
        prefill, _, decode, whole = self.legs[request_id]
        self.troubled.add(request_id)
        index = data.draw(st.sampled_from([None, None, *range(whole.sampling.n)])) if who == "decode" else None
        for worker, name in ((prefill, "prefill"), (decode, "decode")):
            if who in ("both", name) and request_id in worker.requests:
                worker.receive(Abort(request_id, index))
                assert index is not None or (request_id, 0) in worker.ended, "what is aborted must end at once"

    @rule(turns=st.integers(1, 4), data=st.data())
    def step(self, turns: int, data: st.DataObject) -> None:
        worker = data.draw(st.sampled_from(self.workers))
        for _ in range(turns):
            worker.turn()

    @rule(turns=st.integers(1, 6))
    def flow(self, turns: int) -> None:
        """All goes well for a while."""
        for _ in range(turns):
            self.network.deliver_all()
            for worker in self.workers:
                worker.turn()

    @precondition(lambda self: any(self.network.on_way.values()))
    @rule(data=st.data(), num=st.integers(1, 3), twice=st.booleans())
    def deliver(self, data: st.DataObject, num: int, twice: bool) -> None:
        """Some messages of one direction arrive; the others are late. A message may come twice."""
        ends = [end for end, messages in self.network.on_way.items() if messages]
        end = data.draw(st.sampled_from(range(len(ends))))
        for _ in range(min(num, len(self.network.on_way[ends[end]]))):
            self.network.deliver(ends[end], twice)

    @precondition(lambda self: self.network.links)
    @rule(data=st.data())
    def cut(self, data: st.DataObject) -> None:
        """A connection breaks. Requests of these two workers may be lost."""
        ends = list(self.network.links)
        wire, peer = ends[data.draw(st.sampled_from(range(len(ends))))]
        both = {wire, self.network.links[wire, peer][0]}
        self.network.cut((wire, peer))
        self.troubled |= {
            name for name, (prefill, _, decode, _) in self.legs.items() if {prefill.wire, decode.wire} == both
        }

    @rule(seconds=st.sampled_from([1.0, 31.0]))
    def wait(self, seconds: float) -> None:
        self.now_s += seconds
        if seconds > 30.0:
            self.troubled |= self.legs.keys()  # one leg may have waited for the other

    def teardown(self) -> None:
        if not hasattr(self, "workers"):
            return
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

    def check_request(
        self, request_id: str, prefill: LegWorker, leg: Request, decode: LegWorker, whole: Request
    ) -> None:
        for worker, request in ((prefill, leg), (decode, whole)):
            oracle = generate(request.prompt_ids, request.sampling.max_tokens or 0, EOS, VOCAB)
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


@pytest.mark.timeout(7200)
def test_every_history_of_two_legs_yields_right_tokens_and_leaves_nothing() -> None:
    run_state_machine_as_test(
        LegMachine,
        settings=settings(
            max_examples=count(25, 20_000),
            stateful_step_count=30,
            suppress_health_check=list(HealthCheck),
            deadline=None,
        ),
    )
