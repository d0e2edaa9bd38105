"""Drafts on the real engine: answers are those without drafts, with every parameter that tokens depend on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxsgl.config.engine import EngineConfig
from jaxsgl.config.features import SpeculationConfig
from jaxsgl.engine.engine import Engine
from jaxsgl.messages.replies import TokenLogprob
from jaxsgl.requests.grammar import Grammar
from jaxsgl.requests.request import Request, SamplingParams
from jaxsgl.testing.engine import ScriptedMailbox
from jaxsgl.testing.grammars import FakeMatcher, compile_fake
from tests.checkpoint_kinds.sizes import VOCAB_SIZE
from tests.checkpoints import make_checkpoint
from tests.end_to_end.offline import ends, outputs, serve
from tests.engine.driving import few_sizes
from tests.grids import NIGHTLY
from tests.scheduler.drafters import knowing

pytestmark = pytest.mark.device

FLAGS: dict[str, Any] = {
    "page_size": 4,
    "chunked_prefill_size": 64,
    "context_length": 160,
    "max_running_requests": 6,
    "max_total_tokens": 900,
    "decode_buckets": (6,),
    "extend_buckets": (64,),
    "compilation_cache_dir": "",
    "speculation": SpeculationConfig("NGRAM", 5),
}
PARAMS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0, "seed": 3},
    {"temperature": 0.8, "seed": 4, "top_p": 0.9},
    {"temperature": 1.0, "seed": 5, "top_k": 20, "min_p": 0.01},
    {"temperature": 0.0, "logit_bias": {7: 3.0, 11: 4.0}},
    {"temperature": 1.0, "seed": 6, "min_tokens": 12, "stop_token_ids": tuple(range(3, 40))},
    {"temperature": 0.0, "stop_token_ids": tuple(range(40, 60))},
    {"temperature": 0.7, "seed": 7, "logprobs": 2},
    {"temperature": 0.0, "frequency_penalty": 0.5, "repetition_penalty": 1.2},
    {"temperature": 0.0, "grammar": Grammar.regex("1 17")},
    {"temperature": 1.0, "seed": 8, "grammar": Grammar.regex("2 40")},
    {"temperature": 1.0, "seed": 9, "allowed_token_ids": tuple(range(0, 200, 2)), "logprobs": 0},
]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder: Path = make_checkpoint("qwen3", tmp_path_factory.mktemp("qwen3"), seed=3)
    with pytest.MonkeyPatch.context() as monkeypatch:
        few_sizes(monkeypatch)
        engine = Engine(EngineConfig(model=str(folder), **FLAGS), progress=False)
    yield engine
    assert engine.recompiles == 0
    engine.close()


def requests(vocab_size: int = VOCAB_SIZE) -> list[Request]:
    """One of each kind of parameters, whose ends come at any place of a run."""
    rng = np.random.default_rng(1)
    asked = []
    for number, params in enumerate(PARAMS):
        prompt = rng.integers(3, vocab_size, 5 + 7 * number).tolist()
        asked.append(Request(f"r{number}", prompt, SamplingParams(max_tokens=14 + number, **params)))
    return asked


def compile(grammar: Grammar) -> FakeMatcher:
    return compile_fake(grammar, VOCAB_SIZE)


def logprobs_of(mailbox: ScriptedMailbox, request_id: str) -> list[TokenLogprob | None]:
    return [reply.logprob for reply in mailbox.replies if reply.request_id == request_id and reply.token_ids]


@pytest.fixture(scope="module")
def plain(engine: Engine) -> ScriptedMailbox:
    return serve(engine, [requests()], compile=compile, eos_token_ids=range(3))


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("kind", ["right", "wrong", "half"])
def test_answers_are_those_without_drafts(engine: Engine, plain: ScriptedMailbox, kind: str, overlap: bool) -> None:
    asked = requests()
    known = {request.request_id: plain.output_ids(request.request_id) for request in asked}
    drafter_of = knowing(lambda request: known[request.request_id], kind, VOCAB_SIZE)
    mailbox = serve(engine, [asked], compile=compile, eos_token_ids=range(3), overlap=overlap, drafter_of=drafter_of)
    assert outputs(mailbox, asked) == outputs(plain, asked)
    reasons = [{name: reply.finish_reason for name, reply in ends(served).items()} for served in (mailbox, plain)]
    assert reasons[0] == reasons[1]
    totals = mailbox.loads[-1].speculation
    assert totals.runs > 20 and (totals.accepted_tokens > 20) == (kind != "wrong")
    for request in asked:
        if request.sampling.logprobs is not None:
            found, expected = (logprobs_of(served, request.request_id) for served in (mailbox, plain))
            assert [one and [top for top, _ in one.top] for one in found] == [
                one and [top for top, _ in one.top] for one in expected
            ]
            values = [[one.logprob for one in of_served if one is not None] for of_served in (found, expected)]
            np.testing.assert_allclose(values[0], values[1], atol=1e-4)


@pytest.mark.parametrize("retract_every", [3, 8])
def test_retracted_requests_yield_the_same_with_drafts(
    engine: Engine, plain: ScriptedMailbox, retract_every: int
) -> None:
    asked = requests()
    known = {request.request_id: plain.output_ids(request.request_id) for request in asked}
    drafter_of = knowing(lambda request: known[request.request_id], "half", VOCAB_SIZE)
    mailbox = serve(
        engine, [asked], compile=compile, eos_token_ids=range(3), drafter_of=drafter_of, retract_every=retract_every
    )
    assert outputs(mailbox, asked) == outputs(plain, asked)


def test_programs_that_verify_are_compiled_where_flags_ask_for_them_alone(engine: Engine) -> None:
    kinds = {key.kind for key in engine.compiled.compilations}
    assert "accepted" in kinds
    verified = [bucket for bucket in engine.buckets.all() if bucket.kind == "verify"]
    assert sorted({bucket.num_tokens for bucket in verified}) == ([6, 12, 24, 36] if NIGHTLY else [36])
