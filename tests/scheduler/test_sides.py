"""Prefill and decode in different workers: what clients get, and what is left behind."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace as changed

from jaxsgl.cache import kv_file
from jaxsgl.cache.tiers import WRITE_THROUGH
from jaxsgl.config.engine import SchedulingConfig
from jaxsgl.config.features import WRITE_POLICIES
from jaxsgl.frontend.legs import leg_sampling
from jaxsgl.messages.orders import Abort
from jaxsgl.messages.replies import RefusalKind
from jaxsgl.requests.grammar import Grammar
from jaxsgl.requests.request import FinishReason, Request, SamplingParams
from jaxsgl.scheduler.disagg.decode import DecodeState
from jaxsgl.scheduler.disagg.decode_side import DecodeSide
from jaxsgl.scheduler.disagg.prefill import PrefillState
from jaxsgl.scheduler.disagg.prefill_side import PrefillSide
from jaxsgl.scheduler.grammars.queue import GrammarQueue
from jaxsgl.testing.engine import RetractEvery, generate
from jaxsgl.testing.grammars import FakeMatcher, compile_fake
from tests.scheduler.memory_wire import Network
from tests.scheduler.serving import VOCAB, capacity, expected, request
from tests.scheduler.sides import PREFILL, Worker, at, run
from tests.scheduler.test_constraints import EOS, asking, constrained, fake, some_requests
from tests.scheduler.tiered import tier_of


class Pair:
    """A prefill worker and a decode worker."""

    def __init__(
        self,
        pages: int = 200,
        decode_pages: int = 200,
        chunk: int = 128,
        adapters: int = 0,
        host_pages: int = 0,
        policy: str = WRITE_THROUGH,
        **decode: Any,
    ) -> None:
        self.now_s = 0.0
        self.network = Network()
        places: dict[str, Any] = {"max_adapters": adapters, "adapter_columns": 4 * adapters}
        sizes = replace(capacity(num_pages=pages, max_extend_tokens=chunk), **places)
        decode_sizes = replace(capacity(num_pages=decode_pages), **places)
        tiers = [tier_of(each, host_pages, policy) if host_pages else None for each in (sizes, decode_sizes)]
        self.prefill = Worker(self.network, PREFILL, sizes, lambda: self.now_s, tier=tiers[0])
        self.decode = Worker(self.network, None, decode_sizes, lambda: self.now_s, tier=tiers[1], **decode)
        self.number = 0

    @property
    def computed_by_decode(self) -> int:
        return self.decode.scheduler.state.totals.extend_tokens

    def send(self, request: Request) -> None:
        """Both legs, as a gateway sends them."""
        self.number += 1
        leg = changed(request, sampling=leg_sampling(request.sampling, "prefill"))
        self.prefill.receive(at(leg, self.number))
        self.decode.receive(at(request, self.number))

    def run(self) -> None:
        run(self.network, self.prefill, self.decode)

    def moved_bytes(self, request: Request) -> int:
        """What prefill sends for a request, which is served."""
        before = self.decode.transfer.moved_bytes
        self.send(request)
        self.run()
        return self.decode.transfer.moved_bytes - before

    def check_empty(self) -> None:
        self.prefill.check_empty()
        self.decode.check_empty()


def test_decode_computes_at_most_a_page_of_the_prompt_and_yields_the_same_tokens() -> None:
    pair = Pair(chunk=16)
    for length in (1, 3, 4, 5, 8, 9, 63, 64, 100):
        prompt = list(range(length, 2 * length))
        before = pair.computed_by_decode
        pair.send(request(f"r{length}", prompt, 6))
        pair.run()
        assert pair.decode.outputs[f"r{length}", 0] == expected(prompt, 6)
        assert pair.computed_by_decode - before <= 4
        assert pair.prefill.ended[f"r{length}", 0] is FinishReason.LENGTH
    pair.check_empty()


def test_a_prompt_of_many_chunks_is_computed_once_and_sent_while_it_is_computed() -> None:
    pair = Pair(chunk=16)
    prompt = list(range(100))
    pair.send(request("a", prompt, 3))
    in_time = 0
    pair.network.clock = lambda: pair.now_s
    while ("a", 0) not in pair.prefill.ended:
        pair.now_s += 0.1
        pair.network.deliver_all()
        pair.prefill.turn()
        pair.decode.turn()
        assert isinstance(pair.prefill.side, PrefillSide)
        if pair.prefill.side.rooms.state_of("a") is PrefillState.EXTENDING:
            in_time = pair.prefill.transfer.moved_bytes
    pair.run()
    assert pair.prefill.scheduler.state.totals.extend_tokens == len(prompt)
    assert in_time > pair.decode.engine.page_layout.page_bytes * 10
    assert in_time <= pair.prefill.transfer.hidden_bytes <= pair.prefill.transfer.moved_bytes
    assert pair.decode.outputs["a", 0] == expected(prompt, 3)
    pair.check_empty()


def test_no_step_is_owed_to_a_request_that_waits_for_the_other_side() -> None:
    """Without its grant at prefill, and until its pages are at decode."""
    pair = Pair(chunk=16)
    states = set()

    def loads() -> list[tuple[int, bool]]:
        return [(load.num_waiting, load.owes_step) for load in (side.load(0) for side in sides)]

    sides = [pair.prefill.side, pair.decode.side]
    pair.send(request("a", range(40), 3))
    assert loads() == [(1, False), (1, False)], "decode's grant is on its way"
    while ("a", 0) not in pair.decode.ended:
        pair.network.deliver_all()
        pair.prefill.turn()
        states.add((pair.prefill.side.rooms.state_of("a"), *loads()))
        pair.decode.turn()
    assert {(PrefillState.EXTENDING, (0, True), (1, False)), (PrefillState.SENDING, (0, False), (1, False))} <= states
    pair.run()
    assert loads() == [(0, False), (0, False)]


def test_what_decode_has_cached_is_not_sent_again() -> None:
    pair = Pair()
    for name in "ab":
        before = pair.decode.transfer
        pair.send(request(name, range(40), 3))
        pair.run()
    assert pair.decode.transfer == before
    assert pair.decode.outputs["b", 0] == expected(range(40), 3)
    pair.check_empty()


def test_what_prefill_computed_for_a_request_is_not_reported_as_cached() -> None:
    """Decode finds it in its own cache, where it lands."""
    pair, prompt, two = Pair(chunk=16), list(range(40)), SamplingParams(temperature=0.0, max_tokens=5, n=2)
    for name, ids in (("cold", prompt), ("again", prompt), ("longer", [*prompt, *range(100, 130)])):
        pair.send(changed(request(name, ids, 5), sampling=two))
        pair.run()
    pair.decode.scheduler.flush_cache()
    pair.send(request("at_prefill", prompt, 5))
    pair.run()
    pair.prefill.scheduler.flush_cache()
    pair.send(request("at_decode", prompt, 5))
    pair.run()
    cached = {reply.request_id: reply.cached_tokens for reply in pair.decode.replies if reply.finish_reason}
    assert cached == {"cold": 0, "again": 36, "longer": 40, "at_prefill": 36, "at_decode": 36}
    totals = pair.decode.scheduler.state.totals
    assert totals.prompt_tokens == 2 * (40 + 40 + 70) + 40 + 40
    assert totals.cached_prompt_tokens == 2 * (36 + 40) + 36 + 36
    pair.check_empty()


def test_samples_of_one_prompt_share_its_pages() -> None:
    pair = Pair()
    sampling = SamplingParams(temperature=0.0, max_tokens=5, n=3)
    pair.send(Request("a", list(range(30)), sampling))
    pair.run()
    assert [pair.decode.outputs["a", index] for index in range(3)] == [expected(range(30), 5)] * 3
    assert pair.computed_by_decode <= 3 * 4
    pair.check_empty()


def test_the_prefill_leg_ends_with_the_log_probabilities_of_the_prompt() -> None:
    pair = Pair(chunk=16)
    sampling = SamplingParams(temperature=0.0, max_tokens=5, logprobs=0, prompt_logprobs=0)
    pair.number += 1
    pair.prefill.receive(at(Request("a", list(range(30)), SamplingParams(max_tokens=1, prompt_logprobs=0)), 1))
    pair.decode.receive(at(Request("a", list(range(30)), SamplingParams(temperature=0.0, max_tokens=5, logprobs=0)), 1))
    pair.run()
    (last,) = pair.prefill.replies
    assert last.prompt_logprobs is not None and len(last.prompt_logprobs) == 29
    assert sum(reply.logprob is not None for reply in pair.decode.replies) == sampling.max_tokens
    pair.check_empty()


@pytest.mark.parametrize("who", ["prefill", "decode", "both"])
@pytest.mark.parametrize("turns", range(0, 16, 3))
def test_an_abort_in_any_state_leaves_nothing_and_harms_no_neighbour(turns: int, who: str) -> None:
    """The neighbours take the pages at once."""
    pair = Pair(pages=40, decode_pages=40, chunk=16)
    pair.send(request("a", range(100), 20))
    for _ in range(turns):
        pair.network.deliver_all()
        pair.prefill.turn()
        pair.decode.turn()
    for worker in (pair.prefill, pair.decode):
        if who == "both" or worker is getattr(pair, who):
            worker.receive(Abort("a"))
    for number in range(3):
        pair.send(request(f"b{number}", range(number, 60 + number), 20))
    pair.run()
    for number in range(3):
        assert pair.decode.outputs[f"b{number}", 0] == expected(range(number, 60 + number), 20)
    assert {("a", 0)} <= pair.decode.ended.keys() & pair.prefill.ended.keys()
    pair.check_empty()


def test_a_prompt_that_prefill_refuses_is_not_generated_by_decode() -> None:
    for refused_first in (True, False):
        pair = Pair(pages=10)
        leg, whole = at(request("a", range(60), 1), 1), at(request("a", range(60), 4), 1)
        first, second = (pair.prefill, pair.decode) if refused_first else (pair.decode, pair.prefill)
        first.receive(leg if refused_first else whole)
        pair.network.deliver_all()
        pair.prefill.turn()
        second.receive(whole if refused_first else leg)
        pair.run()
        assert pair.decode.ended["a", 0] is RefusalKind.INVALID
        assert not pair.decode.outputs
        pair.check_empty()


@pytest.mark.parametrize("refused_first", [True, False])
@pytest.mark.parametrize(
    ("sizes", "kind"), [({"decode_pages": 10}, RefusalKind.INVALID), ({"max_rooms": 1}, RefusalKind.OVERLOADED)]
)
def test_a_prompt_that_decode_refuses_is_not_computed_by_prefill(
    sizes: dict[str, Any], kind: RefusalKind, refused_first: bool
) -> None:
    pair = Pair(**sizes)
    pair.decode.receive(at(request("first", range(30), 4), 1))
    leg, whole = at(request("a", range(60), 1), 2), at(request("a", range(60), 4), 2)
    first, second = (pair.decode, pair.prefill) if refused_first else (pair.prefill, pair.decode)
    first.receive(whole if refused_first else leg)
    pair.network.deliver_all()
    pair.prefill.turn()
    second.receive(leg if refused_first else whole)
    pair.run()
    assert pair.decode.ended["a", 0] is pair.prefill.ended["a", 0] is kind
    of_decode, of_prefill = pair.decode.replies[-1].refusal, pair.prefill.replies[-1].refusal
    assert of_decode is not None and of_prefill is not None and of_prefill.text == f"decode: {of_decode.text}"
    pair.prefill.receive(at(request("first", range(30), 1), 1))
    pair.run()
    assert pair.decode.outputs["first", 0] == expected(range(30), 4)
    assert pair.prefill.scheduler.state.totals.extend_tokens == 30
    pair.check_empty()


@pytest.mark.parametrize("refused_first", [True, False])
@pytest.mark.parametrize("refuses", ["prefill", "decode"])
def test_neither_side_waits_for_a_leg_that_the_others_front_end_refuses(refuses: str, refused_first: bool) -> None:
    pair = Pair()
    leg, whole = at(request("a", range(60), 1), 1), at(request("a", range(60), 4), 1)
    if refuses == "prefill":
        leg = changed(leg, refused="too large")
    else:
        whole = changed(whole, refused="too large")
    sends = [(pair.prefill, leg), (pair.decode, whole)]
    for worker, message in sends if refused_first == (refuses == "prefill") else reversed(sends):
        worker.receive(message)
        pair.run()
    other = pair.decode if refuses == "prefill" else pair.prefill
    assert other.ended["a", 0] is RefusalKind.INVALID
    refusal = other.replies[-1].refusal
    assert refusal is not None and refusal.text == f"{refuses}: too large"
    assert pair.prefill.scheduler.state.totals.extend_tokens == 0
    pair.check_empty()


def test_requests_do_not_wait_for_rows_for_all_samples_of_one_ahead_of_them() -> None:
    network = Network()
    pair = Pair()
    prefill = Worker(network, PREFILL, capacity())
    decode = Worker(network, None, capacity(rows=4, num_pages=200))
    pair.network, pair.prefill, pair.decode = network, prefill, decode
    pair.send(request("long", range(20), 90))
    many = Request("many", list(range(30)), SamplingParams(temperature=0.0, max_tokens=5, n=4))
    pair.send(many)
    pair.send(request("after", range(40), 5))
    while ("after", 0) not in decode.ended:
        network.deliver_all()
        prefill.turn()
        decode.turn()
    assert ("long", 0) not in decode.ended
    pair.run()
    assert [decode.outputs["many", index] for index in range(4)] == [expected(range(30), 5)] * 4
    pair.check_empty()


@pytest.mark.parametrize("order", [1, -1])
def test_legs_whose_prompts_differ_hear_so_when_their_time_is_up(order: int) -> None:
    pair = Pair()
    sends = [(pair.prefill, at(request("a", range(40), 1), 1)), (pair.decode, at(request("a", range(41), 4), 1))]
    for worker, leg in sends[::order]:
        worker.receive(leg)
        pair.run()
        pair.now_s += 1.0
    pair.now_s = 30.5
    pair.run()
    for worker in (pair.prefill, pair.decode):
        assert worker.ended["a", 0] is RefusalKind.PEER
        refusal = worker.replies[-1].refusal
        assert refusal is not None and "other tokens at prefill than at decode" in refusal.text
    pair.check_empty()


@pytest.mark.parametrize("refused_first", [True, False])
def test_a_prompt_for_which_prefill_has_no_room_is_refused_by_decode_at_once(refused_first: bool) -> None:
    network = Network()
    prefill, decode = Worker(network, PREFILL, capacity(), max_rooms=1), Worker(network, None, capacity())
    prefill.receive(at(request("first", range(30), 1), 1))
    leg, whole = at(request("a", range(60), 1), 2), at(request("a", range(60), 4), 2)
    first, second = (prefill, decode) if refused_first else (decode, prefill)
    first.receive(leg if refused_first else whole)
    network.deliver_all()
    prefill.turn()
    second.receive(whole if refused_first else leg)
    run(network, prefill, decode)
    assert decode.ended["a", 0] is prefill.ended["a", 0] is RefusalKind.OVERLOADED
    decode.receive(at(request("first", range(30), 4), 1))
    run(network, prefill, decode)
    assert decode.outputs["first", 0] == expected(range(30), 4)
    prefill.check_empty()
    decode.check_empty()


def test_a_second_request_of_a_room_that_is_refused_ends_none_that_runs_there() -> None:
    pair = Pair()
    for worker, num_tokens in ((pair.prefill, 1), (pair.decode, 4)):
        asked = request("a", range(30), num_tokens)
        worker.receive(at(asked, 1))
        worker.receive(at(changed(asked, request_id="twin", adapter="unknown"), 1))
        assert worker.ended == {("twin", 0): RefusalKind.INVALID}
    pair.run()
    assert pair.decode.outputs["a", 0] == expected(range(30), 4)
    for worker, num_tokens in ((pair.decode, 4), (pair.prefill, 1)):
        worker.receive(at(request("later", range(30), num_tokens), 1))
        pair.run()
    assert pair.decode.outputs["later", 0] == expected(range(30), 4)
    pair.check_empty()


def test_prompts_in_rooms_count_toward_the_limit_of_waiting_tokens() -> None:
    network = Network()
    prefill, decode = (Worker(network, address, capacity(), max_queued_tokens=100) for address in (PREFILL, None))
    for number in range(8):
        asked = request(f"r{number}", range(number, 30 + number), 4)
        prefill.receive(at(changed(asked, sampling=leg_sampling(asked.sampling, "prefill")), number))
        decode.receive(at(asked, number))
    for worker in (prefill, decode):
        assert list(worker.ended.values()) == [RefusalKind.OVERLOADED] * 4
        assert "prompts of 120 tokens" in str(worker.replies[-1].refusal)
        assert worker.side.load(0).waiting_tokens == 120
    run(network, prefill, decode)
    for worker in (prefill, decode):
        assert list(worker.ended.values()).count(FinishReason.LENGTH) == 4
        assert worker.side.load(0).waiting_tokens == 0
        worker.check_empty()


@pytest.mark.parametrize("short_of", ["rows at decode", "staging memory at decode", "staging memory at prefill"])
def test_time_in_a_room_counts_toward_the_limit_of_the_queue(short_of: str) -> None:
    """The first request runs, or holds what the second one waits for."""
    now_s, network, config = [0.0], Network(), SchedulingConfig(queue_timeout_s=5.0)
    at_prefill, at_decode = (8 if short_of == f"staging memory at {side}" else 1000 for side in ("prefill", "decode"))
    rows = 1 if "rows" in short_of else 4
    prefill = Worker(network, PREFILL, capacity(), lambda: now_s[0], config=config, staging_pages=at_prefill)
    decode = Worker(network, None, capacity(rows=rows), lambda: now_s[0], config=config, staging_pages=at_decode)
    prefill.holds_gathers = "memory" in short_of  # pages stay in staging memory
    for number, name in enumerate("ab"):
        asked = request(name, range(number, 30 + number), 60)
        prefill.receive(at(changed(asked, sampling=leg_sampling(asked.sampling, "prefill")), number))
        decode.receive(at(asked, number))
    for seconds in (0.0, 5.0):
        now_s[0] = seconds
        for _ in range(20):
            network.deliver_all()
            prefill.turn()
            decode.turn()
        assert ("b", 0) not in decode.ended, "not a moment too soon"
    now_s[0] = 5.6
    for _ in range(3):
        network.deliver_all()
        prefill.turn()
        decode.turn()
    assert decode.ended["b", 0] is RefusalKind.WAITED
    assert prefill.ended["b", 0] is (FinishReason.LENGTH if "rows" in short_of else RefusalKind.WAITED)
    prefill.holds_gathers = False
    run(network, prefill, decode)
    prefill.check_empty()
    decode.check_empty()


def test_a_request_is_due_by_the_time_of_its_room_whatever_came_to_the_queue_before() -> None:
    now_s, network, config = [0.0], Network(), SchedulingConfig(queue_timeout_s=5.0)
    prefill = Worker(network, PREFILL, capacity(rows=1), lambda: now_s[0], config=config)
    decode = Worker(network, None, capacity(), lambda: now_s[0])
    prefill.receive(at(request("in room", range(30), 1), 1))
    now_s[0] = 2.0
    for name in ("runs", "queued"):
        prefill.receive(request(name, range(9), 90))
        prefill.turn()
    decode.receive(at(request("in room", range(30), 4), 1))
    for seconds in (2.0, 5.5):
        now_s[0] = seconds
        for _ in range(5):
            network.deliver_all()
            prefill.turn()
            decode.turn()
    assert prefill.ended == {("in room", 0): RefusalKind.WAITED}
    run(network, prefill, decode)
    prefill.check_empty()
    decode.check_empty()


def test_time_in_a_room_is_shown_as_time_in_the_queue() -> None:
    pair = Pair()
    asked = request("a", range(60), 4)
    pair.decode.receive(at(asked, 1))
    pair.run()
    pair.now_s = 20.0
    pair.prefill.receive(at(changed(asked, sampling=leg_sampling(asked.sampling, "prefill")), 1))
    pair.run()
    queue_s = [[reply.times.queue_s for reply in side.replies if reply.times] for side in (pair.decode, pair.prefill)]
    assert queue_s == [[20.0], [0.0]]


def test_a_request_that_is_retracted_on_decode_finishes_or_can_be_aborted() -> None:
    pair = Pair(retract_also=RetractEvery(3))
    for name in "abc":
        pair.send(request(name, range(ord(name), ord(name) + 30), 12))
    retracted: list[str] = []
    for _ in range(40):
        pair.network.deliver_all()
        pair.prefill.turn()
        pair.decode.turn()
        plan = pair.decode.scheduler.last_plan
        if plan is not None and plan.retract and not retracted:
            retracted = [req.request_id for req in plan.retract]
            pair.decode.receive(Abort(retracted[0]))
    pair.run()
    assert pair.decode.ended[retracted[0], 0] is FinishReason.ABORT
    for name in set("abc") - set(retracted):
        assert pair.decode.outputs[name, 0] == expected(range(ord(name), ord(name) + 30), 12)
    assert pair.decode.scheduler.state.totals.retractions > 1
    pair.check_empty()


def test_ten_thousand_rooms_without_a_partner_take_bounded_memory_and_expire() -> None:
    network = Network()
    now_s = [0.0]
    prefill = Worker(network, PREFILL, capacity(), lambda: now_s[0], max_rooms=50)
    decode = Worker(network, None, capacity(), lambda: now_s[0], max_rooms=50)
    for number in range(10_000):
        side = prefill if number % 2 else decode
        side.receive(at(request(f"r{number}", range(number % 37, 40), 1), number))
        assert side.transfer.num_bootstrapping <= 50
    run(network, prefill, decode)
    assert prefill.transfer.num_bootstrapping == 50
    now_s[0] = 31.0
    run(network, prefill, decode)
    assert set(prefill.ended.values()) | set(decode.ended.values()) == {
        RefusalKind.OVERLOADED,
        RefusalKind.PEER,
    }
    prefill.check_empty()
    decode.check_empty()


def test_a_burst_beyond_decodes_rows_and_staging_memory_fails_no_request() -> None:
    """A window of 4 and a burst of 32; requests that only queue at decode are not given up."""
    now_s = [0.0]
    network = Network()
    prefill = Worker(network, PREFILL, capacity(), lambda: now_s[0])
    decode = Worker(network, None, capacity(rows=4, num_pages=60), lambda: now_s[0], staging_pages=25)
    pair = Pair()
    pair.network, pair.prefill, pair.decode = network, prefill, decode
    for number in range(32):
        pair.send(request(f"r{number}", range(number, number + 40), 30))
    for _ in range(3000):
        network.deliver_all()
        prefill.turn()
        decode.turn()
        now_s[0] += 1.0
        assert decode.transfer.staged_bytes <= 25 * decode.engine.page_layout.page_bytes
    for number in range(32):
        assert decode.outputs[f"r{number}", 0] == expected(range(number, number + 40), 30)
    assert set(prefill.ended.values()) == {FinishReason.LENGTH}
    pair.check_empty()


def test_staging_memory_full_of_dead_transfers_comes_free_without_new_work() -> None:
    network = Network()
    prefill = Worker(network, PREFILL, capacity(), staging_pages=12)
    decode = Worker(network, None, capacity(), staging_pages=12)
    for number in range(6):
        decode.receive(at(request(f"r{number}", range(number, number + 30), 4), number))
        prefill.receive(at(request(f"r{number}", range(number, number + 30), 1), number))
    assert decode.transfer.staged_bytes
    network.deliver_all()
    prefill.turn()
    network.cut(next(iter(network.links)))
    run(network, prefill, decode)
    assert set(decode.ended.values()) == set(prefill.ended.values()) == {RefusalKind.PEER}
    prefill.check_empty()
    decode.check_empty()


def test_a_prompt_larger_than_staging_memory_is_sent_in_part_and_completed_by_decode() -> None:
    network = Network()
    prefill = Worker(network, PREFILL, capacity(), staging_pages=5)
    decode = Worker(network, None, capacity(), staging_pages=9)
    prefill.receive(at(request("a", range(60), 1), 1))
    decode.receive(at(request("a", range(60), 4), 1))
    run(network, prefill, decode)
    assert decode.outputs["a", 0] == expected(range(60), 4)
    assert decode.scheduler.state.totals.extend_tokens == 60 - 5 * 4
    prefill.check_empty()
    decode.check_empty()


def test_two_running_requests_of_one_room_and_prompt_are_not_mixed_up() -> None:
    pair = Pair()
    pair.send(request("a", range(30), 4))
    pair.number -= 1
    pair.send(request("b", range(5, 30), 4))  # the same room, another prompt
    pair.number -= 1
    pair.send(request("c", range(30), 4))  # the same room and prompt
    pair.run()
    assert pair.decode.outputs["a", 0] == expected(range(30), 4)
    assert pair.decode.outputs["b", 0] == expected(range(5, 30), 4)
    assert pair.decode.ended["c", 0] is pair.prefill.ended["c", 0] is RefusalKind.INVALID
    pair.check_empty()


def test_pages_of_other_weights_are_not_used() -> None:
    pair = Pair()
    pair.decode.engine.weight_version = "v2"
    pair.send(request("a", range(30), 4))
    pair.run()
    assert pair.decode.ended["a", 0] is pair.prefill.ended["a", 0] is RefusalKind.PEER
    (text,) = {reply.refusal.text for reply in pair.decode.replies if reply.refusal}
    assert "v2" in text and "default" in text
    pair.decode.engine.weight_version = "default"
    pair.send(request("b", range(30), 4))
    pair.network.deliver_all()
    pair.prefill.turn()
    assert isinstance(pair.decode.side, DecodeSide)
    assert pair.decode.side.rooms.state_of("b") is DecodeState.RECEIVING
    pair.decode.engine.weight_version = "v2"  # while pages are on their way
    pair.run()
    assert pair.computed_by_decode == 30
    pair.check_empty()


@pytest.mark.parametrize("who", ["prefill", "decode"])
def test_pages_are_not_used_if_weights_were_exchanged_on_the_way_under_their_old_name(who: str) -> None:
    """The first chunk is computed and on its way by then."""
    pair = Pair(chunk=16)
    pair.send(request("a", range(30), 4))
    pair.network.deliver_all()
    pair.prefill.turn()
    pair.network.deliver_all()
    getattr(pair, who).scheduler.retire_cache()
    pair.run()
    assert pair.computed_by_decode == 30
    pair.check_empty()


def test_grammars_hold_from_the_first_token_and_are_compiled_while_prefill_computes() -> None:
    asked = [*some_requests(7, 12), asking("twice", range(30), fake(1, 12), n=2)]
    grammars = GrammarQueue(lambda grammar: compile_fake(grammar, VOCAB), 30.0)
    pair = Pair(chunk=16, eos=EOS, grammars=grammars, retract_also=RetractEvery(5))
    for each in asked:
        pair.send(each)
    assert grammars.num_waiting, "before any page has come"
    pair.run()
    for each in asked:
        for index in range(each.sampling.n if each.sampling.grammar is not None else 0):
            key = each.request_id, index
            assert (pair.decode.outputs[key], pair.decode.ended[key]) == constrained(each)
        assert pair.prefill.ended[each.request_id, 0] is FinishReason.LENGTH, "no grammar there, and one token"
    pair.check_empty()


def test_a_client_that_leaves_while_its_grammar_is_compiled_leaves_nothing() -> None:
    may_compile = threading.Event()

    def compile(grammar: Grammar) -> FakeMatcher:
        may_compile.wait()
        return compile_fake(grammar, VOCAB)

    grammars = GrammarQueue(compile, 30.0)
    pair = Pair(eos=EOS, grammars=grammars)
    for name in "ab":
        pair.send(asking(name, range(40), fake(3, 9)))
    pair.decode.receive(Abort("a"))
    assert grammars.num_waiting == 1
    may_compile.set()
    pair.run()
    assert pair.decode.outputs["b", 0] == constrained(asking("b", range(40), fake(3, 9)))[0]
    assert pair.decode.ended["a", 0] is FinishReason.ABORT and not grammars.num_waiting
    pair.check_empty()


def test_a_prompt_is_computed_with_its_adapter_and_shared_among_equal_loadings_only() -> None:
    pair = Pair(chunk=16, adapters=2)
    for worker, others in ((pair.prefill, ("two", "3r1")), (pair.decode, ("three", "5r2"))):
        worker.load_adapter("it", "1r4")  # under another number and namespace on each
        worker.load_adapter(*others)
    names = {"a": "it", "b": "", "c": "it", "d": "two"}
    for name, adapter in names.items():
        pair.send(changed(request(name, range(40), 5), adapter=adapter))
        pair.run()
    weights = generate(range(40), 5, frozenset(), VOCAB, weights=1000)
    assert pair.decode.outputs == {("a", 0): weights, ("b", 0): expected(range(40), 5), ("c", 0): weights}
    assert pair.decode.ended["d", 0] is pair.prefill.ended["d", 0] is RefusalKind.INVALID, "decode has no adapter two"
    assert pair.computed_by_decode <= 3 * 4
    cached = {reply.request_id: reply.cached_tokens for reply in pair.decode.replies if reply.finish_reason}
    assert cached == {"a": 0, "b": 0, "c": 36}
    pair.check_empty()


def test_pages_of_another_adapter_of_the_same_name_are_not_used() -> None:
    pair = Pair(chunk=16, adapters=2)
    pair.prefill.load_adapter("it", "1r4")
    pair.decode.load_adapter("it", "2r4")
    pair.send(changed(request("a", range(40), 4), adapter="it"))
    pair.run()
    assert pair.decode.ended["a", 0] is pair.prefill.ended["a", 0] is RefusalKind.PEER
    (text,) = {reply.refusal.text for reply in pair.decode.replies if reply.refusal}
    assert "1000r4" in text and "2000r4" in text
    assert isinstance(pair.decode.side, DecodeSide)
    for number, worker in enumerate((pair.decode, pair.prefill)):
        for each, folder in ((pair.prefill, "1r4"), (pair.decode, "1r4")):
            each.load_adapter("it", folder)
        name = f"b{number}"
        pair.send(changed(request(name, range(number, 40), 4), adapter="it"))
        pair.network.deliver_all()
        pair.prefill.turn()
        assert pair.decode.side.rooms.state_of(name) is DecodeState.RECEIVING
        worker.load_adapter("it", "3r4")  # while pages are on their way
        pair.run()
        there = 3000 if worker is pair.decode else 1000
        assert pair.decode.outputs[name, 0] == generate(range(number, 40), 4, frozenset(), VOCAB, weights=there)
    pair.check_empty()


def test_a_request_without_a_room_is_served_whole_by_either_worker() -> None:
    pair = Pair()
    for worker in (pair.prefill, pair.decode):
        worker.receive(request("a", range(30), 4))
    pair.run()
    assert pair.prefill.outputs == pair.decode.outputs == {("a", 0): expected(range(30), 4)}
    pair.check_empty()


@pytest.mark.parametrize("proved", [True, False])
def test_pages_of_a_server_that_has_not_proved_itself_are_found_by_its_own_requests_alone(proved: bool) -> None:
    """Without a secret anything may be at the address that a client names, and send what it likes."""
    pair = Pair()
    pair.decode.wire.proves_peers = proved
    other = Worker(pair.network, ("other", 8998), capacity(num_pages=200))
    moved: list[int] = []
    for number, (worker, address) in enumerate(
        ((pair.prefill, PREFILL), (pair.prefill, PREFILL), (other, ("other", 8998)), (other, ("other", 8998)))
    ):
        before = pair.decode.transfer.moved_bytes
        asked = request(str(number), range(40), 3)
        worker.receive(at(changed(asked, sampling=leg_sampling(asked.sampling, "prefill")), number, address))
        pair.decode.receive(at(asked, number, address))
        run(pair.network, pair.prefill, other, pair.decode)
        assert pair.decode.outputs[str(number), 0] == expected(range(40), 3)
        moved.append(pair.decode.transfer.moved_bytes - before)
    assert moved[0] > 0 == moved[1] == moved[3]
    assert moved[2] == (0 if proved else moved[0])
    computed = pair.computed_by_decode
    pair.decode.receive(request("whole", range(40), 3))
    pair.run()
    assert (pair.computed_by_decode - computed >= 40) == (not proved)
    pair.check_empty()


def test_a_prefill_worker_that_is_not_there_fails_the_request_at_once() -> None:
    network = Network()
    decode = Worker(network, None, capacity())
    decode.receive(at(request("a", range(30), 4), 1))
    run(network, decode)
    assert decode.ended["a", 0] is RefusalKind.PEER
    decode.check_empty()


@pytest.mark.parametrize("policy", WRITE_POLICIES)
def test_a_request_that_is_retracted_on_decode_loads_its_prompt_from_the_host(policy: str) -> None:
    """The other answer takes most pages of the prompt until it ends."""
    config = SchedulingConfig(schedule_conservativeness=0.1)
    computed: dict[int, int] = {}
    for host_pages in (0, 100):
        pair = Pair(decode_pages=25, host_pages=host_pages, policy=policy, config=config)
        pair.send(request("long", range(4), 80))
        for _ in range(12):
            pair.network.deliver_all()
            pair.prefill.turn()
            pair.decode.turn()
        pair.send(request("a", range(48), 20))
        pair.run()
        assert pair.decode.outputs == {("long", 0): expected(range(4), 80), ("a", 0): expected(range(48), 20)}
        assert pair.decode.scheduler.state.totals.retractions > 0
        computed[host_pages] = pair.computed_by_decode
        loaded = pair.decode.scheduler.load(0).host.loaded_tokens
        assert (loaded >= 32) == bool(host_pages)
        pair.check_empty()
    assert computed[100] <= computed[0] - 32


def test_prompts_that_have_left_both_pools_are_loaded_on_both_sides_and_not_sent_again() -> None:
    pair = Pair(pages=21, decode_pages=21, host_pages=100)
    prompts = {name: range(first, first + 48) for name, first in (("a", 0), ("b", 100), ("c", 200))}
    sent = {name: pair.moved_bytes(request(name, prompt, 6)) for name, prompt in prompts.items()}
    assert all(sent.values())
    computed = pair.prefill.scheduler.state.totals.extend_tokens, pair.computed_by_decode
    again = {name: pair.moved_bytes(request(f"{name}2", prompt, 6)) for name, prompt in prompts.items()}
    assert again == dict.fromkeys(prompts, 0)
    assert pair.prefill.scheduler.state.totals.extend_tokens - computed[0] <= 3 * 4
    assert pair.computed_by_decode - computed[1] <= 3 * 4
    for name, prompt in prompts.items():
        assert pair.decode.outputs[f"{name}2", 0] == pair.decode.outputs[name, 0] == expected(prompt, 6)
    cached = {reply.request_id: reply.cached_tokens for reply in pair.decode.replies if reply.finish_reason}
    assert cached["a2"] == cached["b2"] == cached["c2"] == 44
    pair.check_empty()


def test_what_follows_a_prefix_that_only_the_host_holds_lands_behind_it() -> None:
    """Decode asks for the new pages alone; those before them come back from the host when these arrive."""
    pair = Pair(pages=200, decode_pages=31, host_pages=100)
    chat = list(range(48))
    first = pair.moved_bytes(request("a", chat, 6))
    for name, start in (("b", 100), ("c", 200), ("d", 300)):
        pair.moved_bytes(request(name, range(start, start + 60), 6))
    assert 0 < pair.moved_bytes(request("e", [*chat, *range(400, 440)], 6)) < first
    assert pair.decode.outputs["e", 0] == expected([*chat, *range(400, 440)], 6)
    assert pair.decode.scheduler.load(0).host.loaded_tokens >= 44
    cached = {reply.request_id: reply.cached_tokens for reply in pair.decode.replies if reply.finish_reason}
    assert cached["e"] == 48
    pair.check_empty()


def test_a_decode_server_that_starts_again_finds_in_its_file_what_prefill_servers_computed(tmp_path: Path) -> None:
    path, first = tmp_path / "pages.kv", Pair(host_pages=100)
    assert first.moved_bytes(request("a", range(48), 6))
    assert first.decode.tier is not None
    first.decode.scheduler.before_exit(first.decode.engine)
    kv_file.save(first.decode.tier.host, path, 4)
    second = Pair(host_pages=100)
    assert second.decode.tier is not None
    assert kv_file.load(second.decode.tier.host, path, 4) == 13
    assert second.moved_bytes(request("a", range(48), 6)) == 0 and second.computed_by_decode <= 4
    assert second.decode.outputs["a", 0] == expected(range(48), 6)
    second.check_empty()


@pytest.mark.parametrize("proved", [True, False])
def test_hosted_pages_of_a_server_that_has_not_proved_itself_are_found_by_its_own_requests_alone(proved: bool) -> None:
    """On the host as in the pool, which these prompts have left."""
    pair = Pair(decode_pages=21, host_pages=100)
    pair.decode.wire.proves_peers = proved
    other = Worker(pair.network, ("other", 8998), capacity(num_pages=200))
    prompt = range(48)
    assert pair.moved_bytes(request("a", prompt, 3))
    for name, first in (("b", 100), ("c", 200)):
        pair.moved_bytes(request(name, range(first, first + 48), 3))
    before = pair.decode.transfer.moved_bytes
    asked = request("of other", prompt, 3)
    other.receive(at(changed(asked, sampling=leg_sampling(asked.sampling, "prefill")), 99, ("other", 8998)))
    pair.decode.receive(at(asked, 99, ("other", 8998)))
    run(pair.network, other, pair.decode)
    assert (pair.decode.transfer.moved_bytes > before) == (not proved)
    computed = pair.computed_by_decode
    pair.decode.receive(request("whole", prompt, 3))
    pair.run()
    assert (pair.computed_by_decode - computed >= 48) == (not proved)
    for name in ("a", "of other", "whole"):
        assert pair.decode.outputs[name, 0] == expected(prompt, 3)
    assert pair.moved_bytes(request("a2", prompt, 3)) == 0
    pair.check_empty()
