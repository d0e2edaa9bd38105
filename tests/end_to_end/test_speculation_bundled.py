"""Drafts of the bundled model: answers are those without, held to real grammars, biased, seeded and cut by stops."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import jaxsgl
from jaxsgl.config.features import SpeculationConfig
from jaxsgl.offline.llm import LLM
from jaxsgl.requests.grammar import Grammar
from jaxsgl.scheduler.speculation.pace import StepCosts
from jaxsgl.scheduler.speculation.speculation import Speculating
from tests.grids import NIGHTLY

pytestmark = pytest.mark.device


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    """The bundled model in float32, whose XLA kernels round alike for one token and several as far as answers show."""
    llm = LLM(
        dtype="float32",
        max_running_requests=8,
        decode_buckets=(8,),
        extend_buckets=(128,),
        chunked_prefill_size=128,
        speculation=SpeculationConfig("NGRAM", 7),
    )
    speculation = llm._scheduler.ranks[0].state.speculation
    assert isinstance(speculation, Speculating)
    speculation._costs = StepCosts()  # any number of drafts pays, however busy the machine is
    yield llm
    llm.close()


SCHEMA = {"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer"}}}
ASKED: list[tuple[str, dict[str, Any]]] = [
    ("Repeat: one two three one two three one two three", {"temperature": 0.0}),
    ("Give me JSON for Anna, 31, Paris", {"temperature": 0.0}),
    ("Give me JSON for Tom, 25, London", {"temperature": 0.0, "grammar": Grammar.json_schema(SCHEMA)}),
    ("one two three four one two three four", {"temperature": 0.9, "seed": 3, "min_tokens": 30}),
    ("Give me JSON for Maria, 64, Rome", {"temperature": 0.7, "seed": 4, "top_p": 0.9}),
    ("aaaa bbbb aaaa bbbb", {"temperature": 1.0, "seed": 5, "grammar": Grammar.regex("([a-f]{4} ){3,9}")}),
    ("What is 3 + 4?", {"temperature": 0.0, "logit_bias": {40: 2.0}}),
    ("red green blue red green blue", {"temperature": 0.0, "stop": ("green",)}),
]


@pytest.mark.skipif(not NIGHTLY, reason="by night; by day test_speculation.py and test_speculation_serving.py")
@pytest.mark.parametrize("predicts", [False, True])
def test_the_bundled_model_answers_as_without_drafts(llm: LLM, predicts: bool) -> None:
    """By prompt lookup, and with predictions that are right for their first half."""
    params = [jaxsgl.SamplingParams(max_tokens=60, **given) for _, given in ASKED]
    chats: list[Any] = [[{"role": "user", "content": text}] for text, _ in ASKED]
    plain = llm.chat(chats, params, speculative=False, use_tqdm=False)
    predictions = [one.text[: len(one.text) // 2] + " so" if predicts else "" for one in plain]
    found = llm.chat(chats, params, prediction=predictions, use_tqdm=False)
    assert [(one.token_ids, one.text, one.finish_reason) for one in found] == [
        (one.token_ids, one.text, one.finish_reason) for one in plain
    ]
    assert sum(one.speculated.accepted_tokens for one in found) > 10
    assert not any(one.speculated.num_steps for one in plain)
