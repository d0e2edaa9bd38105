"""Pipeline stages as the scheduler sees them: who decodes in which step, and what is known when."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from jaxsgl.batch.buckets import BucketSet
from jaxsgl.config.engine import SchedulingConfig
from jaxsgl.messages.orders import Abort, Answer, ContinueGeneration, FlushCache, PauseGeneration, PauseMode, ToEngine
from jaxsgl.scheduler.grammars.constraint import Words
from jaxsgl.scheduler.grammars.queue import GrammarQueue
from jaxsgl.scheduler.loop import run_loop
from jaxsgl.scheduler.request_table import InTurns
from jaxsgl.testing.engine import ScriptedMailbox
from jaxsgl.testing.grammars import compile_fake
from tests.scheduler.serving import VOCAB, capacity, expected, request
from tests.scheduler.staged import OneAtATime, StagedFake, serve_staged
from tests.scheduler.test_constraints import EOS, asking, constrained, fake, outcome

STAGES = ((2, 0), (2, 1), (4, 0), (4, 2))  # stages, steps besides


@pytest.mark.parametrize(("num_stages", "depth"), STAGES)
def test_steps_share_out_the_running_requests_equally_and_in_turn(num_stages: int, depth: int) -> None:
    at_once = num_stages + depth
    prompts = {f"r{i}": list(range(i, i + 5)) for i in range(12)}
    mailbox, engine = serve_staged(
        capacity(rows=12), [[request(name, prompt, 20) for name, prompt in prompts.items()]], num_stages, depth
    )
    for name, prompt in prompts.items():
        assert mailbox.output_ids(name) == expected(prompt, 20)
    share = -(-12 // at_once)
    begun = engine.rows("decode")[: 12 * 15 // share]  # before the first of them end
    assert {len(rows) for rows in begun} == {share}
    for first in range(len(begun) - at_once):
        turn = Counter(row for rows in begun[first : first + at_once] for row in rows)
        assert set(turn.values()) == {1}, "each request decodes once while all have their turn"


def test_where_requests_end_the_others_are_shared_out_anew() -> None:
    requests = [request(f"r{i}", range(i, i + 5), 40 if i % 2 else 10) for i in range(8)]
    mailbox, engine = serve_staged(capacity(rows=8), [requests], 2)
    assert all(len(mailbox.output_ids(f"r{i}")) == (40 if i % 2 else 10) for i in range(8))
    sizes = [len(rows) for rows in engine.rows("decode")]
    assert sizes[:10] == [4] * 10 and sizes[-40:-8] == [2] * 32


@pytest.mark.parametrize(("num_stages", "depth"), STAGES)
def test_chunks_of_a_prompt_go_in_consecutive_steps_none_of_which_waits_for_another(
    num_stages: int, depth: int
) -> None:
    prompt = list(range(70))
    mailbox, engine = serve_staged(capacity(max_extend_tokens=8), [[request("a", prompt, 3)]], num_stages, depth)
    assert mailbox.output_ids("a") == expected(prompt, 3)
    assert [step.bucket.kind for step in engine.steps] == ["extend"] * 9 + ["decode"] * 2
    assert [step.num_tokens for step in engine.steps[:9]] == [8] * 8 + [6]


def test_masks_are_made_while_steps_before_are_unread() -> None:
    sizes, unread = capacity(), []

    class Watched(OneAtATime):
        def masks(self, num_choices: int) -> Words:
            unread.append(self.state.steps_in_flight)
            return super().masks(num_choices)

    grammars = GrammarQueue(lambda grammar: compile_fake(grammar, VOCAB), 30.0)
    scheduler = Watched(sizes, BucketSet.derive(sizes), EOS, grammars=grammars, turns=InTurns(4))
    requests = [asking(f"r{i}", range(i, i + 6), fake(i, 40) if i % 2 else None) for i in range(13, 21)]
    mailbox = ScriptedMailbox([requests])
    run_loop(scheduler, StagedFake(sizes), mailbox, 3, check_every_step=True)
    for each in requests:
        assert outcome(mailbox, each.request_id) == constrained(each)
    assert max(unread) == 3


@pytest.mark.parametrize("turns", range(4, 12, 3))
def test_a_pause_is_complete_and_pages_are_given_back_once_all_stages_are_empty(turns: int) -> None:
    prompts = {f"r{i}": list(range(i, i + 5)) for i in range(8)}
    pause: list[ToEngine] = [PauseGeneration(1, PauseMode.RETRACT), FlushCache(2)]
    script: list[list[ToEngine]] = [[request(name, prompt, 20) for name, prompt in prompts.items()]]
    script += [*([[]] * turns), pause, *([[]] * 9), [ContinueGeneration(3)]]
    mailbox, _ = serve_staged(capacity(rows=8), script, 4)
    assert mailbox.other_news == [Answer(1, True), Answer(2, True), Answer(3, True)]
    for name, prompt in prompts.items():
        assert mailbox.output_ids(name) == expected(prompt, 20)


@pytest.mark.parametrize("num_stages", [1, 2, 4])
def test_stages_are_never_idle_while_there_is_work_for_them(num_stages: int) -> None:
    """A decode step takes a stage's time; chunks follow each other; an unloaded prompt takes all stages' time once."""
    _, decoding = serve_staged(capacity(rows=8), [[request(f"r{i}", [i], 20) for i in range(8)]], num_stages)
    gaps = np.diff(decoding.ends_s)
    assert set(gaps[num_stages:].tolist()) == {1.0}, "after the prompts, which leave the stages empty"
    sizes = capacity(max_extend_tokens=8)
    _, chunks = serve_staged(sizes, [[request("a", range(64), 1)]], num_stages)
    assert chunks.ends_s[-1] == 8 + num_stages - 1
    _, alone = serve_staged(sizes, [[request("a", range(8), 1)]], num_stages)
    assert alone.ends_s == [num_stages]


@pytest.mark.parametrize(("num_stages", "depth"), STAGES)
@pytest.mark.parametrize("mixed", [False, True])
def test_requests_are_aborted_and_retracted_while_they_are_in_any_step(
    num_stages: int, depth: int, mixed: bool
) -> None:
    """The pool holds about half of them; one is aborted in each of many turns, wherever it is."""
    prompts = {f"r{i}": list(range(i, i + 6 + 5 * (i % 4))) for i in range(16)}
    script: list[list[ToEngine]] = [[request(name, prompt, 24) for name, prompt in prompts.items()]]
    aborted = {f"r{i}" for i in range(1, 16, 3)}
    for turn, name in enumerate(sorted(aborted)):
        script += [[]] * (turn + 2) + [[Abort(name)]]
    sizes = capacity(num_pages=40, rows=8, max_extend_tokens=12)
    config = SchedulingConfig(enable_mixed_chunk=mixed, schedule_conservativeness=0.01)
    mailbox, engine = serve_staged(sizes, script, num_stages, depth, config)
    last = mailbox.loads[-1].totals
    for name, prompt in prompts.items():
        tokens, whole = mailbox.output_ids(name), expected(prompt, 24)
        assert tokens == (whole[: len(tokens)] if name in aborted else whole)
    assert last.retractions > 0 and last.steps == len(engine.steps)
