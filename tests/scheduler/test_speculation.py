"""Drafts that a step verifies: each request yields what it yields without them, whatever is proposed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest

from jaxsgl.batch.buckets import BucketSet, Capacity
from jaxsgl.batch.patches import token_positions
from jaxsgl.config.engine import SchedulingConfig
from jaxsgl.messages.orders import Abort, LoadAdapter, ToEngine
from jaxsgl.messages.replies import Run, SpeculationTotals
from jaxsgl.requests.grammar import Grammar
from jaxsgl.requests.request import FinishReason, Request, SamplingParams
from jaxsgl.scheduler.grammars.queue import GrammarQueue
from jaxsgl.scheduler.in_flight import InFlightStep
from jaxsgl.scheduler.loop import run_loop
from jaxsgl.scheduler.speculation.drafter import Drafter, DrafterOf
from jaxsgl.testing.engine import FakeEngine, RetractEvery, ScriptedMailbox, generate
from jaxsgl.testing.grammars import compile_fake
from jaxsgl.testing.outputs import logprob
from jaxsgl.text.detokenizer import NoText
from jaxsgl.text.sample import Sample, Speculated
from tests.checked import CheckedScheduler
from tests.scheduler import image_requests
from tests.scheduler.drafters import KINDS, knowing
from tests.scheduler.grammars import constrained_output
from tests.scheduler.serving import VOCAB, capacity, expected, request

PROMPT = range(5, 15)
DRAFTS = 4
every_kind = pytest.mark.parametrize("kind", KINDS)
both_loops = pytest.mark.parametrize("overlap", [True, False])


def truth(request: Request) -> list[int]:
    """What the request yields, whatever is next to it."""
    sampling = request.sampling
    most = sampling.max_tokens or 0
    if sampling.masked:
        return constrained_output(request, most, VOCAB, frozenset())[0]
    return expected(request.prompt_ids, most, frozenset(sampling.stop_token_ids)) if not sampling.min_tokens else []


def serve(
    sizes: Capacity,
    script: Sequence[Sequence[ToEngine]],
    drafter_of: DrafterOf | str = "right",
    *,
    overlap: bool = True,
    max_drafts: int = DRAFTS,
    decode_steps: int = 1,
    config: SchedulingConfig = SchedulingConfig(),
    retract_every: int | None = None,
    eos: tuple[int, ...] = (),
) -> tuple[ScriptedMailbox, CheckedScheduler]:
    """Runs the loop over `script` until all is served, and looks for leaks after each step."""
    if isinstance(drafter_of, str):
        drafter_of = knowing(truth, drafter_of, VOCAB)
    scheduler = CheckedScheduler(
        sizes,
        BucketSet.derive(sizes, decode_steps=decode_steps, max_drafts=max_drafts),
        eos,
        config,
        retract_also=RetractEvery(retract_every) if retract_every else None,
        grammars=GrammarQueue(lambda grammar: compile_fake(grammar, VOCAB), 30.0),
        drafter_of=drafter_of,
    )
    mailbox = ScriptedMailbox(script)
    run_loop(scheduler, FakeEngine(sizes), mailbox, int(overlap), check_every_step=True)
    assert scheduler.is_idle
    assert scheduler.cache.num_available == sizes.num_pages - 1, "a page is lost"
    return mailbox, scheduler


def totals_of(scheduler: CheckedScheduler) -> SpeculationTotals:
    return scheduler.load(0).speculation


def no_drafts(request: Request) -> Drafter:
    return Drafter()


def asking(request_id: str, prompt: Sequence[int], max_tokens: int = 20, **params: Any) -> Request:
    return Request(request_id, list(prompt), SamplingParams(temperature=0.0, max_tokens=max_tokens, **params))


def outcome(mailbox: ScriptedMailbox, request_id: str) -> tuple[list[int], FinishReason | None]:
    replies = [reply for reply in mailbox.replies if reply.request_id == request_id]
    return [token for reply in replies for token in reply.token_ids], replies[-1].finish_reason


@both_loops
@every_kind
def test_tokens_are_those_without_drafts_whatever_is_proposed(kind: str, overlap: bool) -> None:
    requests = [request(f"r{i}", range(3 * i, 3 * i + 2 + i), 17 + i) for i in range(12)]
    mailbox, scheduler = serve(capacity(num_pages=120, rows=5), [requests], kind, overlap=overlap)
    for asked in requests:
        assert mailbox.output_ids(asked.request_id) == expected(asked.prompt_ids, asked.sampling.max_tokens or 0)
    totals = totals_of(scheduler)
    assert totals.runs > 0 and (totals.accepted_tokens == 0) == (kind == "wrong")


def test_right_drafts_save_steps_and_come_in_one_reply_with_their_run() -> None:
    mailbox, scheduler = serve(capacity(), [[request("a", PROMPT, 21)]], overlap=False)
    assert [len(reply.token_ids) for reply in mailbox.replies] == [1, 5, 5, 5, 5]
    assert [reply.run for reply in mailbox.replies] == [None, *[Run(DRAFTS, DRAFTS)] * 4]
    assert [inputs.bucket.kind for inputs in scheduler.launched] == ["extend", *["verify"] * 4]


@both_loops
@every_kind
def test_counts_agree_with_each_other_and_with_the_tokens(kind: str, overlap: bool) -> None:
    requests = [request(f"r{i}", range(9 * i, 9 * i + 7), 20 + i) for i in range(5)]
    mailbox, scheduler = serve(capacity(), [requests], kind, overlap=overlap)
    totals = totals_of(scheduler)
    assert sum(totals.accepted_at) == totals.accepted_tokens <= totals.draft_tokens
    decoded = sum(len(mailbox.output_ids(f"r{i}")) - 1 for i in range(5))
    assert totals.accepted_tokens + totals.runs + sum(totals.plain_decodes.values()) == decoded
    runs = [reply.run for reply in mailbox.replies if reply.run is not None]
    assert (len(runs), sum(run.drafted for run in runs)) == (totals.runs, totals.draft_tokens)


@every_kind
@pytest.mark.parametrize("place", range(12))
def test_a_stop_token_at_any_place_of_a_run_ends_the_request_there(place: int, kind: str) -> None:
    output = expected(PROMPT, 20)
    stop = output[place]
    end = output.index(stop) + 1
    mailbox, _ = serve(capacity(), [[request("a", PROMPT, 20, stop=(stop,))]], kind)
    assert outcome(mailbox, "a") == (output[:end], FinishReason.STOP)


@every_kind
@pytest.mark.parametrize("max_tokens", range(1, 13))
def test_max_tokens_at_any_place_of_a_run_ends_the_request_there(max_tokens: int, kind: str) -> None:
    mailbox, _ = serve(capacity(), [[request("a", PROMPT, max_tokens)]], kind)
    assert outcome(mailbox, "a") == (expected(PROMPT, max_tokens), FinishReason.LENGTH)


@every_kind
@pytest.mark.parametrize("length", range(1, 11))
def test_a_grammar_that_ends_at_any_place_of_a_run_ends_the_request_there(length: int, kind: str) -> None:
    requests = [asking(f"r{seed}", PROMPT, grammar=Grammar.regex(f"{seed} {length}")) for seed in range(3)]
    mailbox, _ = serve(capacity(), [requests], kind)
    for asked in requests:
        assert outcome(mailbox, asked.request_id) == constrained_output(asked, 20, VOCAB, frozenset())


@every_kind
def test_a_grammar_that_fails_inside_a_run_fails_after_the_same_tokens(kind: str) -> None:
    requests = [asking(f"r{i}", PROMPT, grammar=Grammar.regex(f"2 {8 + 2 * i} fails")) for i in range(5)]
    others = [asking("held", [3, 4], grammar=Grammar.regex("2 30")), asking("free", [5, 6])]
    mailbox, scheduler = serve(capacity(), [[*requests, *others]], kind)
    for i, asked in enumerate(requests):
        assert mailbox.output_ids(asked.request_id) == constrained_output(asked, 20, VOCAB, frozenset())[0]
        assert len(mailbox.output_ids(asked.request_id)) == 4 + i
        (refusal,) = [reply.refusal for reply in mailbox.replies if reply.request_id == f"r{i}" and reply.refusal]
        assert "the fake grammar fails here" in refusal.text
    assert mailbox.output_ids("held") == truth(others[0]) and mailbox.output_ids("free") == truth(others[1])
    assert scheduler.state.totals.failed_requests == 0


@every_kind
def test_limits_of_tokens_hold_at_each_place_of_a_run(kind: str) -> None:
    free = expected(PROMPT, 20)
    limits: list[dict[str, Any]] = [
        {"allowed_token_ids": tuple(range(0, VOCAB, 3))},
        {"bad_word_ids": tuple((before, last) for before, last in zip(free[3::4], free[4::4], strict=False))},
        {"bad_word_ids": ((free[5],),), "grammar": Grammar.regex("3 15")},
    ]
    requests = [asking(f"r{i}", PROMPT, **params) for i, params in enumerate(limits)]
    mailbox, _ = serve(capacity(), [requests], kind)
    for asked in requests:
        assert mailbox.output_ids(asked.request_id) == truth(asked)


@pytest.mark.parametrize("min_tokens", range(1, 9))
def test_stop_tokens_are_held_back_until_min_tokens_at_each_place_of_a_run(min_tokens: int) -> None:
    stop = frozenset(expected(PROMPT, 20)[2:5])
    output = generate(PROMPT, 20, stop, VOCAB, min_tokens)
    asked = asking("a", PROMPT, stop_token_ids=tuple(stop), min_tokens=min_tokens)
    mailbox, scheduler = serve(capacity(), [[asked]], knowing(lambda _: output, "right", VOCAB))
    assert mailbox.output_ids("a") == output
    assert len(output) < 4 or totals_of(scheduler).accepted_tokens > 0


def test_each_token_of_a_run_has_its_own_log_probability() -> None:
    mailbox, scheduler = serve(capacity(), [[asking("a", PROMPT, logprobs=2), asking("b", [1, 2], 11)]])
    output = expected(PROMPT, 20)
    replies = [reply for reply in mailbox.replies if reply.request_id == "a"]
    assert [reply.token_ids for reply in replies] == [(token,) for token in output]
    for place, reply in enumerate(replies):
        assert reply.logprob is not None and reply.logprob.logprob == logprob([*PROMPT, *output[:place]], output[place])
    assert totals_of(scheduler).accepted_tokens > 10


@pytest.mark.parametrize("kind", ["right", "half"])
def test_a_client_is_told_of_the_same_runs_with_log_probabilities(kind: str) -> None:
    def told(asked: Request) -> Speculated:
        mailbox, _ = serve(capacity(), [[asked]], kind)
        end = Sample(asked, 0, NoText()).take(mailbox.replies).end
        assert end is not None
        return end.speculated

    runs = told(asking("a", PROMPT))
    assert runs.accepted_tokens > runs.num_steps
    assert told(asking("a", PROMPT, logprobs=2)) == runs


def test_penalties_change_with_each_token_so_that_such_requests_have_no_drafts() -> None:
    requests = [asking("p", PROMPT, presence_penalty=1.0), asking("b", [1, 2])]
    mailbox, scheduler = serve(capacity(), [requests])
    for asked in requests:
        assert mailbox.output_ids(asked.request_id) == expected(asked.prompt_ids, 20)
    assert totals_of(scheduler).plain_decodes["penalties"] == 19
    assert totals_of(scheduler).accepted_tokens > 10


@both_loops
@every_kind
@pytest.mark.parametrize("retract_every", [2, 5])
def test_no_draft_outlives_a_retraction(kind: str, overlap: bool, retract_every: int) -> None:
    requests = [request(f"r{i}", range(i, i + 6), 25) for i in range(4)]
    mailbox, scheduler = serve(capacity(), [requests], kind, overlap=overlap, retract_every=retract_every)
    assert scheduler.state.totals.retractions > 0
    for asked in requests:
        assert mailbox.output_ids(asked.request_id) == expected(asked.prompt_ids, 25)


def test_drafts_are_dropped_before_a_request_is_retracted() -> None:
    """The pool holds all that the requests store in the end, and nothing for drafts besides."""
    prompts = [range(i, i + 8) for i in range(4)]
    requests = [asking(f"r{i}", prompt, 25, ignore_eos=True) for i, prompt in enumerate(prompts)]
    sizes = capacity(page_size=4, num_pages=4 * 8 + 1, rows=4)
    for kind in ("right", "wrong", "half"):
        mailbox, scheduler = serve(sizes, [requests], kind)
        assert scheduler.state.totals.retractions == 0
        assert totals_of(scheduler).runs > 0
        for i, prompt in enumerate(prompts):
            assert mailbox.output_ids(f"r{i}") == expected(prompt, 25)


def test_a_run_takes_pages_for_its_tokens_alone() -> None:
    class Watching(CheckedScheduler):
        def launch(self) -> Any:
            inputs = super().launch()
            if inputs is not None and inputs.bucket.kind == "verify":
                for req in self._requests.admitted.values():
                    assert req.lease is not None
                    held.append(req.lease.num_pages - self.cache.pages_for(req.kv_len))
            return inputs

    held: list[int] = []
    sizes = capacity(page_size=1)
    scheduler = Watching(
        sizes, BucketSet.derive(sizes, max_drafts=DRAFTS), (), drafter_of=knowing(truth, "right", VOCAB)
    )
    run_loop(scheduler, FakeEngine(sizes), ScriptedMailbox([[request("a", PROMPT, 30)]]), 1)
    assert held and not any(held)


@every_kind
def test_prefixes_are_found_as_often_as_without_drafts(kind: str) -> None:
    """Conversations whose turns repeat the ones before. Overlap, which caches a token more, is off."""

    def hits(max_drafts: int) -> list[int]:
        history: list[int] = list(PROMPT)
        script: list[list[ToEngine]] = []
        for turn in range(5):
            asked = request(f"t{turn}", history, 6 + turn)
            script += [[asked], *[[] for _ in range(40)]]
            history = [*history, *expected(history, 6 + turn), 77 + turn]
        mailbox, _ = serve(
            capacity(page_size=2), script, kind if max_drafts else no_drafts, overlap=False, max_drafts=max_drafts
        )
        cached = [(reply.request_id, reply.cached_tokens) for reply in mailbox.replies]
        return [max(count for name, count in cached if name == f"t{turn}") for turn in range(5)]

    assert hits(DRAFTS) == hits(0)
    assert sum(hits(0)) > 50


def test_drafts_after_a_rejection_are_verified_against_what_was_drawn() -> None:
    """The place of a rejected draft is computed again: were its stored key read, all tokens after it would differ."""
    mailbox, scheduler = serve(capacity(page_size=16), [[request("a", PROMPT, 100)]], "half")
    totals = totals_of(scheduler)
    assert 0 < totals.accepted_tokens < totals.draft_tokens
    assert mailbox.output_ids("a") == expected(PROMPT, 100)


def test_with_nothing_to_propose_steps_and_overlap_are_those_without_speculation() -> None:
    def steps(max_drafts: int) -> tuple[list[tuple[str, int]], list[int]]:
        unread: list[int] = []

        class Watching(CheckedScheduler):
            def launch(self) -> Any:
                unread.append(self.state.steps_in_flight)
                return super().launch()

        sizes = capacity()
        scheduler = Watching(sizes, BucketSet.derive(sizes, max_drafts=max_drafts), (), drafter_of=no_drafts)
        requests = [request(f"r{i}", range(i, i + 5), 15 + i) for i in range(4)]
        run_loop(scheduler, FakeEngine(sizes), ScriptedMailbox([requests]), 1)
        return [(str(inputs.bucket), inputs.num_tokens) for inputs in scheduler.launched], unread

    assert steps(DRAFTS) == steps(0)


def test_steps_overlap_again_after_some_without_drafts_and_not_before() -> None:
    """Proposals at one place alone: the next steps are read first, and eight of them later they overlap."""

    class Once(Drafter):
        known = 0

        def extend(self, tokens: Sequence[int]) -> None:
            self.known += len(tokens)

        def propose(self, most: int) -> tuple[int, ...]:
            return (3,) if self.known in (15, 16) else ()

    unread: list[int] = []

    class Watching(CheckedScheduler):
        def launch(self) -> Any:
            unread.append(self.state.steps_in_flight)
            return super().launch()

    sizes = capacity()
    scheduler = Watching(sizes, BucketSet.derive(sizes, max_drafts=DRAFTS), (), drafter_of=lambda request: Once())
    mailbox = ScriptedMailbox([[request("a", PROMPT, 40)]])
    run_loop(scheduler, FakeEngine(sizes), mailbox, 1)
    assert mailbox.output_ids("a") == expected(PROMPT, 40)
    exact = [place for place, count in enumerate(unread[1:-1], 1) if not count]
    assert exact == list(range(exact[0], exact[-1] + 1)) and 8 <= len(exact) <= 10


def test_a_full_batch_has_no_drafts_and_overlaps() -> None:
    requests = [request(f"r{i}", range(i, i + 5), 20) for i in range(64)]
    _, scheduler = serve(capacity(num_pages=900, rows=64, max_extend_tokens=400), [requests])
    totals = totals_of(scheduler)
    assert not totals.runs
    assert totals.plain_decodes == {"no_room": 64 * 18, "last_token": 64}


def test_drafts_share_the_room_of_a_step_equally() -> None:
    requests = [request(f"r{i}", range(i, i + 5), 40) for i in range(12)]
    _, scheduler = serve(capacity(num_pages=400, rows=12), [requests], max_drafts=10, overlap=False)
    first = next(inputs for inputs in scheduler.launched if inputs.bucket.kind == "verify")
    lengths = np.diff(first.arrays.query_offsets[:13])
    assert lengths.sum() == first.bucket.num_tokens == 64 and lengths.max() - lengths.min() <= 1


def test_programs_of_several_steps_have_no_drafts_and_are_taken_where_nothing_is_proposed() -> None:
    _, scheduler = serve(capacity(), [[request("a", PROMPT, 30)]], no_drafts, decode_steps=4)
    assert 4 in [inputs.bucket.num_steps for inputs in scheduler.launched]
    mailbox, scheduler = serve(capacity(), [[request("a", PROMPT, 60)]], "seldom", decode_steps=4)
    assert mailbox.output_ids("a") == expected(PROMPT, 60)
    assert totals_of(scheduler).plain_decodes["several_steps"] > 0 < totals_of(scheduler).runs


def test_mixed_steps_have_no_drafts_and_are_counted() -> None:
    script: list[list[ToEngine]] = [[request("a", PROMPT, 40)], [], [], [request("b", range(60), 4)]]
    config = SchedulingConfig(enable_mixed_chunk=True)
    mailbox, scheduler = serve(capacity(max_extend_tokens=16), script, config=config)
    assert mailbox.output_ids("a") == expected(PROMPT, 40)
    assert totals_of(scheduler).plain_decodes["mixed"] >= 4


@pytest.mark.parametrize("n", [2, 3])
def test_each_sample_of_a_request_has_its_own_drafter(n: int) -> None:
    mailbox, scheduler = serve(capacity(), [[asking("a", PROMPT, n=n)]], "half")
    for index in range(n):
        ids = [token for reply in mailbox.replies if reply.index == index for token in reply.token_ids]
        assert ids == expected(PROMPT, 20)
    assert totals_of(scheduler).runs > 0


def test_an_abort_while_a_run_is_in_flight_leaves_its_known_tokens_in_the_cache_alone() -> None:
    sizes = capacity(page_size=1)
    again = request("b", [*PROMPT, *expected(PROMPT, 12)], 3)
    script: list[list[ToEngine]] = [[request("a", PROMPT, 30)], [], [Abort("a")], [again]]
    mailbox, scheduler = serve(sizes, script)
    known = len(PROMPT) + len(mailbox.output_ids("a"))
    assert scheduler.load(0).speculation.runs > 0
    assert max(reply.cached_tokens for reply in mailbox.replies if reply.request_id == "b") <= known
    assert mailbox.output_ids("b") == expected(again.prompt_ids, 3)


def test_a_run_has_the_adapter_of_its_request() -> None:
    sizes = replace(capacity(), max_adapters=2, adapter_columns=8)
    asked = [msgspec.structs.replace(request(f"r{i}", PROMPT, 20), adapter="ab"[i]) for i in range(2)]
    answers = {f"r{i}": generate(PROMPT, 20, frozenset(), VOCAB, weights=1000 * (1 + i)) for i in range(2)}
    scheduler = CheckedScheduler(
        sizes,
        BucketSet.derive(sizes, max_drafts=DRAFTS),
        (),
        drafter_of=knowing(lambda one: answers.get(one.request_id, expected(PROMPT, 20)), "half", VOCAB),
    )
    engine = FakeEngine(sizes)
    loads = [LoadAdapter(i, "ab"[i], f"{1 + i}r4", False, False) for i in range(2)]
    mailbox = ScriptedMailbox([loads, *[[] for _ in range(200)], [*asked, request("plain", PROMPT, 20)]])
    run_loop(scheduler, engine, mailbox, 1)
    assert {name: mailbox.output_ids(name) for name in answers} == answers
    assert totals_of(scheduler).accepted_tokens > 0


def test_tokens_of_a_run_behind_an_image_stand_where_single_ones_would() -> None:
    """Their positions are not their indices: the image's columns count, not its tokens."""
    sizes, one = image_requests.capacity(), image_requests.asked("a", [3, (1, 9), 4], max_tokens=20)
    square = [msgspec.structs.replace(item, grid=(1, 6, 6)) for item in one.media]
    one = msgspec.structs.replace(one, media=tuple(square))
    _, delta = token_positions(len(one.prompt_ids), one.media)
    assert delta
    output = image_requests.expected(one)
    scheduler = CheckedScheduler(
        sizes, BucketSet.derive(sizes, max_drafts=DRAFTS), (), drafter_of=knowing(lambda _: output, "half", VOCAB)
    )
    engine, mailbox = FakeEngine(sizes), ScriptedMailbox([[one]])
    run_loop(scheduler, engine, mailbox, 1)
    assert mailbox.output_ids("a") == output
    verified = [inputs for inputs in scheduler.launched if inputs.bucket.kind == "verify"]
    for inputs in verified:
        arrays, count = inputs.arrays, inputs.num_tokens
        assert arrays.rope_positions is not None
        assert arrays.rope_positions[:count].tolist() == (arrays.positions[:count] + delta).tolist()
    assert verified


def test_a_token_too_many_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test of these tests: a scheduler that takes the token after the first rejected draft yields other tokens."""

    def one_more(self: InFlightStep, tokens: np.ndarray) -> Any:
        for place, req, run in runs(self, tokens):
            drafts = self.drafts[place]
            yield place, req, run if len(run) > len(drafts) else (*run[:-1], drafts[len(run) - 1], run[-1])

    runs = InFlightStep.runs
    monkeypatch.setattr(InFlightStep, "runs", one_more)
    with pytest.raises(AssertionError):
        test_tokens_are_those_without_drafts_whatever_is_proposed("half", True)
