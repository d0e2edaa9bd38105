"""Requests run with the adapters that they name, wherever those lie, and none waits for ever for its adapter."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from msgspec.structs import replace as changed

from jaxsgl.batch.buckets import BucketSet
from jaxsgl.messages.orders import Abort, Answer, ListAdapters, LoadAdapter, ToEngine, UnloadAdapter
from jaxsgl.requests.request import Request
from jaxsgl.scheduler.loop import run_loop
from jaxsgl.scheduler.served_engine import StepsOnly
from jaxsgl.testing.engine import FakeEngine, RetractEvery, ScriptedMailbox, generate
from tests.checked import CheckedScheduler
from tests.scheduler.serving import VOCAB, Script, capacity, request

PROMPT = list(range(30))
ANSWERED: list[ToEngine] = []  # in a script: go on once all orders so far are answered


class Served(ScriptedMailbox):
    """A script that may wait for answers, and what came of it."""

    def __init__(self, script: Sequence[list[ToEngine]]) -> None:
        super().__init__(script)
        self._asked: set[int] = set()
        self.ends: list[str] = []  # ids in the order of their ends

    def receive(self, wait_s: float) -> list[ToEngine]:
        if self._script and self._script[0] is ANSWERED:
            if self._asked - self.answers.keys():
                time.sleep(0.02)  # another thread loads; requests go on meanwhile, turn by turn
                return []
            self._script.popleft()
        messages = super().receive(wait_s)
        orders = (LoadAdapter, UnloadAdapter, ListAdapters)
        self._asked |= {message.number for message in messages if isinstance(message, orders)}
        return messages

    def send(self, news: Any) -> None:
        super().send(news)
        self.ends += [reply.request_id for reply in getattr(news, "replies", ()) if reply.finish_reason]

    @property
    def answers(self) -> dict[int, Answer]:
        return {news.number: news for news in self.other_news if isinstance(news, Answer)}

    def refusal(self, request_id: str) -> str:
        return next(reply.refusal.text for reply in self.replies if reply.request_id == request_id and reply.refusal)


def serve(
    script: Sequence[list[ToEngine]], *, places: int = 2, rank: int = 4, retract: int | None = None, **sizes: int
) -> tuple[Served, CheckedScheduler, FakeEngine]:
    limits = replace(capacity(**sizes), max_adapters=places, adapter_columns=places * rank)
    buckets = BucketSet.derive(limits, decode_steps=2)
    retract_also = None if retract is None else RetractEvery(retract)
    scheduler = CheckedScheduler(limits, buckets, (), retract_also=retract_also, max_loaded_loras=4)
    engine, mailbox = FakeEngine(limits), Served(script)
    run_loop(scheduler, engine, mailbox, 1)
    assert scheduler.is_idle and scheduler.cache.num_available == limits.num_pages - 1
    return mailbox, scheduler, engine


def load(
    number: int, name: str, weights: int, rank: int = 4, pinned: bool = False, replace: bool = False
) -> LoadAdapter:
    return LoadAdapter(number, name, f"{weights}r{rank}", pinned, replace)


def ask(request_id: str, adapter: str, max_tokens: int = 6, prompt: Sequence[int] = PROMPT, n: int = 1) -> Request:
    made = request(request_id, prompt, max_tokens)
    return changed(made, adapter=adapter, sampling=changed(made.sampling, n=n))


def tokens_of(weights: int, max_tokens: int = 6, prompt: Sequence[int] = PROMPT) -> list[int]:
    return generate(prompt, max_tokens, frozenset(), VOCAB, weights=1000 * weights)


def test_requests_with_several_adapters_and_none_share_steps_and_yield_their_own_tokens() -> None:
    asked: list[ToEngine] = [ask("a", "one"), ask("b", "two"), ask("c", ""), ask("d", "one")]
    mailbox, scheduler, _ = serve([[load(1, "one", 1), load(2, "two", 2, 2)], ANSWERED, asked])
    for request_id, weights in zip("abcd", (1, 2, 0, 1), strict=True):
        assert mailbox.output_ids(request_id) == tokens_of(weights)
    mixed = [inputs for inputs in scheduler.launched if inputs.num_seqs == 4 and inputs.bucket.kind == "decode"]
    assert mixed and all(inputs.bucket.adapter_columns == 8 for inputs in mixed)
    assert mailbox.loads[-1].adapters == ("one", "two")


def test_batches_without_adapters_run_the_programs_of_a_server_that_has_none() -> None:
    _, scheduler, _ = serve([[load(1, "one", 1)], ANSWERED, [ask("a", "one"), ask("b", "", 40)]])
    assert {inputs.bucket.adapter_columns for inputs in scheduler.launched} == {0, 8}
    assert scheduler.launched[-1].bucket.adapter_columns == 0
    assert all((inputs.arrays.adapters is None) == (not inputs.bucket.adapter_columns) for inputs in scheduler.launched)


def test_same_name_with_new_weights_finds_no_old_kv() -> None:
    script: Script = [[load(1, "one", 1)], ANSWERED, [ask("a", "one")], [UnloadAdapter(2, "one")], ANSWERED]
    script += [[load(3, "one", 2)], ANSWERED, [ask("b", "one")], *[[]] * 40, [ask("c", "one")]]
    mailbox, _, engine = serve(script)
    assert mailbox.output_ids("a") == tokens_of(1)
    assert mailbox.output_ids("b") == mailbox.output_ids("c") == tokens_of(2)
    cached = {reply.request_id: reply.cached_tokens for reply in mailbox.replies}
    assert cached == {"a": 0, "b": 0, "c": 28}
    assert list(engine.adapters.kept) == [2]


def test_equal_weights_find_their_kv_after_another_loading_under_another_name() -> None:
    script: Script = [[load(1, "one", 1)], ANSWERED, [ask("a", "one")], [UnloadAdapter(2, "one")], ANSWERED]
    script += [[load(3, "two", 1), load(4, "none of these", 1, rank=2)], ANSWERED, [ask("b", "two")]]
    mailbox, _, _ = serve([*script, *[[]] * 40, [ask("c", "none of these")]])
    assert mailbox.output_ids("a") == mailbox.output_ids("b") == tokens_of(1)
    assert {reply.request_id: reply.cached_tokens for reply in mailbox.replies} == {"a": 0, "b": 28, "c": 0}


def test_a_salt_that_imitates_an_adapter_does_not_reach_its_kv() -> None:
    salted = [changed(ask(f"s{i}", ""), cache_salt=salt) for i, salt in enumerate(("one", "1", "\xfe1"))]
    script: Script = [[load(1, "one", 1)], ANSWERED, [ask("a", "one")], *[[]] * 40, list(salted)]
    mailbox, _, _ = serve(script)
    assert all(reply.cached_tokens == 0 for reply in mailbox.replies)
    assert all(mailbox.output_ids(each.request_id) == tokens_of(0) for each in salted)


@pytest.mark.parametrize("policy_prefix", [0, 28])
def test_with_one_place_a_request_is_served_however_many_come_for_another_adapter(policy_prefix: int) -> None:
    """Those end at different times, so that some run at any time."""
    prompts = [[*PROMPT[:policy_prefix], i, 2 * i] for i in range(200)]
    lengths = [4 + 7 * i % 17 for i in range(200)]
    script: Script = [[load(1, "one", 1), load(2, "two", 2)], ANSWERED, [ask("a0", "one", 8)], [ask("b", "two", 8)]]
    script += [[ask(f"a{i}", "one", lengths[i], prompts[i])] for i in range(1, 200)]
    mailbox, _, _ = serve(script, places=1)
    assert mailbox.output_ids("b") == tokens_of(2, 8)
    assert mailbox.ends.index("b") < 60, "32 may overtake it, and 8 run then"
    assert mailbox.output_ids("a199") == tokens_of(1, lengths[199], prompts[199])


def test_requests_without_an_adapter_pass_one_that_waits_for_a_place() -> None:
    script: Script = [
        [load(1, "one", 1), load(2, "two", 2)],
        ANSWERED,
        [ask("a", "one", 60)],
        [ask("b", "two"), ask("c", "")],
    ]
    mailbox, _, _ = serve(script, places=1)
    assert mailbox.ends == ["c", "a", "b"]
    assert mailbox.output_ids("b") == tokens_of(2)
    totals = mailbox.loads[-1].totals
    assert totals.short_of_adapters > 0
    assert (totals.short_of_tokens, totals.short_of_rows, totals.short_of_chunk) == (0, 0, 0)


def test_unload_is_answered_when_all_samples_have_ended_and_refuses_requests_from_then_on() -> None:
    script: Script = [[load(1, "one", 1)], ANSWERED, [ask("a", "one", 20, n=16)], [], [UnloadAdapter(2, "one")]]
    script += [[ask("late", "one")], ANSWERED]
    mailbox, scheduler, engine = serve(script)
    assert mailbox.answers[2].ok and mailbox.ends.count("a") == 16
    assert mailbox.refusal("late") == "no adapter named one is loaded: none is"
    assert scheduler.state.adapters is not None
    assert not engine.adapters.kept and not scheduler.state.adapters.on_device


def test_an_adapter_that_is_replaced_serves_those_that_have_it_and_is_forgotten_after_them() -> None:
    script: Script = [[load(1, "one", 1, pinned=True)], ANSWERED, [ask("old", "one", 60)], []]
    script += [[load(2, "one", 2, pinned=True, replace=True)], ANSWERED, [ask("new", "one")]]
    mailbox, _, engine = serve(script)
    assert (mailbox.output_ids("old"), mailbox.output_ids("new")) == (tokens_of(1, 60), tokens_of(2))
    assert mailbox.ends == ["new", "old"]
    assert list(engine.adapters.kept) == [2]


def test_a_pinned_adapter_stays_on_the_device_and_others_leave_in_order_of_their_last_use() -> None:
    names = ["one", "two", "three", "four"]
    loads: list[ToEngine] = [load(i, name, i, pinned=name == "one") for i, name in enumerate(names, 1)]
    script: Script = [loads, ANSWERED]
    for name in ("one", "two", "three", "two", "four"):
        script += [[ask(f"{name}-{len(script)}", name)], *[[]] * 30]
    _, scheduler, _ = serve(script, places=3)
    assert scheduler.state.adapters is not None
    on_device = {adapter.name for adapter in scheduler.state.adapters.on_device.values()}
    assert on_device == {"one", "two", "four"}


def test_orders_that_cannot_be_carried_out_say_why_and_change_nothing() -> None:
    orders: list[ToEngine] = [load(1, "one", 1, pinned=True), LoadAdapter(2, "bad", "nowhere"), load(3, "big", 1, 5)]
    more: list[ToEngine] = [load(4, "one", 2), load(5, "two", 2, pinned=True), UnloadAdapter(6, "zero")]
    full: list[ToEngine] = [load(i, f"n{i}", 1) for i in (7, 8, 9, 10)]
    mailbox, _, _ = serve([orders, ANSWERED, more, ANSWERED, full, ANSWERED, [ListAdapters(11)], [ask("r", "no")]])
    told = {number: answer.text for number, answer in mailbox.answers.items() if not answer.ok}
    assert told.keys() == {2, 3, 4, 5, 6, 10}
    assert "nowhere holds no adapter" in told[2] and "--max-lora-rank" in told[3]
    assert "loaded already" in told[4] and "--max-loras-per-batch" in told[5] and "--max-loaded-loras" in told[10]
    assert mailbox.answers[11].text.count('"name"') == 4
    assert mailbox.refusal("r").startswith("no adapter named no is loaded: loaded are one, n7")


def test_a_name_or_an_id_stands_for_one_adapter_alone() -> None:
    def load_as(number: int, name: str, alias: str, replace: bool = False) -> LoadAdapter:
        return LoadAdapter(number, name, f"{number}r4", False, replace, alias)

    orders: list[ToEngine] = [load_as(1, "sql", "id-1")]
    more: list[ToEngine] = [load_as(2, "poet", "id-1"), load_as(3, "id-1", "id-2"), load_as(4, "poet", "sql")]
    more += [load_as(5, "same", "same"), load_as(6, "sql", "id-1", replace=True), load_as(7, "poet", "id-2")]
    mailbox, _, _ = serve([orders, ANSWERED, more, ANSWERED])
    told = {number: answer.text for number, answer in mailbox.answers.items() if not answer.ok}
    assert told.keys() == {2, 3, 4}
    assert told[2] == told[3] == told[4].replace("sql names", "id-1 names")
    assert told[2].startswith("id-1 names the adapter sql already: unload that first")


def test_without_adapters_orders_and_requests_for_them_are_refused() -> None:
    sizes = capacity()
    scheduler, engine = CheckedScheduler(sizes, BucketSet.derive(sizes), ()), FakeEngine(sizes)
    mailbox = Served([[load(1, "one", 1), ask("a", "one")]])
    run_loop(scheduler, StepsOnly(engine), mailbox, 1)
    assert "--enable-lora" in mailbox.answers[1].text
    assert mailbox.refusal("a") == "no adapter named one is loaded: none is"


@pytest.mark.parametrize("seed", range(4))
def test_random_histories_of_loads_requests_aborts_and_retractions_yield_the_tokens_of_their_adapters(
    seed: int,
) -> None:
    rng = random.Random(seed)
    script: Script = [[]]
    weights: dict[str, int] = {}
    expected: dict[str, list[int]] = {}
    aborted: set[str] = set()
    for number in range(1, 120):
        draw = rng.random()
        name = rng.choice("wxyz")
        if draw < 0.12 and name not in weights:
            script += [[load(number, name, number, rng.randint(1, 4))], ANSWERED, []]
            weights[name] = number
        elif draw < 0.17 and name in weights:
            script[-1].append(UnloadAdapter(number, name))
            del weights[name]
        elif draw < 0.24 and expected:
            aborted.add(rng.choice(list(expected)))
            script[-1].append(Abort(max(aborted)))
            aborted.add(max(aborted))
        else:
            adapter = rng.choice([*weights, ""])
            prompt, count = PROMPT[: rng.randint(1, 30)], rng.randint(1, 25)
            expected[str(number)] = tokens_of(weights.get(adapter, 0), count, prompt)
            script[-1].append(ask(str(number), adapter, count, prompt))
        script += [[] for _ in range(rng.choice((0, 1, 1, 3)))]
    mailbox, _, engine = serve(script, retract=5, num_pages=60)
    for request_id, tokens in expected.items():
        found = mailbox.output_ids(request_id)
        assert found == (tokens[: len(found)] if request_id in aborted else tokens)
    assert len(engine.adapters.kept) == len(weights)
