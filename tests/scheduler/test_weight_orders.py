"""Updates of the weights and release of memory, behind the real loop.

The fake engine's tokens tell by which weights they, and all KV behind them, were computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from jaxsgl.batch.buckets import BucketSet
from jaxsgl.batch.inputs import StepInputs
from jaxsgl.config.engine import SchedulingConfig
from jaxsgl.messages.orders import (
    Answer,
    ContinueGeneration,
    FlushCache,
    MemoryTag,
    News,
    PauseGeneration,
    PauseMode,
    Ping,
    ReleaseMemory,
    ResumeMemory,
    SetWeightVersion,
    ToEngine,
    UpdateMode,
    UpdateReport,
    UpdateWeights,
    WatchCache,
    Withdraw,
)
from jaxsgl.messages.replies import CacheEvents, Replies
from jaxsgl.requests.request import FinishReason, Request, SamplingParams
from jaxsgl.scheduler.loop import run_loop
from jaxsgl.scheduler.served_engine import StepsOnly
from jaxsgl.testing.engine import FakeEngine, FakeHandle, ScriptedMailbox, generate, next_token, seed_of
from tests.cache_mirror import CacheMirror
from tests.checked import CheckedScheduler
from tests.scheduler.serving import VOCAB, Script, capacity, finish_reason, last_reply, request

PROMPT = list(range(40))
BOTH = (MemoryTag.WEIGHTS, MemoryTag.KV_CACHE)
both_loops = pytest.mark.parametrize("overlap", [True, False])


class Serving(ScriptedMailbox):
    """Notes which version of the weights is said to have made each token.

    Turns pass quickly while weights are loaded by a thread, so scripts leave many empty ones behind an update.
    """

    def __init__(self, script: Sequence[Sequence[ToEngine]]) -> None:
        super().__init__(script)
        self.versions: dict[str, list[str]] = {}  # of each request, those of its tokens

    def send(self, news: News) -> None:
        super().send(news)
        if isinstance(news, Replies):
            for reply in news.replies:
                versions = self.versions.setdefault(reply.request_id, [])
                versions.extend(news.load.weight_version for _ in reply.token_ids)

    @property
    def answers(self) -> dict[int, Answer]:
        return {news.number: news for news in self.other_news if isinstance(news, Answer)}


def run(
    script: Script, overlap: bool = True, engine: FakeEngine | None = None, rows: int = 8, **config: Any
) -> tuple[Serving, CheckedScheduler]:
    sizes = capacity(max_extend_tokens=16, rows=rows)
    scheduler = CheckedScheduler(sizes, BucketSet.derive(sizes), (), SchedulingConfig(**config))
    engine = engine or FakeEngine(sizes)
    mailbox = Serving(script)
    run_loop(scheduler, engine, mailbox, int(overlap), check_every_step=True)
    assert scheduler.is_idle and not scheduler.leaks()
    return mailbox, scheduler


def of(prompt: Sequence[int], max_tokens: int, weights: int) -> list[int]:
    return generate(prompt, max_tokens, frozenset(), VOCAB, weights=weights)


def report(answer: Answer) -> UpdateReport:
    assert answer.ok, answer.text
    return msgspec.json.decode(answer.text, type=UpdateReport)


@both_loops
@pytest.mark.parametrize("turns", [0, 1, 3, 7, 12])
def test_no_answer_mixes_weights_and_none_is_computed_from_old_kv(turns: int, overlap: bool) -> None:
    requests: list[ToEngine] = [request(f"r{i}", PROMPT[: 20 + i], 12) for i in range(12)]
    later: list[ToEngine] = [request(f"s{i}", PROMPT[: 20 + i], 12) for i in range(12)]
    script: Script = [requests, *[[]] * turns, [UpdateWeights(1, "new-1"), *later]]
    mailbox, _ = run(script, overlap)
    assert report(mailbox.answers[1]) == UpdateReport("1", 0)
    for name, asked in (("r", requests), ("s", later)):
        for i in range(len(asked)):
            (version,) = set(mailbox.versions[f"{name}{i}"])
            weights = {"default": 0, "1": 1}[version]
            assert mailbox.output_ids(f"{name}{i}") == of(PROMPT[: 20 + i], 12, weights), f"{name}{i}"
    if turns == 7:
        begun = [name for name, (version, *_) in mailbox.versions.items() if version == "default"]
        assert 0 < len(begun) < 24, "requests that had begun end with the old weights, the others wait"


def test_what_a_running_request_computes_by_new_weights_is_not_replaced_by_what_another_has_of_old_ones() -> None:
    """Two pages ahead of it in the same prompt, as the weights are exchanged. It computes all of that, to score it."""
    sizes, prompt = capacity(max_extend_tokens=8), PROMPT[:20]
    scheduler, engine = CheckedScheduler(sizes, BucketSet.derive(sizes), ()), FakeEngine(sizes)
    outputs: dict[str, list[int]] = {"ahead": [], "behind": []}
    scheduler.receive([request("ahead", prompt, 3)])
    stored: dict[str, int] = {}
    for turn in range(12):
        if turn == 1:
            scored = SamplingParams(temperature=0.0, max_tokens=3, prompt_logprobs=0)
            scheduler.receive([Request("behind", prompt, scored)])
        elif turn == 2:
            stored = {req.request_id: req.kv_len for req in scheduler.state.requests.all()}
            engine.swap_weights(1, None)
            scheduler.retire_cache()
        inputs = scheduler.launch()
        if inputs is not None:
            step = engine.submit(inputs)
            scheduler.collect(step.tokens(), step.outputs())
        for reply in scheduler.take_replies():
            outputs[reply.request_id] += reply.token_ids
    assert scheduler.is_idle and 0 < stored["behind"] < stored["ahead"] < len(prompt)
    for name, num_old in stored.items():
        sequence = list(prompt)
        for _ in range(3):
            weights = [0] * num_old + [1] * (len(sequence) - num_old)
            sequence.append(next_token(sequence, VOCAB, seed_of(weights)))
        assert outputs[name] == sequence[len(prompt) :], name


@both_loops
def test_retracted_requests_go_on_with_the_new_weights_alone(overlap: bool) -> None:
    script: Script = [[request("a", PROMPT, 20)], *[[]] * 8, [UpdateWeights(1, "new-1", UpdateMode.RETRACT, "two")]]
    mailbox, _ = run(script, overlap)
    assert report(mailbox.answers[1]) == UpdateReport("two", 1)
    ids, versions = mailbox.output_ids("a"), mailbox.versions["a"]
    old = versions.count("default")
    assert 0 < old < 20 and versions == ["default"] * old + ["two"] * (20 - old)
    assert ids[:old] == of(PROMPT, old, 0)
    assert ids[old:] == of([*PROMPT, *ids[:old]], 20 - old, 1)


@both_loops
def test_in_place_requests_keep_their_kv_which_no_other_request_finds(overlap: bool) -> None:
    script: Script = [
        [request("a", PROMPT, 20)],
        *[[]] * 8,
        [UpdateWeights(1, "new-1", UpdateMode.IN_PLACE)],
        *[[]] * 4,
        [request("beside", PROMPT, 6)],
        *[[]] * 40,
        [request("after", [*PROMPT, 5, 6], 6)],
    ]
    mailbox, scheduler = run(script, overlap)
    assert report(mailbox.answers[1]) == UpdateReport("1", 1)
    ids, old = mailbox.output_ids("a"), mailbox.versions["a"].count("default")
    assert mailbox.loads[-1].totals.retractions == 0 and 0 < old < 20
    # The KV of the last token that the old weights sampled is computed by the new ones.
    kept = [0] * (len(PROMPT) + old - 1)
    for i in range(old, 20):
        sequence = [*PROMPT, *ids[:i]]
        seed = seed_of([*kept, *[1] * (len(sequence) - len(kept))])
        assert ids[i] == next_token(sequence, VOCAB, seed)
    assert mailbox.output_ids("beside") == of(PROMPT, 6, 1)
    assert last_reply(mailbox, "beside").cached_tokens == 0
    assert mailbox.output_ids("after") == of([*PROMPT, 5, 6], 6, 1)
    assert last_reply(mailbox, "after").cached_tokens == 40, "of the request beside it"
    scheduler.flush_cache()
    assert scheduler.cache.num_available == scheduler.cache.num_pages - 1


def test_an_update_can_abort_all_requests() -> None:
    waits = request("waits", PROMPT, 3)
    script: Script = [[request("a", PROMPT, 20), waits], *[[]] * 8, [UpdateWeights(1, "new-1", UpdateMode.ABORT)]]
    mailbox, _ = run([*script, *[[]] * 5, [request("new", PROMPT, 3)]], rows=1)
    assert report(mailbox.answers[1]).num_continued == 0
    assert finish_reason(mailbox, "a") is finish_reason(mailbox, "waits") is FinishReason.ABORT
    assert mailbox.output_ids("new") == of(PROMPT, 3, 1)


@pytest.mark.parametrize("mode", UpdateMode)
def test_weights_that_cant_be_loaded_change_nothing(mode: UpdateMode) -> None:
    script: Script = [[request("a", PROMPT, 20)], *[[]] * 8, [UpdateWeights(1, "broken", mode, "new")]]
    mailbox, _ = run([*script, *[[]] * 30, [request("b", PROMPT, 3)]])
    assert mailbox.answers[1] == Answer(1, False, "broken holds no weights")
    assert mailbox.output_ids("a") == of(PROMPT, 20, 0)
    assert last_reply(mailbox, "b").cached_tokens > 0
    assert {load.weight_version for load in mailbox.loads} == {"default"}
    assert not any(load.paused for load in mailbox.loads)


def test_requests_run_while_weights_are_loaded() -> None:
    class Loading(FakeEngine):
        def __init__(self) -> None:
            super().__init__(capacity(max_extend_tokens=16))
            self.may_load.clear()

        def submit(self, inputs: StepInputs) -> FakeHandle:
            self.num_steps = getattr(self, "num_steps", 0) + 1
            if self.num_steps == 15:
                self.may_load.set()
            return super().submit(inputs)

    mailbox, _ = run([[request("a", PROMPT, 20), UpdateWeights(1, "new-1")]], engine=Loading())
    assert mailbox.output_ids("a") == of(PROMPT, 20, 0)
    assert report(mailbox.answers[1]).weight_version == "1"


@both_loops
def test_the_cache_of_watchers_is_cleared(overlap: bool) -> None:
    script: Script = [[WatchCache(9), request("a", PROMPT, 4)], *[[]] * 12, [UpdateWeights(1, "new-1")]]
    mailbox, scheduler = run(script, overlap)
    mirror = CacheMirror()
    for news in mailbox.other_news:
        if isinstance(news, CacheEvents):
            mirror.take(news.events)
    assert not mirror.prefixes
    assert scheduler.cache.num_free == scheduler.cache.num_pages - 1
    place = [news.number for news in mailbox.other_news if isinstance(news, Answer)]
    assert place == [1] and isinstance(mailbox.other_news[-1], Answer), "the events come before the answer"


def test_a_withdrawn_update_is_dropped_while_it_waits() -> None:
    script: Script = [[request("a", PROMPT, 30)], *[[]] * 6, [UpdateWeights(1, "new-1")], *[[]] * 6]
    mailbox, _ = run([*script, [Withdraw(1)], [request("b", PROMPT, 3)]])
    assert mailbox.answers == {}
    assert mailbox.output_ids("b") == of(PROMPT, 3, 0)


def test_a_paused_server_is_updated_at_once_and_stays_paused() -> None:
    script: Script = [
        [request("a", PROMPT, 20)],
        *[[]] * 8,
        [PauseGeneration(1, PauseMode.RETRACT)],
        [UpdateWeights(2, "new-1")],
        *[[]] * 99,
        [ContinueGeneration(3)],
    ]
    mailbox, _ = run(script)
    assert all(answer.ok for answer in mailbox.answers.values())
    ids, old = mailbox.output_ids("a"), mailbox.versions["a"].count("default")
    assert ids[old:] == of([*PROMPT, *ids[:old]], 20 - old, 1)
    updated = next(i for i, load in enumerate(mailbox.loads) if load.weight_version == "1")
    assert mailbox.loads[updated].paused and mailbox.loads[updated + 1].paused


def test_an_update_is_refused_where_paused_requests_would_keep_it_waiting() -> None:
    script: Script = [[request("a", PROMPT, 20)], *[[]] * 8, [PauseGeneration(1, PauseMode.IN_PLACE)], []]
    mailbox, _ = run([*script, [UpdateWeights(2, "new-1")], *[[]] * 99, [ContinueGeneration(3)]])
    assert not mailbox.answers[2].ok and "1 requests that hold KV can't end: pause in" in mailbox.answers[2].text
    assert mailbox.output_ids("a") == of(PROMPT, 20, 0)


@both_loops
def test_generation_is_paused_until_all_released_memory_is_back(overlap: bool) -> None:
    script: Script = [
        [request("a", PROMPT, 9)],
        *[[]] * 3,
        [ReleaseMemory(1, BOTH)],
        [request("late", PROMPT, 3)],
        *[[]] * 99,
        [ContinueGeneration(3), ResumeMemory(2, (MemoryTag.WEIGHTS,))],
        *[[]] * 99,
        [ResumeMemory(4, (MemoryTag.KV_CACHE,))],
    ]
    mailbox, _ = run(script, overlap)
    assert all(answer.ok for answer in mailbox.answers.values())
    assert mailbox.answers[2].text == "generation stays paused until these are back: kv_cache"
    assert mailbox.answers[3].text == "generation stays paused until these are back: weights, kv_cache"
    assert mailbox.output_ids("a") == of(PROMPT, 9, 0), "it ended first"
    assert mailbox.output_ids("late") == of(PROMPT, 3, 0)
    assert last_reply(mailbox, "late").cached_tokens == 0
    told = [news.number for news in mailbox.other_news if isinstance(news, Answer)]
    assert told.index(1) < told.index(2) < told.index(4)


def test_an_update_brings_released_weights_back() -> None:
    script: Script = [[ReleaseMemory(1, BOTH)], *[[]] * 9, [UpdateWeights(2, "new-1"), ResumeMemory(3, BOTH)], []]
    mailbox, _ = run([*script, [request("a", PROMPT, 3)]])
    assert report(mailbox.answers[2]).weight_version == "1" and mailbox.answers[3] == Answer(3, True)
    assert mailbox.output_ids("a") == of(PROMPT, 3, 1)


def test_weights_can_be_renamed() -> None:
    mailbox, _ = run([[SetWeightVersion(1, "mine")], [request("a", PROMPT, 3)], *[[]] * 9, [FlushCache(2), Ping(3)]])
    assert mailbox.answers[1] == Answer(1, True)
    assert set(mailbox.versions["a"]) == {"mine"}


@both_loops
def test_weights_are_renamed_while_requests_run(overlap: bool) -> None:
    traffic: Script = [[request(f"r{turn}", PROMPT, 5)] for turn in range(40)]
    mailbox, _ = run([*traffic[:10], [SetWeightVersion(1, "mine")], *traffic[10:]], overlap)
    assert mailbox.answers[1] == Answer(1, True)
    renamed = [set(mailbox.versions[f"r{turn}"]) for turn in range(12, 40)]
    assert renamed == [{"mine"}] * 28


def test_an_engine_without_weights_refuses() -> None:
    sizes = capacity()
    scheduler, mailbox = CheckedScheduler(sizes, BucketSet.derive(sizes), ()), Serving([[UpdateWeights(1, "new-1")]])
    run_loop(scheduler, StepsOnly(FakeEngine(sizes)), mailbox, 1)
    assert not mailbox.answers[1].ok
