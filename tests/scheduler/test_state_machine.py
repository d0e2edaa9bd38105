"""Random histories of requests and commands against scheduler, cache and fake engine; integrity after every step.

The oracle is the hash chain of each request's own tokens: whatever is cached, chunked, evicted, aborted or overlapped,
every request must yield exactly what it would yield alone. The fake engine itself checks the tables of logit edits. A
follower of the prefix cache that hears its events alone must know exactly what is in it. Every command is answered
exactly once. Planning twice gives equal plans and changes nothing; an applied plan leaves the pages that it predicted.

JAXSGL_TEST_NIGHTLY=1 runs a hundred times as much.
"""

from __future__ import annotations

import itertools
import json
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from dataclasses import replace
from typing import Any, TypeVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from jaxsgl.batch.buckets import BucketSet, Capacity
from jaxsgl.cache.pages import pages_for
from jaxsgl.cache.tiers import WRITE_AFTER_REUSE, WRITE_THROUGH
from jaxsgl.config.engine import POLICIES, PRIORITY_POLICIES, SchedulingConfig
from jaxsgl.messages.orders import (
    Abort,
    Answer,
    ContinueGeneration,
    DumpState,
    FlushCache,
    MemoryTag,
    News,
    PauseGeneration,
    PauseMode,
    ReleaseMemory,
    ResumeMemory,
    UpdateMode,
    UpdateWeights,
    WeightOrder,
)
from jaxsgl.requests.grammar import Grammar
from jaxsgl.requests.outputs import Pooling, PoolingSpec
from jaxsgl.requests.request import POOLING_SAMPLING, Request, SamplingParams
from jaxsgl.scheduler.orders.control import Control
from jaxsgl.scheduler.orders.inspection import LeakCheck
from jaxsgl.scheduler.orders.journal import CacheJournal
from jaxsgl.scheduler.request_table import AllAtOnce, InTurns
from jaxsgl.scheduler.resources.host_tier import LoadRule
from jaxsgl.testing.engine import FakeEngine, FakeHandle, RetractEvery
from tests.cache_mirror import CacheMirror, cached_prefixes
from tests.checked import WatchedScheduler
from tests.grids import count
from tests.scheduler.answers import EOS, VOCAB, Answers, output_of
from tests.scheduler.drafters import KINDS, knowing
from tests.scheduler.grammars import GrammarsInTurn
from tests.scheduler.staged import StagedFake
from tests.scheduler.tiered import check_names, tier_of

pytestmark = pytest.mark.histories

NUM_BASES = 3
GRAMMARS = ("0 5", "1 12", "2 40", "3 1", "0 9 fails", "none")  # seed and longest text; tests/scheduler/grammars.py
LIMITS = ({"allowed_token_ids": tuple(range(0, VOCAB, 3))}, {"bad_word_ids": ((7,), (8, 9), (1,))})
T = TypeVar("T")


class AtOnce(Executor):
    """Loads weights before it returns. With a thread, an update takes more or fewer turns each time a history runs, and
    Hypothesis can't repeat it."""

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        """See `Executor`."""
        future: Future[T] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future


def base_token(base: int, position: int) -> int:
    """Prompts start as one of a few long texts, so that many share prefixes of many lengths."""
    return 2 + (position * position + base * (position // 7 + 1)) % (VOCAB - 2)


class ServingMachine(RuleBasedStateMachine):
    """Arrivals, aborts, launches and collects in any order that the loop could take."""

    @initialize(
        page_size=st.sampled_from([1, 2, 3, 8, 16]),
        context=st.sampled_from([12, 40, 80]),
        spare_pages=st.integers(1, 12),
        rows=st.integers(1, 5),
        chunk=st.sampled_from([2, 3, 8, 80]),
        radix=st.sampled_from([True, True, True, False]),
        overlap=st.booleans(),
        config=st.builds(
            SchedulingConfig,
            schedule_conservativeness=st.sampled_from([0.01, 1.0, 2.0]),
            max_prefill_tokens=st.sampled_from([5, 16384]),
            prefill_max_requests=st.sampled_from([None, None, 1, 2]),
            enable_mixed_chunk=st.booleans(),
            decode_first=st.booleans(),
            max_itl_ms=st.sampled_from([None, None, 0.001, 5000.0]),
            schedule_policy=st.sampled_from(POLICIES),
            queue_timeout_s=st.sampled_from([None, None, 9.0]),
            running_timeout_s=st.sampled_from([None, None, 4.0]),
        ),
        retract_every=st.sampled_from([None, None, 2, 3, 7]),
        by_priority=st.booleans(),
        decode_steps=st.sampled_from([1, 2, 4, 7]),
        host=st.sampled_from([None, None, (1, 1), (6, 2), (60, 3), (400, 64)]),
        write_policy=st.sampled_from([WRITE_THROUGH, WRITE_AFTER_REUSE]),
        pooling=st.sampled_from([None, None, PoolingSpec("last", 1), PoolingSpec("mean", 1)]),
        max_drafts=st.sampled_from([0, 0, 1, 3, 9]),
        drafts=st.sampled_from(KINDS),
        snapshots=st.sampled_from([None, None, None, 1, 4, 40]),
        stages=st.sampled_from([None, None, None, (2, 0), (2, 1), (4, 0), (4, 2)]),
    )
    def start(
        self,
        page_size: int,
        context: int,
        spare_pages: int,
        rows: int,
        chunk: int,
        radix: bool,
        overlap: bool,
        config: SchedulingConfig,
        retract_every: int | None,
        by_priority: bool,
        decode_steps: int,
        host: tuple[int, int] | None,
        write_policy: str,
        pooling: PoolingSpec | None,
        max_drafts: int,
        drafts: str,
        snapshots: int | None,
        stages: tuple[int, int] | None,
    ) -> None:
        if stages is not None:  # what doesn't go with pipeline stages
            host, max_drafts, snapshots, decode_steps = None, 0, None, 1
            config = replace(config, max_itl_ms=None)
        if snapshots is not None:  # what doesn't go with states
            host, decode_steps = None, decode_steps if not max_drafts else 1
        if by_priority and config.schedule_policy in PRIORITY_POLICIES:
            config = replace(
                config, enable_priority_scheduling=True, priority_scheduling_preemption_threshold=spare_pages
            )
        num_pages = pages_for(context, page_size) // 2 + spare_pages + 2  # often too small for the longest requests
        sizes = Capacity(page_size, num_pages, rows, context, min(chunk, context), VOCAB)
        self.capacity = replace(sizes, pooling=pooling, num_snapshots=snapshots)
        self.config = config
        self.now_s = 0.0
        self.tier = None if host is None or not radix else tier_of(self.capacity, host[0], write_policy, host[1])
        self.holds_gathers = False
        self.scheduler = WatchedScheduler(
            self.capacity,
            BucketSet.derive(self.capacity, decode_steps=decode_steps, max_drafts=max_drafts),
            EOS,
            config,
            radix_cache=radix,
            retract_also=None if retract_every is None else RetractEvery(retract_every),
            clock=lambda: self.now_s,
            tier=self.tier,
            loads=None if self.tier is None else LoadRule(0.0, timeout_s=3.0, least_tokens=1),
            grammars=GrammarsInTurn(VOCAB, lambda: self.now_s),
            drafter_of=knowing(lambda request: output_of(request, self.capacity.limits), drafts, VOCAB),
            turns=AllAtOnce() if stages is None else InTurns(sum(stages) if overlap else 1),
        )
        self.engine = FakeEngine(self.capacity) if stages is None else StagedFake(self.capacity)
        self.leak_check = LeakCheck(self.scheduler, clock=lambda: self.now_s)
        self.news: list[News] = []
        self.control = Control(self.scheduler, self.engine, self.leak_check, lambda: self.now_s, loader=AtOnce())
        self.numbers = itertools.count()
        self.unanswered: set[int] = set()
        self.unread_allowed = int(overlap) if stages is None else int(overlap) * (sum(stages) - 1)
        self.in_flight: deque[FakeHandle] = deque()
        self.answers = Answers(config)
        self.journal: CacheJournal | None = None
        self.mirror = CacheMirror()

    @rule(
        base=st.integers(0, NUM_BASES - 1),
        shared=st.integers(0, 80),
        part=st.sampled_from([1, 2, 4, 8]),
        own=st.lists(st.integers(0, VOCAB - 1), max_size=4),
        max_tokens=st.sampled_from([None, 1, 2, 5, 20, 100]),
        ignore_eos=st.booleans(),
        copies=st.sampled_from([1, 2, 4]),
        priority=st.sampled_from([-20, 0, 0, 5, 20]),
        cache_salt=st.sampled_from(["", "", "", "a", "bc"]),
        features=st.fixed_dictionaries(
            {},
            optional={
                "presence_penalty": st.just(1.0),
                "min_tokens": st.integers(0, 6),
                "logprobs": st.integers(0, 3),
                "prompt_logprobs": st.integers(0, 2),
                "n": st.integers(1, 3),
            },
        ),
        masks=st.sampled_from([{}, {}, {}, {}, *({"grammar": Grammar.regex(text)} for text in GRAMMARS), *LIMITS]),
        label_ids=st.sampled_from([None, None, None, (), (3, VOCAB - 1)]),
    )
    def arrive(
        self,
        base: int,
        shared: int,
        part: int,
        own: list[int],
        max_tokens: int | None,
        ignore_eos: bool,
        copies: int,
        features: dict[str, Any],
        priority: int,
        cache_salt: str,
        masks: dict[str, Any],
        label_ids: tuple[int, ...] | None,
    ) -> None:
        prompt = [base_token(base, i) for i in range(min(shared, self.capacity.context_length - 1) // part)] + own
        if max_tokens is not None and "min_tokens" in features:
            features["min_tokens"] = min(features["min_tokens"], max_tokens)
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=ignore_eos, **features, **masks)
        pooling = None if label_ids is None or self.capacity.pooling is None else Pooling(label_ids)
        if pooling is not None:
            params = POOLING_SAMPLING
        for _ in range(copies):
            name = f"r{len(self.answers.requests)}"
            request = Request(name, prompt, params, priority, cache_salt, pooling=pooling)
            self.answers.expect(request, self.now_s)
            self.scheduler.receive([request])
        self.settle()

    @precondition(lambda self: self.answers.requests)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        """Aborts any request, whether it waits, is between chunks, runs, is in flight or has ended."""
        request_id = data.draw(st.sampled_from(sorted(self.answers.requests)))
        everything = self.answers.samples(request_id)
        index = data.draw(st.sampled_from([None, *(index for _, index in everything)]))
        aborts = [Abort(request_id, index)]
        ended = everything if index is None else [(request_id, index)]
        if data.draw(st.integers(0, 4)) == 0:  # all requests whose ids begin like this one's
            aborts = [Abort(other) for other in self.answers.requests if other.startswith(request_id)]
            ended = [key for abort in aborts for key in self.answers.samples(abort.request_id)]
        self.scheduler.receive(aborts)
        self.settle()
        assert set(ended) <= set(self.answers.ended), "what is aborted must end at once"

    @rule(
        turns=st.integers(0, 3),
        what=st.sampled_from(["pause", "pause", "resume", "drain", "dump"]),
        mode=st.sampled_from(PauseMode),
        timeout_s=st.sampled_from([0.0, 3.0, 50.0]),
        check=st.booleans(),
    )
    def command(self, turns: int, what: str, mode: PauseMode, timeout_s: float, check: bool) -> None:
        """Sends a command at any time; a pause may come while generation is paused already."""
        for _ in range(turns):
            self.turn()
        number = next(self.numbers)
        self.unanswered.add(number)
        if what == "pause":
            self.control.handle(PauseGeneration(number, mode))
            assert self.scheduler.is_paused
            assert mode is not PauseMode.ABORT or self.scheduler.num_waiting == self.scheduler.num_running == 0
        elif what == "resume":
            self.control.handle(ContinueGeneration(number))
            assert not self.scheduler.is_paused or self.engine.released
        elif what == "drain":
            self.control.handle(FlushCache(number, timeout_s))
        else:
            self.control.handle(DumpState(number, check))
        self.settle()

    @rule(turns=st.integers(0, 3), mode=st.sampled_from(UpdateMode), folder=st.sampled_from(["same-0", "broken"]))
    def update(self, turns: int, mode: UpdateMode, folder: str) -> None:
        """Exchanges the weights for equal ones: all but the tokens changes as with others."""
        for _ in range(turns):
            self.turn()
        self.order(UpdateWeights(next(self.numbers), folder, mode))

    @rule(turns=st.integers(0, 9), tags=st.sampled_from([(MemoryTag.WEIGHTS,), tuple(MemoryTag)]))
    def lend_memory(self, turns: int, tags: tuple[MemoryTag, ...]) -> None:
        """Releases memory, perhaps not before it is to be taken back."""
        self.order(ReleaseMemory(next(self.numbers), tags))
        for _ in range(turns):
            self.turn()
        self.order(ResumeMemory(next(self.numbers), tuple(MemoryTag)))

    def order(self, order: WeightOrder) -> None:
        self.unanswered.add(order.number)
        self.control.handle(order)

    @rule(seconds=st.sampled_from([1.0, 5.0]))
    def wait(self, seconds: float) -> None:
        self.now_s += seconds

    @rule(turns=st.integers(1, 4), holds_gathers=st.booleans())
    def step(self, turns: int, holds_gathers: bool) -> None:
        """Takes some turns of the loop, in which pages reach the host or are still on their way."""
        self.holds_gathers = holds_gathers
        for _ in range(turns):
            self.turn()
        self.holds_gathers = False

    def turn(self) -> None:
        was_paused = self.scheduler.is_paused
        reads_first = bool(self.in_flight) and self.scheduler.reads_first
        if reads_first:
            self.collect()
        inputs = self.scheduler.launch()
        assert inputs is None or not was_paused
        for number, op in self.scheduler.ops.take():
            self.engine.apply(op, number)
        if inputs is not None:
            self.in_flight.append(self.engine.submit(inputs))
        self.scheduler.check()
        collects = bool(self.in_flight) and (inputs is None or len(self.in_flight) > self.unread_allowed)
        newest_only = len(self.in_flight) == 1
        if collects and not newest_only:
            self.collect()
        if inputs is not None and inputs.masked:
            self.in_flight[-1].choose(self.scheduler.masks(inputs.bucket.num_choices))
        if collects and newest_only:
            self.collect()
        if self.scheduler.ops.waiting and not self.holds_gathers:
            self.scheduler.ops.finished(self.engine.poll())
        if self.control.is_active:
            self.news += self.control.after_turn(collects or reads_first)
        self.settle()
        if self.tier is not None:
            check_names(self.tier, self.scheduler.cache)
        if self.scheduler.is_idle:
            self.leak_check.when_idle()
        self.take_answers()

    def collect(self) -> None:
        oldest = self.in_flight.popleft()
        self.scheduler.collect(oldest.tokens(), oldest.outputs(), oldest.drafts)

    @precondition(lambda self: self.scheduler.is_paused)
    @rule()
    def resume(self) -> None:
        """Ends pauses, so that they don't last."""
        self.command(0, "resume", PauseMode.IN_PLACE, 0.0, False)

    @rule()
    def flush(self) -> None:
        self.scheduler.flush_cache()
        self.settle()

    @rule()
    def watch(self) -> None:
        """Watches the cache, at any time and any number of times: a snapshot, then news."""
        if self.journal is None:
            self.journal = CacheJournal(self.scheduler.cache)
        self.journal.take()
        self.mirror = CacheMirror(self.journal.snapshot())
        self.settle()

    def settle(self) -> None:
        """Takes the replies and checks everything that must hold between any two events."""
        self.scheduler.check()
        self.check_load()
        if self.journal is not None:
            self.mirror.take(self.journal.take())
            assert self.mirror.prefixes == cached_prefixes(self.scheduler.cache.edges())
        for reply in self.scheduler.take_replies():
            self.answers.take(reply, self.now_s)

    def take_answers(self) -> None:
        for news in self.news:
            assert isinstance(news, Answer) and news.number in self.unanswered, "a command is answered once"
            self.unanswered.remove(news.number)
            if news.text.startswith('{"paused"'):
                state = json.loads(news.text)
                assert not state.get("leaks")
                assert (len(state["running"]), len(state["waiting"])) == (state["num_running"], state["num_waiting"])
        self.news.clear()

    def check_load(self) -> None:
        load = self.scheduler.load(0)
        assert load.num_waiting + load.num_running <= len(self.answers.unended())
        assert (load.waiting_tokens > 0) == (load.num_waiting > 0)
        assert load.num_running <= self.capacity.num_rows
        assert load.used_tokens + load.cached_tokens <= self.capacity.pool_tokens
        assert (load.used_tokens > 0) == (load.num_running > 0)

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
        assert self.scheduler.cache.num_available == self.capacity.num_pages - 1, "a page is lost"
        load = self.scheduler.load(0)
        assert (load.num_waiting, load.num_running, load.used_tokens) == (0, 0, 0)
        assert load.totals.output_tokens == sum(map(len, self.answers.outputs.values()))
        self.answers.check(self.capacity.limits)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("part", range(count(1, 4)))
def test_every_request_yields_its_own_tokens_whatever_happens_around_it(part: int) -> None:
    """About 2,000 events in 1,800 turns of the loop; by night 280,000 in 240,000, in parts that are drawn anew."""
    run_state_machine_as_test(
        ServingMachine,
        settings=settings(
            max_examples=count(6, 200),
            stateful_step_count=80,
            suppress_health_check=list(HealthCheck),
        ),
    )
