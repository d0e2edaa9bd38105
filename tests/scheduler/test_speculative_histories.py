"""Random histories of requests with drafts: aborts, retractions, grammars, stops, flushes, with leaks looked for.

The oracle is the hash chain of each request's tokens: whatever is proposed, accepted or rejected, a request yields what
it yields without drafts. After every event all pages are accounted for, and in the end the counts of drafts agree with
the tokens.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest

from jaxsgl.batch.buckets import BucketSet, Capacity
from jaxsgl.cache.pages import pages_for
from jaxsgl.config.engine import SchedulingConfig
from jaxsgl.messages.orders import Abort
from jaxsgl.requests.grammar import Grammar
from jaxsgl.requests.request import Request, SamplingParams
from jaxsgl.scheduler.speculation.drafter import Drafter
from jaxsgl.testing.engine import FakeEngine, FakeHandle, RetractEvery
from tests.checked import CheckedScheduler
from tests.choices import Choices, check_histories
from tests.grids import count
from tests.scheduler.answers import EOS, VOCAB, Answers, output_of
from tests.scheduler.drafters import KINDS, FromFake, Knowing
from tests.scheduler.grammars import GrammarsInTurn

pytestmark = pytest.mark.histories

CONTEXT = 40
NUM_BYTES = 45  # some nine events
GRAMMARS = ("0 5", "1 12", "2 40", "3 1", "0 9 fails")
MASKS: list[dict[str, Any]] = [{"grammar": Grammar.regex(text)} for text in GRAMMARS] + [{"bad_word_ids": ((7,),)}]


class SpeculativeHistory:
    """A scheduler that speculates, and what clients and operators may do to it."""

    def __init__(self, choices: Choices) -> None:
        self.choices = choices
        one_of = choices.one_of
        page_size = one_of((4, 1, 2, 8))
        rows = one_of(range(1, 6))
        num_pages = pages_for(CONTEXT, page_size) + one_of((200, 2, 3, 5, 9))
        config = SchedulingConfig(
            schedule_conservativeness=one_of((1.0, 0.01)),
            enable_mixed_chunk=one_of((False, True)),
            decode_first=one_of((False, True)),
        )
        self.capacity = Capacity(page_size, num_pages, rows, CONTEXT, one_of((40, 8, 3)), VOCAB)
        retract_every = one_of((None, None, 3))
        buckets = BucketSet.derive(self.capacity, decode_steps=one_of((1, 1, 1, 3)), max_drafts=one_of((4, 1, 2, 12)))
        self.scheduler = CheckedScheduler(
            self.capacity,
            buckets,
            EOS,
            config,
            retract_also=None if retract_every is None else RetractEvery(retract_every),
            grammars=GrammarsInTurn(VOCAB, lambda: 0.0),
            drafter_of=self.drafter_of,
        )
        self.engine = FakeEngine(self.capacity)
        self.unread_allowed = one_of((1, 0))
        self.in_flight: deque[FakeHandle] = deque()
        self.answers = Answers(config)
        self.drafters: list[Knowing] = []

    def drafter_of(self, request: Request) -> Drafter:
        kind = self.choices.one_of((*KINDS, "none", "device", "device"))
        if kind == "none":
            return Drafter()
        if kind == "device":
            self.drafters.append(FromFake(request.prompt_ids, output_of(request, self.capacity.limits), kind, VOCAB))
        else:
            self.drafters.append(Knowing(request.prompt_ids, output_of(request, self.capacity.limits), kind, VOCAB))
        return self.drafters[-1]

    def play(self) -> None:
        """Plays the whole history."""
        events = (
            self.turns, self.arrive, self.arrive, self.arrive, self.turns, self.turns, self.abort, self.operate,
        )  # fmt: skip
        while not self.choices.are_over:
            self.choices.one_of(events)()
        self.end()

    def arrive(self) -> None:
        """A request whose prompt begins as one of three texts."""
        one_of = self.choices.one_of
        base, length = one_of(range(3)), 20 - one_of(range(20))
        prompt = [2 + (i * i + base * (i // 9 + 1)) % (VOCAB - 2) for i in range(length)]
        masks: dict[str, Any] = one_of(({}, {}, {}, *MASKS))
        features: dict[str, Any] = one_of(
            (
                {},
                {},
                {},
                {"logprobs": 1},
                {"logprobs": 0, "logprob_token_ids": (2, 5)},
                {"min_tokens": 4},
                {"presence_penalty": 1.0},
                {"n": 2},
            )
        )
        max_tokens = one_of((12, 1, 2, 20, 7))
        params = SamplingParams(
            temperature=0.0,
            max_tokens=max(max_tokens, features.get("min_tokens", 0)),
            ignore_eos=one_of((True, False)),
            **masks,
            **features,
        )
        request = Request(f"r{len(self.answers.requests)}", prompt, params)
        self.answers.expect(request, 0.0)
        self.scheduler.receive([request])
        self.settle()

    def turns(self) -> None:
        for _ in range(self.choices.one_of(range(1, 9))):
            self.turn()

    def turn(self) -> None:
        """One of the loop, as in loop.py."""
        if self.in_flight and self.scheduler.reads_first:
            self.collect()
        inputs = self.scheduler.launch()
        if inputs is not None:
            self.in_flight.append(self.engine.submit(inputs))
        collects = bool(self.in_flight) and (inputs is None or len(self.in_flight) > self.unread_allowed)
        newest_only = len(self.in_flight) == 1
        if collects and not newest_only:
            self.collect()
        if inputs is not None and inputs.masked:
            self.in_flight[-1].choose(self.scheduler.masks(inputs.bucket.num_choices))
        if collects and newest_only:
            self.collect()
        self.settle()

    def collect(self) -> None:
        oldest = self.in_flight.popleft()
        self.scheduler.collect(oldest.tokens(), oldest.outputs(), oldest.drafts)

    def abort(self) -> None:
        if self.answers.requests:
            self.scheduler.receive([Abort(self.choices.one_of(list(self.answers.requests)))])
            self.settle()

    def operate(self) -> None:
        """Retracts all, or drops what is cached."""
        act = self.choices.one_of((self.scheduler.retract_all, self.scheduler.flush_cache))
        self.scheduler.pause()
        while self.in_flight:
            self.turn()
        act()
        self.scheduler.resume()
        self.settle()

    def settle(self) -> None:
        """Takes the replies. The scheduler has looked for leaks, as it does after each launch and each collect."""
        for reply in self.scheduler.take_replies():
            self.answers.take(reply, 0.0)

    def end(self) -> None:
        """All is served; counts agree."""
        turns = 0
        while not self.scheduler.is_idle or self.in_flight:
            self.turn()
            turns += 1
            assert turns < 5_000, "a request waits forever"
        self.answers.check(self.capacity.limits)
        assert self.scheduler.cache.num_available == self.capacity.num_pages - 1, "a page is lost"
        assert all(drafter.ended for drafter in self.drafters)
        load = self.scheduler.load(0)
        totals = load.speculation
        assert sum(totals.accepted_at) == totals.accepted_tokens <= totals.draft_tokens
        assert list(totals.accepted_at) == sorted(totals.accepted_at, reverse=True)
        verdicts = [verdict for drafter in self.drafters for verdict in drafter.verdicts]
        assert (len(verdicts), sum(drafted for drafted, _ in verdicts)) == (totals.runs, totals.draft_tokens)
        assert load.totals.output_tokens == sum(map(len, self.answers.outputs.values()))


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("part", range(count(1, 4)))
def test_every_history_with_drafts_yields_the_tokens_without_and_leaves_no_page(part: int) -> None:
    """By night 10,000 histories, in parts that are drawn anew."""
    check_histories(lambda choices: SpeculativeHistory(choices).play(), count(500, 2_500), NUM_BYTES)
