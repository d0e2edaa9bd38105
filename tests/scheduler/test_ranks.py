"""Ranks of one engine: random histories, and what becomes of requests, steps and loads where ranks differ.

The histories are those of test_state_machine.py: every request yields what it would yield alone, in whatever rank it
runs. Each rank checks itself after every event as a scheduler alone does, and the fake engine gives each rank no more
than its part of what goes to the device.
"""

from __future__ import annotations

import itertools
import json
from collections import deque
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule, run_state_machine_as_test

from jaxsgl.batch.buckets import BucketSet, Capacity
from jaxsgl.batch.inputs import StepInputs
from jaxsgl.cache.pages import pages_for
from jaxsgl.config.engine import POLICIES, SchedulingConfig
from jaxsgl.messages.orders import Abort, Answer, News
from jaxsgl.messages.replies import CacheEvents
from jaxsgl.requests.outputs import PoolingSpec
from jaxsgl.requests.request import FinishReason, Request
from jaxsgl.scheduler.grammars.queue import GrammarQueue, NoGrammars, grammars_of_ranks
from jaxsgl.scheduler.loop import run_loop
from jaxsgl.scheduler.orders.control import Control
from jaxsgl.scheduler.orders.inspection import LeakCheck
from jaxsgl.scheduler.orders.journal import CacheJournal
from jaxsgl.scheduler.ranks import RankedScheduler
from jaxsgl.testing.engine import FakeHandle, FakeRanks, RetractEvery, ScriptedMailbox
from tests.cache_mirror import CacheMirror, cached_prefixes
from tests.checked import CheckedScheduler, WatchedScheduler
from tests.grids import count
from tests.scheduler import serving
from tests.scheduler.answers import EOS, VOCAB, Answers
from tests.scheduler.grammars import GrammarsInTurn
from tests.scheduler.serving import expected, request
from tests.scheduler.test_state_machine import AtOnce, ServingMachine


class RankedMachine(ServingMachine):
    """The same events for ranks; what needs one rank is off."""

    @initialize(
        num_ranks=st.integers(1, 4),
        page_size=st.sampled_from([1, 2, 3, 8, 16]),
        context=st.sampled_from([12, 40, 80]),
        spare_pages=st.integers(1, 12),
        rows=st.integers(1, 4),
        chunk=st.sampled_from([4, 8, 80]),
        radix=st.sampled_from([True, True, True, False]),
        overlap=st.booleans(),
        config=st.builds(
            SchedulingConfig,
            schedule_conservativeness=st.sampled_from([0.01, 1.0, 2.0]),
            max_prefill_tokens=st.sampled_from([5, 16384]),
            enable_mixed_chunk=st.booleans(),
            decode_first=st.booleans(),
            schedule_policy=st.sampled_from(POLICIES),
            queue_timeout_s=st.sampled_from([None, None, 9.0]),
            running_timeout_s=st.sampled_from([None, None, 4.0]),
        ),
        retract_every=st.sampled_from([None, None, 2, 3, 7]),
        pooling=st.sampled_from([None, None, PoolingSpec("last", 1), PoolingSpec("mean", 1)]),
        snapshots=st.sampled_from([None, None, 1, 4, 40]),
    )
    def start(
        self,
        num_ranks: int,
        page_size: int,
        context: int,
        spare_pages: int,
        rows: int,
        chunk: int,
        radix: bool,
        overlap: bool,
        config: SchedulingConfig,
        retract_every: int | None,
        pooling: PoolingSpec | None,
        snapshots: int | None,
    ) -> None:
        num_pages = pages_for(context, page_size) // 2 + spare_pages + 2
        sizes = Capacity(page_size, num_pages, rows, context, min(chunk, context), VOCAB)
        self.capacity = replace(sizes, pooling=pooling, num_snapshots=snapshots)
        self.config = config
        self.now_s = 0.0
        self.tier = None
        self.holds_gathers = False
        grammars = GrammarsInTurn(VOCAB, lambda: self.now_s)
        self.ranks = [
            WatchedScheduler(
                self.capacity,
                BucketSet.derive(self.capacity, num_ranks=num_ranks),
                EOS,
                config,
                radix_cache=radix,
                retract_also=None if retract_every is None else RetractEvery(retract_every),
                clock=lambda: self.now_s,
                grammars=own,
            )
            for own in grammars_of_ranks(grammars, num_ranks)
        ]
        self.scheduler = RankedScheduler(self.ranks, grammars, lambda: self.now_s)  # type: ignore[assignment]
        self.engine = FakeRanks(self.capacity, num_ranks)
        self.leak_check = LeakCheck(self.scheduler, clock=lambda: self.now_s)
        self.news: list[News] = []
        self.control = Control(self.scheduler, self.engine, self.leak_check, lambda: self.now_s, loader=AtOnce())
        self.numbers = itertools.count()
        self.unanswered: set[int] = set()
        self.unread_allowed = int(overlap)
        self.in_flight: deque[FakeHandle] = deque()
        self.answers = Answers(config)
        self.journals: list[CacheJournal] = []
        self.mirrors: list[CacheMirror] = []

    @rule()
    def watch(self) -> None:
        """Watches the caches, at any time and any number of times."""
        self.journals = self.journals or [CacheJournal(rank.cache) for rank in self.ranks]
        for journal in self.journals:
            journal.take()
        self.mirrors = [CacheMirror(journal.snapshot()) for journal in self.journals]
        self.settle()

    def settle(self) -> None:
        self.scheduler.check()
        self.check_load()
        for journal, mirror, rank in zip(self.journals, self.mirrors, self.ranks, strict=False):
            mirror.take(journal.take())
            assert mirror.prefixes == cached_prefixes(rank.cache.edges())
        for reply in self.scheduler.take_replies():
            self.answers.take(reply, self.now_s)

    def take_answers(self) -> None:
        for news in self.news:
            assert isinstance(news, Answer) and news.number in self.unanswered, "a command is answered once"
            self.unanswered.remove(news.number)
            if news.text.startswith('{"paused"'):
                assert not json.loads(news.text).get("leaks")
        self.news.clear()

    def check_load(self) -> None:
        load = self.scheduler.load(0)
        assert load.num_waiting + load.num_running <= len(self.answers.unended())
        for of_rank in load.ranks:
            assert of_rank.num_running <= self.capacity.num_rows
            assert of_rank.used_tokens + of_rank.cached_tokens <= self.capacity.pool_tokens
            assert (of_rank.used_tokens > 0) == (of_rank.num_running > 0)

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        self.resume()
        turns = 0
        while not self.scheduler.is_idle or self.control.is_active:
            self.turn()
            turns += 1
            assert turns < 20_000, "a request waits forever"
        self.turn()
        assert not self.unanswered, "a command was never answered"
        assert not self.leak_check.num_leaks
        for rank in self.ranks:
            assert rank.cache.num_available == self.capacity.num_pages - 1, "a page is lost"
        totals = self.scheduler.load(0).totals
        assert totals.output_tokens == sum(map(len, self.answers.outputs.values()))
        assert totals.extend_tokens <= totals.extend_tokens_padded and totals.decode_rows <= totals.decode_rows_padded
        self.answers.check(self.capacity.limits)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("part", range(count(1, 3)))
def test_every_request_yields_its_own_tokens_in_any_rank(part: int) -> None:
    run_state_machine_as_test(
        RankedMachine,
        settings=settings(
            max_examples=count(6, 200),
            stateful_step_count=60,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


class Steps(RankedScheduler):
    """Keeps the steps that it launches."""

    def __init__(self, *args: object) -> None:
        super().__init__(*args)  # type: ignore[arg-type]
        self.launched: list[StepInputs] = []

        self._compiled = set(self.buckets.all())

    def launch(self) -> StepInputs | None:
        inputs = super().launch()
        if inputs is not None:
            assert inputs.bucket in self._compiled
            self.launched.append(inputs)
        return inputs


MIXED = SchedulingConfig(enable_mixed_chunk=True)


def ranked(
    sizes: Capacity, num_ranks: int, config: SchedulingConfig = MIXED, max_queued_requests: int | None = None
) -> Steps:
    buckets = BucketSet.derive(sizes, num_ranks=num_ranks)
    made = [
        CheckedScheduler(sizes, buckets, (), config, max_queued_requests=max_queued_requests) for _ in range(num_ranks)
    ]
    return Steps(made)


def serve(scheduler: Steps, sizes: Capacity, script: Sequence[Sequence[Request | Abort]]) -> ScriptedMailbox:
    mailbox = ScriptedMailbox(script)
    run_loop(scheduler, FakeRanks(sizes, len(scheduler.ranks)), mailbox, depth=1)
    assert scheduler.is_idle and not scheduler.leaks()
    return mailbox


def to(rank: int, request: Request) -> Request:
    return Request(request.request_id, request.prompt_ids, request.sampling, rank=rank)


@pytest.mark.parametrize("rank", [0, 1])
def test_requests_decode_in_the_steps_in_which_their_rank_or_another_extends(rank: int) -> None:
    """Each step that extends the long prompt yields a token of the running request."""
    sizes = serving.capacity(max_extend_tokens=16, rows=8)
    scheduler = ranked(sizes, 2)
    long = list(range(1, 100))
    mailbox = serve(
        scheduler, sizes, [[to(rank, request("short", [7, 8], 12))], [], [], [to(1, request("long", long, 2))]]
    )
    assert mailbox.output_ids("short") == expected([7, 8], 12)
    assert mailbox.output_ids("long") == expected(long, 2)
    extends = [step for step in scheduler.launched if step.bucket.kind == "extend" and step.of_ranks[1].num_tokens > 2]
    assert len(extends) >= 7  # chunks of 16, less a decode in the same rank
    assert all(step.num_seqs == 2 for step in extends), "a request stood still while another was extended"


def test_mlps_compute_few_more_places_than_all_ranks_have_tokens() -> None:
    """One rank extends a prompt of 60 tokens while three decode: in the whole step 63 tokens, not 4 times 64."""
    sizes = serving.capacity(rows=8)
    scheduler = ranked(sizes, 4)
    shorts = [to(rank, request(f"r{rank}", [rank + 5] * 4, 12)) for rank in range(3)]
    serve(scheduler, sizes, [shorts, [], [], [to(3, request("long", list(range(1, 61)), 3))]])
    (step,) = (step for step in scheduler.launched if step.num_tokens > 60)
    assert (step.num_tokens, step.bucket.num_tokens, step.bucket.mlp_tokens) == (63, 64, 64)
    totals = scheduler.load(0).totals
    assert totals.extend_tokens_padded == sum(
        each.padded_tokens for each in scheduler.launched if each.bucket.kind == "extend"
    )
    for each in scheduler.launched:
        assert each.num_tokens <= each.padded_tokens < max(2 * each.num_tokens, 17)


def test_a_step_has_the_smallest_bucket_of_all_ranks_and_ranks_without_work_are_padding() -> None:
    sizes = serving.capacity(rows=8)
    scheduler = ranked(sizes, 4)
    serve(scheduler, sizes, [[to(2, request("a", [5] * 9, 3)), to(3, request("b", list(range(1, 41)), 3))]])
    first, *others = scheduler.launched
    assert (first.bucket.kind, first.bucket.num_tokens) == ("extend", 64)
    assert [part.num_tokens for part in first.of_ranks] == [0, 0, 9, 40]
    assert {(step.bucket.kind, step.bucket.num_seqs, step.bucket.mlp_tokens) for step in others} == {("decode", 2, 2)}
    for step in scheduler.launched:
        for rank in (0, 1):
            arrays = step.of_ranks[rank].arrays
            assert not arrays.slots.any() and (arrays.sample_rows == sizes.num_rows).all()


def test_a_prompt_goes_where_its_prefix_is_and_others_where_least_is_to_be_computed() -> None:
    sizes = serving.capacity()
    scheduler = ranked(sizes, 3)
    shared = list(range(1, 41))
    serve(scheduler, sizes, [[to(1, request("first", shared))]])
    assert scheduler._place(request("again", [*shared, 77])) == 1
    assert scheduler._place(request("other", [900, 901])) == 0
    scheduler.receive([to(0, request("waits", [3] * 30))])
    assert scheduler._place(request("other", [900, 901])) == 1
    assert scheduler._place(to(2, request("asked", [900, 901]))) == 2


def test_no_request_is_refused_while_the_queue_of_another_rank_takes_it() -> None:
    sizes = serving.capacity()
    scheduler = ranked(sizes, 3, max_queued_requests=2)
    shared = list(range(1, 41))
    serve(scheduler, sizes, [[to(1, request("first", shared))]])
    scheduler.receive([request(f"r{i}", [*shared, i]) for i in range(6)])
    assert not scheduler.take_replies() and [rank.num_waiting for rank in scheduler.ranks] == [2, 2, 2]
    scheduler.receive([request("late", shared)])
    (reply,) = scheduler.take_replies()
    assert reply.refusal is not None and "the queue is full" in reply.refusal.text


def test_a_request_that_lacks_pages_in_its_rank_moves_to_an_idle_one() -> None:
    sizes = serving.capacity(num_pages=12, context=44, rows=4)
    scheduler = ranked(sizes, 2)
    prompt = list(range(1, 31))
    stuck = request("stuck", [*prompt, 40], 8)  # rank 0 has a part of it
    mailbox = serve(scheduler, sizes, [[to(0, request("runs", prompt, 12))], [], [stuck]])
    assert mailbox.output_ids("stuck") == expected([*prompt, 40], 8)
    assert scheduler.ranks[1].state.totals.prompt_tokens == 31
    together = [step for step in scheduler.launched if all(part.num_seqs for part in step.of_ranks)]
    assert together, "it waited for pages that another rank had"


def test_a_request_whose_client_has_named_its_rank_stays_there() -> None:
    sizes = serving.capacity(num_pages=12, context=44, rows=4)
    scheduler = ranked(sizes, 2)
    prompt = list(range(1, 31))
    script = [[to(0, request("runs", prompt, 12))], [], [to(0, request("stuck", [*prompt, 40], 8))]]
    mailbox = serve(scheduler, sizes, script)
    assert mailbox.output_ids("stuck") == expected([*prompt, 40], 8)
    assert scheduler.ranks[1].state.totals.prompt_tokens == 0


def test_aborts_reach_whichever_rank_has_the_request() -> None:
    sizes = serving.capacity()
    scheduler = ranked(sizes, 3)
    arrivals = [to(rank, request(f"r{rank}", [rank + 5] * 6, 50)) for rank in range(3)]
    mailbox = serve(scheduler, sizes, [arrivals, [], [], [Abort("r1")], [], [Abort("r0"), Abort("r2")]])
    for rank in range(3):
        assert serving.finish_reason(mailbox, f"r{rank}") is FinishReason.ABORT
        output = mailbox.output_ids(f"r{rank}")
        assert output == expected([rank + 5] * 6, 50)[: len(output)]


def test_each_rank_keeps_states_of_its_own_and_those_of_decodes_next_to_anothers_chunks() -> None:
    """A turn of a chat goes on, in its rank, where the answer before it ended, all of which another's prompts filled.

    The fake engine refuses a sequence whose state is not that of its tokens.
    """
    sizes = replace(serving.capacity(max_extend_tokens=16), num_snapshots=8)
    scheduler = ranked(sizes, 2)
    chat = list(range(1, 11))
    turn = [*chat, *expected(chat, 12), 7, 8]
    others = [[to(1, request(f"long {i}", list(range(100 + 10 * i, 160 + 10 * i)), 1))] for i in range(4)]
    second = [to(0, request("next", turn, 5)), to(1, request("elsewhere", turn, 5))]
    mailbox = serve(scheduler, sizes, [[to(0, request("chat", chat, 12))], *others, *[[]] * 40, second])
    beside = [step for step in scheduler.launched if step.of_ranks[1].num_tokens > 8 and step.of_ranks[0].num_seqs]
    assert len(beside) > 10 and all(step.bucket.kind == "extend" for step in beside)
    found = {reply.request_id: (reply.cached_tokens, mailbox.output_ids(reply.request_id)) for reply in mailbox.replies}
    assert mailbox.output_ids("chat") == expected(chat, 12)
    assert (found["next"], found["elsewhere"]) == ((20, expected(turn, 5)), (0, expected(turn, 5)))
    assert scheduler._place(request("again", turn)) == 0


def test_loads_and_cache_events_name_their_rank() -> None:
    sizes = serving.capacity()
    scheduler = ranked(sizes, 2)
    mailbox = serve(scheduler, sizes, [[to(1, request("a", [5] * 12, 6))], [], []])
    busy = [load for load in mailbox.loads if load.num_running]
    assert busy and all([each.num_running for each in load.ranks] == [0, 1] for load in busy)
    journals = Control(scheduler, FakeRanks(sizes, 2), LeakCheck(scheduler))
    journals._watch(3)
    found = [news for news in journals.after_turn(False) if isinstance(news, CacheEvents)]
    assert [(news.number, news.rank, bool(news.events)) for news in found] == [(3, 0, False), (3, 1, True)]


def test_ranks_get_the_answers_to_their_own_grammars() -> None:
    queue = GrammarsInTurn(VOCAB, lambda: 0.0)
    first, second = grammars_of_ranks(queue, 2)
    from jaxsgl.requests.grammar import Grammar

    assert first.ask("a", Grammar.regex("0 5")) is None and second.ask("b", Grammar.regex("1 12")) is None
    assert (first.num_waiting, second.num_waiting) == (1, 1)
    answers = [name for _ in range(2) for name, _ in first.poll()]
    assert answers == ["a"] and second.num_waiting == 1
    second.forget("b")
    assert second.poll() == [] and second.num_waiting == 0
    assert isinstance(queue, GrammarQueue) and NoGrammars.num_waiting == 0
