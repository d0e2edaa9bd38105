"""Drafts of models whose layers keep states: no answer changes, and states move over the tokens that stand."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from jaxsgl.batch.inputs import Bucket
from jaxsgl.config.engine import EngineConfig
from jaxsgl.config.features import SpeculationConfig
from jaxsgl.engine.engine import Engine
from jaxsgl.requests.request import Request, SamplingParams
from jaxsgl.scheduler.loop import run_loop
from jaxsgl.scheduler.speculation.drafter import drafts_nothing
from jaxsgl.scheduler.speculation.speculation import Speculating
from jaxsgl.testing.engine import ScriptedMailbox
from jaxsgl.testing.grammars import compile_fake
from tests.checkpoint_kinds import DELTA_KINDS, HYBRID_KINDS, two_layers
from tests.checkpoints import make_checkpoint
from tests.end_to_end.offline import ends, new_scheduler, outputs, serve
from tests.end_to_end.test_hybrids import copying_states
from tests.end_to_end.test_speculation import FLAGS, requests
from tests.engine.driving import no_scores_of_prompts
from tests.engine.next_layers import write_draft_head
from tests.grids import NIGHTLY, daily
from tests.scheduler.drafters import Judge, knowing

pytestmark = [pytest.mark.device, pytest.mark.timeout(900)]
PAGE = 64
PAGES: dict[str, Any] = {"page_size": PAGE, "context_length": 4 * PAGE, "max_total_tokens": 40 * PAGE}
KINDS = HYBRID_KINDS if NIGHTLY else ("qwen3_5",)
WHOLE = ("qwen3_5", "lfm2") if NIGHTLY else ()  # with all of their layers


@pytest.fixture(scope="module", params=KINDS)
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    sizes = {} if request.param in WHOLE else two_layers(request.param)
    folder = make_checkpoint(request.param, tmp_path_factory.mktemp(request.param), seed=3, **sizes)
    with pytest.MonkeyPatch.context() as monkeypatch:
        no_scores_of_prompts(monkeypatch)
        engine = Engine(EngineConfig(model=str(folder), **{**FLAGS, **PAGES}), progress=False)
    yield engine
    engine.close()


def long_requests(engine: Engine) -> list[Request]:
    """One of each kind of parameters, each with an answer across the end of a page."""
    return [
        msgspec.structs.replace(each, sampling=msgspec.structs.replace(each.sampling, max_tokens=PAGE + 10))
        for each in requests(engine.capacity.vocab_size)
    ]


def drafting(engine: Engine, asked: list[Request], answers: list[list[int]], kind: str) -> Any:
    """Drafters that know the answers, and draft as `kind` says."""
    known = {request.request_id: answer for request, answer in zip(asked, answers, strict=True)}
    return knowing(lambda request: known[request.request_id], kind, engine.capacity.vocab_size)


def test_answers_are_those_without_drafts(engine: Engine) -> None:
    asked, vocab_size = long_requests(engine), engine.capacity.vocab_size
    of_tests: Any = {"compile": lambda grammar: compile_fake(grammar, vocab_size)}
    expected = outputs(serve(engine, [asked], **of_tests), asked)
    assert len(set(map(tuple, expected))) > 6  # else any model would agree
    for kind, more in (("half", {"retract_every": 7}), ("right", {"overlap": False}), ("wrong", {})):
        drafter_of = drafting(engine, asked, expected, kind)
        found = serve(engine, [asked], drafter_of=drafter_of, **of_tests, **more)
        assert outputs(found, asked) == expected, kind
        assert found.loads[-1].speculation.runs > 50
    assert engine.recompiles == 0


@pytest.mark.parametrize("kind", ["half", "right"])
def test_the_next_turn_begins_at_a_state_that_a_run_of_drafts_has_kept(engine: Engine, kind: str) -> None:
    """Wherever the run ends: before the end of the page, at it or after it."""
    rng = np.random.default_rng(5)
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    prompts = [rng.integers(3, engine.capacity.vocab_size, PAGE - 18 + i).tolist() for i in range(8)]
    first = [Request(str(i), prompt, params) for i, prompt in enumerate(prompts)]
    answers = outputs(serve(engine, [first], radix=False), first)
    scheduler = new_scheduler(engine, radix=True, drafter_of=drafting(engine, first, answers, kind))
    mailbox = ScriptedMailbox([first])
    run_loop(scheduler, engine, mailbox, depth=1)
    assert outputs(mailbox, first) == answers and mailbox.loads[-1].speculation.accepted_tokens > 20
    second = [
        Request(f"{i} again", [*prompt, *answer, 7, 8, 9], params)
        for i, (prompt, answer) in enumerate(zip(prompts, answers, strict=True))
    ]
    speculation = scheduler.state.speculation
    assert isinstance(speculation, Speculating)
    speculation._drafter_of = drafts_nothing
    mailbox = ScriptedMailbox([second])
    run_loop(scheduler, engine, mailbox, depth=1)
    assert {ends(mailbox)[request.request_id].cached_tokens for request in second} == {PAGE}
    assert outputs(mailbox, second) == outputs(serve(engine, [second], radix=False), second)
    assert engine.recompiles == 0


def test_no_program_copies_the_states(engine: Engine) -> None:
    """A step that verifies leaves them as they are; then they are written in place."""
    keys = [
        key
        for key in engine.compiled.compilations
        if key.kind == "settled" or (isinstance(key.shape, Bucket) and key.shape.kind == "verify")
    ]
    assert {key.kind for key in keys} == {"forward", "settled"} and not copying_states(engine, keys)


def _judge_of(judges: dict[str, Judge], request: Request) -> Judge:
    return judges[request.request_id]


@pytest.mark.parametrize("kind", daily(DELTA_KINDS, every=3))
def test_a_draft_head_drafts_what_it_does_after_the_whole_text(
    kind: str, tmp_path: Path, greedy_steps_by_day: None
) -> None:
    """In chunks, after cached prefixes and retraction; answers are those without drafts."""
    with_experts: Any = {"mlp_only_layers": []} if kind == "qwen3_next" else {}  # as the draft head is
    head = write_draft_head(kind, tmp_path, **with_experts)
    flags = {**FLAGS, **PAGES, "speculation": SpeculationConfig("NEXTN", 3), "grammar_backend": "none"}
    engine = Engine(EngineConfig(model=str(head.folder), **flags), progress=False)
    rng = np.random.default_rng(7)
    shared = rng.integers(3, engine.capacity.vocab_size, PAGE + 3).tolist()
    prompts = [[*shared, *rng.integers(3, engine.capacity.vocab_size, 9).tolist()] for _ in range(4)]
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    asked = [Request(str(i), prompt, params) for i, prompt in enumerate(prompts)]
    plain = outputs(serve(engine, [asked], drafter_of=drafts_nothing), asked)
    script = [each for one in asked for each in ([one], *[[]] * 12)]
    for retract_every in (None, 4):
        judges = {one.request_id: Judge(partial(head.drafts, count=3)) for one in asked}
        found = serve(engine, script, retract_every=retract_every, drafter_of=partial(_judge_of, judges))
        assert outputs(found, asked) == plain
        assert [ends(found)[one.request_id].cached_tokens for one in asked][2:] == [PAGE, PAGE]
        assert min(judge.judged for judge in judges.values()) > 3
    assert engine.recompiles == 0
    engine.close()
