"""The bundled head drafts for the bundled model: answers are those without, and it guesses more than prompt lookup."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from random import Random
from typing import Any

import pytest
from tiny.corpus import SINGLE_TURN

import jaxsgl
from jaxsgl.config.features import SpeculationConfig
from jaxsgl.offline.llm import LLM, Completion
from jaxsgl.requests.grammar import Grammar
from jaxsgl.scheduler.speculation.pace import StepCosts
from jaxsgl.scheduler.speculation.sources import PromptLookup
from jaxsgl.scheduler.speculation.speculation import Speculating
from jaxsgl.testing.engine import RetractEvery
from jaxsgl.text.tokenizer import ChatMessage
from pallas_kernels.native import library
from tests.end_to_end.test_speculation_bundled import SCHEMA
from tests.engine.driving import few_sizes
from tests.grids import NIGHTLY

pytestmark = [pytest.mark.device, pytest.mark.timeout(900)]
NUM_DRAFTS = 5
SKILLS = ("small_talk", "knowledge", "addition", "json_record", "echo", "story", "counting")


@pytest.fixture(scope="module", params=("float32", "bfloat16") if NIGHTLY else ("float32",))
def llm(request: pytest.FixtureRequest) -> Iterator[LLM]:
    """In float32, whose XLA kernels round alike for one token and several as far as answers show; by night, in both."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        few_sizes(monkeypatch)
        llm = LLM(
            dtype=request.param,
            page_size=8,
            max_running_requests=4,
            decode_buckets=(4,),
            extend_buckets=(64,),
            chunked_prefill_size=64,
            context_length=512,
            speculation=SpeculationConfig("EAGLE3", NUM_DRAFTS),
        )
    speculation = llm._scheduler.ranks[0].state.speculation
    assert isinstance(speculation, Speculating)
    speculation._costs = StepCosts()  # any number of drafts pays, however busy the machine is
    yield llm
    llm.close()


ASKED: list[tuple[str, dict[str, Any]]] = [
    ("Tell me a story about a fox.", {"temperature": 0.0}),
    ("Tell me a story about a bear.", {"temperature": 0.9, "seed": 3}),
    ("Give me JSON for Tom, 25, London", {"temperature": 0.0, "grammar": Grammar.json_schema(SCHEMA)}),
    ("Count from 1 to 30", {"temperature": 0.7, "seed": 4, "top_p": 0.9, "min_tokens": 20}),
    ("aaaa bbbb aaaa bbbb", {"temperature": 1.0, "seed": 5, "grammar": Grammar.regex("([a-f]{4} ){3,9}")}),
    ("What is 3 + 4?", {"temperature": 0.0, "logit_bias": {40: 2.0}}),
    ("Count from 5 to 40", {"temperature": 0.0, "stop": ("17",), "logprobs": 1}),
    ("Who are you?", {"temperature": 0.0, "frequency_penalty": 0.3}),
]


def said(answers: Sequence[Completion]) -> list[Any]:
    return [(one.token_ids, one.text, one.finish_reason) for one in answers]


def accept_length(answers: Sequence[Completion]) -> float:
    steps = sum(one.speculated.num_steps for one in answers)
    return 1 + sum(one.speculated.accepted_tokens for one in answers) / steps


def chats_of(texts: Sequence[str]) -> list[Any]:
    return [[{"role": "user", "content": text}] for text in texts]


def test_answers_are_those_without_a_head(llm: LLM) -> None:
    params = [jaxsgl.SamplingParams(max_tokens=47, **given) for _, given in ASKED]
    chats = chats_of([text for text, _ in ASKED])
    plain = llm.chat(chats, params, speculative=False, use_tqdm=False)
    found = llm.chat(chats, params, use_tqdm=False)
    assert said(found) == said(plain)
    if llm.config.dtype == "bfloat16" and library.load() is None:  # the C++ kernels run
        assert [one.logprobs for one in found] == [one.logprobs for one in plain], "to the bit"
    assert not any(one.speculated.num_steps for one in plain)
    assert found[0].speculated.accept_length > 3 < found[1].speculated.accept_length
    assert found[-1].speculated.num_steps == 0, "penalties change with each token of a run"


def looked_up(prompt: Sequence[int], answer: Sequence[int]) -> tuple[int, int]:
    """(steps that verify, drafts that they keep) of prompt lookup that proposes at every step of an answer."""
    lookup = PromptLookup(2, 4)
    lookup.extend([*prompt, answer[0]])
    at, steps, kept = 1, 0, 0
    while at < len(answer):
        drafts = lookup.propose(NUM_DRAFTS)
        right = next((i for i, pair in enumerate(zip(drafts, answer[at:], strict=False)) if pair[0] != pair[1]), None)
        right = min(len(drafts), len(answer) - at) if right is None else right
        steps, kept = steps + 1, kept + right
        lookup.extend(answer[at : at + right + 1])
        at += right + 1
    return steps, kept


def test_the_head_guesses_more_of_unseen_chats_than_prompt_lookup(llm: LLM) -> None:
    rng = Random("unseen chats")
    texts = [SINGLE_TURN[skill][0](rng)[0] for skill in SKILLS for _ in range(2)]
    answers = llm.chat(chats_of(texts), jaxsgl.SamplingParams(max_tokens=60, temperature=0.0), use_tqdm=False)
    prompts = [llm.tokenizer.encode_chat([ChatMessage("user", text)]) for text in texts]
    counts = [looked_up(prompt, one.token_ids) for prompt, one in zip(prompts, answers, strict=True)]
    by_lookup = 1 + sum(kept for _, kept in counts) / sum(steps for steps, _ in counts)
    assert accept_length(answers) > 3.5 > 2.5 > by_lookup


def test_text_that_repeats_is_looked_up_and_stories_are_the_heads(llm: LLM) -> None:
    """The head has not learned to copy: alone it keeps fewer than 0.5 drafts a step of echoes."""
    params = jaxsgl.SamplingParams(max_tokens=60, temperature=0.0)
    rng = Random("echoes")
    texts = [text for text in (SINGLE_TURN["echo"][0](rng)[0] for _ in range(40)) if len(text) > 60][:4]
    echoes = llm.chat(chats_of(texts), params, use_tqdm=False)
    stories = llm.chat(
        chats_of(["Tell me a story about a fox.", "Tell me a story about an owl."]), params, use_tqdm=False
    )
    assert accept_length(echoes) > 3
    assert accept_length(stories) > 4


def test_the_head_guesses_as_much_after_cached_prefixes_and_retraction(llm: LLM) -> None:
    """A key of the head that was computed from another token's state would show here."""
    params = jaxsgl.SamplingParams(max_tokens=60, temperature=0.0)
    counted = " ".join(map(str, range(1, 41)))
    turns = [("user", "Count from 1 to 40"), ("assistant", counted), ("user", "Tell me a story about an owl.")]
    chats: list[Any] = [[{"role": role, "content": text} for role, text in turns]]
    first, again = (llm.chat(chats, params, use_tqdm=False)[0] for _ in range(2))
    assert again.cached_tokens > 64 > first.cached_tokens
    assert again.token_ids == first.token_ids
    state = llm._scheduler.ranks[0].state
    state.retract_also = RetractEvery(3)
    retracted = llm.chat(chats, params, use_tqdm=False)[0]
    state.retract_also = None
    assert retracted.token_ids == first.token_ids
    assert state.totals.retractions > 3
    lengths = [accept_length([one]) for one in (first, again, retracted)]
    assert min(lengths) > 0.75 * max(lengths) > 3  # a retraction may cut a run of drafts
