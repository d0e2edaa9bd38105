"""Random histories of a scheduler with a host tier: too few host pages, late gathers, aborts, retractions, flushes.

The oracle is the hash chain of each request's tokens: whatever was written, loaded, evicted or found no room, a request
yields what it would yield alone. After every event all pages of both tiers are accounted for, and on the host each page
bears the name of its tokens; in the end nothing is pinned, written or loaded any more.
"""

from __future__ import annotations

import pytest

from jaxsgl.batch.buckets import Capacity
from jaxsgl.cache.pages import pages_for
from jaxsgl.cache.tiers import WRITE_AFTER_REUSE, WRITE_THROUGH
from jaxsgl.messages.orders import Abort
from jaxsgl.requests.request import FinishReason, Request, SamplingParams
from jaxsgl.testing.engine import RetractEvery
from tests.checked import CheckedScheduler
from tests.choices import Choices, check_histories
from tests.grids import count
from tests.scheduler.serving import VOCAB, expected
from tests.scheduler.tiered import Stepper, check_names, tier_of

pytestmark = pytest.mark.histories

CONTEXT = 40
NUM_BYTES = 40  # some ten events


class HostHistory:
    """A scheduler, and what clients, operators and slow copies may do to it."""

    def __init__(self, choices: Choices) -> None:
        self.choices = choices
        one_of = choices.one_of
        page_size = one_of((4, 2, 1))
        num_pages = pages_for(CONTEXT, page_size) + one_of((2, 3, 5, 9))
        sizes = Capacity(page_size, num_pages, one_of(range(1, 5)), CONTEXT, one_of((40, 40, 8, 3)), VOCAB)
        host_pages = one_of((100, 100, 30, 12, 5, 1))
        tier = tier_of(sizes, host_pages, one_of((WRITE_THROUGH, WRITE_THROUGH, WRITE_AFTER_REUSE)), one_of((2, 1, 64)))
        self.overlap, retract_every = one_of((True, False)), one_of((None, None, 3))
        self.stepper = Stepper(
            sizes,
            tier,
            timeout_s=5.0,
            checked=CheckedScheduler,
            retract_also=None if retract_every is None else RetractEvery(retract_every),
        )
        self.requests: dict[str, Request] = {}
        self.aborted: set[str] = set()

    def play(self) -> None:
        """Plays the whole history."""
        events = (
            self.serve, self.arrive, self.turns, self.arrive, self.arrive_and_serve, self.arrive_and_serve,
            self.arrive_and_serve, self.arrive_and_serve, self.abort, self.hold_gathers, self.arrive_late, self.operate,
        )  # fmt: skip
        while not self.choices.are_over:
            self.choices.one_of(events)()
        self.end()

    def arrive(self) -> None:
        """A request whose prompt begins as one of three texts."""
        base, length = self.choices.one_of(range(3)), 36 - self.choices.one_of((0, 0, 0, *range(36)))
        max_tokens, salt = self.choices.one_of(((1, ""), (2, ""), (4, ""), (2, "a")))
        request_id = f"r{len(self.requests)}"
        prompt = [1 + (i * i + base * (i // 9 + 1)) % (VOCAB - 1) for i in range(length)]
        request = Request(request_id, prompt, SamplingParams(temperature=0.0, max_tokens=max_tokens), 0, salt)
        self.requests[request_id] = request
        self.stepper.receive(request)

    def serve(self) -> None:
        """All goes well for a while."""
        scheduler, turns_left = self.stepper.scheduler, 40
        while turns_left > 0:
            has_requests = scheduler.num_waiting or scheduler.num_running or self.stepper.num_in_flight
            turns_left -= 1 if has_requests else 15  # a few, in which pages are written
            self.turn()

    def arrive_and_serve(self) -> None:
        self.arrive()
        self.serve()

    def turns(self) -> None:
        for _ in range(self.choices.one_of(range(1, 7))):
            self.turn()

    def turn(self) -> None:
        if not self.stepper.scheduler.is_idle or self.stepper.num_in_flight:
            self.stepper.turn(collects=not self.overlap or bool(self.stepper.num_in_flight))

    def abort(self) -> None:
        if self.requests:
            self.aborted.add(request_id := self.choices.one_of(list(self.requests)))
            self.stepper.receive(Abort(request_id))
            assert request_id in self.stepper.ended

    def hold_gathers(self) -> None:
        """Copies to the host take long, or end at last."""
        self.stepper.holds_gathers = self.choices.one_of((False, False, True))

    def arrive_late(self) -> None:
        """A request whose load, if it has one, comes to its deadline."""
        self.arrive()
        self.turns()
        self.stepper.now_s += 6.0

    def operate(self) -> None:
        """Retracts all, drops what is cached, or takes new weights, which happen to compute the same."""
        scheduler = self.stepper.scheduler
        act = self.choices.one_of((scheduler.retract_all, scheduler.flush_cache, scheduler.retire_cache))
        scheduler.pause()
        while self.stepper.num_in_flight:
            self.stepper.turn()
        act()
        self.stepper.settle()
        scheduler.resume()

    def end(self) -> None:
        """Copies end and all is served."""
        stepper = self.stepper
        stepper.holds_gathers = False
        stepper.run()
        for request_id, request in self.requests.items():
            output = stepper.outputs.get(request_id, [])
            whole = expected(request.prompt_ids, request.sampling.max_tokens or 0)
            assert output == whole[: len(output)], f"{request_id} yields other tokens"
            if stepper.ended[request_id] is FinishReason.ABORT:
                assert request_id in self.aborted
            else:
                assert output == whole
        assert not stepper.tier.is_writing and not any(entry.num_loads for entry in stepper.tier.host.all())
        assert stepper.scheduler.cache.num_available == stepper.scheduler.cache.num_pages - 1
        check_names(stepper.tier, stepper.scheduler.cache)


@pytest.mark.timeout(1800)
def test_every_history_of_a_host_tier_yields_right_tokens_and_leaves_no_pin() -> None:
    """By night 5,000 histories, drawn anew each night."""
    check_histories(lambda choices: HostHistory(choices).play(), count(100, 5_000), NUM_BYTES)
